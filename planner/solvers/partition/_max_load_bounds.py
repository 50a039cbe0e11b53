"""Lower bounds of the max-load problem that need no search, and the way from a plan on groups to a result."""

from __future__ import annotations

import math

import numpy as np

from planner.solvers.partition import RELATIVE_TOLERANCE, Result
from planner.solvers.partition._max_load_form import Form
from planner.space.partition.max_load import MaxLoadDecision, MaxLoadProblem

_MOST_COUNTED = 600
_SAFE = 1 - 1e-12
"""Sums of floats are trusted to this fraction only."""


def simple_bound(form: Form) -> float:
    """The best of the bounds below, ms; O(g^2) at most."""
    return max(fluid_bound(form), largest_bound(form), pigeonhole_bound(form)) * _SAFE


def fluid_bound(form: Form) -> float:
    """Least load when work could be cut at will and moved for free: the groups best suited to it go to the CPUs."""
    accs, cpus = form.problem.accelerators, form.problem.cpus
    bound_to_cpu = ~form.supported
    cpu_done, acc_left = float(form.cpu[bound_to_cpu].sum()), float(form.acc[form.supported].sum())
    if not cpus:
        return acc_left / accs
    if not accs:
        return float(form.cpu.sum()) / cpus
    free = np.flatnonzero(form.supported & (form.acc > 0))
    order = free[np.argsort(form.cpu[free] / form.acc[free], kind="stable")]
    for v in order:
        acc, cpu = float(form.acc[v]), float(form.cpu[v])
        if (cpu_done + cpu) / cpus >= (acc_left - acc) / accs:
            # The share s of this group on the CPUs evens out both sides.
            share = (acc_left / accs - cpu_done / cpus) / (cpu / cpus + acc / accs)
            return max(acc_left / accs - max(share, 0.0) * acc / accs, cpu_done / cpus)
        cpu_done, acc_left = cpu_done + cpu, acc_left - acc
    return max(acc_left / accs, cpu_done / cpus)


def largest_bound(form: Form) -> float:
    """Every group has to run somewhere."""
    on_acc = np.where(form.supported & (form.problem.accelerators > 0), form.acc, np.inf)
    on_cpu = form.cpu if form.problem.cpus else np.full(form.groups, np.inf)
    return float(np.minimum(on_acc, on_cpu).max(initial=0.0))


def pigeonhole_bound(form: Form) -> float:
    """Of the q k + 1 largest groups on k accelerators, q + 1 share one.

    Below a load T the CPUs can take only so many of the m largest groups; when q k + 1 are left for the accelerators,
    one of these holds q + 1 of them. The bound is the least T that contradicts no q, found by bisection. O(g^2).
    """
    accs, cpus = form.problem.accelerators, form.problem.cpus
    eligible = np.flatnonzero(form.supported & (form.acc > 0))
    order = eligible[np.argsort(-form.acc[eligible], kind="stable")][:_MOST_COUNTED]
    if not accs or not len(order):
        return 0.0
    sizes = form.acc[order]
    below = np.concatenate([[0.0], np.cumsum(sizes)])
    taken = _cumulated_smallest(form.cpu[order]) / cpus if cpus else np.full((len(order), 1), np.inf)
    full = np.arange((len(order) - 1) // accs + 1)

    def contradicted(load: float) -> bool:
        left = np.arange(1, len(order) + 1) - (taken <= load).sum(axis=1)
        most = np.maximum.accumulate(left)
        m = np.searchsorted(most, full * accs + 1) + 1
        q = full[m <= len(order)]
        m = m[m <= len(order)]
        return bool((below[m] - below[m - q - 1] > load).any())

    low, high = 0.0, float(below[-1]) * (1 + 1e-9)
    for _ in range(60):
        middle = (low + high) / 2
        if contradicted(middle):
            low = middle
        else:
            high = middle
    return low


def _cumulated_smallest(times: np.ndarray) -> np.ndarray:
    """Row m: running sums of the m + 1 first times in ascending order, infinite beyond."""
    rows = np.full((len(times), len(times)), np.inf)
    for m in range(len(times)):
        rows[m, : m + 1] = np.cumsum(np.sort(times[: m + 1]))
    return rows


def result(
    problem: MaxLoadProblem,
    decision: MaxLoadDecision | None,
    bound: float,
    solver: str,
    *,
    claimed: float | None = None,
    statistics: dict[str, int] | None = None,
) -> Result:
    """A result whose plan has passed the judge.

    Args:
        problem: the problem.
        decision: the plan, devices in canonical order; None when none was found.
        bound: no plan is below it, ms; infinite when there is proven to be none.
        solver: who found it.
        claimed: the plan's load as the solver sees it.
        statistics: counts.

    Raises:
        RuntimeError: the judge finds a limit broken or another load than claimed: a fault of the solver.
    """
    space = "contiguous plans" if problem.contiguous else "all plans"
    if decision is None:
        return Result(None, math.inf, bound, solver, space, statistics or {})
    verdict = problem.judge(decision)
    if not verdict.feasible:
        raise RuntimeError(f"{solver} returned an infeasible plan: {verdict.violations[0].message}")
    if claimed is not None and not math.isclose(claimed, verdict.objective, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-12):
        raise RuntimeError(f"{solver} claims a load of {claimed!r}, the judge says {verdict.objective!r}")
    if bound > verdict.objective * (1 + RELATIVE_TOLERANCE) + 1e-12:
        raise RuntimeError(f"{solver} claims a bound of {bound!r} above its own plan of {verdict.objective!r}")
    if bound >= verdict.objective * (1 - RELATIVE_TOLERANCE):
        bound = verdict.objective
    return Result(decision, verdict.objective, bound, solver, space, statistics or {})


def canonical(problem: MaxLoadProblem, decision: MaxLoadDecision) -> MaxLoadDecision:
    """The same plan with like devices numbered by their first node, so that equal plans look equal."""
    names: dict[int, int] = {}
    following = [0, problem.accelerators]
    for device in decision.device_of:
        if device not in names:
            kind = int(device >= problem.accelerators)
            names[device] = following[kind]
            following[kind] += 1
    return MaxLoadDecision(tuple(names[d] for d in decision.device_of))


def usable(problem: MaxLoadProblem, start: MaxLoadDecision | None) -> tuple[MaxLoadDecision | None, float]:
    """A start that the judge accepts with its load, or None and infinity."""
    if start is None:
        return None, math.inf
    verdict = problem.judge(start)
    return (start, verdict.objective) if verdict.feasible else (None, math.inf)


def opening(
    problem: MaxLoadProblem, form: Form, start: MaxLoadDecision | None, bound: float
) -> tuple[MaxLoadDecision | None, float, float]:
    """What an engine begins with: a plan and its load (the best trivial one without a usable start), and a bound.

    The plan is None and its load infinite where no trivial plan is feasible either; with a bound that reaches the load
    there is nothing left to do.
    """
    found, load = usable(problem, start)
    if found is None:
        found, load = min((usable(problem, plan) for _, plan in problem.trivial()), key=lambda known: known[1])
    return found, load, max(bound, simple_bound(form))
