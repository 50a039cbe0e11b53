"""The fastest way to lay stages on devices in line: a label sweep over (place, cut), pruned by a limit on the answer.

Whatever is faster than `limit` keeps every stage below it, and a stage on R devices takes at least its
compute time / R. So with u of E devices used the compute time before a cut lies between total - limit (E - u) and
limit u: near the optimum few cuts remain at each place, and a graph with hundreds of thousands of cuts is solved
exactly. Nothing faster than the limit is lost: when nothing is found, the limit is a lower bound.

Sites and moves of the sweep: devices on a tree of levels; machines on one level are a tree without any.

All places where a layer graph can be cut are arrays sorted by the compute time before the cut.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.graph.ideals import ancestor_bits, enumerate_ideals, prefix_ideals
from planner.memory import fits
from planner.solvers.partition import Deadline, OutOfTime
from planner.space.partition import BoundaryBytes, Frontiers, Layers, PipeDreamProblem, PlacedPipelineProblem, StageCost

_CHUNK = 1 << 15


@dataclass(frozen=True, eq=False)
class Cuts:
    """S cuts, the empty one first and the full one last.

    Attributes:
        bits: uint64 [S, words] layers before the cut.
        compute_s: float64 [S] their compute time, ascending.
        weight_bytes: float64 [S].
        saved_bytes: float64 [S].
        cut_bytes: float64 [S] bytes that cross.
        complete: whether these are all cuts there are.
    """

    bits: np.ndarray
    compute_s: np.ndarray
    weight_bytes: np.ndarray
    saved_bytes: np.ndarray
    cut_bytes: np.ndarray
    complete: bool

    @property
    def count(self) -> int:
        """Number of cuts."""
        return len(self.bits)

    @functools.cached_property
    def nested(self) -> bool:
        """Whether each cut holds the one before it."""
        return not (self.bits[:-1] & ~self.bits[1:]).any()

    def subset(self, rows: np.ndarray) -> Cuts:
        """Some of the cuts, with the two ends in any case."""
        keep = np.unique(np.concatenate([rows, [0, self.count - 1]]))
        tables = ("bits", "compute_s", "weight_bytes", "saved_bytes", "cut_bytes")
        kept: dict[str, Any] = {name: getattr(self, name)[keep] for name in tables}
        return replace(self, **kept, complete=self.complete and len(keep) == self.count)

    def coarse(self, most: int) -> Cuts:
        """About that many cuts: those where little crosses, and some spread over the compute time."""
        if self.count <= most:
            return self
        spread = np.linspace(0, self.count - 1, most // 2).astype(np.int64)
        return self.subset(np.concatenate([spread, np.argsort(self.cut_bytes, kind="stable")[: most // 2]]))

    def layers_between(self, first: int, last: int) -> tuple[int, ...]:
        """Layers before cut `last` that are not before cut `first`."""
        members = np.unpackbits((self.bits[last] & ~self.bits[first]).view(np.uint8), bitorder="little")
        return tuple(np.flatnonzero(members).tolist())

    def line(self) -> np.ndarray:
        """Cuts on one chain from empty to full: each holds the one before."""
        found, sizes = [0], np.bitwise_count(self.bits).sum(axis=1)
        for row in range(1, self.count):
            if sizes[row] > sizes[found[-1]] and not (self.bits[found[-1]] & ~self.bits[row]).any():
                found.append(row)
        return np.array(found)


def all_cuts(layers: Layers, boundary: BoundaryBytes, frontiers: Frontiers, most: int, deadline: Deadline) -> Cuts:
    """Every cut of a layer graph; when there are too many, those along its topological order only.

    Too many are more than `most`, and more than can be listed and priced before the deadline.

    Complexity: O(cuts * (layers + edges)) in vectorised operations.
    """
    arcs = [(a, b) for a, b in layers.edges.tolist()]
    bits, figures = None, np.zeros((0, 6))
    with contextlib.suppress(OutOfTime):
        bits = enumerate_ideals(layers.count, arcs, most, check=deadline.check)
        if bits is not None:
            figures = _figures(layers, boundary, frontiers, bits, deadline.check)
    complete = len(figures) > 0
    if bits is None or not complete:
        bits = prefix_ideals(layers.count, [range(layers.count)])
        figures = _figures(layers, boundary, frontiers, bits, lambda: None)
    keep = np.flatnonzero(figures[:, 5] > 0)
    order = keep[np.lexsort((*bits[keep].T, figures[keep, 4], figures[keep, 0]))]
    compute_s, weight_bytes, saved_bytes, cut_bytes = (figures[order, i].copy() for i in range(4))
    return Cuts(bits[order], compute_s, weight_bytes, saved_bytes, cut_bytes, complete)


def _figures(
    layers: Layers, boundary: BoundaryBytes, frontiers: Frontiers, bits: np.ndarray, check: Callable[[], None]
) -> np.ndarray:
    """Compute time, weights, saved bytes, bytes at the cut, number of layers, whether allowed: float64 [rows, 6]."""
    _, after = layers.neighbours()
    ancestors = ancestor_bits(layers.count, [(a, b) for a, b in layers.edges.tolist()])
    parts = []
    for at in range(0, len(bits), _CHUNK):
        parts.append(_chunk_figures(layers, boundary, frontiers, bits[at : at + _CHUNK], after, ancestors, check))
    return np.concatenate(parts)


def _chunk_figures(
    layers: Layers,
    boundary: BoundaryBytes,
    frontiers: Frontiers,
    bits: np.ndarray,
    after: list[list[int]],
    ancestors: list[int],
    check: Callable[[], None],
) -> np.ndarray:
    octets = bits.view(np.uint8).reshape(len(bits), -1)
    inside = np.unpackbits(octets, axis=1, bitorder="little", count=layers.count).astype(bool)
    last = inside.copy()
    for layer, readers in enumerate(after):
        if readers:
            last[:, layer] &= ~inside[:, readers].any(axis=1)
    crossing = np.zeros(len(bits))
    for layer, readers in enumerate(after):
        check()
        if boundary is BoundaryBytes.RELEASED:
            carried = last[:, [layer, *_outliving(layer, readers, ancestors)]].any(axis=1)
        else:
            carried = inside[:, layer] & (~inside[:, readers]).any(axis=1)
        crossing[carried] += layers.output_bytes[layer]
    allowed = np.ones(len(bits), dtype=bool)
    if frontiers is Frontiers.FIRST_SOURCE:
        allowed = _walked(inside, last, ancestors)
    sums = inside.astype(np.float64) @ np.stack([layers.compute_s, layers.weight_bytes, layers.saved_bytes], axis=1)
    return np.column_stack([sums, crossing, inside.sum(axis=1), allowed])


def _walked(inside: np.ndarray, last: np.ndarray, ancestors: list[int]) -> np.ndarray:
    """Which cuts a walk from the first source comes to (`Frontiers.FIRST_SOURCE`), the two ends in any case."""
    count = len(ancestors)
    first = next(i for i, before in enumerate(ancestors) if not before)
    reached = [i == first or bool(ancestors[i] >> first & 1) for i in range(count)]
    allowed = last[:, reached].any(axis=1)
    for layer in range(count):
        if reached[layer]:
            continue
        kin = [end for end in range(count) if reached[end] and ancestors[end] & ancestors[layer]]
        allowed &= ~last[:, layer] | last[:, kin].any(axis=1)
    sizes = inside.sum(axis=1)
    return np.asarray(allowed | (sizes == 0) | (sizes == count))


def _outliving(layer: int, readers: list[int], ancestors: list[int]) -> list[int]:
    """Layers that depend on `layer` while some reader of it is neither one of them nor before them."""
    return [
        end
        for end, before in enumerate(ancestors)
        if before >> layer & 1 and any(reader != end and not before >> reader & 1 for reader in readers)
    ]


_BLOCK = 200_000
_SLACK = 1 + 1e-12


@dataclass(frozen=True, slots=True)
class Move:
    """A stage put on some devices: from one site to the next.

    Attributes:
        target: site after it.
        replicas: its devices.
        used: devices used after it.
        exchange_s_per_byte: seconds to exchange a byte of its weights.
        level: of the slowest links between its place's left end and its last device.
        tail_level: of the slowest links between its first device and the next site.
        place: (first device, width, copies, stride).
    """

    target: int
    replicas: int
    used: int
    exchange_s_per_byte: float
    level: int
    tail_level: int
    place: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where stages may go when exactly `devices` devices are used: moves by site, first to last."""

    devices: int
    moves: tuple[tuple[Move, ...], ...]


@dataclass(frozen=True, slots=True)
class Pricing:
    """How stages and cuts are charged.

    Attributes:
        problem: says how times add up, what cuts cost, links and memory.
        receiver: whether sending by the first stage is free.
        idle_behind_first: devices that the first stage has behind it besides those used.
    """

    problem: PipeDreamProblem | PlacedPipelineProblem
    receiver: bool
    idle_behind_first: int = 0

    @property
    def paper(self) -> bool:
        """Maximum instead of sum, and transfers not shared among replicas."""
        return self.problem.cost is StageCost.PAPER

    def cut_s_per_byte(self, tail: Tail, level: int, replicas: int) -> float:
        """Seconds for a byte at the cut between a stage that ended as `tail` and one on `replicas` devices."""
        if not self.problem.transfers or tail.replicas == 0:
            return 0.0
        sharing = replicas if tail.first and self.receiver else min(replicas, tail.replicas)
        return 2.0 / (self.problem.bandwidth_byte_per_s[max(tail.level, level)] * (1 if self.paper else sharing))


@dataclass(frozen=True, slots=True, order=True)
class Tail:
    """What the next cut must know of the last stage: reach to the left, replicas (0: there is none), whether first."""

    level: int
    replicas: int
    first: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One stage of an answer: cut before, cut behind, where."""

    start: int
    stop: int
    place: tuple[int, int, int, int]


Labels = dict[Tail, tuple[np.ndarray, np.ndarray]]


class Sweep:
    """One search. Labels of a site: for each tail, rows of cuts (ascending) with the slowest time so far.

    Args:
        cuts: where the graph may be cut.
        layout: where stages may go.
        pricing: what they cost.
        limit: only plans faster than that are looked for.
        check: called often; raises to stop.
    """

    def __init__(self, cuts: Cuts, layout: Layout, pricing: Pricing, limit: float, check: Callable[[], None]) -> None:
        self.cuts = cuts
        self.layout = layout
        self.pricing = pricing
        self.limit = limit
        self.check = check
        self.labels: list[Labels] = [{} for _ in range(len(layout.moves) + 1)]
        self.pairs = 0

    def run(self) -> tuple[float, tuple[Step, ...]] | None:
        """The fastest plan, None when there is none below the limit."""
        self.labels[0][Tail(0, 0, False)] = (np.zeros(1, dtype=np.int64), np.zeros(1))
        for site, moves in enumerate(self.layout.moves):
            merged: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
            for move in moves if self.labels[site] else ():
                key = (move.level, move.replicas)
                if key not in merged:
                    merged[key] = self._merge(site, move)
                self._extend(site, move, *merged[key])
        found = [(float(times[0]), tail) for tail, (_, times) in self.labels[-1].items() if len(times)]
        if not found:
            return None
        best, tail = min(found)
        return best, self._trace(tail, best)

    def _merge(self, site: int, move: Move) -> tuple[np.ndarray, np.ndarray]:
        """Best time up to each cut at a site, the transfer into a stage like `move` included."""
        labels = self.labels[site]
        low = min(int(rows[0]) for rows, _ in labels.values())
        best = np.full(max(int(rows[-1]) for rows, _ in labels.values()) + 1 - low, np.inf)
        for tail, (rows, times) in labels.items():
            price = self.pricing.cut_s_per_byte(tail, move.level, move.replicas)
            at = rows - low
            best[at] = np.minimum(best[at], np.maximum(times, price * self.cuts.cut_bytes[rows]))
        rows = np.flatnonzero(best < self.limit)
        return rows + low, best[rows]

    def _goals(self, move: Move, tail: Tail) -> np.ndarray:
        """Cuts that can follow a move, by their compute time and by what crosses them at the very least."""
        cuts, last = self.cuts, self.cuts.count - 1
        ahead = self.layout.devices - move.used
        if ahead == 0:
            return np.array([last])
        low, high = 1, last
        if math.isfinite(self.limit):
            total = float(cuts.compute_s[-1])
            low = max(1, int(np.searchsorted(cuts.compute_s, total - self.limit * ahead * _SLACK, "left")))
            high = min(last, int(np.searchsorted(cuts.compute_s, self.limit * move.used * _SLACK, "right")))
        rows = np.arange(low, max(low, high))
        replicas = 1 if self.pricing.paper else ahead
        levels = range(move.tail_level, len(self.pricing.problem.bandwidth_byte_per_s))
        least = min(self.pricing.cut_s_per_byte(tail, level, replicas) for level in levels)
        return rows[least * cuts.cut_bytes[rows] < self.limit] if least else rows

    def _extend(self, site: int, move: Move, rows: np.ndarray, times: np.ndarray) -> None:
        tail = Tail(move.tail_level, move.replicas, site == 0)
        goals = self._goals(move, tail)
        if not len(rows) or not len(goals):
            return
        best = np.full(len(goals), self.limit)
        at = 0
        while at < len(goals):
            self.check()
            first, top = goals[at], int(np.searchsorted(rows, goals[-1], "left"))
            low = self._earliest(rows, int(first), move.replicas)
            step = max(16, min(512, _BLOCK // max(1, top - low)))
            block = goals[at : at + step]
            top = int(np.searchsorted(rows, block[-1], "left"))
            if low < top:
                reached = self._block(site, move, rows[low:top], times[low:top], block).min(axis=0)
                best[at : at + step] = np.minimum(reached, self.limit)
            at += step
        keep = best < self.limit
        if keep.any():
            self._store(move.target, tail, goals[keep], best[keep])

    def _earliest(self, rows: np.ndarray, goal: int, replicas: int) -> int:
        """First of the rows from which one stage can reach a goal below the limit."""
        if math.isinf(self.limit):
            return 0
        start = self.cuts.compute_s[goal] - self.limit * replicas * _SLACK
        return int(np.searchsorted(self.cuts.compute_s[rows], start, "left"))

    def _block(self, site: int, move: Move, rows: np.ndarray, times: np.ndarray, goals: np.ndarray) -> np.ndarray:
        """Slowest time of plans up to each goal, by the cut before: [rows, goals], infinite where impossible."""
        self.pairs += len(rows) * len(goals)
        stage = self._stage_s(site, move, rows, goals)
        np.maximum(stage, times[:, None], out=stage)
        stage[rows[:, None] >= goals[None, :]] = np.inf
        if not self.cuts.nested:
            near, far = np.nonzero(stage < self.limit)
            outside = np.zeros(len(near), dtype=bool)
            for word in range(self.cuts.bits.shape[1]):
                column = self.cuts.bits[:, word]
                outside |= (column[rows[near]] & ~column[goals[far]]) != 0
            stage[near[outside], far[outside]] = np.inf
        return stage

    def _stage_s(self, site: int, move: Move, rows: np.ndarray, goals: np.ndarray) -> np.ndarray:
        """Seconds a minibatch of a stage from each row to each goal, infinite where memory does not do."""
        cuts, memory = self.cuts, self.pricing.problem.memory
        compute = cuts.compute_s[goals][None, :] - cuts.compute_s[rows][:, None]
        weights = cuts.weight_bytes[goals][None, :] - cuts.weight_bytes[rows][:, None]
        exchange = weights * move.exchange_s_per_byte
        stage = np.maximum(compute, exchange) if self.pricing.paper else compute + exchange
        stage /= move.replicas
        if math.isfinite(memory.device_bytes):
            behind = self.layout.devices - move.used + (self.pricing.idle_behind_first if site == 0 else 0)
            saved = cuts.saved_bytes[goals][None, :] - cuts.saved_bytes[rows][:, None]
            in_flight = memory.in_flight(behind, move.replicas)
            needed = memory.needed(weights, saved, cuts.cut_bytes[rows][:, None], in_flight)
            stage[~fits(needed, memory.device_bytes)] = np.inf
        return np.asarray(stage)

    def _store(self, site: int, tail: Tail, rows: np.ndarray, times: np.ndarray) -> None:
        """Add labels; where some are known, the better of the two stays."""
        known = self.labels[site].get(tail)
        if known is not None:
            both = np.union1d(known[0], rows)
            best = np.full(len(both), np.inf)
            best[np.searchsorted(both, known[0])] = known[1]
            at = np.searchsorted(both, rows)
            best[at] = np.minimum(best[at], times)
            rows, times = both, best
        self.labels[site][tail] = (rows, times)

    def _trace(self, tail: Tail, best: float) -> tuple[Step, ...]:
        """The stages of the plan that ends with a label of the last site."""
        steps: list[Step] = []
        site, row, time = len(self.labels) - 1, self.cuts.count - 1, best
        while row:
            site, tail, step, time = self._step_before(site, tail, row, time)
            steps.append(step)
            row = step.start
        return tuple(reversed(steps))

    def _step_before(self, target: int, tail: Tail, row: int, time: float) -> tuple[int, Tail, Step, float]:
        """The last stage of a label: site, tail and time before it."""
        goal = np.array([row])
        for site, moves in enumerate(self.layout.moves[:target]):
            for move in moves:
                made = Tail(move.tail_level, move.replicas, site == 0)
                if move.target != target or made != tail:
                    continue
                for before, (rows, times) in sorted(self.labels[site].items()):
                    price = self.pricing.cut_s_per_byte(before, move.level, move.replicas)
                    slowest = np.maximum(times, price * self.cuts.cut_bytes[rows])
                    reached = self._block(site, move, rows, slowest, goal)[:, 0]
                    at = int(np.argmin(reached))
                    if reached[at] <= time * _SLACK:
                        return site, before, Step(int(rows[at]), row, move.place), float(times[at])
        raise RuntimeError("a label of the sweep has no stage before it")


Site = tuple[int, int, int, int]
"""(devices before, copies, stride, offset inside a unit); (p, 1, 0, 0) between sections."""


def layout_on(problem: PlacedPipelineProblem, devices: int, deadline: Deadline, *, replicate: bool = True) -> Layout:
    """Runs of neighbouring devices, and sections of several units that are run alike, `devices` in all."""
    found: dict[Site, list[tuple[Site, Move]]] = defaultdict(list)
    for before in range(devices):
        for width in range(1, devices - before + 1 if replicate else 2):
            deadline.check()
            after: Site = (before + width, 1, 0, 0)
            found[(before, 1, 0, 0)].append((after, _move(problem, (before, 1, 0, 0), after, width)))
        for level in range(1, len(problem.fanout)):
            stride = problem.unit_devices(level)
            if before % stride == 0:
                for copies in range(2, (devices - before) // stride + 1):
                    deadline.check()
                    _add_section(problem, found, before, copies, stride)
    sites = sorted({*found, *(after for ways in found.values() for after, _ in ways)}, key=_order)
    number = {site: i for i, site in enumerate(sites)}
    rows = []
    for site in sites[:-1]:
        ways = sorted(found[site], key=lambda way: (number[way[0]], way[1].place))
        rows.append(tuple(replace(move, target=number[after]) for after, move in ways))
    return Layout(devices, tuple(rows))


def _order(site: Site) -> tuple[int, ...]:
    """Topological: by devices really used, whole sections last among equals."""
    before, copies, stride, offset = site
    return (before + copies * offset, offset == 0, before, copies, stride)


def _add_section(
    problem: PlacedPipelineProblem, found: dict[Site, list[tuple[Site, Move]]], before: int, copies: int, stride: int
) -> None:
    end: Site = (before + copies * stride, 1, 0, 0)
    for offset in range(stride):
        site: Site = (before, copies, stride, offset) if offset else (before, 1, 0, 0)
        for width in range(1, stride - offset + 1):
            if width == stride:
                continue
            after = end if offset + width == stride else (before, copies, stride, offset + width)
            found[site].append((after, _move(problem, (before, copies, stride, offset), after, width)))


def _move(problem: PlacedPipelineProblem, site: Site, after: Site, width: int) -> Move:
    before, copies, stride, offset = site
    first = before + offset
    devices = [first + k * stride + i for k in range(copies) for i in range(width)]
    within = offset > 0
    last = first + width - 1 if within else devices[-1]
    next_device = after[0] + after[3]
    inside_after = after[1] > 1
    edge = next_device if inside_after or next_device < problem.devices else devices[-1]
    return Move(
        target=-1,
        replicas=len(devices),
        used=before + copies * (offset + width),
        exchange_s_per_byte=problem.exchange_s_per_byte(devices),
        level=problem.span_level(first, last),
        tail_level=problem.span_level(first, edge),
        place=(first, width, copies, stride if copies > 1 else 0),
    )
