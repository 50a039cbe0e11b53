"""Exact DP over suffixes: Pareto labels of partial decisions, kept while a relaxation says that they may still win.

A label stands for blocks i..n-1 cut into stages on the last devices of the slice. Its times are those of a `Suffix`;
what becomes of them when a stage is put in front, and which of them matter, the objective says. None of them is better
large. Two more that are better small: the micro-batches that pass the first stage before its first backward (what
earlier stages must keep grows with it), and, where stages are limited, their number. The time to receive depends on the
stage before, so suffixes are kept apart by *context*: where they begin and which class of link each of their possible
first stages would be reached over. Where the first and the last block share weights, they are also kept apart by what
summing these gradients will cost given their last stage (`tied`).

Contexts of suffixes: where they begin, and which links each of their possible first stages would be reached over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.solvers._objectives import NewStage, Suffix
from planner.solvers._relaxation import Relaxation, longest
from planner.solvers._stages import Pins, StageTables
from planner.space.problem import StageProblem
from planner.space.types import StageChoice


@dataclass(frozen=True, eq=False)
class Contexts:
    """Contexts by number, ordered by where they begin.

    Attributes:
        at: [contexts] device at which the suffix begins.
        link: [contexts, R] class of link into a first stage with replicas[o].
        first: [W + 2] contexts that begin at a are first[a]..first[a + 1] - 1.
        after: [R, W + 1] context of a suffix at a whose stage before has replicas[o].
        follows: bool [R, contexts], whether a stage with replicas[o] can stand before a suffix of that context.
    """

    at: np.ndarray
    link: np.ndarray
    first: np.ndarray
    after: np.ndarray
    follows: np.ndarray


def contexts(problem: StageProblem) -> Contexts:
    """Group the stages before each boundary by the links they mean; O(R^2 W)."""
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
class _Batch:
    """Labels as columns."""

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

    def take(self, rows: np.ndarray) -> _Batch:
        return _Batch(*(getattr(self, name)[rows] for name in _COLUMNS))

    @staticmethod
    def join(batches: list[_Batch]) -> _Batch:
        return _Batch(*(np.concatenate([getattr(b, name) for b in batches]) for name in _COLUMNS))


@dataclass(frozen=True, eq=False)
class _Front:
    """New first stages, each before a suffix of which only the number of devices is looked at."""

    rows: np.ndarray
    at: np.ndarray
    forward_s: np.ndarray
    work_s: np.ndarray
    end_s: np.ndarray

    def take(self, rows: np.ndarray) -> _Front:
        return _Front(self.rows[rows], self.at[rows], self.forward_s[rows], self.work_s[rows], self.end_s[rows])


_COLUMNS = tuple(_Batch.__dataclass_fields__)


class LabelSearch:
    """One run of the DP.

    Args:
        problem: the problem.
        tables: its stages.
        relaxation: bounds for blocks before a cut, made with a cutoff no lower than this run's.
        cutoff_s: decisions at least this slow are of no interest.
        tolerance_s: a label is also forgotten when another one is worse by no more than this in each number.
    """

    def __init__(
        self,
        problem: StageProblem,
        tables: StageTables,
        relaxation: Relaxation,
        cutoff_s: float,
        tolerance_s: float,
    ) -> None:
        self._problem, self._tables, self._relaxation = problem, tables, relaxation
        self._cutoff_s, self._tolerance_s = cutoff_s, tolerance_s
        self._objective = relaxation.objective
        self._stops = longest(problem, tables, relaxation.objective, cutoff_s)
        self._contexts = contexts(problem)
        self._pins = Pins.of(problem)
        n = problem.blocks
        self._counts = tuple(sorted(set(problem.replicas.tolist())))
        self._keeps_more = bool((problem.in_flight != problem.in_flight[:, :1]).any())
        self._starts = np.zeros(n + 2, dtype=np.int64)
        self._columns: dict[str, np.ndarray] = {}
        self.states = 0

    def run(self, keep: int, limit: int) -> list[tuple[float, Stages]] | None:
        """Decisions below the cutoff and times they do not exceed, exact for the first, which is the fastest.

        None when more than `limit` labels would be kept.
        """
        n = self._problem.blocks
        final = np.array([len(self._contexts.at) - 1])
        zero, none = np.zeros(1), np.full(1, -1)
        self._store(n, _Batch(final, zero, zero, zero, zero, none + 2, none + 1, none + 1, none, none, none, zero))
        for i in range(n - 1, 0, -1):
            found = self._expand(i)
            self._store(i, self._prune(found) if found is not None else None)
            if self.states > limit:
                return None
        found = self._expand(0)
        counts = self._problem.stage_counts
        if found is not None and len(counts):
            found = found.take(np.flatnonzero(np.isin(found.stages, counts)))
        if found is None or not len(found.context):
            return []
        times = found.bound_s
        order = np.lexsort((found.option, found.parent, found.stages, times))
        best: dict[Stages, float] = {}
        for row in order[: 4 * keep]:
            best.setdefault(self._stages(found, int(row)), float(times[row]))
        return [(seconds, stages) for stages, seconds in best.items()][:keep]

    def _store(self, position: int, batch: _Batch | None) -> None:
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

    def _expand(self, i: int) -> _Batch | None:
        """All labels of suffixes that begin with block i and may still win."""
        batches = []
        for o in range(len(self._problem.replicas)):
            front = self._front(i, o)
            if front is not None:
                batches += self._grown(i, o, front)
        return _Batch.join(batches) if batches else None

    def _front(self, i: int, o: int) -> _Front | None:
        """Stages from block i with replicas[o] before all suffixes that they may stand before, if these may win."""
        problem, relaxed, columns = self._problem, self._relaxation, self._columns
        r = int(problem.replicas[o])
        stop = int(self._stops[o, i])
        first = int(self._starts[stop])
        if stop <= i or first == self.states:
            return None
        context = columns["context"][first : self.states]
        at = self._contexts.at[context] - r
        kept = columns["promise"][first : self.states] <= r
        kept &= self._contexts.follows[o, context] & np.isfinite(relaxed.delay_s[i, at])
        if problem.max_stages:
            kept &= columns["stages"][first : self.states] < problem.max_stages
        if len(problem.stage_counts):
            total = columns["stages"][first : self.states] + 1
            kept &= total + (i > 0) <= problem.stage_counts[-1]
            kept &= total + np.minimum(i, at) >= problem.stage_counts[0]
        if len(problem.pins):
            ends = columns["position"][first : self.states], columns["stages"][first : self.states]
            kept &= self._pins.allow(i, *ends)
        (rows,) = kept.nonzero()
        if not len(rows):
            return None
        at, rows = at[rows], rows + first
        position = columns["position"][rows]
        forward, work, end = self._tables.choose(
            problem.place[o, at], i, position - 1, problem.in_flight[o, columns["passing"][rows]]
        )
        if i == 0 and len(problem.tied_s):
            end = end + np.where(position < problem.blocks, problem.tied_s[columns["tied"][rows], o, at], 0.0)
        least = self._objective.carried(self._suffix(rows), work + self._tables.transfer_s[o, at, i], forward)
        bound = self._objective.bound_s(least, relaxed.before(i, at))
        (good,) = (bound < self._cutoff_s).nonzero()
        return _Front(rows, at, forward, work, end).take(good) if len(good) else None

    def _suffix(self, rows: np.ndarray) -> Suffix:
        return Suffix(*(self._columns[name][rows] for name in ("work_s", "reach_s", "pace_s", "end_s")))

    def _grown(self, i: int, o: int, front: _Front) -> list[_Batch]:
        """Labels of the same with every class of links over which the new first stage may be reached."""
        problem, columns = self._problem, self._columns
        if i:
            at = front.at
            begin, count = self._contexts.first[at], self._contexts.first[at + 1] - self._contexts.first[at]
            source = np.repeat(np.arange(len(at)), count)
            context = np.arange(len(source)) - np.repeat(np.cumsum(count) - count, count) + begin[source]
            link = self._contexts.link[context, o]
            front = front.take(source)
            receive, back = problem.receive_s[link, i], problem.return_s[link, i]
        else:
            context, receive, back = np.zeros(len(front.rows), dtype=np.int64), np.zeros(1), np.zeros(1)
        rows, r = front.rows, int(problem.replicas[o])
        passing = columns["passing"][rows]
        stage = NewStage(
            replicas=r,
            turns=problem.micro_batches // r,
            first=i == 0,
            forward_s=front.forward_s + receive,
            backward_s=front.work_s - front.forward_s + back,
            work_s=front.work_s + (receive + back),
            end_s=front.end_s,
            later_s=columns["work_s"][rows],
            in_flight=problem.in_flight[o, passing],
            filling=problem.filling[o, passing],
        )
        last = columns["position"][rows] == problem.blocks
        tied = np.where(last, problem.tied_class[o], columns["tied"][rows])
        before, batches = self._relaxation.before(i, front.at), []
        grown = self._objective.grown(self._suffix(rows), stage, columns["promise"][rows], before, self._counts)
        for promise, suffix, useful in grown:
            bound = self._objective.bound_s(suffix, before)
            good = np.flatnonzero(useful & (bound < self._cutoff_s))
            if len(good):
                batches.append(
                    _Batch(
                        context=context[good],
                        work_s=suffix.work_s[good],
                        reach_s=suffix.reach_s[good],
                        pace_s=suffix.pace_s[good],
                        end_s=suffix.end_s[good],
                        promise=np.full(len(good), promise),
                        passing=problem.passing[o, passing[good]],
                        stages=columns["stages"][rows[good]] + 1,
                        tied=tied[good],
                        parent=rows[good],
                        option=np.full(len(good), o),
                        bound_s=bound[good],
                    )
                )
        return batches

    def _prune(self, batch: _Batch) -> _Batch:
        """Only labels that no other one of the same context (and, where these are given, number of stages) beats.

        In every round the most promising label left of each context is kept and what it beats forgotten.
        """
        exact = len(self._problem.stage_counts) > 0 or bool(self._pins.behind)
        costs = (batch.pace_s, batch.end_s, batch.reach_s, batch.work_s, batch.bound_s)
        nothing = np.zeros(len(batch.stages), dtype=np.int64)
        group = batch.stages if exact else nothing
        kept_apart = batch.passing if self._objective.counts_passing else nothing
        order = np.lexsort(
            (batch.stages, batch.passing, batch.promise, *costs, kept_apart, group, batch.tied, batch.context)
        )
        apart = np.stack([batch.context, batch.tied, group, kept_apart])[:, order]
        number = np.concatenate([[0], np.cumsum((apart[:, 1:] != apart[:, :-1]).any(axis=0))])
        counts = [batch.promise, *([batch.passing] if self._keeps_more else [])]
        counts += [batch.stages] if self._problem.max_stages else []
        times = [getattr(batch, name) for name in self._objective.figures]
        figures = np.stack([*times, *counts])[:, order]
        slack = np.array([self._tolerance_s] * len(times) + [0.0] * len(counts))[:, None]
        kept, left = [], np.arange(len(order))
        while len(left):
            new = np.concatenate([[True], number[left[1:]] != number[left[:-1]]])
            heads = np.flatnonzero(new)
            kept.append(left[heads])
            head = heads[np.cumsum(new) - 1]
            own = figures[:, left]
            beaten = (own >= own[:, head] - slack).all(axis=0)
            left = left[~(beaten | new)]
        return batch.take(order[np.concatenate(kept)])

    def _stages(self, batch: _Batch, row: int) -> Stages:
        """The stages of a complete decision, from the front."""
        problem, columns = self._problem, self._columns
        stages, start = [], 0
        option, parent = int(batch.option[row]), int(batch.parent[row])
        while parent >= 0:
            stop, r = int(columns["position"][parent]), int(problem.replicas[option])
            at = int(self._contexts.at[columns["context"][parent]]) - r
            kept = int(problem.in_flight[option, columns["passing"][parent]])
            way = self._tables.way(int(problem.place[option, at]), start, stop - 1, kept)
            stages.append(problem.stage(start, stop, option, way))
            start, option, parent = stop, int(columns["option"][parent]), int(columns["parent"][parent])
        return tuple(stages)
