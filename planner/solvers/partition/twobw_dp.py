"""Exact solver of PipeDream-2BW's plans: every width, depth, micro-batch, recomputation, with the best stages."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import numpy as np

from planner.hardware.collectives import moved_bytes
from planner.hardware.types import Collective
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
from planner.space.partition.twobw import TwoBWDecision, TwoBWProblem, TwoBWSchedule, stage_bytes

NAME = "twobw-dp"
_SLACK = 1 + 1e-12
_FLUSHED = (TwoBWSchedule.FLUSH, TwoBWSchedule.GPIPE)


def solve_twobw(
    problem: TwoBWProblem,
    *,
    time_limit_s: float = 60.0,
    start: TwoBWDecision | None = None,
    progress: Progress | None = None,
) -> Result:
    """The best plan over all (width, depth, micro-batch, recomputation, schedule).

    Equal stages are priced one by one. Unequal stages: for each point a DP over (stages, layers), min-max of
    micro-batch time and gradient time, O(depth layers^2) vectorised; with a flush, where the two add up, once for each
    gradient time that a stage can have. Points that cannot beat the best are skipped.
    """
    deadline = Deadline(time_limit_s)
    best, points = Incumbent(problem, NAME, progress, [start]), 0
    with contextlib.suppress(OutOfTime):
        for point in _points(problem):
            deadline.check()
            points += 1
            width, size, recompute, schedule, _ = point
            for marks in _stages(problem, point, best.objective, deadline):
                best.offer(TwoBWDecision(marks, width, problem.micro_batches[size], recompute, schedule))
        best.bound = best.objective
    return best.result(f"{'equal' if problem.equal else 'unequal'} stages", {"points": points})


Point = tuple[int, int, bool, TwoBWSchedule, int]
"""Width, index of the micro-batch size, recomputation, schedule, depth."""


def _points(problem: TwoBWProblem) -> Iterator[Point]:
    for schedule in problem.schedules:
        for width in range(problem.devices, 0, -1):
            for depth in range(1, min(problem.devices // width, problem.layers) + 1):
                if problem.equal and problem.layers % depth:
                    continue
                for size, samples in enumerate(problem.micro_batches):
                    count, rest = divmod(problem.global_batch, samples * width)
                    if rest or not count or (schedule not in _FLUSHED and count < depth):
                        continue
                    for recompute in problem.recompute:
                        yield width, size, recompute, schedule, depth


def _stages(problem: TwoBWProblem, point: Point, best: float, deadline: Deadline) -> Iterator[tuple[int, ...]]:
    """Stages worth judging at a point: equal ones, or those that a DP finds below `best`."""
    width, size, recompute, schedule, depth = point
    layers = problem.layers
    if problem.equal:
        yield tuple(range(0, layers + 1, layers // depth))
        return
    count = problem.global_batch // (problem.micro_batches[size] * width)
    rounds = count + depth - 1 if schedule in _FLUSHED else count
    work = problem.forward_s[size] * (2 if recompute else 1) + problem.backward_s[size]
    if rounds * work.sum() / depth >= best * _SLACK:
        return
    tables = _Tables(problem, point, count, deadline)
    if schedule not in _FLUSHED:
        marks, _ = tables.split(np.maximum(tables.gradient_s, 0.0), count, best)
        if marks:
            yield marks
        return
    for limit in np.unique(tables.gradient_s[tables.real]):
        if rounds * work.sum() / depth + limit >= best:
            break
        allowed = np.where(tables.gradient_s <= limit * _SLACK, 0.0, np.inf)
        marks, slowest = tables.split(allowed, rounds, best - limit)
        if marks:
            best = min(best, slowest + limit)
            yield marks


class _Tables:
    """Time, gradients and memory of all runs of layers [n + 1, n + 1] (start, stop) at one point of the space."""

    def __init__(self, problem: TwoBWProblem, point: Point, count: int, deadline: Deadline) -> None:
        self.problem, self.point, self.count, self.deadline = problem, point, count, deadline
        width, size, recompute, _, _ = point
        self.real = real_runs(problem.layers)
        forward, backward = prefix_differences(problem.forward_s[size]), prefix_differences(problem.backward_s[size])
        self.weights, self.saved = run_sums(problem.weight_bytes), run_sums(problem.saved_bytes[size])
        crossing = problem.boundary_bytes[size].copy()
        crossing[0] = crossing[-1] = 0.0
        moved = (crossing[:, None] + crossing[None, :]) / problem.bandwidth_byte_per_s
        self.micro_s = forward * (2 if recompute else 1) + backward + moved
        self.gradient_s = moved_bytes(Collective.ALL_REDUCE, self.weights, width) / problem.bandwidth_byte_per_s

    def _fits(self, stage: int) -> np.ndarray:
        """Which runs fit on a device as that stage of the pipeline."""
        problem, (_, size, recompute, schedule, depth) = self.problem, self.point
        if math.isinf(problem.memory_bytes):
            return self.real
        in_flight = schedule.in_flight(depth, self.count)
        if problem.in_flight_by_stage and schedule is not TwoBWSchedule.GPIPE:
            in_flight = min(self.count, depth - stage)
        kept = stage_bytes(
            schedule, self.weights, self.saved, problem.boundary_bytes[size][:, None], depth, in_flight,
            recompute=recompute,
        )  # fmt: skip
        needed = problem.optimizer_per_weight * self.weights + kept
        return np.asarray(self.real & fits(needed, problem.memory_bytes))

    def split(self, floor: np.ndarray, rounds: int, below: float) -> tuple[tuple[int, ...] | None, float]:
        """Stages that minimise the largest of `rounds` * time and `floor`; None unless that is less than `below`."""
        cost = np.maximum(rounds * self.micro_s, floor)
        stages = (np.where(self._fits(stage), cost, np.inf) for stage in range(self.point[-1]))
        slowest, marks = least_slowest(stages, self.deadline)
        return (tuple(marks), slowest) if slowest < below else (None, math.inf)


PARTITION_SOLVERS.register(NAME, PartitionSolver((TwoBWProblem,), exact=True, run=solve_twobw))
