"""Max-load plans by two solvers of one model: CP-SAT, exact in integers, and HiGHS, in floats.

For CP-SAT, times become integers in units of about 2^-43 of the incumbent, rounded down. So its bound is valid for the
true times and weaker than for them by less than the tolerance. It runs on one thread up to a limit on deterministic
work, so that the answer depends on the machine's speed only if the time limit ends it first.

HiGHS, through MathOpt, often gives the better bound where transfers outweigh work. It computes with tolerances, so its
bound is lowered by a millionth, and an infeasible model proves nothing unless a plan is known.
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

import numpy as np

from planner.cp_sat import careful_solver, memory_units, solved, weighted_sum
from planner.memory import room_bytes
from planner.solvers.partition import PARTITION_SOLVERS, PartitionSolver, Search
from planner.solvers.partition._max_load_form import prove
from planner.solvers.partition._max_load_model import LoadModel, offer, search_model, upper_bound_ms, values_of
from planner.solvers.partition.max_load_moves import group_devices
from planner.space.partition import MaxLoadDecision, MaxLoadProblem

_TIME_BITS = 43
_WORK = 0.5
"""Deterministic work of CP-SAT per second of the time limit, minus the work it already did in earlier turns."""


def solve_by_cp_sat(search: Search) -> None:
    """Find the best plan and prove it, given time; starts from the best plan so far."""
    model, start = search_model(search), search.decision
    if model is None:
        return
    top = upper_bound_ms(search, model.form)
    scale = 2.0 ** (_TIME_BITS - math.frexp(max(top, 1e-200))[1])
    program, binaries = _program(model, scale, search.bound, top)
    hinted = start is not None and _hint(program, binaries, model, start)
    work = (1.0 if search.problem.contiguous else _WORK) * search.work_s - search.engine_work
    if work > 0 and _run(program, binaries, model, scale, search, work) and hinted:
        raise RuntimeError(f"{search.solver}: the engine says that a model is infeasible which the start satisfies")


def _hint(program: Any, binaries: list[Any], model: LoadModel, start: MaxLoadDecision) -> bool:  # noqa: ANN401
    """Hint a plan to CP-SAT; returns whether the model's groups can state it exactly."""
    device = group_devices(model.form, start)
    value = values_of(model, device)
    if value is None:
        return False
    for binary, bit in zip(binaries, value.tolist(), strict=True):
        program.add_hint(binary, bit)
    return model.form.decision(device) == start


def _program(model: LoadModel, scale: float, lower_bound: float, top: float) -> tuple[Any, list[Any]]:
    from ortools.sat.python import cp_model

    program = cp_model.CpModel()
    binaries = [program.new_bool_var(f"b{i}") for i in range(model.binaries)]
    largest = program.new_int_var(
        math.floor(lower_bound * (1 - 1e-12) * scale), math.ceil(top * (1 + 1e-9) * scale), "load"
    )
    for terms, lower, upper in model.rows:
        model.deadline.check()
        program.add_linear_constraint(weighted_sum([(binaries[b], factor) for b, factor in terms]), lower, upper)
    for loads, unless in model.loads:
        whole = [(binaries[b], math.trunc(milliseconds * scale)) for b, milliseconds in loads]
        bounded = program.add(weighted_sum(whole) <= largest)
        if unless >= 0:
            bounded.only_enforce_if(~binaries[unless])
    sizes, room = memory_units(model.form.size, model.form.problem.memory_bytes)
    for groups, unless in model.memory:
        bounded = program.add(weighted_sum([(binaries[b], sizes[v]) for b, v in groups]) <= room)
        if unless >= 0:
            bounded.only_enforce_if(~binaries[unless])
    program.minimize(largest)
    return program, binaries


def _run(
    program: Any,  # noqa: ANN401
    binaries: list[Any],
    model: LoadModel,
    scale: float,
    search: Search,
    work: float,
) -> bool:
    """Run CP-SAT, offer every plan that it finds, prove its bound; returns whether the model is infeasible.

    With a known plan the model only holds plans no worse than that.
    """
    from ortools.sat.python import cp_model

    class Callback(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            value = np.array([self.value(b) for b in binaries], dtype=np.int64)
            offer(search, model, value)

    search.deadline.check()
    solver = careful_solver(work, search.deadline.left_s)
    status = solved(solver, program, Callback())
    if status == cp_model.INFEASIBLE:
        search.prove(search.objective)
        return True
    if status == cp_model.MODEL_INVALID:
        raise RuntimeError(f"{search.solver}: the model is not valid: {program.validate()}")
    prove(search, solver.best_objective_bound / scale * (1 - 1e-13))
    return False


PARTITION_SOLVERS.register("max-load-cp-sat", PartitionSolver(MaxLoadProblem, solve_by_cp_sat, turn=5))


TRUSTED = 1 - 1e-6
"""Factor on a bound of HiGHS, which covers its tolerances."""
_SHARE = 0.4


def solve_by_highs(search: Search) -> None:
    """Bound, and the best plan up to a millionth; only the root node of the search if other solvers run as well."""
    model, start = search_model(search), search.decision
    if model is None:
        return
    top = upper_bound_ms(search, model.form) or 1.0
    program, binaries = _float_program(model, search.bound / top, top)
    hint = values_of(model, group_devices(model.form, start)) if start is not None else None
    search.deadline.check()
    answer = _solved_by_highs(program, binaries, hint, search.deadline.left_s, None if search.alone else 1)
    if answer.has_primal_feasible_solution():
        value = np.array([round(answer.variable_values(b)) for b in binaries], dtype=np.int64)
        offer(search, model, value)
    prove(search, _bound(answer, top, start is not None))


def _float_program(model: LoadModel, lower_bound: float, top: float) -> tuple[Any, list[Any]]:
    """The model in floats, loads divided by `top` and sizes by an accelerator's memory; and its binaries."""
    from ortools.math_opt.python import mathopt

    program = mathopt.Model()
    binaries = [program.add_binary_variable() for _ in range(model.binaries)]
    largest = program.add_variable(lb=lower_bound * (1 - 1e-9), ub=1 + 1e-9)
    for terms, lower, upper in model.rows:
        model.deadline.check()
        program.add_linear_constraint(expr=mathopt.fast_sum(c * binaries[b] for b, c in terms), lb=lower, ub=upper)
    for loads, unless in model.loads:
        _at_most(program, binaries, [(b, milliseconds / top) for b, milliseconds in loads], largest, unless)
    room = room_bytes(model.form.problem.memory_bytes)
    unit_bytes = max(room, 1.0)
    for groups, unless in model.memory:
        sizes = [(b, float(model.form.size[v]) / unit_bytes) for b, v in groups]
        _at_most(program, binaries, sizes, room / unit_bytes, unless)
    program.minimize(largest)
    return program, binaries


def _at_most(
    program: Any,  # noqa: ANN401
    binaries: list[Any],
    terms: list[tuple[int, float]],
    limit: Any,  # noqa: ANN401
    unless: int,
) -> None:
    from ortools.math_opt.python import mathopt

    total = mathopt.fast_sum(c * binaries[b] for b, c in terms)
    if unless >= 0:
        total -= sum(c for _, c in terms if c > 0) * binaries[unless]
    program.add_linear_constraint(total <= limit)


def _solved_by_highs(
    program: Any,  # noqa: ANN401
    binaries: list[Any],
    hint: np.ndarray | None,
    seconds: float,
    node_limit: int | None,
) -> Any:  # noqa: ANN401
    from ortools.math_opt.python import mathopt

    parameters = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=seconds),
        node_limit=node_limit,
        random_seed=0,
        relative_gap_tolerance=1e-9,
    )
    hints = []
    if hint is not None:
        values = {b: float(v) for b, v in zip(binaries, hint.tolist(), strict=True)}
        hints.append(mathopt.SolutionHint(variable_values=values))
    with _quiet():
        return mathopt.solve(
            program, mathopt.SolverType.HIGHS, params=parameters,
            model_params=mathopt.ModelSolveParameters(solution_hints=hints),
        )  # fmt: skip


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


def _bound(answer: Any, top: float, has_plan: bool) -> float:  # noqa: ANN401
    from ortools.math_opt.python import mathopt

    if answer.termination.reason == mathopt.TerminationReason.INFEASIBLE:
        # With a known plan the model only holds plans no worse than that.
        return top * TRUSTED if has_plan else 0.0
    dual = float(answer.termination.objective_bounds.dual_bound)
    return dual * top * TRUSTED if math.isfinite(dual) else 0.0


PARTITION_SOLVERS.register(
    "max-load-highs",
    PartitionSolver(
        MaxLoadProblem, solve_by_highs, turn=3, share=lambda problem: 0.0 if problem.contiguous else _SHARE
    ),
)
