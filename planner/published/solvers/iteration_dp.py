"""Iteration time of a synchronous pipeline, exactly: branch and bound on the longest stage over a chain DP.

`search_bottlenecks` splits the range of the longest stage time: ten to forty passes, not one per candidate value. A
pass is a DP over (first layer, devices left), vectorised over the last layer and all devices. Memory depends on the
number of later stages. A pass first ignores that, which gives a lower bound. Only if its plan does not fit, the pass is
repeated stage by stage from the end; a state with more stages is kept if it is better than all with fewer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.memory import most_that_fit
from planner.published.problems import IterationDecision, IterationProblem, MeshStage
from planner.published.solvers import PARTITION_SOLVERS, Deadline, PartitionSolver, SearchState
from planner.solvers.cluster_chains.chain_dp import STEP, search_bottlenecks


@dataclass(frozen=True)
class Stages:
    """Stage times under a cap. V levels of links, G mesh sizes, L layers.

    Attributes:
        seconds: [V, G, L, L] by first and last layer, with the boundary before the stage; infinite above the cap.
        stops: [V, G, L] by first layer, one past the last layer of the longest finite stage; 0 if there is none.
    """

    seconds: np.ndarray
    stops: np.ndarray


class Passes:
    """An instance as the passes use it. L layers, C configurations, G mesh sizes, V levels, D devices.

    In state (i, r), layers i..L-1 are to be placed on the last r devices; the next mesh starts at device D - r.

    Attributes:
        sizes: [G] distinct mesh sizes, ascending.
        configs: [G] configurations of each size.
        most_in_flight: [L, L, C] most micro-batches that fit; the largest integer without a memory limit.
        boundary_s: [V, L] with 0 for the first layer; V = 1 and zero if boundaries are free.
        level: [D + 1] level of the links before the next mesh, by r.
        count: passes so far.
        staged: passes so far that were repeated stage by stage.
    """

    def __init__(self, problem: IterationProblem, deadline: Deadline) -> None:
        self.problem, self.deadline, self.count, self.staged = problem, deadline, 0, 0
        devices = problem.devices
        self.sizes = sorted({int(n) for n in problem.config_devices if n <= devices})
        self.configs = [np.flatnonzero(problem.config_devices == n) for n in self.sizes]
        self.most_in_flight = np.full(problem.time_s.shape, np.iinfo(np.int64).max)
        if problem.fixed_bytes is not None and problem.activation_bytes is not None:
            self.most_in_flight = most_that_fit(problem.fixed_bytes, problem.activation_bytes, problem.memory_bytes)
        self.boundary_s, self.level = np.zeros((1, problem.layers)), np.zeros(devices + 1, dtype=np.int64)
        if problem.boundary_s is not None and problem.boundary_level is not None:
            self.boundary_s = np.array(problem.boundary_s, dtype=np.float64)
            self.boundary_s[:, 0] = 0.0
            self.level = problem.boundary_level[np.minimum(devices - np.arange(devices + 1), devices - 1)]

    def _times(self, in_flight: int) -> np.ndarray:
        """[L, L, C] stage times, infinite where so many micro-batches do not fit."""
        fitting = self.most_in_flight >= min(in_flight, self.problem.micro_batches)
        return np.where(fitting, self.problem.time_s, np.inf)

    def longest(self) -> np.ndarray:
        """All values that the longest stage can take, in ascending order."""
        times = self._times(1)[:, :, self.problem.config_devices <= self.problem.devices]
        values = np.unique(times + self.boundary_s[:, :, None, None])
        return values[np.isfinite(values)]

    def stages(self, in_flight: int, cap: float) -> Stages:
        """Times of the fastest configuration of each size that fits with so many micro-batches in flight."""
        times = self._times(in_flight)
        fastest = np.stack([times[:, :, configs].min(axis=2) for configs in self.configs])
        seconds = fastest + self.boundary_s[:, None, :, None]
        seconds[seconds > cap] = np.inf
        finite = np.isfinite(seconds)
        stops = self.problem.layers - np.argmax(finite[..., ::-1], axis=3)
        return Stages(seconds, np.where(finite.any(axis=3), stops, 0))

    def ends(self) -> np.ndarray:
        """[L + 1, D + 1] least sums of the states behind the last layer, infinite for all others."""
        table = np.full((self.problem.layers + 1, self.problem.devices + 1), np.inf)
        table[-1, 0 if self.problem.use_all else slice(None)] = 0.0
        return table

    def extend(self, stages: Stages, after: np.ndarray, first: int, low: int = 0) -> np.ndarray:
        """[D + 1] least sums of the states (first, r), from those of the later layers.

        Args:
            stages: allowed stages.
            after: [L + 1, D + 1] least sums of the next states.
            first: layer of the states to compute.
            low: first layer of `after` with finite sums.

        Raises:
            OutOfTime: the deadline passed.
        """
        self.deadline.check()
        devices, begin = self.problem.devices, max(first + 1, low)
        best = np.full(devices + 1, np.inf)
        for level in range(len(self.boundary_s)):
            at = self.level == level
            if first == 0:
                at[:devices] = False
            for g, size in enumerate(self.sizes):
                stop = int(stages.stops[level, g, first])
                if stop >= begin:
                    seconds = stages.seconds[level, g, first, begin - 1 : stop, None]
                    sums = (after[begin : stop + 1, : devices + 1 - size] + seconds).min(axis=0)
                    np.minimum(best[size:], sums, out=best[size:], where=at[size:])
        return best

    def path(self, following: Callable[[int], tuple[Stages, np.ndarray]]) -> IterationDecision:
        """The stages behind the least sum of all layers on all devices.

        Args:
            following: by number of stages so far, the allowed stages and
                [L + 1, D + 1] least sums of the states after.
        """
        path: list[tuple[int, int, int]] = []
        first, left = 0, self.problem.devices
        while first < self.problem.layers:
            stages, after = following(len(path))
            steps = []
            for g, size in enumerate(self.sizes):
                if size <= left:
                    totals = stages.seconds[self.level[left], g, first, first:] + after[first + 1 :, left - size]
                    at = int(np.argmin(totals))
                    steps.append((float(totals[at]), g, first + at, left - size))
            _, g, last, left = min(steps)
            path.append((g, first, last))
            first = last + 1
        return tuple(self._fastest(*step, len(path) - i) for i, step in enumerate(path))

    def _fastest(self, g: int, first: int, last: int, in_flight: int) -> MeshStage:
        """The stage in the fastest configuration of a size that fits with the micro-batches in flight."""
        configs = self.configs[g]
        fitting = self.most_in_flight[first, last, configs] >= min(in_flight, self.problem.micro_batches)
        times = np.where(fitting, self.problem.time_s[first, last, configs], np.inf)
        return MeshStage(first, last, int(configs[np.argmin(times)]))


def solve_iteration(search: SearchState) -> None:
    """Find the least iteration time and prove it.

    A pass takes O(L^2 G D) for L layers, G mesh sizes and D devices, and as much again for every stage when memory
    binds.
    """
    problem: IterationProblem = search.problem
    search.space = "all cuts of the chain, meshes in line and their configurations"
    passes = Passes(problem, search.deadline)
    if not passes.sizes:
        search.prove(np.inf)
        return
    values = passes.longest()

    def solve(cap: float, enough: float) -> tuple[float, float]:
        least_sum, decision = _least_sum(passes, cap, enough)
        search.count(candidates=len(values), passes=passes.count, staged_passes=passes.staged)
        if not decision:
            return np.inf, np.inf
        longest = max(problem.judge(decision).parts)
        search.offer(decision, least_sum + (problem.micro_batches - 1) * longest)
        return least_sum, longest

    search_bottlenecks(values, problem.micro_batches - 1, search.objective, solve, search.prove)


def _least_sum(passes: Passes, cap: float, enough: float) -> tuple[float, IterationDecision]:
    """The least sum of stage times under a cap, and its plan; an empty one if no sum is below `enough`."""
    passes.count += 1
    stages, table = passes.stages(1, cap), passes.ends()
    for first in range(passes.problem.layers - 1, -1, -1):
        table[first] = passes.extend(stages, table, first)
    least_sum = float(table[0, -1])
    if not least_sum < enough:
        return least_sum, ()
    decision = passes.path(lambda _: (stages, table))
    verdict = passes.problem.judge(decision)
    if verdict.feasible and math.fsum(verdict.parts) <= least_sum * (1 + STEP):
        return least_sum, decision
    return _least_staged_sum(passes, cap, enough)


def _least_staged_sum(passes: Passes, cap: float, enough: float) -> tuple[float, IterationDecision]:
    """Like `_least_sum`, but with exact memory: states by their number of stages, fewest first."""
    passes.staged += 1
    history, stage_count = [passes.ends()], 0
    best = np.full_like(history[0], np.inf)
    for count in range(1, min(passes.problem.layers, passes.problem.devices) + 1):
        active = np.flatnonzero(np.isfinite(history[-1]).any(axis=1))
        if not len(active):
            break
        stages, table = passes.stages(count, cap), np.full_like(best, np.inf)
        for first in range(int(active[-1]) - 1, -1, -1):
            row = passes.extend(stages, history[-1], first, int(active[0]))
            row[(row >= best[first]) | (row >= enough)] = np.inf
            table[first] = row
        np.minimum(best, table, out=best)
        history.append(table)
        if table[0, -1] < enough:
            enough, stage_count = float(table[0, -1]), count
    if not stage_count:
        return np.inf, ()
    return enough, passes.path(lambda i: (passes.stages(stage_count - i, cap), history[stage_count - i - 1]))


PARTITION_SOLVERS.register("iteration-dp", PartitionSolver(IterationProblem, solve_iteration))
