"""Cuts for a shape: where its stages begin, and in which way each runs, so that every worker fits its memory."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.costs.precision import optimizer_state_bytes
from planner.exchange import Kept, Phase, kept_bytes, phase_s, recipe_of
from planner.hardware.types import Cluster, neighbours
from planner.memory import room_bytes
from planner.solvers._candidates import comparable
from planner.solvers.shapes import Shape
from planner.solvers.stage_options import BINS, StageOptions, packed, run_pairs
from planner.space.configuration import Configuration, StageChoice
from planner.space.cuts import balanced, pinned_blocks, stage_starts
from planner.space.jobs import precision_of
from planner.space.types import Job
from planner.space.workers import lay_workers

Edges = tuple[int, ...]

MOST_MOVES = 60
"""Moves of boundaries that are tried for one shape."""

FAR = 0.05
"""Cuts that are slower than the best known configuration by more than this are not improved."""

HOPELESS = 0.1
"""Of stages that all run alike none but the leanest cut is looked at where that exceeds the memory by more than this.
"""

GOOD = 0.002
"""Cuts whose longest way is this close to the shape's bound are not improved."""

MOST_PACKINGS = 8
"""Times that options are chosen anew because more is kept than was counted."""

MOST_ENUMERATED, MOST_OF_FEW = 512, 1536
"""Cuts and choices of which all are looked at; of chains of at most `FEW` blocks."""

FEW = 4
"""Blocks of a chain of which many choices, and few cuts, make up what is enumerated."""

TINY = 8
"""Blocks of chains for which estimates leave nothing out."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Boundaries 0, ..., n, the option of each stage, and what is known of it.

    Attributes:
        edges: boundaries.
        options: by stage.
        over: memory of the fullest worker beyond what it has, as a fraction; 0 where all fit.
        least_s: no play is faster.
        pace_s: the same where all workers wait for the slowest at their first stages, at their second, and so on.
        uneven: sum of squares of the stages' seconds.
        worst: the fullest worker where memory lacks, else the slowest.
    """

    edges: Edges
    options: tuple[int, ...]
    over: float
    least_s: float
    pace_s: float
    uneven: float
    worst: int

    @property
    def key(self) -> tuple[float, float, float]:
        """What is better is smaller, and what is equally good is equal."""
        return comparable(self.over), comparable(self.pace_s), comparable(self.uneven)

    @property
    def place(self) -> tuple[tuple[float, float, float], Edges, tuple[int, ...]]:
        """The best first, of equally good ones the first cut."""
        return self.key, self.edges, self.options


@dataclass(frozen=True, slots=True, eq=False)
class _Choices:
    """Of each stage in each option, [stages, options]: seconds of a micro-batch, seconds at the end, and bytes."""

    forward_s: np.ndarray
    work_s: np.ndarray
    tail_s: np.ndarray
    unit: np.ndarray
    resident: np.ndarray
    working: np.ndarray
    workspace: np.ndarray


def room_of(memory_bytes: np.ndarray, part: float) -> np.ndarray:
    """What fits into a part of some devices' memory."""
    return np.asarray(room_bytes(memory_bytes * part))


def moved(place: int, by: int, starts: np.ndarray) -> int:
    """The next place up (by 1) or down (by -1) where a stage may begin (`stage_starts`), or one out of range."""
    place += by
    while 0 < place < len(starts) and not starts[place]:
        place += by
    return place


def enumerable(shape: Shape, options: StageOptions, job: Job) -> bool:
    """Whether all cuts and choices of a shape can be looked at; a choice at a time where stages are to be alike."""
    choices = 1 if job.structure.alike else len(options.ways) ** shape.stages
    most = MOST_OF_FEW if options.blocks <= FEW else MOST_ENUMERATED
    return math.comb(options.blocks - 1, shape.stages - 1) * choices <= most


class Cutter:
    """Cuts the chain for one shape.

    Args:
        shape: the shape.
        options: how its stages can run.
        cluster: the machine.
        job: precision, optimizer, pinned blocks.

    Attributes:
        few: all cuts are looked at, in the options that are worth it.
    """

    def __init__(self, shape: Shape, options: StageOptions, cluster: Cluster, job: Job) -> None:
        self._shape = shape
        schedule, pipeline = shape.schedule, shape.pipeline
        self._hosted, self._holders = schedule.placement(pipeline), schedule.holders(pipeline)
        peaks = zip(self._hosted, schedule.peaks(pipeline), strict=True)
        self._units = [held.units[:, : len(own)].astype(float) for own, held in peaks]
        self._main = [rows[rows.sum(axis=1).argmax()] if rows.size else rows[:0].sum(axis=0) for rows in self._units]
        self._shares = [np.array(counts, float) for counts in schedule.workload(pipeline)]
        self._ramp = schedule.ramp(pipeline)
        self._fixed = schedule.recomputed_stages(pipeline) or None
        self._types, self._memory, ranks = self._devices(cluster)
        self._room = room_of(self._memory, 1.0)
        self._pass_s, self._tail_s = self._exchange_s(cluster, job, ranks)
        self._each, self._left, self._transient = self._state_bytes(cluster, job)
        held = max(float(rows.sum(axis=1).max(initial=0.0)) for rows in self._units)
        self._options = options
        if self._fixed is None and not enumerable(shape, options, job):
            kept = held / max(map(len, self._hosted)) / schedule.parts
            each = float(self._each.mean()), float(self._left.mean())
            self._options = options.worth(pipeline.micro_batches + shape.workers, self._tail_s, kept, each)
        self.few = enumerable(shape, self._options, job)
        self._starts_at = stage_starts(shape.ways[0], job)
        pins = pinned_blocks(job, shape.ways[0].names) if job.keep else ()
        self._pins = [(block, stage % shape.stages) for block, stage in pins]
        self._picked: dict[tuple[bytes, ...], np.ndarray] = {}

    def alike(self) -> Iterator[Cutter]:
        """For each option one that gives it to all stages, the fastest first."""
        for option in range(len(self._options.ways)):
            alone = copy.copy(self)
            alone._options, alone._picked = self._options.only([option]), {}
            yield alone

    def within(self, part: float) -> Cutter:
        """The same for a part of the memory."""
        smaller = copy.copy(self)
        smaller._room, smaller._picked = room_of(self._memory, part), {}
        return smaller

    @property
    def least_s(self) -> float:
        """No cut is faster."""
        return self._shape.least_s(self._options.work_each_s)

    def _devices(self, cluster: Cluster) -> tuple[list[list[int]], np.ndarray, np.ndarray]:
        """Device types by stage, usable bytes by worker, and the first ranks of all that hold the first stage."""
        shape = self._shape
        stages = tuple(StageChoice(i, i + 1, 1, ranks=shape.ways[0].ranks) for i in range(shape.stages))
        laid = lay_workers(
            Configuration(stages, shape.copies, 1, shape.micro_batches, shape.schedule.name, adjacent=shape.adjacent),
            shape.schedule,
        )
        types = [np.unique(cluster.device_types[ranks]).tolist() for ranks in laid.ranks]
        peers = neighbours(shape.ways[0].ranks, shape.copies * len(self._holders[0]), shape.stages > 1)
        devices = [[cluster.devices[t] for t in own] for own in types]
        least = [min(float(d.usable_bytes - d.neighbour_bytes * peers) for d in own) for own in devices]
        by_stage = [sorted({t for worker in own for t in types[worker]}) for own in self._holders]
        first = laid.groups(0)[..., 0].ravel()
        return by_stage, np.array(least), first

    def _exchange_s(self, cluster: Cluster, job: Job, ranks: np.ndarray) -> tuple[float, float]:
        """Seconds of exchanges for an element: in a forward and a backward pass, and at the end of an iteration."""
        shape, recipe = self._shape, recipe_of(self._shape.zero)
        way = shape.ways[0]
        left = way.parameter_elements if way.shard_elements is None else way.shard_elements
        elements = float(left.sum()) / shape.stages
        if len(ranks) < 2 or not elements:
            return 0.0, 0.0
        at_once = max(1, len(self._hosted) // len(self._holders[0])) * shape.ways[0].ranks
        forward_s, backward_s, end_s = (
            phase_s(cluster, recipe, phase, ranks, precision_of(job, cluster), elements, at_once) / elements
            for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.END)
        )
        return forward_s + backward_s, end_s if shape.schedule.weight_policy.synchronous else 0.0

    def _state_bytes(self, cluster: Cluster, job: Job) -> tuple[np.ndarray, np.ndarray, float]:
        """Bytes of weights and what goes with them: by stage, of an element that a rank holds, and of one that is
        left to it where state is sharded; and what is gathered block by block."""
        shape, chosen = self._shape, precision_of(job, cluster)
        replicas = shape.copies * len(self._holders[0])
        state, largest = optimizer_state_bytes(job.optimizer, chosen), shape.ways[0].parameter_elements.max()
        recipe = recipe_of(shape.zero)

        def kept(count: float, elements: float, largest: float) -> Kept:
            def parts(group: object) -> float:
                return 1.0 if group is None else count

            return kept_bytes(recipe, chosen, state, parts, elements, largest, chosen.spare_bytes, chosen.copy_bytes)

        shards, whole = kept(replicas, 1.0, 0.0), kept(math.inf, 1.0, 0.0)
        versions = np.array(shape.schedule.weight_versions(shape.pipeline), float)
        buffers = shape.schedule.weight_buffers * chosen.weight_bytes
        each = versions * float(whole.weights) + float(whole.gradients + whole.optimizer + whole.gathered) + buffers
        left = versions * float(shards.weights - whole.weights)
        left = left + float(shards.gradients + shards.optimizer - whole.gradients - whole.optimizer)
        return each, left, float(kept(replicas, 0.0, float(largest)).transient)

    def cuts(self, cutoff_s: float) -> list[Cut]:
        """Cuts worth judging: all where they are few, the most promising first; else the best that was found.

        Args:
            cutoff_s: cuts that are far from it are not improved.
        """
        if self.few:
            return sorted(self._all(), key=lambda cut: cut.place)
        single, found = len(self._options.ways) == 1, list[Cut]()
        edges_tried = self._tried(single=single)
        alone = single or all(len(own) < 2 for own in self._hosted)
        for aligned in (False,) if alone else (True, False):
            best = min(
                (self._cut(edges, aligned=aligned) for edges in edges_tried), key=lambda cut: cut.key, default=None
            )
            if best is not None:
                near = best.least_s < cutoff_s * (1 + FAR)
                found.append(self._improved(best, aligned=aligned) if near else best)
        return sorted(found, key=lambda cut: cut.place)

    def _all(self) -> Iterator[Cut]:
        shape, options = self._shape, range(len(self._options.ways))
        places = np.flatnonzero(self._starts_at[1:-1]) + 1
        for inner in itertools.combinations(places.tolist(), shape.stages - 1):
            edges = (0, *inner, self._options.blocks)
            if not self._pinned(edges):
                continue
            choices = self._choices(edges)
            for chosen in itertools.product(options, repeat=shape.stages):
                if self._allowed(chosen):
                    yield self._judged(edges, choices, np.array(chosen))

    def _allowed(self, chosen: Sequence[int]) -> bool:
        """Whether the forwards that the orders repeat by actions of their own, if any, are those of the options."""
        again = self._options.again
        return self._fixed is None or all(again[o] == (s in self._fixed) for s, o in enumerate(chosen))

    def _pinned(self, edges: Edges) -> bool:
        return all(edges[stage] <= block < edges[stage + 1] for block, stage in self._pins)

    def _tried(self, *, single: bool) -> list[Edges]:
        """Boundaries to begin with: as lean as can be, balanced with an even share of memory for each stage, and
        balanced by work alone. Of a single option one is enough that fits balanced by work, or the leanest that is
        hopeless."""
        stages, n = range(self._shape.stages), self._options.blocks
        real = np.arange(n + 1)[:, None] < np.arange(n + 1)[None, :]
        real &= self._starts_at[:, None] & self._starts_at[None, :]
        allowed = [self._mask(stage, real) for stage in stages]
        work_s = functools.cache(lambda *kind: self._framed(self._seconds(*kind).min(axis=0)))
        by_work = balanced([work_s(*self._kind(stage)) for stage in stages], allowed)
        if single and by_work is not None and self._cut(by_work, aligned=False).over <= 0:
            return [by_work]
        needs = functools.cache(self._needed)
        least = functools.cache(lambda *key: self._framed(needs(*key).min(axis=0)))
        fitting_s = functools.cache(lambda budget, state, kind: self._fitting(budget, needs(state, *kind), kind))
        leanest = balanced([least(self._state(stage), *self._kind(stage)) for stage in stages], allowed)
        if single and leanest is not None and self._cut(leanest, aligned=False).over > HOPELESS:
            return [leanest]
        tables = [fitting_s(self._budget(stage), self._state(stage), self._kind(stage)) for stage in stages]
        within = [mask & np.isfinite(table) for mask, table in zip(allowed, tables, strict=True)]
        return [e for e in dict.fromkeys((balanced(tables, within), by_work, leanest)) if e is not None]

    def _kind(self, stage: int) -> tuple[int, ...]:
        """Whether a stage's forward is repeated (-1: that is open), and the types of its devices."""
        return -1 if self._fixed is None else int(stage in self._fixed), *self._types[stage]

    def _state(self, stage: int) -> tuple[float, float, float]:
        """Bytes of an element's state, of one that is left to a rank, and micro-batches in flight."""
        worker = self._holders[stage][0]
        own = self._hosted[worker]
        units = float(self._main[worker][own.index(stage)])
        most = max(units, float(self._units[worker][:, own.index(stage)].max(initial=0.0))) if len(own) == 1 else units
        return float(self._each[stage]), float(self._left[stage]), most

    def _budget(self, stage: int) -> float:
        """A stage's share of its worker's memory."""
        worker = self._holders[stage][0]
        return float(self._room[worker]) / len(self._hosted[worker])

    def _which(self, again: int) -> list[int]:
        """The options that repeat the forward, or not; all where that is open."""
        return [o for o, repeated in enumerate(self._options.again) if again < 0 or repeated == bool(again)]

    def _seconds(self, again: int, *types: int) -> np.ndarray:
        """[options, n, n] of a micro-batch on the slowest of some devices."""
        return np.asarray(self._options.work_s[self._which(again)][:, list(types)].max(axis=1))

    def _needed(self, state: tuple[float, float, float], again: int, *_types: int) -> np.ndarray:
        """[options, n, n] bytes."""
        (each, left, units), options = state, self._options
        need = (
            each * options.elements
            + left * options.shard_elements
            + units * options.unit_bytes / self._shape.schedule.parts
            + options.working_bytes
            + options.workspace_bytes
        )
        return np.asarray(need[self._which(again)] + self._transient)

    def _fitting(self, budget: float, needed: np.ndarray, kind: tuple[int, ...]) -> np.ndarray:
        """[n + 1, n + 1] seconds within a budget of bytes."""
        return self._framed(np.where(needed <= budget, self._seconds(*kind), np.inf).min(axis=0))

    def _framed(self, table: np.ndarray) -> np.ndarray:
        """[n, n] of blocks i..j to [n + 1, n + 1] of blocks i..j-1, infinite where there is none."""
        n = len(table)
        found = np.full((n + 1, n + 1), np.inf)
        found[:n, 1:] = np.where(np.arange(n)[:, None] <= np.arange(n)[None, :], table, np.inf)
        return found

    def _mask(self, stage: int, real: np.ndarray) -> np.ndarray:
        """Runs of blocks that may be a stage."""
        own = [block for block, wanted in self._pins if wanted == stage]
        other = [block for block, wanted in self._pins if wanted != stage]
        at = np.arange(len(real))
        found = real
        for block in own:
            found = found & (at[:, None] <= block) & (at[None, :] > block)
        for block in other:
            found = found & ~((at[:, None] <= block) & (at[None, :] > block))
        return found

    def _choices(self, edges: Edges) -> _Choices:
        """What the stages between boundaries cost and keep in each option."""
        options, (first, last) = self._options, run_pairs(edges)
        rows = np.arange(len(first))
        forward_s, work_s = options.forward_s[:, :, first, last], options.work_s[:, :, first, last]
        mask = np.zeros((work_s.shape[1], len(first)), bool)
        for stage in rows:
            mask[self._types[stage], stage] = True
        elements, left = options.elements[:, first, last], options.shard_elements[:, first, last]
        return _Choices(
            np.where(mask, forward_s, 0.0).max(axis=1).T,
            np.where(mask, work_s, 0.0).max(axis=1).T,
            left.T * (self._tail_s + self._pass_s * self._shape.micro_batches / len(self._holders[0])),
            options.unit_bytes[:, first, last].T / self._shape.schedule.parts,
            (elements * self._each + left * self._left).T,
            options.working_bytes[:, first, last].T,
            options.workspace_bytes[:, first, last].T,
        )

    def _cut(self, edges: Edges, *, aligned: bool) -> Cut:
        """The boundaries with the options that make each worker fastest within its memory.

        Where they are `aligned`, the first stages of all workers run alike, the second ones, and so on, as the slowest
        worker has them: none waits for another's slower stage more than once.
        """
        choices = self._choices(edges)
        chosen = np.zeros(self._shape.stages, np.int64)
        picks = {w: self._pick(w, choices, list(own)) for w, own in enumerate(self._hosted) if own}
        if aligned:
            slowest = max(picks, key=lambda w: float(choices.work_s[list(self._hosted[w]), picks[w]].sum()))
            picks = {w: self._alike(w, choices, pick, picks[slowest]) for w, pick in picks.items()}
        for worker, pick in picks.items():
            at = list(self._hosted[worker])
            chosen[at] = np.maximum(chosen[at], pick)
        return self._judged(edges, choices, chosen)

    def _alike(self, worker: int, choices: _Choices, own: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Another worker's options, where they are as many and fit; else its own."""
        if (
            len(own) != len(other)
            or self._held(worker, choices, list(self._hosted[worker]), other) > self._room[worker]
        ):
            return own
        return other

    def _judged(self, edges: Edges, choices: _Choices, chosen: np.ndarray) -> Cut:
        """A cut with what is known of it."""
        rows = np.arange(len(chosen))
        work_s, forward_s = choices.work_s[rows, chosen], choices.forward_s[rows, chosen]
        tail_s = choices.tail_s[rows, chosen]
        filled, drained = np.cumsum(forward_s) - forward_s, np.cumsum(work_s - forward_s) - (work_s - forward_s)
        over, least_s, uneven = (0.0, -1), (0.0, -1), float((work_s**2).sum())
        rows_s = np.zeros(max(map(len, self._hosted)))
        way_before_s = 0.0
        for worker, own in enumerate(self._hosted):
            if own:
                at, first = list(own), own[0]
                each_s = self._shares[worker] * work_s[at]
                ramp_s = float(self._ramp[0] * filled[first] + self._ramp[1] * drained[first])
                least_s = max(least_s, (float(each_s.sum()) + ramp_s, worker))
                rows_s[: len(own)] = np.maximum(rows_s[: len(own)], each_s + tail_s[at])
                way_before_s = max(way_before_s, ramp_s)
                over = max(over, (self._held(worker, choices, at, chosen[at]) / self._room[worker] - 1, worker))
        worst = over[1] if over[0] > 0 else least_s[1]
        pace_s = max(least_s[0], float(rows_s.sum()) + way_before_s)
        return Cut(edges, tuple(chosen.tolist()), over[0], least_s[0], pace_s, uneven, worst)

    def _held(self, worker: int, choices: _Choices, own: list[int], chosen: np.ndarray) -> float:
        """Bytes of a worker."""
        units = self._units[worker] @ choices.unit[own, chosen]
        beside = choices.working[own, chosen].max() + choices.workspace[own, chosen].max() + self._transient
        return float(choices.resident[own, chosen].sum() + units.max(initial=0.0) + beside)

    def _pick(self, worker: int, choices: _Choices, own: list[int]) -> np.ndarray:
        """Options of a worker's stages that fit its memory in the least time; where none do, the leanest."""
        work_s = choices.work_s[own] * self._shares[worker][:, None] + choices.tail_s[own]
        kept = choices.resident[own] + self._main[worker][:, None] * choices.unit[own]
        if self._fixed is not None:
            again = np.array(self._options.again)
            work_s = np.where(again == np.isin(own, list(self._fixed))[:, None], work_s, np.inf)
        key = (self._units[worker].tobytes(), work_s.tobytes(), kept.tobytes(), self._room[worker].tobytes())
        if key not in self._picked:
            self._picked[key] = self._packed(worker, choices, own, work_s, kept)
        found: np.ndarray = self._picked[key]
        return found

    def _packed(
        self, worker: int, choices: _Choices, own: list[int], work_s: np.ndarray, kept: np.ndarray
    ) -> np.ndarray:
        """The choice itself: what is kept beside, and at other moments, is taken off the room as far as it is met."""
        room = float(self._room[worker])
        fastest: np.ndarray = work_s.argmin(axis=1)
        over = self._held(worker, choices, own, fastest) - room
        if over <= 0:
            return fastest
        budget = room - self._transient - float(choices.workspace[own].max())
        for _ in range(MOST_PACKINGS):
            chosen = packed(work_s, kept, budget)
            if chosen is None or (over := self._held(worker, choices, own, chosen) - room) <= 0:
                break
            budget -= max(over, room / BINS)
        leanest: np.ndarray = np.where(np.isfinite(work_s), kept, np.inf).argmin(axis=1)
        return leanest if chosen is None else chosen

    def _improved(self, best: Cut, *, aligned: bool) -> Cut:
        """Boundaries moved by a block at a time, as long as the longest way gets shorter within memory."""
        tried, moved = 0, True
        while moved and tried < MOST_MOVES and best.key > (0.0, self._shape.bound_s * (1 + GOOD)):
            moved = False
            for edges in self._moves(best):
                tried += 1
                other = self._cut(edges, aligned=aligned)
                if other.key < best.key:
                    best, moved = other, True
                    break
                if tried >= MOST_MOVES:
                    break
        return best

    def _moves(self, cut: Cut) -> Iterator[Edges]:
        """A block less for a stage of the worker that is slowest, or fullest where memory lacks, at either end."""
        edges = cut.edges
        for stage in self._hosted[cut.worst]:
            for at, by in ((stage, 1), (stage + 1, -1)):
                place = moved(edges[at], by, self._starts_at)
                if 0 < at < len(edges) - 1 and edges[at - 1] < place < edges[at + 1]:
                    other = (*edges[:at], place, *edges[at + 1 :])
                    if self._pinned(other):
                        yield other

    def configuration(self, cut: Cut, job: Job) -> Configuration:
        """The configuration of a cut."""
        shape, options = self._shape, self._options
        ways = [shape.ways[options.ways[o]] for o in cut.options]
        return Configuration(
            stages=tuple(
                way.stage(a, b, 1, options.again[o], options.repeats[o])
                for (a, b), o, way in zip(itertools.pairwise(cut.edges), cut.options, ways, strict=True)
            ),
            copies=shape.copies,
            micro_batch=ways[0].micro_batch,
            micro_batches=shape.micro_batches,
            schedule=shape.schedule.name,
            zero=shape.zero,
            adjacent=shape.adjacent,
            whole_stages=(job.whole_stages or shape.repeats) and any(options.again[o] for o in cut.options),
            transfers=job.transfers,
        )
