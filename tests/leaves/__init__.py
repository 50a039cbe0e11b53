"""Mutations of every value of plan files: what `check` finds of them, and the named exceptions."""
