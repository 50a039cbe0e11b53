"""The front of the max-load solvers: who runs in what order, and what is proven in the end.

Contiguous: the programme over ideals, which calls CP-SAT where it needs to. Not contiguous: the best contiguous plan
first, so that the answer is never worse; then tabu moves; then the root of HiGHS' search, which has the sharper
relaxation; then CP-SAT from there. The order is fixed and all of them count work and not seconds, so that equal
problems give equal plans unless the time limit strikes, which the result's statistics say (`out_of_time`).
"""

from __future__ import annotations

import time

from planner.solvers.partition import PARTITION_SOLVERS, PartitionSolver, Progress, Result
from planner.solvers.partition._max_load_bounds import canonical, result, simple_bound, usable
from planner.solvers.partition._max_load_form import form_of
from planner.solvers.partition.cp_sat_max_load import solve_by_cp_sat
from planner.solvers.partition.highs_max_load import solve_by_highs
from planner.solvers.partition.ideal_dp_max_load import solve_by_ideals
from planner.solvers.partition.local_search_max_load import improve
from planner.space.partition.max_load import MaxLoadDecision, MaxLoadProblem

NAME = "max-load"
_CHAIN_SHARE = 0.3
_MOVES_SHARE = 0.25
_ROOT_SHARE = 0.4
_WORK_SHARE = 1.5


def solve_max_load(
    problem: MaxLoadProblem,
    *,
    time_limit_s: float,
    start: MaxLoadDecision | None = None,
    progress: Progress | None = None,
) -> Result:
    """The best plan with its bound.

    Args:
        problem: the problem, contiguous or not.
        time_limit_s: stop after about this long.
        start: a feasible plan to begin with.
        progress: called with the name of the solver at work, incumbent and bound when either improves.
    """
    if problem.contiguous:
        return solve_by_ideals(problem, time_limit_s=time_limit_s, start=start, progress=progress)
    deadline = time.monotonic() + time_limit_s
    bound = simple_bound(form_of(problem))
    best, load = usable(problem, start)
    statistics: dict[str, int] = {}

    def left() -> float:
        return deadline - time.monotonic()

    def proven() -> bool:
        return bound >= load * (1 - 1e-9) or left() <= 0

    chain = solve_by_ideals(problem, time_limit_s=_CHAIN_SHARE * time_limit_s, start=best, progress=progress)
    best, load = _better(problem, best, load, chain.decision)
    if best is not None and not proven():
        until = min(deadline, time.monotonic() + _MOVES_SHARE * time_limit_s)
        moved = improve(problem, best, until, bound=bound, progress=progress)
        best, load = _better(problem, best, load, canonical(problem, moved))
    if not proven():
        root = solve_by_highs(
            problem, time_limit_s=_ROOT_SHARE * left(), start=best, progress=progress, bound=bound, most_nodes=1
        )
        best, load = _better(problem, best, load, root.decision)
        bound = max(bound, root.bound)
    if not proven():
        work = _WORK_SHARE * time_limit_s
        found = solve_by_cp_sat(
            problem, time_limit_s=left(), start=best, progress=progress, bound=bound, work_limit=work
        )  # fmt: skip
        best, load = _better(problem, best, load, found.decision)
        bound = max(bound, found.bound)
        statistics |= found.statistics
    statistics["out_of_time"] = int(left() <= 0)
    best = canonical(problem, best) if best is not None else None
    return result(problem, best, min(bound, load) if best is not None else bound, NAME, statistics=statistics)


def _better(
    problem: MaxLoadProblem, best: MaxLoadDecision | None, load: float, plan: MaxLoadDecision | None
) -> tuple[MaxLoadDecision | None, float]:
    found, found_load = usable(problem, plan)
    return (found, found_load) if found_load < load else (best, load)


PARTITION_SOLVERS.register(NAME, PartitionSolver((MaxLoadProblem,), exact=True, run=solve_max_load))
