"""The answer as a file: types, JSON, assembly, diff, validation, explanation."""
