"""CP-SAT for max-load plans: exact in whole numbers, with and without an order of the devices.

Times become whole numbers of about 2^-43 of the incumbent, rounded down, so that the bound holds for the true times
as well and falls short of them by less than the tolerance. Workers take turns in a fixed order, so that the answer
depends on the machine's speed only where the time limit cuts the search off.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from planner.solvers.partition import (
    PARTITION_SOLVERS,
    Deadline,
    Incumbent,
    OutOfTime,
    PartitionSolver,
    Progress,
    Result,
)
from planner.solvers.partition._cp_sat import careful_solver, memory_units, solved, weighted_sum
from planner.solvers.partition._max_load_form import canonical, form_of, opening, reduce_form, result
from planner.solvers.partition._max_load_model import LoadModel, build_model, plan_of, values_of
from planner.solvers.partition.local_search_max_load import group_devices
from planner.space.partition.max_load import MaxLoadDecision, MaxLoadProblem

NAME = "max-load-cp-sat"
_TIME_BITS = 43


def solve_by_cp_sat(
    problem: MaxLoadProblem,
    *,
    time_limit_s: float,
    start: MaxLoadDecision | None = None,
    progress: Progress | None = None,
    bound: float = 0.0,
    work_limit: float | None = None,
) -> Result:
    """The best plan, given time.

    Args:
        problem: the problem.
        time_limit_s: stop after about this long.
        start: a feasible plan to begin with; it also bounds the search from above.
        progress: called when incumbent or bound improve.
        bound: a lower bound known already, ms.
        work_limit: stop after so much work as the engine counts it, about a second's each, whatever the clock says;
            `time_limit_s` by default.
    """
    deadline = Deadline(time_limit_s)
    work_limit = time_limit_s if work_limit is None else work_limit
    form = form_of(problem)
    best = opening(problem, form, start, bound, NAME, progress)
    start, load, known = best.decision, best.objective, best.bound
    if known >= load * (1 - 1e-12):
        return result(problem, start, known, NAME)
    form = reduce_form(form, load, deadline)
    try:
        model = build_model(form, deadline)
        top = load if start is not None else float(form.acc.sum() + 2 * form.cost.sum() + form.cpu.sum())
        scale = 2.0 ** (_TIME_BITS - math.frexp(max(top, 1e-200))[1])
        program, binaries = _program(model, scale, known, top)
        hinted = start is not None and _hint(program, binaries, model, start)
    except OutOfTime:
        return result(problem, start, known, NAME)
    found = _Watch(best, model, scale)
    infeasible = work_limit > 0 and _search(program, binaries, found, deadline, work_limit)
    if infeasible and hinted:
        raise RuntimeError(f"{NAME}: the engine says that a model is infeasible which the start satisfies")
    return found.result(infeasible)


def _hint(program: Any, binaries: list[Any], model: LoadModel, start: MaxLoadDecision) -> bool:  # noqa: ANN401
    """Begin with a plan where the model's groups allow it; whether they do."""
    device = group_devices(model.form, start)
    value = values_of(model, device)
    if value is None:
        return False
    for binary, bit in zip(binaries, value.tolist(), strict=True):
        program.add_hint(binary, bit)
    return model.form.decision(device) == start


def _program(model: LoadModel, scale: float, known: float, top: float) -> tuple[Any, list[Any]]:
    from ortools.sat.python import cp_model

    program = cp_model.CpModel()
    binaries = [program.new_bool_var(f"b{i}") for i in range(model.binaries)]
    largest = program.new_int_var(_down(known * (1 - 1e-12), scale), math.ceil(top * (1 + 1e-9) * scale), "load")
    for row in model.rows:
        model.deadline.check()
        total = weighted_sum([(binaries[b], factor) for b, factor in row.terms])
        program.add_linear_constraint(total, row.least, row.most)
    for load in model.loads:
        terms = [(binaries[b], _down(t, scale)) for b, t in load.work]
        for cost, part, whole in load.nets:
            whole_cost = _down(cost, scale)
            terms.append((binaries[part], whole_cost))
            if whole >= 0:
                terms.append((binaries[whole], -whole_cost))
        bounded = program.add(weighted_sum(terms) <= largest)
        if load.unless >= 0:
            bounded.only_enforce_if(~binaries[load.unless])
    sizes, room = memory_units(model.form.size, model.form.problem.memory_bytes)
    for memory in model.memory:
        bounded = program.add(weighted_sum([(binaries[b], sizes[v]) for b, v in memory.groups]) <= room)
        if memory.unless >= 0:
            bounded.only_enforce_if(~binaries[memory.unless])
    program.minimize(largest)
    return program, binaries


def _down(value: float, scale: float) -> int:
    return math.floor(value * scale)


class _Watch:
    """Collects the plans that the engine finds, each through the judge, and its bound."""

    def __init__(self, best: Incumbent, model: LoadModel, scale: float) -> None:
        self.best, self.model, self.scale = best, model, scale

    def plan(self, value: np.ndarray) -> None:
        """Take a solution of the model."""
        problem = self.model.form.problem
        self.best.offer(canonical(problem, self.model.form.decision(plan_of(self.model, value))))

    def bounded(self, units: float) -> None:
        """Take a bound of the model."""
        bound = units / self.scale * (1 - 1e-13)
        if bound > self.best.bound:
            self.best.bound = bound
            self.best.report()

    def result(self, infeasible: bool) -> Result:
        """The outcome; the model speaks of plans better than the start only, when there is one."""
        best, form = self.best, self.model.form
        if infeasible:
            best.bound = best.objective
        bound, statistics = min(best.bound, best.objective), {"groups": form.groups, "binaries": self.model.binaries}
        return result(form.problem, best.decision, bound, NAME, statistics=statistics)


def _search(
    program: Any,  # noqa: ANN401
    binaries: list[Any],
    found: _Watch,
    deadline: Deadline,
    work_limit: float,
) -> bool:
    """Run the engine; true when it proves the model infeasible."""
    from ortools.sat.python import cp_model

    class Callback(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            found.plan(np.array([self.value(b) for b in binaries], dtype=np.int64))

    if deadline.passed:
        return False
    solver = careful_solver(work_limit, deadline.left_s)
    status = solved(solver, program, Callback())
    if status == cp_model.INFEASIBLE:
        return True
    if status == cp_model.MODEL_INVALID:
        raise RuntimeError(f"{NAME}: the model is not valid: {program.validate()}")
    found.bounded(solver.best_objective_bound)
    return False


PARTITION_SOLVERS.register(NAME, PartitionSolver((MaxLoadProblem,), exact=True, run=solve_by_cp_sat))
