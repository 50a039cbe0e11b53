"""Runs commands as a user does, on small plans written for the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.main import main
from planner.plans import Plan, write


def run(*arguments: object) -> int:
    """Exit code of a command line."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return int(caught.value.code or 0)


def written(plan: Plan, folder: Path, name: str = "toy.plan.json") -> Path:
    """The plan as a file."""
    path = folder / name
    write(plan, path)
    return path
