"""Checks of the planner against the outside world; each module is a command (`python -m benchmarks.published`)."""
