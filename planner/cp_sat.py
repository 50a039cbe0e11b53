"""CP-SAT with settings under which equal models give equal answers and no best solution is presolved away."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from planner.memory import room_bytes

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_MEMORY_BITS = 52


def careful_solver(work_limit: float = math.inf, time_limit_s: float = math.inf, seed: int = 0) -> cp_model.CpSolver:
    """A CP-SAT solver with one thread.

    Args:
        work_limit: deterministic time at which it stops, positive; the same on every machine.
        time_limit_s: seconds after which it stops anyway; the answer then depends on the machine's speed.
        seed: of its random choices.
    """
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = work_limit
    solver.parameters.max_time_in_seconds = max(0.05, time_limit_s)
    # One thread: taking turns (interleave_search) is deterministic too, but 9.15 aborts in it on some small models
    # ("Check failed: heuristics.fixed_search != nullptr").
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    # Simplifications of version 9.15 that drop some of the solutions, by dominance, symmetry or inclusion, have been
    # seen to drop all the best ones of models like ours (or-tools issue 5293 is one case).
    solver.parameters.keep_all_feasible_solutions_in_presolve = True
    solver.parameters.symmetry_level = 0
    solver.parameters.presolve_inclusion_work_limit = 0
    return solver


def memory_units(size_bytes: np.ndarray, capacity_bytes: float) -> tuple[list[int], int]:
    """Sizes as integers, and the largest sum of them that fits the capacity: `fits` for an integer model.

    Exact for whole bytes of less than 4 PB in total, and for multiples of any power of two above 2^-52 of the total.
    Other sizes are rounded down, so that the model may allow a plan that the judge refuses, but never the reverse.
    """
    total = float(size_bytes.sum())
    unit = 2.0 ** (_MEMORY_BITS - math.frexp(max(total, 1e-200))[1])
    sizes = np.floor(size_bytes * unit).astype(np.int64)
    room = math.floor(min(room_bytes(capacity_bytes) * unit, 2.0 ** (_MEMORY_BITS + 1)))
    common = max(1, int(np.gcd.reduce(sizes)) if len(sizes) else 1)
    return (sizes // common).tolist(), room // common


def weighted_sum(terms: Sequence[tuple[cp_model.IntVar, int]]) -> cp_model.LinearExprT:
    """Sum of coefficient * variable over (variable, coefficient) pairs."""
    from ortools.sat.python import cp_model

    return cp_model.LinearExpr.weighted_sum([variable for variable, _ in terms], [factor for _, factor in terms])


def solved(solver: cp_model.CpSolver, program: cp_model.CpModel) -> cp_model.CpSolverStatus:
    """Run CP-SAT; the status is "infeasible" only if CP-SAT says so without presolve as well.

    Under the settings above, version 9.15 has been seen to call small models infeasible that a known plan satisfies;
    without presolve it solves them. The second run has the time and work that the first one left.
    """
    from ortools.sat.python import cp_model

    status = solver.solve(program)
    if status == cp_model.INFEASIBLE:
        limits, spent = solver.parameters, solver.response_proto.deterministic_time
        limits.cp_model_presolve = False
        limits.max_time_in_seconds = max(0.05, limits.max_time_in_seconds - solver.wall_time)
        limits.max_deterministic_time = max(1e-3, limits.max_deterministic_time - spent)
        status = solver.solve(program)
    return status
