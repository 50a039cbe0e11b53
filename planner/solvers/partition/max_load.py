"""The front of the max-load solvers: who runs in what order, and what is proven in the end.

Contiguous: the programme over ideals, which calls CP-SAT where it needs to. Not contiguous: the best contiguous plan
first, so that the answer is never worse; then tabu moves; then the root of HiGHS' search, which has the sharper
relaxation; then pairs of devices divided anew; then CP-SAT on the whole. The order is fixed and all of them count work
and not seconds: about half of what a slow core does within the time limit. So equal problems give equal plans, also on
a machine that is busy with other things; where the clock strikes all the same, the statistics say so (`out_of_time`).
"""

from __future__ import annotations

import math

from planner.solvers.partition import PARTITION_SOLVERS, RELATIVE_TOLERANCE, PartitionSolver, Progress, Result
from planner.solvers.partition._deadline import Deadline
from planner.solvers.partition._max_load_bounds import canonical, result, simple_bound, usable
from planner.solvers.partition._max_load_form import form_of
from planner.solvers.partition._max_load_pairs import divide_anew
from planner.solvers.partition.cp_sat_max_load import solve_by_cp_sat
from planner.solvers.partition.highs_max_load import solve_by_highs
from planner.solvers.partition.ideal_dp_max_load import solve_by_ideals
from planner.solvers.partition.local_search_max_load import improve
from planner.space.partition.max_load import MaxLoadDecision, MaxLoadProblem

NAME = "max-load"
_CHAIN_SHARE, _MOVES_SHARE, _ROOT_SHARE = 0.3, 0.25, 0.4
"""Parts of the time limit, and the root's of what is left of it, at which the clock ends a turn whatever its work."""
_PAIRS_WORK, _ENGINE_WORK = 0.15, 0.5
"""CP-SAT's work a second of the time limit: for pairs, and for pairs and the whole problem together."""
_NO_TIME_S = 0.25
"""With less than this left after the last turn, the clock may have ended it."""


def solve_max_load(
    problem: MaxLoadProblem,
    *,
    time_limit_s: float,
    work_s: float | None = None,
    start: MaxLoadDecision | None = None,
    progress: Progress | None = None,
) -> Result:
    """The best plan with its bound.

    Args:
        problem: the problem, contiguous or not.
        time_limit_s: stop after about this long.
        work_s: seconds by which its work is measured out; by default the time limit.
        start: a feasible plan to begin with.
        progress: called with the name of the solver at work, incumbent and bound when either improves.
    """
    if problem.contiguous:
        return solve_by_ideals(problem, time_limit_s=time_limit_s, start=start, progress=progress)
    search = _Search(problem, time_limit_s, time_limit_s if work_s is None else work_s, progress)
    search.offer(start)
    search.by_ideals()
    for turn in (search.by_moves, search.by_root, search.by_pairs, search.by_cp_sat):
        if not search.proven:
            turn()
    return search.result()


class _Search:
    """The incumbent and the bound of one run, its clock and its work."""

    def __init__(self, problem: MaxLoadProblem, time_limit_s: float, work_s: float, progress: Progress | None) -> None:
        self.problem, self.limit_s, self.work_s, self.progress = problem, time_limit_s, work_s, progress
        self.deadline = Deadline(time_limit_s)
        self.bound = simple_bound(form_of(problem))
        self.best: MaxLoadDecision | None = None
        self.load = math.inf
        self.work = 0.0
        self.out_of_time = False
        self.statistics: dict[str, int] = {}

    @property
    def left_s(self) -> float:
        return self.deadline.left_s

    @property
    def proven(self) -> bool:
        """Whether there is nothing more to find, or no time to find it."""
        self.out_of_time |= self.left_s <= 0
        return self.bound >= self.load * (1 - RELATIVE_TOLERANCE) or self.left_s <= 0

    def offer(self, plan: MaxLoadDecision | None) -> None:
        found, load = usable(self.problem, plan)
        if load < self.load:
            self.best, self.load = found, load

    def by_ideals(self) -> None:
        """The best contiguous plan."""
        limit_s = _CHAIN_SHARE * self.limit_s
        chain = solve_by_ideals(self.problem, time_limit_s=limit_s, start=self.best, progress=self.progress)
        self.offer(chain.decision)

    def by_moves(self) -> None:
        """Tabu moves, which end by themselves."""
        if self.best is None:
            return
        until = self.deadline.within(_MOVES_SHARE * self.limit_s)
        moved = improve(self.problem, self.best, until, bound=self.bound, progress=self.progress)
        self.out_of_time |= until.passed
        self.offer(canonical(self.problem, moved))

    def by_root(self) -> None:
        """The root of HiGHS' search."""
        until = self.deadline.within(_ROOT_SHARE * self.left_s)
        root = solve_by_highs(
            self.problem,
            time_limit_s=until.left_s,
            start=self.best,
            progress=self.progress,
            bound=self.bound,
            most_nodes=1,
        )
        self.out_of_time |= until.passed
        self.offer(root.decision)
        self.bound = max(self.bound, root.bound)

    def by_pairs(self) -> None:
        """Pairs of devices divided anew."""
        if self.best is None:
            return
        divided = divide_anew(
            self.problem,
            self.best,
            work_limit=_PAIRS_WORK * self.work_s,
            deadline=self.deadline,
            bound=self.bound,
            progress=self.progress,
        )
        self.work += divided.work
        self.out_of_time |= not divided.in_time
        self.offer(canonical(self.problem, divided.plan))

    def by_cp_sat(self) -> None:
        """CP-SAT on the whole problem, with the work that is left."""
        found = solve_by_cp_sat(
            self.problem,
            time_limit_s=self.left_s,
            start=self.best,
            progress=self.progress,
            bound=self.bound,
            work_limit=_ENGINE_WORK * self.work_s - self.work,
        )
        self.offer(found.decision)
        self.bound = max(self.bound, found.bound)
        self.statistics |= found.statistics
        self.out_of_time |= self.left_s < _NO_TIME_S

    def result(self) -> Result:
        statistics = {**self.statistics, "out_of_time": int(self.out_of_time)}
        best = canonical(self.problem, self.best) if self.best is not None else None
        return result(self.problem, best, min(self.bound, self.load), NAME, statistics=statistics)


PARTITION_SOLVERS.register(NAME, PartitionSolver((MaxLoadProblem,), exact=True, run=solve_max_load, counts_work=True))
