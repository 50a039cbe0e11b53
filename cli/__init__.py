"""The command line: parse, one call, render."""
