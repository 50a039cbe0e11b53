"""The best configuration among shapes of pipelines, for any schedule: most promising shape first, each cut by balance.

For each shape that may beat the best known, the chain is cut into balanced stages within memory; boundaries then move
as long as the schedule's longest known chain of waits gets shorter; and the judge prices and plays what comes out. The
bound is that of the shapes, over every cut: it holds for all that was not tried, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.costs.precision import optimizer_state_bytes
from planner.hardware.types import Cluster
from planner.schedules.held import HeldUnits
from planner.schedules.types import Schedule
from planner.solvers.shapes import Recompute, Shape
from planner.space.configuration import Configuration, StageChoice
from planner.space.cuts import balanced
from planner.space.ranges import Ranges
from planner.space.settled import precision_of
from planner.space.types import BlockCosts, Evaluation, Job

Edges = tuple[int, ...]
Judge = Callable[[Configuration, Schedule, bool], Evaluation]
"""Prices a configuration under its schedule; the last argument says whether it is played, or only bounded."""

FAR = 0.3
"""Shapes whose estimate is slower than the best by more than this are left to the bound."""

MOST_PLAYED = 40
"""Configurations that are played at the most."""

MOST_MOVES = 120
"""Moves of boundaries that are tried for one shape."""

GOOD = 0.005
"""Cuts whose longest chain of waits is this close to the shape's bound are not improved."""

REPEATS = 3
"""Times that stages are cut anew after some of them have been made to repeat their forward."""


@dataclass(frozen=True, slots=True)
class ShapeAnswer:
    """What the search came to.

    Attributes:
        found: feasible configurations with the judge's verdicts, fastest first.
        bound_s: no configuration of the shapes is faster.
        nearest: the configuration that exceeds memory by least, where none fits; None when there is no shape at all.
        shapes: how many were looked at.
        played: how many configurations were played.
    """

    found: tuple[tuple[Configuration, Evaluation], ...]
    bound_s: float
    nearest: tuple[Configuration, Evaluation] | None
    shapes: int
    played: int


def search_shapes(
    shapes: Iterable[Shape], cluster: Cluster, job: Job, judge: Judge, *, cutoff_s: float = math.inf, keep: int = 8
) -> ShapeAnswer:
    """Find the fastest configuration of the shapes that fits.

    Args:
        shapes: what may be chosen.
        cluster: the machine.
        job: precision, optimizer.
        judge: prices configurations.
        cutoff_s: only configurations faster than this matter.
        keep: most configurations to return.
    """
    ordered = sorted(shapes, key=lambda s: (s.estimate_s, s.stages, s.workers, -s.costs.micro_batch, s.adjacent))
    cutter = Cutter(cluster, job)
    found: list[tuple[Configuration, Evaluation]] = []
    nearest: tuple[float, Configuration, Evaluation] | None = None
    best_s, played = cutoff_s, 0
    for shape in ordered:
        if played >= MOST_PLAYED or shape.estimate_s * (1 - FAR) > best_s:
            break
        if shape.bound_s >= best_s:
            continue
        for configuration in cutter.configurations(shape):
            bounded = judge(configuration, shape.schedule, False)
            if not bounded.feasible:
                excess = _excess(bounded)
                if nearest is None or excess < nearest[0]:
                    nearest = (excess, configuration, bounded)
                continue
            if bounded.iteration_s >= best_s * (1 + (0.02 if len(found) < keep else 0.0)):
                break
            verdict = judge(configuration, shape.schedule, True)
            played += 1
            found.append((configuration, verdict))
            best_s = min(best_s, verdict.iteration_s)
            break
    found.sort(key=lambda entry: entry[1].iteration_s)
    bound_s = min((shape.bound_s for shape in ordered), default=math.inf)
    closest = None if nearest is None or found else nearest[1:]
    return ShapeAnswer(tuple(found[:keep]), min(bound_s, best_s), closest, len(ordered), played)


def _excess(evaluation: Evaluation) -> float:
    """How far the fullest device is over its memory, as a fraction; infinite where something else is wrong."""
    over = [v.needed / v.available - 1 for v in evaluation.violations if v.kind == "memory"]
    return max(over) if len(over) == len(evaluation.violations) and over else math.inf


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """Costs of blocks i..j-1 on a device of mean speed, [n + 1, n + 1]; see `planner.space.ranges`."""

    real: np.ndarray
    forward_s: np.ndarray
    backward_s: np.ndarray
    repeat_s: np.ndarray
    elements: np.ndarray
    workspace_bytes: np.ndarray
    saved_bytes: np.ndarray
    checkpoint_bytes: np.ndarray
    working_bytes: np.ndarray
    entering_bytes: np.ndarray

    @staticmethod
    def of(costs: BlockCosts) -> _Tables:
        """From the costs of a chain."""
        ranges = Ranges(costs)
        n = len(costs.parameter_elements)
        real = np.arange(n + 1)[:, None] < np.arange(n + 1)[None, :]

        def framed(table: np.ndarray) -> np.ndarray:
            found = np.zeros((n + 1, n + 1))
            found[:n, 1:] = table
            return np.where(real, found, 0.0)

        return _Tables(
            real,
            framed(ranges.forward_s.mean(axis=0)),
            framed(ranges.backward_s.mean(axis=0)),
            framed(ranges.repeat_s.mean(axis=0)),
            framed(ranges.elements),
            framed(ranges.workspace_bytes),
            framed(ranges.saved_bytes),
            framed(ranges.checkpoint_bytes),
            framed(ranges.working_bytes),
            np.repeat(costs.boundary_bytes[:, None], n + 1, axis=1),
        )


class Cutter:
    """Cuts chains into stages for shapes; tables of a chain are made once."""

    def __init__(self, cluster: Cluster, job: Job) -> None:
        self._chosen = precision_of(job, cluster)
        self._state_bytes = optimizer_state_bytes(job.optimizer, self._chosen)
        self._room = min(device.usable_bytes for device in cluster.devices)
        self._known: dict[int, tuple[BlockCosts, _Tables]] = {}

    def configurations(self, shape: Shape) -> list[Configuration]:
        """Configurations of a shape, the most promising first; the last ones need the least memory."""
        tables = self._tables(shape.costs)
        recompute = shape.recompute
        flags = [recompute in (Recompute.ALWAYS, Recompute.WHOLE_STAGES)] * shape.stages
        cut = _Cut(shape, tables, self._bytes(shape, tables), self._room)
        found: list[Configuration] = []
        for _ in range(REPEATS if recompute is Recompute.AUTO else 1):
            edges = cut.edges(flags)
            if edges is None:
                break
            edges = cut.improved(edges, flags)
            found.append(cut.configuration(edges, flags))
            if recompute is not Recompute.AUTO or not cut.crowded(edges, flags):
                break
            flags = cut.relieved(edges, flags)
        if recompute is Recompute.AUTO and not all(flags):
            every = [True] * shape.stages
            edges = cut.edges(every)
            if edges is not None:
                found.append(cut.configuration(cut.improved(edges, every), every))
        return list(dict.fromkeys(found))

    def _tables(self, costs: BlockCosts) -> _Tables:
        known = self._known.get(id(costs))
        if known is None or known[0] is not costs:
            known = (costs, _Tables.of(costs))
            self._known[id(costs)] = known
        return known[1]

    def _bytes(self, shape: Shape, tables: _Tables) -> np.ndarray:
        """[n + 1, n + 1] bytes of weights and what goes with them of a stage, one version, and workspace."""
        shards = shape.copies * len(shape.schedule.holders(shape.pipeline)[0]) if shape.zero else 1
        chosen = self._chosen
        versions = max(shape.schedule.weight_versions(shape.pipeline)) + shape.schedule.weight_buffers
        each = (
            versions * chosen.weight_bytes / (shards if shape.zero >= 3 else 1)
            + chosen.gradient_bytes / (shards if shape.zero >= 2 else 1)
            + self._state_bytes / shards
        )
        return np.asarray(each * tables.elements)


class _Cut:
    """Cuts for one shape."""

    def __init__(self, shape: Shape, tables: _Tables, resident: np.ndarray, room: float) -> None:
        self._shape, self._tables, self._resident, self._room = shape, tables, resident, room
        pipeline = shape.pipeline
        self._kept = np.array(shape.schedule.in_flight(pipeline), float) / shape.schedule.parts
        self._peaks = shape.schedule.peaks(pipeline)
        self._hosted = shape.schedule.placement(pipeline)
        each = max(1, max(len(own) for own in self._hosted))
        self._budget = room / each
        self._whole = shape.recompute is Recompute.WHOLE_STAGES
        self._ramp = shape.schedule.ramp(pipeline)
        self._first = np.array([own[0] if own else 0 for own in self._hosted])
        places = [
            (w, s, n)
            for w, (own, counts) in enumerate(zip(self._hosted, shape.schedule.workload(pipeline), strict=True))
            for s, n in zip(own, counts, strict=True)
        ]
        self._place_worker, self._place_stage, self._place_share = (np.array(c) for c in zip(*places, strict=True))
        self._moments, self._moment_worker = _stacked(self._peaks, shape.stages)

    def configuration(self, edges: Edges, flags: Sequence[bool]) -> Configuration:
        """The configuration with these boundaries."""
        shape, costs = self._shape, self._shape.costs
        return Configuration(
            stages=tuple(
                StageChoice(a, b, 1, again, costs.ranks, costs.sharding)
                for (a, b), again in zip(itertools.pairwise(edges), flags, strict=True)
            ),
            copies=shape.copies,
            micro_batch=costs.micro_batch,
            micro_batches=shape.micro_batches,
            schedule=shape.schedule.name,
            zero=shape.zero,
            adjacent=shape.adjacent,
            whole_stages=self._whole,
            transfers=shape.transfers,
        )

    def edges(self, flags: Sequence[bool]) -> Edges | None:
        """Balanced within memory; where no even share of memory is enough, the fullest stage as empty as can be."""
        seconds = {again: np.where(self._tables.real, self._work_s(again), np.inf) for again in set(flags)}
        tables = [seconds[again] for again in flags]
        needs = [self._need(stage, again) for stage, again in enumerate(flags)]
        found = balanced(tables, [self._tables.real & (need <= self._budget) for need in needs])
        if found is None:
            found = balanced(
                [np.where(self._tables.real, need, np.inf) for need in needs], [self._tables.real] * len(needs)
            )
        return found

    def crowded(self, edges: Edges, flags: Sequence[bool]) -> list[int]:
        """Workers whose stages exceed the memory."""
        return [w for w, own in enumerate(self._hosted) if own and self._held(w, edges, flags) > self._room]

    def relieved(self, edges: Edges, flags: Sequence[bool]) -> list[bool]:
        """More stages of crowded workers repeat their forward: those first that give most memory for their time."""
        found = list(flags)
        for worker in self.crowded(edges, flags):
            own = [stage for stage in self._hosted[worker] if not found[stage]]
            gains = {s: self._saved(s, edges, again=False) - self._saved(s, edges, again=True) for s in own}
            for stage in sorted(own, key=lambda s: (-gains[s], s)):
                if self._held(worker, edges, found) <= self._room:
                    break
                found[stage] = True
        return found

    def improved(self, edges: Edges, flags: Sequence[bool]) -> Edges:
        """Boundaries moved, one block at a time, as long as the longest chain of waits gets shorter within memory."""
        best, best_key = edges, self._key(edges, flags)
        tried, moved = 0, True
        while moved and tried < MOST_MOVES and best_key > (0.0, self._shape.bound_s * (1 + GOOD)):
            moved = False
            for at in range(1, len(best) - 1):
                for by in (-1, 1):
                    place = best[at] + by
                    if not best[at - 1] < place < best[at + 1]:
                        continue
                    other = (*best[:at], place, *best[at + 1 :])
                    key = self._key(other, flags)
                    tried += 1
                    if key < best_key:
                        best, best_key, moved = other, key, True
        return best

    def _key(self, edges: Edges, flags: Sequence[bool]) -> tuple[float, float, float]:
        """Bytes over the memory, the longest way to a worker, through its work and back, and how uneven stages are."""
        start, stop = np.asarray(edges[:-1]), np.asarray(edges[1:])
        again = np.asarray(flags, bool)
        forward_s = self._tables.forward_s[start, stop]
        repeat = self._tables.forward_s if self._whole else self._tables.repeat_s
        backward_s = self._tables.backward_s[start, stop] + np.where(again, repeat[start, stop], 0.0)
        both_s = forward_s + backward_s
        work_s = np.bincount(self._place_worker, (self._place_share * both_s[self._place_stage]), len(self._hosted))
        filled, drained = np.cumsum(forward_s) - forward_s, np.cumsum(backward_s) - backward_s
        ways_s = self._ramp[0] * filled[self._first] + self._ramp[1] * drained[self._first]
        over = max(self._held_all(edges, again) - self._room)
        return max(0.0, over), float((work_s + ways_s).max()), float((both_s**2).sum())

    def _work_s(self, again: bool) -> np.ndarray:
        tables = self._tables
        repeat = tables.forward_s if self._whole else tables.repeat_s
        return np.asarray(tables.forward_s + tables.backward_s + (repeat if again else 0.0))

    def _need(self, stage: int, again: bool) -> np.ndarray:
        """[n + 1, n + 1] bytes of one stage with all that it has in flight."""
        tables, kept = self._tables, self._kept[stage]
        held = self._resident + tables.workspace_bytes
        if not again:
            return np.asarray(held + kept * tables.saved_bytes)
        unit, working = self._recomputed()
        return np.asarray(held + kept * unit + working)

    def _recomputed(self) -> tuple[np.ndarray, np.ndarray]:
        tables = self._tables
        return (tables.entering_bytes, tables.saved_bytes) if self._whole else (
            tables.checkpoint_bytes, tables.working_bytes,
        )  # fmt: skip

    def _saved(self, stage: int, edges: Edges, *, again: bool) -> float:
        a, b = edges[stage], edges[stage + 1]
        return float(self._recomputed()[0][a, b] if again else self._tables.saved_bytes[a, b])

    def _held(self, worker: int, edges: Edges, flags: Sequence[bool]) -> float:
        """Bytes of a worker, all its stages together."""
        return float(self._held_all(edges, np.asarray(flags, bool))[worker])

    def _held_all(self, edges: Edges, again: np.ndarray) -> np.ndarray:
        """[workers] bytes, all stages of each together."""
        start, stop, workers = np.asarray(edges[:-1]), np.asarray(edges[1:]), len(self._hosted)
        kept, working = (table[start, stop] for table in self._recomputed())
        unit = np.where(again, kept, self._tables.saved_bytes[start, stop]) / self._shape.schedule.parts
        at, stage = self._place_worker, self._place_stage
        resident = np.bincount(at, self._resident[start, stop][stage], workers)
        beside = np.zeros((2, workers))
        np.maximum.at(beside[0], at, self._tables.workspace_bytes[start, stop][stage])
        np.maximum.at(beside[1], at, np.where(again, working, 0.0)[stage])
        most = np.zeros(workers)
        np.maximum.at(most, self._moment_worker, self._moments @ unit)
        return np.asarray(resident + beside.sum(axis=0) + most)


def _stacked(peaks: Sequence[HeldUnits], stages: int) -> tuple[np.ndarray, np.ndarray]:
    """[moments, stages] units that are held, and the worker of each moment."""
    rows, workers = [], []
    for worker, held in enumerate(peaks):
        spread = np.zeros((len(held.units), stages))
        spread[:, list(held.stages)] = held.units
        rows.append(spread)
        workers += [worker] * len(held.units)
    return np.concatenate(rows), np.asarray(workers, dtype=np.int64)
