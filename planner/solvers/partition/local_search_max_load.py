"""Tabu search for max-load plans: single groups change device, so that a steep sum of powers of the loads falls.

The sum of load^p looks at all devices, most at the fullest, and has none of the plateaus of the maximum. Each run
starts from the best plan so far, with another power; a group that moved must stay for a while. Runs go from coarse to
fine: first regions of the plan move as a whole, then their halves, at last single groups. The search ends after a
number of runs without success, so that equal problems give equal plans; only the time limit can cut it short.
"""

from __future__ import annotations

import math

import numpy as np

from planner.solvers.partition import PARTITION_SOLVERS, PartitionSolver, Progress, Result
from planner.solvers.partition._deadline import NEVER, Deadline
from planner.solvers.partition._max_load_bounds import canonical, result, simple_bound, usable
from planner.solvers.partition._max_load_form import Form, form_of, merge_groups, reduce_form
from planner.solvers.partition._max_load_moves import Loads
from planner.space.partition.max_load import MaxLoadDecision, MaxLoadProblem

NAME = "max-load-moves"
_POWERS = (16.0, 64.0, 8.0, 32.0)
_ROUNDS = 1000
_PATIENCE = 16
_LEVELS = 4
_TENURE = (8, 13)


def solve_by_moves(
    problem: MaxLoadProblem,
    *,
    time_limit_s: float,
    start: MaxLoadDecision | None = None,
    progress: Progress | None = None,
) -> Result:
    """Improve a plan by moving one group at a time.

    Contiguous plans keep their chain: only nodes that no forward edge binds are moved.

    Args:
        problem: the problem.
        time_limit_s: stop after about this long.
        start: a feasible plan; without one, the problem's trivial plans are tried.
        progress: called when a better plan is found.
    """
    deadline = Deadline(time_limit_s)
    form = form_of(problem)
    bound = simple_bound(form)
    plans = [start] if start is not None else []
    plans += [plan for _, plan in problem.trivial()]
    begin, _ = min((usable(problem, plan) for plan in plans), key=lambda found: found[1])
    if begin is None:
        return result(problem, None, bound, NAME)
    better = improve(problem, begin, deadline, bound=bound, progress=progress)
    return result(problem, canonical(problem, better), bound, NAME)


def improve(
    problem: MaxLoadProblem,
    start: MaxLoadDecision,
    deadline: Deadline,
    *,
    bound: float = 0.0,
    patience: int = _PATIENCE,
    progress: Progress | None = None,
) -> MaxLoadDecision:
    """The best plan that tabu runs from a feasible plan come by; never worse than it.

    Args:
        problem: the problem.
        start: a feasible plan.
        deadline: when to stop.
        bound: a lower bound; the search stops when it is reached.
        patience: stop after so many runs in a row without a better plan; each run after the first begins with regions
            of the plan merged and moved as a whole.
        progress: called when a better plan is found.
    """
    best, load = start, problem.judge(start).objective
    random = np.random.default_rng(len(start.device_of))
    cycle, last = -1, 0
    while (cycle := cycle + 1) - last < patience:
        form = form_of(problem) if problem.contiguous else reduce_form(form_of(problem), load, deadline)
        movable = ~form.ordered if problem.contiguous else np.ones(form.groups, dtype=bool)
        if not movable.any():
            return best
        device = group_devices(form, best)
        levels = [(form, movable)]
        if cycle and not problem.contiguous:
            levels += _coarser(form, device, random)
        power = _POWERS[cycle % len(_POWERS)]
        for level, free in reversed(levels):
            loads = Loads(level, group_devices(level, form.decision(device)))
            rounds = _ROUNDS if level is form else _ROUNDS // 2
            found, placed = tabu(loads, free, power, rounds, random, deadline)
            device = group_devices(form, level.decision(placed))
            if found < load * (1 - 1e-12):
                plan = level.decision(placed)
                verdict = problem.judge(plan)
                if verdict.feasible and verdict.objective < load:
                    best, load, last = plan, verdict.objective, cycle
                    if progress:
                        progress(NAME, load, bound)
            if deadline.passed or load <= bound * (1 + 1e-9):
                return best
    return best


def _coarser(form: Form, device: np.ndarray, random: np.random.Generator) -> list[tuple[Form, np.ndarray]]:
    """Ever smaller forms, neighbours on one device merged two by two, so that whole regions can move at once."""
    levels = []
    for _ in range(_LEVELS):
        merged = _matching(form, device, random)
        smaller = merge_groups(form, merged)
        if smaller.groups > 0.9 * form.groups or smaller.groups < 3 * form.problem.devices:
            break
        device = group_devices(smaller, form.decision(device))
        form = smaller
        levels.append((form, np.ones(form.groups, dtype=bool)))
    return levels


def _matching(form: Form, device: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Pairs of neighbours on one device, those with the dearest common nets first, chance breaking in."""
    weight = form.cost * random.uniform(0.2, 1.0, size=len(form.nets)) if len(form.nets) else form.cost
    into = np.arange(form.groups)
    paired = np.zeros(form.groups, dtype=bool)
    for e in np.argsort(-weight, kind="stable"):
        alone = [v for v in form.nets[e] if not paired[v]]
        for a, b in zip(alone[::2], alone[1::2], strict=False):
            if device[a] == device[b]:
                into[b] = a
                paired[[a, b]] = True
    return into


def group_devices(form: Form, plan: MaxLoadDecision) -> np.ndarray:
    """The device of each group: that of its node with most work, where a plan tears a group apart."""
    nodes = np.array(plan.device_of, dtype=np.int64)
    by_work = np.argsort(form.problem.accelerator_ms, kind="stable")
    device = np.zeros(form.groups, dtype=np.int64)
    device[form.group_of[by_work]] = nodes[by_work]
    return device


def tabu(
    loads: Loads,
    movable: np.ndarray,
    power: float,
    rounds: int,
    random: np.random.Generator,
    deadline: Deadline = NEVER,
) -> tuple[float, np.ndarray]:
    """Run a number of moves, each the best for the sum of powers among groups that have not moved lately.

    Returns:
        the least largest load met, and the devices of the groups there. O(rounds * (pins + groups) * devices).
    """
    best, device = float(loads.load.max()), loads.device.copy()
    blocked = np.zeros(loads.form.groups, dtype=np.int64)
    blocked[~movable] = rounds + 1
    tenure = random.integers(*_TENURE, size=rounds)
    for step in range(rounds):
        if deadline.passed:
            break
        left, got = loads.moves()
        scale = float(loads.load.max())
        if scale <= 0:
            break
        now = (loads.load / scale) ** power
        change = ((left / scale) ** power - now[loads.device])[:, None] + (got / scale) ** power - now
        change[blocked > step] = np.inf
        group, to = divmod(int(np.argmin(change)), loads.devices)
        if not math.isfinite(change[group, to]):
            break
        loads.move(group, to)
        blocked[group] = step + tenure[step]
        if step % 512 == 511:
            loads.refresh()
        if loads.load.max() < best * (1 - 1e-12):
            best, device = float(loads.load.max()), loads.device.copy()
    return best, device


PARTITION_SOLVERS.register(NAME, PartitionSolver((MaxLoadProblem,), exact=False, run=solve_by_moves))
