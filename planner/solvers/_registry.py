"""All solvers by name."""

from __future__ import annotations

from planner.registry import Registry
from planner.solvers.types import Solver

SOLVERS: Registry[Solver] = Registry("planner.solvers", "solver")
"""A module of this package registers its own."""
