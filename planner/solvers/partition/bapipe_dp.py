"""BaPipe's plans, exactly: every schedule, micro-batch size and number of stages, each with its best stages.

`balanced_stages` states the problem of one pipeline over all devices of a cluster.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import numpy as np

from planner.hardware.types import Cluster
from planner.memory import fits
from planner.solvers.partition import (
    PARTITION_SOLVERS,
    Deadline,
    Incumbent,
    OutOfTime,
    PartitionSolver,
    Progress,
    Result,
)
from planner.solvers.partition.chains import least_slowest, prefix_differences, real_runs, run_sums
from planner.solvers.partition.pipedream_stages import levels_of
from planner.space.cuts import StageTables, least_need
from planner.space.partition.bapipe import BaPipeDecision, BaPipeProblem, BaPipeSchedule, features_in_flight, pipeline_s

TIME_LIMIT_S = 4.0
"""For one partition problem."""


def balanced_stages(
    tables: StageTables, cluster: Cluster, devices: int, micro_batches: int, form: BaPipeSchedule, limit_s: float
) -> tuple[int, ...] | None:
    """Boundaries of the stages, one a device; None where none fit, or where none can be below the limit.

    Args:
        tables: of the chain.
        cluster: the machine.
        devices: that are used, in line.
        micro_batches: of an iteration.
        form: the order of work.
        limit_s: slower pipelines do not matter.
    """
    costs, chosen = tables.costs, tables.precision
    count = min(devices, len(costs.parameter_elements))
    fastest_s = float((costs.forward_s + costs.backward_s).min(axis=0).sum()) / count
    if count < 2 or micro_batches * fastest_s >= limit_s or not _may_fit(tables, cluster, count, micro_batches):
        return None
    types, (_, speeds) = cluster.device_types[:count], levels_of(cluster, count)
    problem = BaPipeProblem(
        (costs.micro_batch,),
        costs.forward_s[types][None],
        costs.backward_s[types][None],
        np.diagonal(costs.saved_bytes)[None].copy(),
        costs.boundary_bytes[None],
        costs.parameter_elements * (chosen.weight_bytes + chosen.held_gradient_bytes + tables.state_bytes) / 2,
        np.array([float(cluster.devices[t].usable_bytes) for t in types]),
        min(speeds),
        micro_batches * costs.micro_batch,
        schedules=(form,),
        exact_features=True,
    )
    decision = solve_bapipe(problem, time_limit_s=TIME_LIMIT_S).decision
    return None if decision is None else decision.boundaries


def _may_fit(tables: StageTables, cluster: Cluster, count: int, micro_batches: int) -> bool:
    """Whether some cut into so many stages leaves room for the features of 1F1B."""
    needs = [tables.needed_bytes(min(micro_batches, count - s)) for s in range(count)]
    return fits(least_need(needs, tables.real), max(d.usable_bytes for d in cluster.devices))


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
    points, plans = 0, [*(plan for _, plan in problem.trivial()), start]
    best = Incumbent(problem, NAME, progress, plans)
    with contextlib.suppress(OutOfTime):
        for schedule, size, stages in _points(problem):
            deadline.check()
            points += 1
            for marks in _stages(problem, schedule, size, stages, best.objective, deadline):
                best.offer(BaPipeDecision(marks, schedule, problem.micro_batches[size]))
        best.bound = best.objective
    return best.result("stages in line", {"points": points})


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
        self.real = real_runs(problem.layers)
        self.cut_s = problem.boundary_bytes[size] / problem.bandwidth_byte_per_s
        self.cut_s[0] = self.cut_s[-1] = 0.0
        self.slots = [self._slot(stage) for stage in range(stages)]

    def _slot(self, stage: int) -> np.ndarray:
        problem, schedule = self.problem, self.schedule
        forward = prefix_differences(problem.forward_s[self.size, stage])
        backward = prefix_differences(problem.backward_s[self.size, stage])
        before, behind = self.cut_s[:, None], self.cut_s[None, :]
        if schedule is BaPipeSchedule.AS:
            slot = np.maximum(forward, behind) + np.maximum(backward, before)
        elif schedule is BaPipeSchedule.FBP_AS:
            slot = np.maximum(forward + backward, 2 * np.maximum(before, behind))
        elif schedule is BaPipeSchedule.SO:
            slot = np.maximum(forward + backward, np.maximum(before, behind))
        else:
            slot = forward + backward
        exact = problem.exact_features
        kept = features_in_flight(schedule, stage, self.stages, self.count, exact=exact)
        needed = 2 * run_sums(problem.weight_bytes) + kept * run_sums(problem.feature_bytes[self.size])
        return np.asarray(np.where(self.real & fits(needed, float(problem.memory_bytes[stage])), slot, np.inf))

    def split(self, limit: float) -> Split | None:
        """The stages of the smallest slot whose cuts take no longer than a limit."""
        open_ = self.cut_s <= limit
        open_[0] = open_[-1] = True
        marks = np.flatnonzero(open_)
        slowest, at = least_slowest((slot[np.ix_(marks, marks)] for slot in self.slots), self.deadline)
        return None if math.isinf(slowest) else (slowest, tuple(int(marks[i]) for i in at))


PARTITION_SOLVERS.register(NAME, PartitionSolver((BaPipeProblem,), exact=True, run=solve_bapipe))
