"""Exact solver of BaPipe's plans: every schedule, micro-batch size and number of stages, each with its best stages."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import numpy as np

from planner.memory import fits
from planner.solvers.partition import (
    PARTITION_SOLVERS,
    Deadline,
    OutOfTime,
    PartitionSolver,
    Progress,
    Result,
    verified,
)
from planner.solvers.partition._run_sums import run_sums
from planner.space.partition.bapipe import BaPipeDecision, BaPipeProblem, BaPipeSchedule, pipeline_s

NAME = "bapipe-dp"
_SLACK = 1 + 1e-12
Split = tuple[float, tuple[int, ...]]


def solve_bapipe(
    problem: BaPipeProblem,
    *,
    time_limit_s: float = 60.0,
    start: BaPipeDecision | None = None,
    progress: Progress | None = None,
) -> Result:
    """The best plan over all schedules, micro-batch sizes and numbers of stages.

    For each, a DP over (stages, layers) minimises the slot under memory. Where the largest transfer counts besides the
    slot (sno, so), cuts that carry more than some limit are forbidden (the "coarse partition"), for every limit at
    which the best slot changes; these are found by bisection.
    """
    deadline = Deadline(time_limit_s)
    best, decision, finished, points = math.inf, None, False, 0
    plans = [plan for _, plan in problem.trivial()] + ([start] if start else [])
    for plan in plans:
        verdict = problem.judge(plan)
        if verdict.feasible and verdict.objective < best:
            best, decision = verdict.objective, plan
    with contextlib.suppress(OutOfTime):
        for schedule, size, stages in _points(problem):
            deadline.check()
            points += 1
            for marks in _stages(problem, schedule, size, stages, best, deadline):
                plan = BaPipeDecision(marks, schedule, problem.micro_batches[size])
                verdict = problem.judge(plan)
                if verdict.feasible and verdict.objective < best:
                    best, decision = verdict.objective, plan
                    if progress:
                        progress(NAME, best, 0.0)
        finished = True
    return verified(problem, decision, best, best if finished else 0.0, NAME, "stages in line", {"points": points})


def _points(problem: BaPipeProblem) -> Iterator[tuple[BaPipeSchedule, int, int]]:
    for schedule in problem.schedules:
        for size in range(len(problem.micro_batches)):
            if schedule is BaPipeSchedule.DATA_PARALLEL:
                yield schedule, size, 1
            elif problem.global_batch % problem.micro_batches[size] == 0:
                for stages in range(min(problem.devices, problem.layers), 0, -1):
                    yield schedule, size, stages


def _stages(
    problem: BaPipeProblem, schedule: BaPipeSchedule, size: int, stages: int, best: float, deadline: Deadline
) -> Iterator[tuple[int, ...]]:
    """Stages worth judging at a point."""
    if schedule is BaPipeSchedule.DATA_PARALLEL:
        yield (0, problem.layers)
        return
    count = problem.global_batch // problem.micro_batches[size]

    def total(slot: float, transfer: float) -> float:
        return pipeline_s(schedule, stages, count, slot, transfer, fill_overlap=problem.fill_overlap)

    fastest = (problem.forward_s[size] + problem.backward_s[size]).min(axis=0)
    if total(fastest.sum() / stages, 0.0) >= best * _SLACK:
        return
    tables = _Tables(problem, schedule, size, stages, count, deadline)
    if schedule in (BaPipeSchedule.SNO, BaPipeSchedule.SO) and stages > 1:
        limits = np.unique(tables.cut_s[1:-1])
        yield from _coarse(limits, tables.split, total)
        return
    found = tables.split(math.inf)
    if found:
        yield found[1]


def _coarse(
    limits: np.ndarray, split: Callable[[float], Split | None], total: Callable[[float, float], float]
) -> Iterator[tuple[int, ...]]:
    """Best stages for each limit on the transfers at which the slot changes, those that cannot be best left out.

    The slot falls as the limit rises: where it is the same at both ends of a range of limits, nothing within helps.
    """
    ends = (0, len(limits) - 1)
    known: dict[int, Split | None] = {i: split(float(limits[i])) for i in ends}
    best = min((total(known[i][0], float(limits[i])) for i in ends if known[i]), default=math.inf)  # type: ignore[index]
    ranges = [ends]
    while ranges:
        low, high = ranges.pop()
        near, far = known[low], known[high]
        slot = far[0] if far else math.inf
        if high - low < 2 or far is None or (near and near[0] <= slot):
            continue
        if total(slot, float(limits[low + 1])) >= best * _SLACK:
            continue
        middle = (low + high) // 2
        found = known[middle] = split(float(limits[middle]))
        if found:
            best = min(best, total(found[0], float(limits[middle])))
        ranges += [(low, middle), (middle, high)]
    for index in sorted(known):
        found = known[index]
        if found and total(found[0], float(limits[index])) <= best * _SLACK:
            yield found[1]


class _Tables:
    """Slots and memory of runs of layers [n + 1, n + 1] (start, stop), device by device."""

    def __init__(
        self, problem: BaPipeProblem, schedule: BaPipeSchedule, size: int, stages: int, count: int, deadline: Deadline
    ) -> None:
        self.deadline = deadline
        self.problem, self.schedule, self.size, self.stages, self.count = problem, schedule, size, stages, count
        marks = np.arange(problem.layers + 1)
        self.real = marks[:, None] < marks[None, :]
        self.cut_s = problem.boundary_bytes[size] / problem.bandwidth_byte_per_s
        self.cut_s[0] = self.cut_s[-1] = 0.0
        self.slots = [self._slot(stage) for stage in range(stages)]

    @staticmethod
    def _sums(figures: np.ndarray) -> np.ndarray:
        total = np.concatenate([[0.0], np.cumsum(figures)])
        return np.asarray(total[None, :] - total[:, None])

    def _slot(self, stage: int) -> np.ndarray:
        problem, schedule = self.problem, self.schedule
        forward = self._sums(problem.forward_s[self.size, stage])
        backward = self._sums(problem.backward_s[self.size, stage])
        before, behind = self.cut_s[:, None], self.cut_s[None, :]
        if schedule is BaPipeSchedule.AS:
            slot = np.maximum(forward, behind) + np.maximum(backward, before)
        elif schedule is BaPipeSchedule.FBP_AS:
            slot = np.maximum(forward + backward, 2 * np.maximum(before, behind))
        elif schedule is BaPipeSchedule.SO:
            slot = np.maximum(forward + backward, np.maximum(before, behind))
        else:
            slot = forward + backward
        behind_it = self.stages - stage
        kept = 2 * behind_it if schedule in (BaPipeSchedule.SO, BaPipeSchedule.FBP_AS) else behind_it
        if problem.exact_features:
            kept = min(self.count, kept - (schedule is BaPipeSchedule.SO))
        needed = 2 * run_sums(problem.weight_bytes) + kept * run_sums(problem.feature_bytes[self.size])
        return np.asarray(np.where(self.real & fits(needed, float(problem.memory_bytes[stage])), slot, np.inf))

    def split(self, limit: float) -> Split | None:
        """The stages of the smallest slot whose cuts take no longer than a limit."""
        open_ = self.cut_s <= limit
        open_[0] = open_[-1] = True
        marks = np.flatnonzero(open_)
        best = np.full((self.stages + 1, len(marks)), np.inf)
        best[0, 0] = 0.0
        choice = np.zeros(best.shape, dtype=np.int64)
        for stage, slot in enumerate(self.slots):
            self.deadline.check()
            through = np.maximum(best[stage][:, None], slot[np.ix_(marks, marks)])
            choice[stage + 1] = through.argmin(axis=0)
            best[stage + 1] = through.min(axis=0)
        if math.isinf(best[self.stages, -1]):
            return None
        at, found = len(marks) - 1, [self.problem.layers]
        for stage in range(self.stages, 0, -1):
            at = int(choice[stage, at])
            found.append(int(marks[at]))
        return float(best[self.stages, -1]), tuple(reversed(found))


PARTITION_SOLVERS.register(NAME, PartitionSolver((BaPipeProblem,), exact=True, run=solve_bapipe))
