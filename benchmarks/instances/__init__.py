"""Synthetic partition problems of any size, for benchmarks and tests."""
