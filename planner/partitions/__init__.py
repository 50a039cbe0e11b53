"""Instances of published partition problems: read, solved, written down, checked, explained.

`families` knows the kinds of files, `run` plans one, `types` and `files` are the plan file, `check` judges it and
`report` says what it says to people. `planner` exports what users need.
"""
