"""PipeDream's recurrence over several levels, on tables of all pairs of cuts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.memory import fits
from planner.solvers.partition._pipedream_cuts import Cuts
from planner.space.partition.pipedream import PipeDreamProblem, ReplicatedStage
from planner.space.partition.pipedream_terms import StageCost, StashRule

_SAME = 1 + 1e-12


@dataclass(frozen=True, slots=True)
class Context:
    """Where a unit stands, for its memory: units that run the same, devices on later stages."""

    copies: int
    behind: int


class Nested:
    """Tables of all levels, made when asked for.

    Complexity: O(S^3 m^2) vectorised operations on each level but the last, O(S^2 m^2) there.
    """

    def __init__(self, problem: PipeDreamProblem, cuts: Cuts, check: Callable[[], None]) -> None:
        self.problem = problem
        self.cuts = cuts
        self.check = check
        self.top = len(problem.machines) - 1
        inside = np.zeros((cuts.count, cuts.count), dtype=bool)
        for row in range(cuts.count):
            inside[row, row + 1 :] = ~(cuts.bits[row] & ~cuts.bits[row + 1 :]).any(axis=1)
        self.reach = inside
        self.compute = self._differences(cuts.compute_s, np.inf)
        self.weights = self._differences(cuts.weight_bytes, 0.0)
        self.saved = self._differences(cuts.saved_bytes, 0.0)
        self.tables: dict[tuple[int, Context], tuple[np.ndarray, ...]] = {}
        self.by_device = math.isfinite(problem.memory.device_bytes) and problem.memory.rule is StashRule.STASHED

    def solve(self) -> tuple[float, tuple[ReplicatedStage, ...] | None]:
        """The best time of the whole network on the whole cluster, and the plan."""
        context = Context(1, 0)
        machines = self.problem.machines[self.top]
        best = float(self._table(self.top, context)[machines][0, -1])
        if math.isinf(best):
            return best, None
        return best, self._trace(self.top, context, 0, self.cuts.count - 1, machines)

    def _differences(self, figures: np.ndarray, outside: float) -> np.ndarray:
        return np.where(self.reach, figures[None, :] - figures[:, None], outside)

    def _context(self, level: int, context: Context, behind: int, replicas: int) -> Context:
        """Context of the units of a stage with `behind` units of its level on later stages."""
        if not self.by_device:
            return Context(1, 0)
        size = math.prod(self.problem.machines[:level])
        return Context(context.copies * replicas, context.behind + context.copies * behind * size)

    def _unit(self, level: int, context: Context) -> np.ndarray:
        """Time that one unit of the level below takes from each cut to each."""
        if level == 0:
            return self.compute
        return self._table(level - 1, context)[self.problem.machines[level - 1]]

    def _stage(self, level: int, context: Context, behind: int, replicas: int, *, first: bool) -> np.ndarray:
        """Time of a stage from each cut to each, transfers at its ends included unless it is the first of its run."""
        problem = self.problem
        speed = problem.bandwidth_byte_per_s[level]
        unit = self._unit(level, self._context(level, context, behind, replicas))
        if problem.cost is StageCost.PAPER:
            time = np.maximum(unit, 2 * (replicas - 1) * self.weights / speed) / replicas
        else:
            shared = problem.machines[level - 1] if first and level else 1
            time = (unit + 4 * (replicas - 1) * self.weights / (speed * replicas) / shared) / replicas
        if problem.transfers and not first:
            sharing = 1 if problem.cost is StageCost.PAPER else replicas
            cut_s = 2 * self.cuts.cut_bytes / (speed * sharing)
            leaving = cut_s.copy()
            leaving[-1] = 0.0
            time = np.maximum(time, np.maximum(cut_s[:, None], leaving[None, :]))
        return self._within_memory(level, context, behind, replicas, time)

    def _within_memory(self, level: int, context: Context, behind: int, replicas: int, time: np.ndarray) -> np.ndarray:
        memory = self.problem.memory
        if math.isinf(memory.device_bytes) or (self.by_device and level):
            return time
        kept = self.weights + self.saved
        if self.by_device:
            own = replicas * context.copies
            later = behind * context.copies + context.behind
            needed = -(-(later + own) // own) * (kept + self.cuts.cut_bytes[:, None])
            needed = needed + memory.optimizer_per_weight * self.weights
        else:
            needed = -(-behind // replicas) * kept
        return np.where(fits(needed, memory.device_bytes), time, np.inf)

    def _table(self, level: int, context: Context) -> tuple[np.ndarray, ...]:
        """Best times of runs on one level: [m][i, j] for cuts i to j on m units; on the last level i is 0 only."""
        key = (level, context)
        if key not in self.tables:
            self.tables[key] = self._fill(level, context)
        return self.tables[key]

    def _fill(self, level: int, context: Context) -> tuple[np.ndarray, ...]:
        machines = self.problem.machines[level]
        rows = 1 if level == self.top else self.cuts.count
        runs = [np.full((rows, self.cuts.count), np.inf)]
        for used in range(1, machines + 1):
            best = np.full((rows, self.cuts.count), np.inf)
            if used == 1 or self.problem.replicate:
                best = self._stage(level, context, machines - used, used, first=True)[:rows].copy()
            if self.problem.use_fewer:
                best = np.minimum(best, runs[used - 1])
            for replicas in range(1, used if self.problem.replicate else min(used, 2)):
                stage = self._stage(level, context, machines - used, replicas, first=False)
                self._join(runs[used - replicas], stage, best)
            runs.append(best)
        return tuple(runs)

    def _join(self, runs: np.ndarray, stage: np.ndarray, best: np.ndarray) -> None:
        """best[i, j] = min(best, min over k of max(runs[i, k], stage[k, j]))."""
        for row in range(len(runs)):
            self.check()
            at = row + 1
            if at < runs.shape[1]:
                through = np.maximum(runs[row, at:, None], stage[at:, at:]).min(axis=0)
                np.minimum(best[row, at:], through, out=best[row, at:])

    def _trace(self, level: int, context: Context, start: int, stop: int, units: int) -> tuple[ReplicatedStage, ...]:
        """The stages behind a figure of a table."""
        runs = self._table(level, context)
        machines, time = self.problem.machines[level], runs[units][start, stop] * _SAME
        if self.problem.use_fewer and units > 1 and runs[units - 1][start, stop] <= time:
            return self._trace(level, context, start, stop, units - 1)
        behind = machines - units
        if units == 1 or self.problem.replicate:
            alone = self._stage(level, context, behind, units, first=True)[start, stop]
            if alone <= time:
                return (self._made(level, context, behind, units, start, stop),)
        for replicas in range(1, units if self.problem.replicate else min(units, 2)):
            stage = self._stage(level, context, behind, replicas, first=False)
            through = np.maximum(runs[units - replicas][start], stage[:, stop])
            cut = int(np.argmin(through))
            if through[cut] <= time:
                before = self._trace(level, context, start, cut, units - replicas)
                return (*before, self._made(level, context, behind, replicas, cut, stop))
        raise RuntimeError("a figure of the table has no stage behind it")

    def _made(self, level: int, context: Context, behind: int, replicas: int, start: int, stop: int) -> ReplicatedStage:
        inner: tuple[ReplicatedStage, ...] = ()
        if level:
            below = self._context(level, context, behind, replicas)
            inner = self._trace(level - 1, below, start, stop, self.problem.machines[level - 1])
        return ReplicatedStage(self.cuts.layers_between(start, stop), replicas, inner)
