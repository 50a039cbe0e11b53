"""Exact DP over suffixes: Pareto labels of partial decisions, pruned by a relaxation.

A label is a cut of blocks i..n-1 into stages on the last devices of the slice. It carries the times of a `Suffix`; the
objective defines how these change when a stage is put before the suffix. Smaller is better for all of them, and for two
more figures: the micro-batches that pass the first stage before its first backward (earlier stages keep more the larger
it is), and the number of stages if that is limited.

Labels compare only within a *context*. The time to receive depends on the stage before, so a context is the device at
which the suffix begins with the link class over which each possible stage before would reach it. If the first and the
last block share weights, labels are also separated by the cost of summing their gradients, which depends on the last
stage (`tied`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.solvers._objectives import NewStage, Suffix
from planner.solvers._relaxation import Relaxation, longest
from planner.solvers._stages import Pins, StagePrices
from planner.space.problem import StageProblem
from planner.space.types import StageChoice


@dataclass(frozen=True, eq=False)
class Contexts:
    """Contexts by number, in order of the device where the suffix begins.

    Attributes:
        at: int64 [contexts], device at which the suffix begins.
        link: int64 [contexts, R], class of the link into a first stage with replicas[o].
        first: int64 [W + 2], contexts that begin at device a are first[a]..first[a + 1] - 1.
        after: int64 [R, W + 1], context of a suffix at device a if the stage before it has replicas[o].
        follows: bool [R, contexts], True if a stage with replicas[o] can stand before a suffix of that context.
    """

    at: np.ndarray
    link: np.ndarray
    first: np.ndarray
    after: np.ndarray
    follows: np.ndarray


def contexts(problem: StageProblem) -> Contexts:
    """Number the contexts of a problem: stages before a boundary with equal links share one. O(R^2 W)."""
    count, width = len(problem.replicas), problem.slice_devices
    at: list[int] = []
    rows: list[np.ndarray] = []
    after = np.full((count, width + 1), -1, dtype=np.int64)
    for a in range(width + 1):
        fits = np.flatnonzero(problem.replicas <= a)
        if a == width:
            after[fits, a] = len(at)
            at.append(a)
            rows.append(np.full(count, -1, dtype=np.int64))
        elif len(fits):
            profiles, which = np.unique(problem.link[fits, :, a], axis=0, return_inverse=True)
            after[fits, a] = len(at) + which.reshape(-1)
            at.extend([a] * len(profiles))
            rows.extend(profiles)
    places = np.array(at, dtype=np.int64)
    follows = np.stack(
        [(after[o, places] == np.arange(len(places))) & (places >= r) for o, r in enumerate(problem.replicas)]
    )
    return Contexts(places, np.stack(rows), np.searchsorted(places, np.arange(width + 2)), after, follows)


Stages = tuple[StageChoice, ...]


@dataclass(frozen=True, eq=False)
class _Labels:
    """Labels as columns; `parent` and `option` lead back to the rest of the suffix and the stage's replicas."""

    context: np.ndarray
    work_s: np.ndarray
    reach_s: np.ndarray
    pace_s: np.ndarray
    end_s: np.ndarray
    promise: np.ndarray
    passing: np.ndarray
    stages: np.ndarray
    tied: np.ndarray
    parent: np.ndarray
    option: np.ndarray
    bound_s: np.ndarray

    def take(self, rows: np.ndarray) -> _Labels:
        """Some of the labels."""
        return _Labels(*(getattr(self, name)[rows] for name in _COLUMNS))

    @staticmethod
    def join(batches: list[_Labels]) -> _Labels:
        """All labels of several batches."""
        return _Labels(*(np.concatenate([getattr(b, name) for b in batches]) for name in _COLUMNS))


_NewFirstStages = tuple[np.ndarray, ...]
"""By new first stage: suffix that it is put before, device where it begins, forward, work and end in seconds."""


_COLUMNS = tuple(_Labels.__dataclass_fields__)


class LabelSearch:
    """One run of the DP.

    Args:
        problem: the problem.
        prices: its stage prices.
        relaxation: lower bounds on the blocks before a cut, made with a cutoff no lower than this run's.
        cutoff_s: decisions at or above it are ignored, in seconds.
        tolerance_s: a label is also dropped if another one exceeds it by no more than this in every time.

    Attributes:
        states: number of labels kept so far.
    """

    def __init__(
        self,
        problem: StageProblem,
        prices: StagePrices,
        relaxation: Relaxation,
        cutoff_s: float,
        tolerance_s: float,
    ) -> None:
        self._problem, self._prices, self._relaxation = problem, prices, relaxation
        self._cutoff_s, self._tolerance_s = cutoff_s, tolerance_s
        self._objective = relaxation.objective
        self._stops = longest(problem, relaxation.objective, cutoff_s)
        self._contexts = contexts(problem)
        self._pins = Pins.of(problem)
        n = problem.blocks
        self._counts = tuple(sorted(set(problem.replicas.tolist())))
        self._keeps_more = bool((problem.in_flight != problem.in_flight[:, :1]).any())
        self._starts = np.zeros(n + 2, dtype=np.int64)
        self._columns: dict[str, np.ndarray] = {}
        self.states = 0

    def run(self, keep: int, limit: int) -> list[tuple[float, Stages]] | None:
        """(seconds, stages) of decisions below the cutoff, fastest first; None if more than `limit` labels are needed.

        The seconds are exact for the first decision and upper bounds for the others.

        Args:
            keep: most decisions to return.
            limit: most labels to keep.
        """
        n = self._problem.blocks
        final = np.array([len(self._contexts.at) - 1])
        zero, none = np.zeros(1), np.full(1, -1)
        self._store(n, _Labels(final, zero, zero, zero, zero, none + 2, none + 1, none + 1, none, none, none, zero))
        for i in range(n - 1, 0, -1):
            labels = self._expand(i)
            self._store(i, self._prune(labels) if labels is not None else None)
            if self.states > limit:
                return None
        labels = self._expand(0)
        counts = self._problem.stage_counts
        if labels is not None and len(counts):
            labels = labels.take(np.flatnonzero(np.isin(labels.stages, counts)))
        if labels is None or not len(labels.context):
            return []
        times = labels.bound_s
        order = np.lexsort((labels.option, labels.parent, labels.stages, times))
        best: dict[Stages, float] = {}
        for row in order[: 4 * keep]:
            best.setdefault(self._stages(labels, int(row)), float(times[row]))
        return [(seconds, stages) for stages, seconds in best.items()][:keep]

    def _store(self, position: int, batch: _Labels | None) -> None:
        """Append the labels of suffixes that begin with block `position` to the columns."""
        self._starts[position] = self.states
        if batch is None:
            return
        size = len(batch.context)
        columns = {name: getattr(batch, name) for name in _COLUMNS if name != "bound_s"}
        columns["position"] = np.full(size, position)
        for name, values in columns.items():
            old = self._columns.get(name)
            if old is None or self.states + size > len(old):
                grown = np.empty(max(1024, 2 * (self.states + size)), dtype=values.dtype)
                if old is not None:
                    grown[: self.states] = old[: self.states]
                self._columns[name] = old = grown
            old[self.states : self.states + size] = values
        self.states += size

    def _expand(self, i: int) -> _Labels | None:
        """All labels of suffixes that begin with block i and may beat the cutoff."""
        batches = []
        for o in range(len(self._problem.replicas)):
            new_stages = self._stages_before_suffixes(i, o)
            if new_stages is not None:
                batches += self._with_link_classes(i, o, new_stages)
        return _Labels.join(batches) if batches else None

    def _stages_before_suffixes(self, i: int, o: int) -> _NewFirstStages | None:
        """Stages with replicas[o] that begin with block i, before every suffix with which they may beat the cutoff."""
        problem, relaxed, columns = self._problem, self._relaxation, self._columns
        r = int(problem.replicas[o])
        stop = int(self._stops[o, i])
        first = int(self._starts[stop])
        if stop <= i or first == self.states:
            return None
        context = columns["context"][first : self.states]
        at = self._contexts.at[context] - r
        useful = columns["promise"][first : self.states] <= r
        behind = columns["stages"][first : self.states] + 1
        useful &= self._contexts.follows[o, context] & np.isfinite(relaxed.before(i, at, behind).delay_s)
        if problem.max_stages:
            useful &= columns["stages"][first : self.states] < problem.max_stages
        if len(problem.stage_counts):
            total = columns["stages"][first : self.states] + 1
            useful &= total + (i > 0) <= problem.stage_counts[-1]
            useful &= total + np.minimum(i, at) >= problem.stage_counts[0]
        if len(problem.pins):
            ends = columns["position"][first : self.states], columns["stages"][first : self.states]
            useful &= self._pins.allow(i, *ends)
        (rows,) = useful.nonzero()
        if not len(rows):
            return None
        at, rows = at[rows], rows + first
        position = columns["position"][rows]
        forward, work, end = self._prices.choose(
            problem.place[o, at], i, position - 1, problem.in_flight[o, columns["passing"][rows]]
        )
        if i == 0 and len(problem.tied_s):
            end = end + np.where(position < problem.blocks, problem.tied_s[columns["tied"][rows], o, at], 0.0)
        least = self._objective.prepended_bound(self._suffix(rows), work + self._prices.transfer_s[o, at, i], forward)
        bound = self._objective.bound_s(least, relaxed.before(i, at, columns["stages"][rows] + 1))
        (good,) = (bound < self._cutoff_s).nonzero()
        return tuple(column[good] for column in (rows, at, forward, work, end)) if len(good) else None

    def _suffix(self, rows: np.ndarray) -> Suffix:
        return Suffix(*(self._columns[name][rows] for name in ("work_s", "reach_s", "pace_s", "end_s")))

    def _with_link_classes(self, i: int, o: int, new_stages: _NewFirstStages) -> list[_Labels]:
        """One copy of each label per link class that may lead into its first stage."""
        problem, columns = self._problem, self._columns
        rows, at, forward_s, work_s, end_s = new_stages
        if i:
            begin, count = self._contexts.first[at], self._contexts.first[at + 1] - self._contexts.first[at]
            source = np.repeat(np.arange(len(at)), count)
            context = np.arange(len(source)) - np.repeat(np.cumsum(count) - count, count) + begin[source]
            link = self._contexts.link[context, o]
            rows, at, forward_s, work_s, end_s = (column[source] for column in new_stages)
            receive, back = problem.receive_s[link, i], problem.return_s[link, i]
        else:
            context, receive, back = np.zeros(len(rows), dtype=np.int64), np.zeros(1), np.zeros(1)
        r, passing = int(problem.replicas[o]), columns["passing"][rows]
        stage = NewStage(
            replicas=r,
            turns=problem.micro_batches // r,
            first=i == 0,
            forward_s=forward_s + receive,
            backward_s=work_s - forward_s + back,
            work_s=work_s + (receive + back),
            end_s=end_s,
            later_s=columns["work_s"][rows],
            in_flight=problem.in_flight[o, passing],
            filling=problem.filling[o, passing],
        )
        last = columns["position"][rows] == problem.blocks
        tied = np.where(last, problem.tied_class[o], columns["tied"][rows])
        stages, batches = columns["stages"][rows] + 1, []
        before = self._relaxation.before(i, at, stages)
        grown = self._objective.prepended(self._suffix(rows), stage, columns["promise"][rows], before, self._counts)
        for promise, suffix, useful in grown:
            bound = self._objective.bound_s(suffix, before)
            good = np.flatnonzero(useful & (bound < self._cutoff_s))
            if len(good):
                batches.append(
                    _Labels(
                        context=context[good],
                        work_s=suffix.work_s[good],
                        reach_s=suffix.reach_s[good],
                        pace_s=suffix.pace_s[good],
                        end_s=suffix.end_s[good],
                        promise=np.full(len(good), promise),
                        passing=problem.passing[o, passing[good]],
                        stages=stages[good],
                        tied=tied[good],
                        parent=rows[good],
                        option=np.full(len(good), o),
                        bound_s=bound[good],
                    )
                )
        return batches

    def _prune(self, batch: _Labels) -> _Labels:
        """Keep the Pareto front of each context (and of each number of stages, if that is fixed).

        Each round keeps the best remaining label of every context and drops the labels that it dominates.
        """
        exact = len(self._problem.stage_counts) > 0 or bool(self._pins.behind)
        costs = (batch.pace_s, batch.end_s, batch.reach_s, batch.work_s, batch.bound_s)
        zeros = np.zeros(len(batch.stages), dtype=np.int64)
        group = batch.stages if exact else zeros
        kept_apart = batch.passing if self._objective.counts_passing else zeros
        order = np.lexsort(
            (batch.stages, batch.passing, batch.promise, *costs, kept_apart, group, batch.tied, batch.context)
        )
        keys = np.stack([batch.context, batch.tied, group, kept_apart])[:, order]
        number = np.concatenate([[0], np.cumsum((keys[:, 1:] != keys[:, :-1]).any(axis=0))])
        counts = [batch.promise, *([batch.passing] if self._keeps_more else [])]
        counts += [batch.stages] if self._problem.max_stages else []
        times = [getattr(batch, name) for name in self._objective.figures]
        figures = np.stack([*times, *counts])[:, order]
        slack = np.array([self._tolerance_s] * len(times) + [0.0] * len(counts))[:, None]
        kept, left = [], np.arange(len(order))
        while len(left):
            new = np.concatenate([[True], number[left[1:]] != number[left[:-1]]])
            firsts = np.flatnonzero(new)
            kept.append(left[firsts])
            dominating = firsts[np.cumsum(new) - 1]
            remaining = figures[:, left]
            beaten = (remaining >= remaining[:, dominating] - slack).all(axis=0)
            left = left[~(beaten | new)]
        return batch.take(order[np.concatenate(kept)])

    def _stages(self, batch: _Labels, row: int) -> Stages:
        """The stages of a complete decision, first stage first."""
        problem, columns = self._problem, self._columns
        stages, start = [], 0
        option, parent = int(batch.option[row]), int(batch.parent[row])
        while parent >= 0:
            stop, r = int(columns["position"][parent]), int(problem.replicas[option])
            at = int(self._contexts.at[columns["context"][parent]]) - r
            in_flight = int(problem.in_flight[option, columns["passing"][parent]])
            way, layers = self._prices.way(int(problem.place[option, at]), start, stop - 1, in_flight)
            stages.append(problem.stage(start, stop, option, way, layers))
            start, option, parent = stop, int(columns["option"][parent]), int(columns["parent"][parent])
        return tuple(stages)
