"""Cut the chain of blocks for one pipeline shape: choose stage boundaries and how each stage runs, within memory."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.hardware.types import Cluster
from planner.memory import room_bytes
from planner.schedules.held import UnitSizes
from planner.solvers._candidates import comparable
from planner.solvers.shape_terms import StageCosts, stage_costs, worker_terms
from planner.solvers.shapes import Shape
from planner.solvers.stage_options import BINS, StageOptions, packed
from planner.space.configuration import Configuration
from planner.space.cuts import balanced, pinned_blocks, stage_starts
from planner.space.types import Job

Edges = tuple[int, ...]

MAX_MOVES = 60
"""Boundary moves tried for one shape."""

IMPROVE_WITHIN = 0.05
"""Boundaries are moved only if the cut's bound is within this fraction of the best known configuration."""

HOPELESS_EXCESS = 0.1
"""With one option for all stages, only the leanest cut is kept if it exceeds memory by more than this fraction."""

GOOD_ENOUGH = 0.002
"""Boundaries are not moved once the cut's pace is within this fraction of the shape's bound."""

MAX_PACKINGS = 8
"""Times that the options of a worker are chosen again with a smaller budget because they exceeded memory."""

MAX_ENUMERATED, MAX_ENUMERATED_SHORT = 512, 1536
"""Pairs of cut and options up to which all are enumerated; the second for chains of at most `SHORT_CHAIN` blocks."""

SHORT_CHAIN = 4
"""Blocks of a short chain, whose enumeration has few cuts and many options."""

TINY_CHAIN = 8
"""Blocks of a chain that is searched without pruning by estimates."""


@dataclass(frozen=True, slots=True)
class ShapeCut:
    """Stage boundaries and the option of each stage, with estimated time and memory.

    Attributes:
        edges: boundaries 0, ..., n.
        options: option index by stage.
        excess: by how much the fullest worker exceeds its memory, as a fraction; 0 if all fit.
        bound_s: lower bound on the simulated iteration time.
        pace_s: the same bound, if in addition all workers keep pace with the slowest first stage, second stage, and so
            on.
        imbalance: sum of squares of the stages' seconds, to break ties.
        worst_worker: the fullest worker if memory is exceeded, else the slowest.
    """

    edges: Edges
    options: tuple[int, ...]
    excess: float
    bound_s: float
    pace_s: float
    imbalance: float
    worst_worker: int

    @property
    def key(self) -> tuple[float, float, float]:
        """Quality of the cut, smaller is better; equal to nine digits for cuts that are equally good."""
        return comparable(self.excess), comparable(self.pace_s), comparable(self.imbalance)

    @property
    def sort_key(self) -> tuple[tuple[float, float, float], Edges, tuple[int, ...]]:
        """Sort key: best cut first, ties by boundaries and options."""
        return self.key, self.edges, self.options


def next_start(place: int, by: int, starts: np.ndarray) -> int:
    """The next allowed boundary (`stage_starts`) above (`by` 1) or below (`by` -1); out of range if there is none."""
    place += by
    while 0 < place < len(starts) and not starts[place]:
        place += by
    return place


def enumerable(shape: Shape, options: StageOptions, job: Job) -> bool:
    """True if a shape has few enough cuts and options to enumerate all; options count once if all stages share one."""
    combinations = 1 if job.structure.alike else len(options.shardings) ** shape.stages
    limit = MAX_ENUMERATED_SHORT if options.blocks <= SHORT_CHAIN else MAX_ENUMERATED
    return math.comb(options.blocks - 1, shape.stages - 1) * combinations <= limit


class Cutter:
    """Finds cuts of the chain for one shape.

    Args:
        shape: the shape.
        options: tables of how a stage can run.
        cluster: the cluster.
        job: precision, optimizer, pinned blocks.

    Attributes:
        enumerates_all: `cuts` enumerates all cuts in all options that are not dominated.
    """

    def __init__(self, shape: Shape, options: StageOptions, cluster: Cluster, job: Job) -> None:
        self._shape = shape
        schedule, pipeline = shape.schedule, shape.pipeline
        self._stages_of_worker, self._workers_of_stage = schedule.placement(pipeline), schedule.holders(pipeline)
        self._peaks = schedule.peaks(pipeline)
        peaks = zip(self._stages_of_worker, self._peaks, strict=True)
        self._units = [peak.units[:, : len(hosted)].astype(float) for hosted, peak in peaks]
        self._peak_units = [
            rows[rows.sum(axis=1).argmax()] if rows.size else rows[:0].sum(axis=0) for rows in self._units
        ]
        self._peak_waiting = [
            peak.waiting[peak.units.sum(axis=1).argmax()].astype(float) if peak.splits else np.zeros_like(units)
            for peak, units in zip(self._peaks, self._peak_units, strict=True)
        ]
        self._passes = [np.array(counts, float) for counts in schedule.workload(pipeline)]
        self._ramp = schedule.ramp(pipeline)
        self._recomputed_stages = schedule.recomputed_stages(pipeline) or None
        self._terms = worker_terms(shape, cluster, job)
        self._room_bytes = np.asarray(room_bytes(self._terms.memory_bytes))
        most_units = max(float(rows.sum(axis=1).max(initial=0.0)) for rows in self._units)
        self._options = options
        if self._recomputed_stages is None and not enumerable(shape, options, job):
            kept_units = most_units / max(map(len, self._stages_of_worker)) / schedule.parts
            element_bytes = (
                float(self._terms.bytes_per_element.mean()),
                float(self._terms.bytes_per_shard_element.mean()),
            )
            self._options = options.worth(
                pipeline.micro_batches + shape.workers, self._terms.end_s_per_element, kept_units, element_bytes
            )
        self.enumerates_all = enumerable(shape, self._options, job)
        self._may_start = stage_starts(shape.shardings[0], job)
        pins = pinned_blocks(job, shape.shardings[0].names) if job.keep else ()
        self._pins = [(block, stage % shape.stages) for block, stage in pins]
        self._options_cache: dict[tuple[bytes, ...], np.ndarray] = {}

    def alike(self) -> Iterator[Cutter]:
        """One cutter per option, which gives that option to all stages; fastest option first.

        Where the schedule itself fixes which stages recompute, options that recompute otherwise are left out.
        """
        for option in range(len(self._options.shardings)):
            if not self._recomputes_as_fixed([option] * self._shape.stages):
                continue
            alone = copy.copy(self)
            alone._options, alone._options_cache = self._options.only([option]), {}
            yield alone

    @property
    def bound_s(self) -> float:
        """Lower bound on the iteration time of any cut, in seconds."""
        return self._shape.bound_below_s(math.inf, self._options.work_each_s)

    def cuts(self, cutoff_s: float) -> list[ShapeCut]:
        """Cuts worth judging, most promising first: all if they are few, else the best found by local search.

        Args:
            cutoff_s: boundaries are moved only for cuts whose bound is near or below it, in seconds.
        """
        if self.enumerates_all:
            return sorted(self._enumerated(), key=lambda cut: cut.sort_key)
        single, cuts = len(self._options.shardings) == 1, list[ShapeCut]()
        edges_tried = self._starting_edges(single=single)
        aligned_is_same = single or all(len(stages) < 2 for stages in self._stages_of_worker)
        for aligned in (False,) if aligned_is_same else (True, False):
            best = min(
                (self._cut(edges, aligned=aligned) for edges in edges_tried), key=lambda cut: cut.key, default=None
            )
            if best is not None:
                near_cutoff = best.bound_s < cutoff_s * (1 + IMPROVE_WITHIN)
                cuts.append(self._improve(best, aligned=aligned) if near_cutoff else best)
        return sorted(cuts, key=lambda cut: cut.sort_key)

    def _enumerated(self) -> Iterator[ShapeCut]:
        """Every allowed cut in every combination of options."""
        shape, options = self._shape, range(len(self._options.shardings))
        places = np.flatnonzero(self._may_start[1:-1]) + 1
        for inner in itertools.combinations(places.tolist(), shape.stages - 1):
            edges = (0, *inner, self._options.blocks)
            if not self._respects_pins(edges):
                continue
            costs = stage_costs(self._shape, self._options, self._terms, edges)
            for combination in itertools.product(options, repeat=shape.stages):
                if self._recomputes_as_fixed(combination):
                    yield self._assessed(edges, costs, np.array(combination))

    def _recomputes_as_fixed(self, combination: Sequence[int]) -> bool:
        """True unless the schedule itself fixes which stages recompute and these options recompute others."""
        ways = self._options.ways
        return self._recomputed_stages is None or all(
            ways[o].recompute == (s in self._recomputed_stages) for s, o in enumerate(combination)
        )

    def _respects_pins(self, edges: Edges) -> bool:
        """True if every pinned block lies in the stage it is pinned to."""
        return all(edges[stage] <= block < edges[stage + 1] for block, stage in self._pins)

    def _starting_edges(self, *, single: bool) -> list[Edges]:
        """Starting boundaries: balanced by work within an even share of memory, by work alone, and by memory.

        With a single option the boundaries balanced by work suffice if they fit, and the leanest ones if even these are
        hopeless.
        """
        stages, n = range(self._shape.stages), self._options.blocks
        real = np.arange(n + 1)[:, None] < np.arange(n + 1)[None, :]
        real &= self._may_start[:, None] & self._may_start[None, :]
        allowed = [self._allowed_ranges(stage, real) for stage in stages]
        work_s = functools.cache(lambda *kind: self._half_open(self._seconds(*kind).min(axis=0)))
        by_work = balanced([work_s(*self._stage_kind(stage)) for stage in stages], allowed)
        if single and by_work is not None and self._cut(by_work, aligned=False).excess <= 0:
            return [by_work]
        needed_bytes = functools.cache(self._needed_bytes)
        least_bytes = functools.cache(lambda *key: self._half_open(needed_bytes(*key).min(axis=0)))
        fitting_s = functools.cache(
            lambda budget, state, kind: self._fitting_s(budget, needed_bytes(state, *kind), kind)
        )
        leanest = balanced(
            [least_bytes(self._stage_state(stage), *self._stage_kind(stage)) for stage in stages], allowed
        )
        if single and leanest is not None and self._cut(leanest, aligned=False).excess > HOPELESS_EXCESS:
            return [leanest]
        tables = [
            fitting_s(self._stage_budget(stage), self._stage_state(stage), self._stage_kind(stage)) for stage in stages
        ]
        fitting = [mask & np.isfinite(table) for mask, table in zip(allowed, tables, strict=True)]
        return [e for e in dict.fromkeys((balanced(tables, fitting), by_work, leanest)) if e is not None]

    def _stage_kind(self, stage: int) -> tuple[int, ...]:
        """(1 if the schedule recomputes the stage, 0 if not, -1 if the option decides, *device types of the stage)."""
        recompute = -1 if self._recomputed_stages is None else int(stage in self._recomputed_stages)
        return recompute, *self._terms.device_types[stage]

    def _stage_state(self, stage: int) -> tuple[float, float, float, float]:
        """(state bytes per element, state bytes per element left by sharding, micro-batches in flight, those of them
        between the halves of a split backward) of a stage."""
        worker = self._workers_of_stage[stage][0]
        hosted = self._stages_of_worker[worker]
        units = float(self._peak_units[worker][hosted.index(stage)])
        if len(hosted) == 1:
            units = max(units, float(self._units[worker].max(initial=0.0)))
        waiting = float(self._peak_waiting[worker][hosted.index(stage)])
        element_bytes, shard_element_bytes = self._terms.bytes_per_element, self._terms.bytes_per_shard_element
        return float(element_bytes[stage]), float(shard_element_bytes[stage]), units, waiting

    def _stage_budget(self, stage: int) -> float:
        """Even share of a stage in its worker's memory, in bytes."""
        worker = self._workers_of_stage[stage][0]
        return float(self._room_bytes[worker]) / len(self._stages_of_worker[worker])

    def _options_that_recompute(self, recompute: int) -> list[int]:
        """Options that recompute (1) or do not (0); all options for -1."""
        return [o for o, way in enumerate(self._options.ways) if recompute < 0 or way.recompute == bool(recompute)]

    def _seconds(self, recompute: int, *types: int) -> np.ndarray:
        """[options, n, n] seconds of a micro-batch on the slowest of some device types."""
        return np.asarray(self._options.work_s[self._options_that_recompute(recompute)][:, list(types)].max(axis=1))

    def _needed_bytes(self, state: tuple[float, float, float, float], recompute: int, *_types: int) -> np.ndarray:
        """[options, n, n] bytes that a stage of blocks i..j needs on its own."""
        (element_bytes, shard_element_bytes, units, waiting), options = state, self._options
        turns = any(peak.splits for peak in self._peaks)
        needed = (
            element_bytes * options.elements
            + shard_element_bytes * options.shard_elements
            + units * options.unit_bytes / self._shape.schedule.parts
            + waiting * (options.waiting_bytes - options.unit_bytes)
            + (options.turning_bytes - options.unit_bytes if turns else options.working_bytes)
            + options.workspace_bytes
        )
        return np.asarray(needed[self._options_that_recompute(recompute)] + self._terms.transient_bytes)

    def _fitting_s(self, budget: float, needed: np.ndarray, kind: tuple[int, ...]) -> np.ndarray:
        """[n + 1, n + 1] seconds of the fastest option within `budget` bytes; infinite if none is."""
        return self._half_open(np.where(needed <= budget, self._seconds(*kind), np.inf).min(axis=0))

    def _half_open(self, table: np.ndarray) -> np.ndarray:
        """Reindex [n, n] of blocks i..j as [n + 1, n + 1] of blocks i..j-1; infinite for empty ranges."""
        n = len(table)
        shifted = np.full((n + 1, n + 1), np.inf)
        shifted[:n, 1:] = np.where(np.arange(n)[:, None] <= np.arange(n)[None, :], table, np.inf)
        return shifted

    def _allowed_ranges(self, stage: int, real: np.ndarray) -> np.ndarray:
        """bool [n + 1, n + 1], ranges of blocks that may be this stage, given the pinned blocks."""
        at, allowed = np.arange(len(real)), real
        for block, pinned_stage in self._pins:
            holds_block = (at[:, None] <= block) & (at[None, :] > block)
            allowed = allowed & (holds_block if pinned_stage == stage else ~holds_block)
        return allowed

    def _cut(self, edges: Edges, *, aligned: bool) -> ShapeCut:
        """The cut at these boundaries with the options that make each worker fastest within its memory.

        If `aligned`, every worker takes the options of the slowest worker, stage by stage, where these fit: then no
        worker waits for another's slower stage more than once.
        """
        costs = stage_costs(self._shape, self._options, self._terms, edges)
        options = np.zeros(self._shape.stages, np.int64)
        picks = {
            w: self._fastest_options(w, costs, list(stages))
            for w, stages in enumerate(self._stages_of_worker)
            if stages
        }
        if aligned:
            slowest = max(picks, key=lambda w: float(costs.work_s[list(self._stages_of_worker[w]), picks[w]].sum()))
            picks = {w: self._aligned_options(w, costs, pick, picks[slowest]) for w, pick in picks.items()}
        for worker, pick in picks.items():
            hosted = list(self._stages_of_worker[worker])
            options[hosted] = np.maximum(options[hosted], pick)
        return self._assessed(edges, costs, options)

    def _aligned_options(
        self, worker: int, costs: StageCosts, own_options: np.ndarray, other_options: np.ndarray
    ) -> np.ndarray:
        """Another worker's options if they are as many and fit this worker's memory; else its own."""
        stages = list(self._stages_of_worker[worker])
        if len(own_options) != len(other_options):
            return own_options
        fits = self._peak_bytes(worker, costs, stages, other_options) <= self._room_bytes[worker]
        return other_options if fits else own_options

    def _assessed(self, edges: Edges, costs: StageCosts, options: np.ndarray) -> ShapeCut:
        """The cut with estimates of its time and memory."""
        all_stages = np.arange(len(options))
        work_s, forward_s = costs.work_s[all_stages, options], costs.forward_s[all_stages, options]
        tail_s = costs.tail_s[all_stages, options]
        fill_s, drain_s = np.cumsum(forward_s) - forward_s, np.cumsum(work_s - forward_s) - (work_s - forward_s)
        fullest, slowest, imbalance = (0.0, -1), (0.0, -1), float((work_s**2).sum())
        pace_by_turn_s = np.zeros(max(map(len, self._stages_of_worker)))
        longest_ramp_s = 0.0
        for worker, stages in enumerate(self._stages_of_worker):
            if not stages:
                continue
            hosted, first = list(stages), stages[0]
            work_by_stage_s = self._passes[worker] * work_s[hosted]
            ramp_s = float(self._ramp[0] * fill_s[first] + self._ramp[1] * drain_s[first])
            slowest = max(slowest, (float(work_by_stage_s.sum()) + ramp_s, worker))
            turns = slice(len(stages))
            pace_by_turn_s[turns] = np.maximum(pace_by_turn_s[turns], work_by_stage_s + tail_s[hosted])
            longest_ramp_s = max(longest_ramp_s, ramp_s)
            peak_bytes = self._peak_bytes(worker, costs, hosted, options[hosted])
            fullest = max(fullest, (peak_bytes / self._room_bytes[worker] - 1, worker))
        worst_worker = fullest[1] if fullest[0] > 0 else slowest[1]
        pace_s = max(slowest[0], float(pace_by_turn_s.sum()) + longest_ramp_s)
        return ShapeCut(edges, tuple(options.tolist()), fullest[0], slowest[0], pace_s, imbalance, worst_worker)

    def _peak_bytes(self, worker: int, costs: StageCosts, stages: list[int], options: np.ndarray) -> float:
        """Peak bytes of a worker with these options for its stages."""
        resident_bytes = float(costs.resident[stages, options].sum()) + self._terms.transient_bytes
        resident_bytes += float(costs.workspace[stages, options].max())
        peak = self._peaks[worker]
        if peak.splits:
            tables = (costs.unit, costs.turning, costs.waiting)
            sizes = (dict(zip(stages, t[stages, options].tolist(), strict=True)) for t in tables)
            return resident_bytes + peak.most_of(UnitSizes(*sizes))
        units = self._units[worker] @ costs.unit[stages, options]
        return resident_bytes + float(costs.working[stages, options].max() + units.max(initial=0.0))

    def _fastest_options(self, worker: int, costs: StageCosts, stages: list[int]) -> np.ndarray:
        """Fastest options of a worker's stages that fit its memory; the leanest if none fit."""
        work_s = costs.work_s[stages] * self._passes[worker][:, None] + costs.tail_s[stages]
        kept = costs.resident[stages] + self._peak_units[worker][:, None] * costs.unit[stages]
        kept = kept + self._peak_waiting[worker][:, None] * (costs.waiting - costs.unit)[stages]
        if self._recomputed_stages is not None:
            recompute = np.array([way.recompute for way in self._options.ways])
            work_s = np.where(recompute == np.isin(stages, list(self._recomputed_stages))[:, None], work_s, np.inf)
        key = (self._units[worker].tobytes(), work_s.tobytes(), kept.tobytes(), self._room_bytes[worker].tobytes())
        if key not in self._options_cache:
            self._options_cache[key] = self._knapsack(worker, costs, stages, work_s, kept)
        return self._options_cache[key]

    def _knapsack(
        self, worker: int, costs: StageCosts, stages: list[int], work_s: np.ndarray, kept_bytes: np.ndarray
    ) -> np.ndarray:
        """Choose options by knapsack over the stages' bytes.

        Bytes that the knapsack does not count (working memory, other moments' peaks) shrink its budget until the result
        fits.
        """
        room_bytes = float(self._room_bytes[worker])
        fastest: np.ndarray = work_s.argmin(axis=1)
        excess_bytes = self._peak_bytes(worker, costs, stages, fastest) - room_bytes
        if excess_bytes <= 0:
            return fastest
        budget_bytes = room_bytes - self._terms.transient_bytes - float(costs.workspace[stages].max())
        for _ in range(MAX_PACKINGS):
            picked = packed(work_s, kept_bytes, budget_bytes)
            if picked is None or (excess_bytes := self._peak_bytes(worker, costs, stages, picked) - room_bytes) <= 0:
                break
            budget_bytes -= max(excess_bytes, room_bytes / BINS)
        leanest: np.ndarray = np.where(np.isfinite(work_s), kept_bytes, np.inf).argmin(axis=1)
        return leanest if picked is None else picked

    def _improve(self, best: ShapeCut, *, aligned: bool) -> ShapeCut:
        """Local search: move one boundary at a time to the next allowed place while that improves the cut."""
        tried, improved = 0, True
        while improved and tried < MAX_MOVES and best.key > (0.0, self._shape.bound_s * (1 + GOOD_ENOUGH)):
            improved = False
            for edges in self._moved_edges(best):
                tried += 1
                other = self._cut(edges, aligned=aligned)
                if other.key < best.key:
                    best, improved = other, True
                    break
                if tried >= MAX_MOVES:
                    break
        return best

    def _moved_edges(self, cut: ShapeCut) -> Iterator[Edges]:
        """Boundaries with one end of one stage of the worst worker moved inward."""
        edges = cut.edges
        for stage in self._stages_of_worker[cut.worst_worker]:
            for at, by in ((stage, 1), (stage + 1, -1)):
                place = next_start(edges[at], by, self._may_start)
                if 0 < at < len(edges) - 1 and edges[at - 1] < place < edges[at + 1]:
                    other = (*edges[:at], place, *edges[at + 1 :])
                    if self._respects_pins(other):
                        yield other

    def configuration(self, cut: ShapeCut, job: Job) -> Configuration:
        """The configuration that a cut stands for."""
        shape, options = self._shape, self._options
        shardings = [shape.shardings[options.shardings[o]] for o in cut.options]
        return Configuration(
            stages=tuple(
                sharding.stage(a, b, 1, options.ways[o])
                for (a, b), o, sharding in zip(itertools.pairwise(cut.edges), cut.options, shardings, strict=True)
            ),
            copies=shape.copies,
            micro_batch=shardings[0].micro_batch,
            micro_batches=shape.micro_batches,
            schedule=shape.schedule.name,
            zero=shape.zero,
            adjacent=shape.adjacent,
            whole_stages=(job.whole_stages or shape.repeats) and any(options.ways[o].recompute for o in cut.options),
            transfers=job.transfers,
        )
