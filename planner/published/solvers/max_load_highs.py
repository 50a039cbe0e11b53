"""A bound on max-load plans by HiGHS: the root node of the model that `max_load_cp_sat` states.

HiGHS, through MathOpt, often gives the better bound where transfers outweigh work. It computes in floats with
tolerances, so its bound is lowered by a millionth, and an infeasible model proves nothing unless a plan is known.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import math
import os
import sys
from collections.abc import Iterator
from typing import Any

from planner.published.problems import MaxLoadProblem
from planner.published.solvers import PARTITION_SOLVERS, PartitionSolver, SearchState
from planner.published.solvers._max_load_form import canonical, prove, space
from planner.published.solvers.max_load_cp_sat import PlacementModel, model_of_search

TRUSTED = 1 - 1e-6
"""Factor on a bound of HiGHS, which covers its tolerances."""
_SHARE = 0.4


def solve_by_highs(search: SearchState) -> None:
    """Prove the bound of the root node, and offer the plan that it ends with; for non-contiguous problems only."""
    from ortools.math_opt.python import mathopt

    search.space = space(search.problem)
    if search.problem.contiguous:
        return
    model = model_of_search(search)
    if model is None:
        return
    program, columns, hints = _in_floats(model)
    search.deadline.check()
    limits = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=search.deadline.left_s),
        node_limit=1,
        random_seed=0,
        relative_gap_tolerance=1e-9,
    )
    start = mathopt.ModelSolveParameters(solution_hints=[mathopt.SolutionHint(variable_values=hints)])
    with _quiet():
        answer = mathopt.solve(program, mathopt.SolverType.HIGHS, params=limits, model_params=start)
    if answer.has_primal_feasible_solution():
        device = model.devices(lambda binary: round(answer.variable_values(columns[binary.index])))
        search.offer(canonical(search.problem, model.form.decision(device)))
    bound_ms = answer.termination.objective_bounds.dual_bound * model.top_ms
    if answer.termination.reason == mathopt.TerminationReason.INFEASIBLE:
        # With a known plan the model only holds plans no worse than that.
        bound_ms = model.top_ms if search.decision is not None else 0.0
    if math.isfinite(bound_ms):
        prove(search, bound_ms * TRUSTED)


def _in_floats(model: PlacementModel) -> tuple[Any, list[Any], dict[Any, float]]:
    """The model as a MathOpt program, its variables by index, and the hinted values.

    The largest load is divided by its upper bound, and each row by its largest coefficient.
    """
    from ortools.math_opt.python import mathopt

    stated, load = model.program.proto, model.largest.index
    factor = [1.0] * len(stated.variables)
    factor[load] = model.top_ms * model.scale
    program = mathopt.Model()
    columns = [
        program.add_variable(lb=variable.domain[0] / unit, ub=variable.domain[1] / unit, is_integer=unit == 1.0)
        for variable, unit in zip(stated.variables, factor, strict=True)
    ]
    for constraint in stated.constraints:
        model.deadline.check()
        row = constraint.linear
        terms = [(columns[i], c * factor[i]) for i, c in zip(row.vars, row.coeffs, strict=True)]
        unit = max(abs(c) for _, c in terms)
        low, high = (end / unit if abs(end) < 2**62 else math.copysign(math.inf, end) for end in row.domain)
        program.add_linear_constraint(lb=low, ub=high, expr=mathopt.fast_sum(c / unit * x for x, c in terms))
    program.minimize(columns[load])
    hint = stated.solution_hint
    return program, columns, {columns[i]: float(v) for i, v in zip(hint.vars, hint.values, strict=True)}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Redirect standard output to nowhere: HiGHS prints remarks there even when output is disabled."""
    if os.name != "posix":
        yield
        return
    library = ctypes.CDLL(None)
    sys.stdout.flush()
    try:
        stdout_copy = os.dup(1)
    except OSError:
        # There is no standard output.
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        library.fflush(None)
        os.dup2(nowhere, 1)
        yield
    finally:
        library.fflush(None)
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)
        os.close(nowhere)


PARTITION_SOLVERS.register(
    "max-load-highs", PartitionSolver(MaxLoadProblem, solve_by_highs, turn=3, share=lambda _: _SHARE)
)
