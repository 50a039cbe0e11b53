"""Exact solver of HetPipe's virtual workers: a DP over (devices used by type, last type, layers placed)."""

from __future__ import annotations

import contextlib
import itertools
import math

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
from planner.space.partition.hetpipe import HetPipeDecision, HetPipeProblem

NAME = "hetpipe-dp"
State = tuple[tuple[int, ...], int]
"""Devices used of each type, type of the last."""


def solve_hetpipe(
    problem: HetPipeProblem,
    *,
    time_limit_s: float = 60.0,
    start: HetPipeDecision | None = None,
    progress: Progress | None = None,
) -> Result:
    """The order of devices and the cuts with the fastest slowest stage.

    With u devices used before a stage, it is the (u + 1)-st: so what it keeps in flight is known from the state, and a
    type need not be told from another device of it. O(prod(counts + 1) types^2 layers^2), vectorised over layers; for
    pipelines that may leave devices idle once for each length.
    """
    deadline = Deadline(time_limit_s)
    best, decision, finished, states = math.inf, None, False, 0
    if start is not None and (verdict := problem.judge(start)).feasible:
        best, decision = verdict.objective, start
    devices = sum(problem.counts)
    lengths = [devices] if problem.use_all else range(min(devices, problem.layers), 0, -1)
    with contextlib.suppress(OutOfTime):
        for stages in lengths:
            if stages > problem.layers:
                continue
            deadline.check()
            line = _Line(problem, stages, deadline)
            slowest, plan = line.run()
            states += len(line.best)
            if plan is not None and slowest < best:
                best, decision = slowest, plan
                if progress:
                    progress(NAME, best, 0.0)
        finished = True
    bound = best if finished else 0.0
    return verified(problem, decision, best, bound, NAME, "orders of devices and cuts", {"states": states})


class _Line:
    """Pipelines of exactly `stages` stages."""

    def __init__(self, problem: HetPipeProblem, stages: int, deadline: Deadline) -> None:
        self.problem, self.stages, self.deadline = problem, stages, deadline
        self.best: dict[State, np.ndarray] = {}
        self.kinds = [kind for kind, count in enumerate(problem.counts) if count]
        self.compute = {kind: _sums(problem.compute_s[kind]) for kind in self.kinds}
        self.weights, self.saved = run_sums(problem.weight_bytes), run_sums(problem.saved_bytes)
        marks = np.arange(problem.layers + 1)
        self.real = marks[:, None] < marks[None, :]

    def run(self) -> tuple[float, HetPipeDecision | None]:
        """The slowest stage of the best pipeline, and it."""
        for used in sorted(self._multisets(), key=lambda used: (sum(used), used)):
            self.deadline.check()
            for kind in self.kinds:
                if used[kind]:
                    self.best[used, kind] = self._arrive(used, kind).min(axis=0)
        ends = [(float(v[-1]), state) for state, v in self.best.items() if sum(state[0]) == self.stages]
        slowest, state = min(ends, default=(math.inf, None))
        if state is None or math.isinf(slowest):
            return math.inf, None
        return slowest, self._trace(state)

    def _multisets(self) -> list[tuple[int, ...]]:
        every = itertools.product(*(range(count + 1) for count in self.problem.counts))
        return [used for used in every if 1 <= sum(used) <= self.stages]

    def _arrive(self, used: tuple[int, ...], kind: int) -> np.ndarray:
        """Slowest stage of pipelines on `used` whose last device is of a type, by (cut before it, cut behind it)."""
        before = tuple(count - (i == kind) for i, count in enumerate(used))
        stage = np.where(self._fits(sum(before), kind), self.compute[kind], np.inf)
        if not any(before):
            only = np.full_like(stage, np.inf)
            only[0] = stage[0]
            return only
        ways = []
        for last in self.kinds:
            if before[last]:
                transfer = 2 * self.problem.boundary_bytes / self.problem.bandwidth_byte_per_s[last, kind]
                ways.append(np.maximum(self.best[before, last][:, None], stage + transfer[:, None]))
        return np.asarray(np.minimum.reduce(ways))

    def _fits(self, place: int, kind: int) -> np.ndarray:
        """Which runs of layers fit on a device of a type as stage `place` (0 is the first)."""
        problem = self.problem
        kept = min(problem.concurrent, max(self.stages, problem.concurrent) - place)
        versions = (kept if problem.stash_weights else 1) + problem.optimizer_per_weight
        needed = versions * self.weights + kept * self.saved
        return np.asarray(self.real & fits(needed, problem.memory_bytes[kind]))

    def _trace(self, state: State) -> HetPipeDecision:
        marks, types = [self.problem.layers], [state[1]]
        while True:
            used, kind = state
            at = int(np.argmin(self._arrive(used, kind)[:, marks[-1]]))
            marks.append(at)
            before = tuple(count - (i == kind) for i, count in enumerate(used))
            if not any(before):
                return HetPipeDecision(tuple(reversed(marks)), tuple(reversed(types)))
            here = marks[-2]
            stage = self.compute[kind][at, here]
            prices = {
                last: max(
                    float(self.best[before, last][at]),
                    stage + 2 * self.problem.boundary_bytes[at] / float(self.problem.bandwidth_byte_per_s[last, kind]),
                )
                for last in self.kinds
                if before[last]
            }
            last = min(prices, key=lambda kind: (prices[kind], kind))
            types.append(last)
            state = (before, last)


def _sums(figures: np.ndarray) -> np.ndarray:
    total = np.concatenate([[0.0], np.cumsum(figures)])
    return np.asarray(total[None, :] - total[:, None])


PARTITION_SOLVERS.register(NAME, PartitionSolver((HetPipeProblem,), exact=True, run=solve_hetpipe))
