"""The fastest stages on devices in line: a label sweep over (site, cut), pruned by a limit on the slowest stage.

A plan below `limit` has every stage below it, and a stage on R devices takes at least its compute time / R. So with u
of E devices used, the compute time before a cut lies between total - limit (E - u) and limit u. Near the optimum few
cuts remain at each site, so that graphs with hundreds of thousands of cuts are solved exactly. No plan below the limit
is lost: if none is found, the limit is a lower bound.

`Cuts` holds all cuts of a layer graph as arrays, sorted by the compute time before the cut. Sites are how many devices
are used, and where inside a unit; a `Move` is a stage on the next devices of a tree of levels.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.graph.ideals import ancestor_bits, enumerate_ideals, prefix_ideals
from planner.memory import fits
from planner.solvers.cluster_chains.pipedream import PipeDreamProblem, ReplicatedPipeline
from planner.solvers.cluster_chains.pipedream_terms import LayerDag, Released
from planner.solvers.cluster_chains.search import Deadline, OutOfTime

_CHUNK = 1 << 15


@dataclass(frozen=True, eq=False)
class Cuts:
    """S cuts, the empty one first and the full one last.

    Attributes:
        bits: uint64 [S, words] bit sets of the layers before the cut.
        compute_s: float64 [S] their compute time, ascending.
        weight_bytes: float64 [S].
        saved_bytes: float64 [S].
        cut_bytes: float64 [S] bytes that cross the cut, one way.
        complete: whether these are all cuts of the graph.
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
        """True if each cut holds the layers of the one before it."""
        return not (self.bits[:-1] & ~self.bits[1:]).any()

    def coarse(self, most: int) -> Cuts:
        """About `most` cuts: half with the fewest bytes, half spread over the compute time, and the two ends."""
        if self.count <= most:
            return self
        spread = np.linspace(0, self.count - 1, most // 2).astype(np.int64)
        rows = np.union1d(spread, np.argsort(self.cut_bytes, kind="stable")[: most // 2])
        tables = ("bits", "compute_s", "weight_bytes", "saved_bytes", "cut_bytes")
        kept: dict[str, Any] = {name: getattr(self, name)[rows] for name in tables}
        return Cuts(**kept, complete=False)

    def layers_between(self, first: int, last: int) -> tuple[int, ...]:
        """Layers before cut `last` that are not before cut `first`."""
        members = np.unpackbits((self.bits[last] & ~self.bits[first]).view(np.uint8), bitorder="little")
        return tuple(np.flatnonzero(members).tolist())


def all_cuts(layers: LayerDag, released: Released, most: int, deadline: Deadline) -> Cuts:
    """All cuts of a layer graph, or only those along its topological order.

    The latter if there are more than `most`, or more than can be listed and priced before the deadline.

    Complexity: O(cuts * (layers + edges)) in vectorised operations.
    """
    arcs = [(a, b) for a, b in layers.edges.tolist()]
    bits, figures = None, list[np.ndarray]()
    with contextlib.suppress(OutOfTime):
        bits = enumerate_ideals(layers.count, arcs, most, check=deadline.check)
        if bits is not None:
            figures = _figures(layers, released, bits, deadline.check)
    complete = len(figures) > 0
    if bits is None or not complete:
        bits = prefix_ideals(layers.count, [range(layers.count)])
        figures = _figures(layers, released, bits, lambda: None)
    compute_s, weight_bytes, saved_bytes, cut_bytes, size, allowed = np.concatenate(figures, axis=1)
    keep = np.flatnonzero(allowed)
    order = keep[np.lexsort((*bits[keep].T, size[keep], compute_s[keep]))]
    tables = (compute_s[order], weight_bytes[order], saved_bytes[order], cut_bytes[order])
    return Cuts(bits[order], *tables, complete)


def _figures(layers: LayerDag, released: Released, bits: np.ndarray, check: Callable[[], None]) -> list[np.ndarray]:
    """float64 [6, rows]: compute time, weights, saved bytes, bytes at the cut, number of layers, whether allowed.

    In parts of so many rows that a part's tables are small.
    """
    _, after = layers.neighbours()
    ancestors = ancestor_bits(layers.count, [(a, b) for a, b in layers.edges.tolist()])
    sizes = np.stack([layers.compute_s, layers.weight_bytes, layers.saved_bytes], axis=1)
    parts = []
    for at in range(0, len(bits), _CHUNK):
        octets = bits[at : at + _CHUNK].view(np.uint8)
        inside = np.unpackbits(octets, axis=1, bitorder="little", count=layers.count).astype(bool)
        last, crossing = inside.copy(), np.zeros(len(inside))
        for layer, readers in enumerate(after):
            last[:, layer] &= ~inside[:, readers].any(axis=1)
        for layer, readers in enumerate(after):
            check()
            if Released.CUT_BYTES in released:
                carried = last[:, [layer, *_outliving(layer, readers, ancestors)]].any(axis=1)
            else:
                carried = inside[:, layer] & (~inside[:, readers]).any(axis=1)
            crossing[carried] += layers.output_bytes[layer]
        walked = _walked(inside, last, ancestors) if Released.CUTS in released else np.ones(len(inside), dtype=bool)
        parts.append(np.stack([*(inside.astype(np.float64) @ sizes).T, crossing, inside.sum(axis=1), walked]))
    return parts


def _walked(inside: np.ndarray, last: np.ndarray, ancestors: list[int]) -> np.ndarray:
    """bool [rows] cuts that `Released.CUTS` allows, and the two ends."""
    count = len(ancestors)
    first = next(i for i, before in enumerate(ancestors) if not before)
    reached = [i == first or bool(ancestors[i] >> first & 1) for i in range(count)]
    allowed = last[:, reached].any(axis=1)
    for layer in range(count):
        if reached[layer]:
            continue
        related = [end for end in range(count) if reached[end] and ancestors[end] & ancestors[layer]]
        allowed &= ~last[:, layer] | last[:, related].any(axis=1)
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
    """A stage on the next devices: leads from one site to another.

    Attributes:
        target: site after the stage.
        replicas: its devices.
        used: devices used up to its end.
        exchange_s_per_byte: seconds to exchange a byte of its weights.
        level: of the slowest links from the left end of its place to its last device.
        tail_level: of the slowest links from its first device to the next site.
        place: (first device, width, copies, stride).
    """

    target: int
    replicas: int
    used: int
    exchange_s_per_byte: float
    level: int
    tail_level: int
    place: tuple[int, int, int, int]


Moves = tuple[tuple[Move, ...], ...]
"""Places of stages if a certain number of devices is used: moves by site, sites in topological order."""


@dataclass(frozen=True, slots=True, order=True)
class Tail:
    """What the price of the next cut depends on: the last stage's `tail_level`, replicas (0: none), whether first."""

    level: int
    replicas: int
    first: bool


Step = tuple[int, int, tuple[int, int, int, int]]
"""One stage of a plan: cut before it, cut after it, its place."""

Labels = list[tuple[Tail, np.ndarray, np.ndarray]]
"""What moves made of a site: cuts (rows, ascending) and the time of the slowest stage so far, by tail."""


class Sweep:
    """One sweep over the sites.

    Args:
        problem: what stages and cuts cost. If it is nested, the transfer after the first stage is divided by the
            receiver's replicas only.
        cuts: where the graph may be cut.
        devices: how many are used.
        moves: where stages may go.
        limit: only plans below this time are searched for.
        check: called often; raises to stop.
    """

    def __init__(
        self,
        problem: ReplicatedPipeline,
        cuts: Cuts,
        devices: int,
        moves: Moves,
        limit: float,
        check: Callable[[], None],
    ) -> None:
        self.problem, self.nested = problem, isinstance(problem, PipeDreamProblem)
        self.cuts = cuts
        self.devices, self.moves = devices, moves
        self.limit = limit
        self.check = check
        self.labels: list[Labels] = [[] for _ in range(len(moves) + 1)]
        self.pairs = 0

    def run(self) -> tuple[float, tuple[Step, ...]] | None:
        """The fastest plan and its time; None if there is none below the limit."""
        self.labels[0].append((Tail(0, 0, False), np.zeros(1, dtype=np.int64), np.zeros(1)))
        for site, moves in enumerate(self.moves):
            merged: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
            for move in moves if self.labels[site] else ():
                key = (move.level, move.replicas)
                if key not in merged:
                    merged[key] = self._merge(site, move)
                self._extend(site, move, *merged[key])
        ends = [(float(times[0]), tail) for tail, _, times in self.labels[-1]]
        return (min(ends)[0], self._trace(*min(ends))) if ends else None

    def _cut_s_per_byte(self, tail: Tail, level: int, replicas: int) -> float:
        """Seconds per byte at the cut between a last stage `tail` and a next one on `replicas` devices."""
        if not self.problem.transfers or tail.replicas == 0:
            return 0.0
        sharing = replicas if tail.first and self.nested else min(replicas, tail.replicas)
        speed = self.problem.bandwidth_byte_per_s[max(tail.level, level)]
        return 2.0 / (speed * (sharing if self.problem.adds_up else 1))

    def _merge(self, site: int, move: Move) -> tuple[np.ndarray, np.ndarray]:
        """Cuts at a site and their least times over all tails, the transfer into the move's stage included."""
        labels = self.labels[site]
        low = min(int(rows[0]) for _, rows, _ in labels)
        best = np.full(max(int(rows[-1]) for _, rows, _ in labels) + 1 - low, np.inf)
        for tail, rows, times in labels:
            price = self._cut_s_per_byte(tail, move.level, move.replicas)
            at = rows - low
            best[at] = np.minimum(best[at], np.maximum(times, price * self.cuts.cut_bytes[rows]))
        rows = np.flatnonzero(best < self.limit)
        return rows + low, best[rows]

    def _goals(self, move: Move) -> np.ndarray:
        """Cuts that can end a move's stage, by the compute time before them."""
        compute_s, last = self.cuts.compute_s, self.cuts.count - 1
        ahead = self.devices - move.used
        if ahead == 0:
            return np.array([last])
        low = int(np.searchsorted(compute_s, compute_s[-1] - self.limit * ahead * _SLACK, "left"))
        high = int(np.searchsorted(compute_s, self.limit * move.used * _SLACK, "right"))
        return np.arange(max(1, low), min(last, high))

    def _extend(self, site: int, move: Move, rows: np.ndarray, times: np.ndarray) -> None:
        """Add the labels that a move makes of the cuts at a site."""
        goals, compute_s = self._goals(move), self.cuts.compute_s
        if not len(rows) or not len(goals):
            return
        best, at = np.full(len(goals), self.limit), 0
        while at < len(goals):
            self.check()
            earliest_s = compute_s[goals[at]] - self.limit * move.replicas * _SLACK  # a stage from before is too long
            low, top = int(np.searchsorted(compute_s[rows], earliest_s)), int(np.searchsorted(rows, goals[-1]))
            step = max(16, min(512, _BLOCK // max(1, top - low)))
            block = goals[at : at + step]
            top = int(np.searchsorted(rows, block[-1]))
            if low < top:
                reached = self._block(move, rows[low:top], times[low:top], block).min(axis=0)
                best[at : at + step] = np.minimum(reached, self.limit)
            at += step
        keep = best < self.limit
        if keep.any():
            tail = Tail(move.tail_level, move.replicas, site == 0)
            self.labels[move.target].append((tail, goals[keep], best[keep]))

    def _block(self, move: Move, rows: np.ndarray, times: np.ndarray, goals: np.ndarray) -> np.ndarray:
        """[rows, goals] time of the slowest stage up to each goal by the cut before; infinite where impossible."""
        self.pairs += len(rows) * len(goals)
        stage = self._stage_s(move, rows, goals)
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

    def _stage_s(self, move: Move, rows: np.ndarray, goals: np.ndarray) -> np.ndarray:
        """[rows, goals] seconds per minibatch of the stage between two cuts; infinite where it does not fit."""
        cuts, memory = self.cuts, self.problem.memory
        compute = cuts.compute_s[goals][None, :] - cuts.compute_s[rows][:, None]
        weights = cuts.weight_bytes[goals][None, :] - cuts.weight_bytes[rows][:, None]
        exchange = weights * move.exchange_s_per_byte
        stage = compute + exchange if self.problem.adds_up else np.maximum(compute, exchange)
        stage /= move.replicas
        if math.isfinite(memory.device_bytes):
            saved = cuts.saved_bytes[goals][None, :] - cuts.saved_bytes[rows][:, None]
            in_flight = memory.in_flight(self.devices - move.used, move.replicas)
            needed = memory.needed(weights, saved, cuts.cut_bytes[rows][:, None], in_flight)
            stage[~fits(needed, memory.device_bytes)] = np.inf
        return np.asarray(stage)

    def _trace(self, best: float, tail: Tail) -> tuple[Step, ...]:
        """The stages of the plan that ends with a label of the last site."""
        steps: list[Step] = []
        site, row, time = len(self.labels) - 1, self.cuts.count - 1, best
        while row:
            site, tail, step, time = self._step_before(site, tail, row, time)
            steps.append(step)
            row = step[0]
        return tuple(reversed(steps))

    def _step_before(self, target: int, tail: Tail, row: int, time: float) -> tuple[int, Tail, Step, float]:
        """The last stage behind a label, with the site, tail and time before it."""
        goal = np.array([row])
        for site, moves in enumerate(self.moves[:target]):
            for move in moves:
                made = Tail(move.tail_level, move.replicas, site == 0)
                if move.target != target or made != tail:
                    continue
                for before, rows, times in sorted(self.labels[site], key=lambda label: label[0]):
                    price = self._cut_s_per_byte(before, move.level, move.replicas)
                    slowest = np.maximum(times, price * self.cuts.cut_bytes[rows])
                    reached = self._block(move, rows, slowest, goal)[:, 0]
                    at = int(np.argmin(reached))
                    if reached[at] <= time * _SLACK:
                        return site, before, (int(rows[at]), row, move.place), float(times[at])
        raise RuntimeError("a label of the sweep has no stage before it")


Site = tuple[int, int, int, int]
"""(devices before the section, copies, stride, offset inside a unit); (p, 1, 0, 0) outside sections of copied units."""


def moves_on(problem: ReplicatedPipeline, devices: int, deadline: Deadline) -> Moves:
    """Moves on `devices` devices: runs of neighbours, and sections of several units that run the same stages."""
    stages = list(_places(problem, devices, deadline))
    sites = sorted({site for place, after, _ in stages for site in (_site(place), after)}, key=_order)
    number = {site: i for i, site in enumerate(sites)}
    moves: list[list[Move]] = [[] for _ in sites[:-1]]
    for place, after, width in stages:
        deadline.check()
        moves[number[_site(place)]].append(_move(problem, place, after, width, number[after]))
    return tuple(tuple(sorted(of_site, key=lambda move: (move.target, move.place))) for of_site in moves)


def _places(problem: ReplicatedPipeline, devices: int, deadline: Deadline) -> Iterator[tuple[Site, Site, int]]:
    """Where a stage may be: its section and offset, the site after it, and its devices in one copy."""
    for before in range(devices):
        deadline.check()
        for width in range(1, devices - before + 1 if problem.replicate else 2):
            yield (before, 1, 0, 0), (before + width, 1, 0, 0), width
        for level in range(1, len(problem.machines) if problem.replicate else 0):
            stride = problem.unit_devices(level)
            most = (devices - before) // stride if before % stride == 0 else 0
            for copies, offset in itertools.product(range(2, most + 1), range(stride)):
                for end in range(offset + 1, stride + (offset > 0)):
                    inside = (before, copies, stride, end)
                    after = inside if end < stride else (before + copies * stride, 1, 0, 0)
                    yield (before, copies, stride, offset), after, end - offset


def _site(place: Site) -> Site:
    """The site before a stage: a section begins outside all sections."""
    return place if place[3] else (place[0], 1, 0, 0)


def _order(site: Site) -> tuple[int, ...]:
    """Sort key of sites in topological order: devices used, then complete sections last."""
    before, copies, stride, offset = site
    return (before + copies * offset, offset == 0, before, copies, stride)


def _move(problem: ReplicatedPipeline, place: Site, after: Site, width: int, target: int) -> Move:
    before, copies, stride, offset = place
    first, next_device = before + offset, after[0] + after[3]
    devices = [first + k * stride + i for k in range(copies) for i in range(width)]
    last = first + width - 1 if offset else devices[-1]
    edge = next_device if after[1] > 1 or next_device < problem.devices else devices[-1]
    return Move(
        target=target,
        replicas=len(devices),
        used=before + copies * (offset + width),
        exchange_s_per_byte=problem.exchange_s_per_byte(devices),
        level=problem.span_level(first, last),
        tail_level=problem.span_level(first, edge),
        place=(first, width, copies, stride),
    )
