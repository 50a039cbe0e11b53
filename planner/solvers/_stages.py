"""Inputs of the chain DP: prices of stages by place, pinned blocks, and problems split into parts that it can solve.

Recomputation never makes an iteration faster, because the repeated forward delays everything by at least the time that
it hides; nor does more recomputation, or the way to the host and back beside the same recomputation. So a stage takes
the fastest allowed choice that fits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from planner.memory import room_bytes
from planner.space.layers import Layers
from planner.space.problem import BY_KIND, BY_OPTION, BY_PLACE, BY_WAY_AND_KIND, StageProblem
from planner.space.ranges import first_layers_bytes


@dataclass(frozen=True, slots=True)
class Pins:
    """Pinned blocks from the view of a search that adds stages at the front.

    Attributes:
        first: last block pinned to the first stage; -1 if there is none.
        behind: (block, number of stages after the one that it is pinned to).
    """

    first: int
    behind: tuple[tuple[int, int], ...]

    @staticmethod
    def of(problem: StageProblem) -> Pins:
        """The pins of a problem; pins counted from the front need a fixed number of stages (`split_by_count`)."""
        first = max((b for b, stage in problem.pins.tolist() if stage == 0), default=-1)
        total = int(problem.stage_counts[0]) if len(problem.stage_counts) else 0
        behind = tuple(
            (b, -stage - 1 if stage < 0 else total - 1 - stage) for b, stage in problem.pins.tolist() if stage
        )
        return Pins(first, behind)

    def allow(self, i: int, stop: np.ndarray, after: np.ndarray) -> np.ndarray:
        """True where a stage of blocks i..stop-1 with `after` stages behind it respects the pins; broadcasts both."""
        allowed = np.full(stop.shape, i == 0 or i > self.first)
        for block, number in self.behind:
            allowed &= (after != number) | ((i <= block) & (stop > block))
            allowed &= (after >= number) | (i > block)
            allowed &= number >= 0  # A negative number means that the pipeline has too few stages.
        return allowed


def split_by_count(problem: StageProblem) -> tuple[StageProblem, ...]:
    """One problem per number of stages if a pin counts from the front; else the problem alone."""
    if len(problem.stage_counts) == 1 or not (problem.pins[:, 1] > 0).any():
        return (problem,)
    most = min(problem.blocks, problem.slice_devices, problem.max_stages or problem.blocks)
    counts = [n for n in range(1, most + 1) if not len(problem.stage_counts) or n in problem.stage_counts]
    return tuple(replace(problem, stage_counts=np.array([n]), max_stages=n) for n in counts)


def split(problem: StageProblem) -> tuple[StageProblem, ...]:
    """Divide a problem by a choice that the label search must know beforehand; empty if there is none.

    In this order: the number of replicas of all stages, their sharding, their recomputation, the number of stages. A
    bound of the problem holds for all parts.
    """
    for split_by in (split_by_replicas, split_by_sharding, split_by_recompute, split_by_count):
        parts = split_by(problem)
        if len(parts) > 1:
            return parts
    return ()


def split_by_sharding(problem: StageProblem) -> tuple[StageProblem, ...]:
    """One problem per sharding if all stages must be alike; else the problem alone."""
    numbers = np.unique(problem.shardings)
    if not problem.alike or len(numbers) == 1:
        return (problem,)
    return tuple(_of_options(problem, np.flatnonzero(problem.shardings == number)) for number in numbers)


def split_by_recompute(problem: StageProblem) -> tuple[StageProblem, ...]:
    """One problem per choice of recomputation if all stages must be alike; else the problem alone.

    Where they may recompute some layers, one more in which each stage takes as many as it needs, and its decisions the
    largest of these numbers for all (`StageProblem.same_layers`).
    """
    if not problem.alike:
        return (problem,)
    parts = [_with_recompute(problem, way) for way in range(len(problem.ways))]
    if problem.layers is not None:
        parts.append(replace(problem, alike=False, same_layers=True, **problem.with_ways([0, -1])))
    return tuple(parts)


def _with_recompute(problem: StageProblem, way: int) -> StageProblem:
    """The problem in which all stages make one choice of recomputation; every block then takes its time."""
    repeat_s = np.diagonal(problem.repeat_s[way], axis1=1, axis2=2).min(axis=0)
    least_s = problem.least_s + np.concatenate([[0.0], np.cumsum(repeat_s)])
    return replace(problem, alike=False, layers=None, least_s=least_s, **problem.with_ways([way]))


def split_by_replicas(problem: StageProblem) -> tuple[StageProblem, ...]:
    """One problem per number of replicas if all stages must have the same; else the problem alone."""
    counts = np.unique(problem.replicas)
    if not problem.uniform or len(counts) == 1:
        return (problem,)
    return tuple(
        replace(_of_options(problem, np.flatnonzero(problem.replicas == count)), uniform=False) for count in counts
    )


def _of_options(problem: StageProblem, options: np.ndarray) -> StageProblem:
    """The problem with some of its options, and only the places and device kinds that these use."""
    kept = {name: getattr(problem, name)[options] for name in BY_OPTION}
    place = problem.place[options]
    places, renumbered = np.unique(place, return_inverse=True)
    outside = int(len(places) > 0 and places[0] < 0)
    places = places[outside:]
    kinds, place_kind = np.unique(problem.place_kind[places], return_inverse=True)
    kept |= {name: values[places] for name in BY_PLACE if len(values := getattr(problem, name))}
    kept |= {name: getattr(problem, name)[kinds] for name in BY_KIND}
    kept |= {name: getattr(problem, name)[:, kinds] for name in BY_WAY_AND_KIND}
    return replace(
        problem,
        **kept,
        place=renumbered.reshape(place.shape) - outside,
        place_kind=place_kind,
        link=problem.link[np.ix_(options, options)],
        tied_s=problem.tied_s[:, options],
    )


@dataclass(frozen=True, eq=False)
class StagePrices:
    """Time of the stages of a problem, each worked out where it is asked for: a search looks at few of them.

    Attributes:
        problem: the problem.
        receive_s, return_s, transfer_s: [R, W + 1, n + 1] transfer in, transfer back and both, at boundary p for a
            stage with replicas[o] that begins at device a; each the minimum over the possible stages before.
        tied_s: [R, W] least time to sum the gradients of weights that the first and the last block share, for a first
            stage with replicas[o] at a; 0 without shared weights.
    """

    problem: StageProblem
    receive_s: np.ndarray
    return_s: np.ndarray
    transfer_s: np.ndarray
    tied_s: np.ndarray

    def choose(
        self, place: np.ndarray, i: int, j: np.ndarray | slice, in_flight: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(forward, forward and backward, end) seconds of stages i..j in the fastest choice of recomputation that fits.

        The second is infinite if no choice fits. A slice `j` adds an axis to those of `place`; `in_flight` has it, too.
        """
        problem, at = self.problem, (place, i, j)
        kind = problem.place_kind[place], i, j
        room = room_bytes(problem.capacity_bytes[kind[0]])
        room = room[..., None] if isinstance(j, slice) else room
        resident = problem.resident_bytes[at]
        repeat, left = np.full(resident.shape, np.inf), np.ones(resident.shape, dtype=bool)
        moved = np.zeros(resident.shape) if len(problem.moved_bytes) else None
        for way in range(len(problem.ways)):
            fixed = resident + problem.working_bytes[way][kind]
            fits = left & (fixed + in_flight * problem.saved_bytes[way][kind] <= room)
            if moved is not None:
                moved_bytes = problem.moved_bytes[way][kind]
                fits &= in_flight * moved_bytes <= problem.host_bytes
                moved = np.where(fits, moved_bytes, moved)
            if fits.any():
                repeat = np.where(fits, problem.repeat_s[way][kind], repeat)
                left &= ~fits
            if not left.any():
                break
        fits = np.isfinite(repeat)
        lacking = np.nonzero(fits & (repeat > 0))
        if problem.layers is not None and len(lacking[0]):
            last = np.arange(problem.blocks)[j] if isinstance(j, slice) else j
            kinds = kind[0][..., None] if isinstance(j, slice) else kind[0]
            columns = (np.broadcast_to(c, fits.shape)[lacking] for c in (kinds, last, in_flight, resident, room))
            kinds, last, *needs = columns
            _, seconds = self._fewest_layers(problem.layers, kinds, (i, last), tuple(needs), repeat[lacking])
            repeat[lacking] = np.minimum(repeat[lacking], seconds)
        rate = problem.host_byte_per_s[kind[0]]
        move_s = None if moved is None else moved / (rate[..., None] if isinstance(j, slice) else rate)
        forward = _with_exchange(problem, problem.forward_s[kind], problem.exchange_forward_s, at, move_s)
        backward = problem.backward_s[kind] + np.where(fits, repeat, 0.0)
        both = forward + _with_exchange(problem, backward, problem.exchange_backward_s, at, move_s)
        return forward, np.where(fits, both, np.inf), _exposed(problem, backward, at) + problem.update_s[at]

    def way(self, place: int, i: int, j: int, in_flight: int) -> tuple[int, int]:
        """The choice of recomputation that `choose` takes for a stage that fits: its index, and the number of layers.

        The number is 0 where the choice says it all.
        """
        problem, kind = self.problem, int(self.problem.place_kind[place])
        resident, room = problem.resident_bytes[place, i, j], room_bytes(float(problem.capacity_bytes[kind]))
        needed = resident + problem.working_bytes[:, kind, i, j] + in_flight * problem.saved_bytes[:, kind, i, j]
        fits = needed <= room
        if len(problem.moved_bytes):
            fits &= in_flight * problem.moved_bytes[:, kind, i, j] <= problem.host_bytes
        way = int(fits.argmax())
        repeat_s = float(problem.repeat_s[way, kind, i, j])
        if problem.layers is None or not repeat_s:
            return way, 0
        needs = tuple(np.array([value]) for value in (in_flight, resident, room))
        span, slower_s = (i, np.array([j])), np.array([repeat_s])
        layers, _ = self._fewest_layers(problem.layers, np.array([kind]), span, needs, slower_s)
        return (len(problem.ways) - 1, int(layers[0])) if layers[0] else (way, 0)

    @functools.cached_property
    def _freed_bytes(self) -> np.ndarray:
        """[K, n, layers] most bytes of a micro-batch that a stage frees which begins with a block, up to each layer."""
        problem, ends = self.problem, np.zeros(0, np.int64) if self.problem.layers is None else self.problem.layers.ends
        freed = (problem.saved_bytes[0] - problem.saved_bytes[-1])[:, :, ends - 1]
        inside = ends[None, :] > np.arange(problem.blocks)[:, None]
        return np.asarray(np.maximum.accumulate(np.where(inside, freed, 0.0), axis=2))

    def _fewest_layers(
        self,
        layers: Layers,
        kind: np.ndarray,
        span: tuple[int, np.ndarray],
        needs: tuple[np.ndarray, ...],
        below_s: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Fewest layers with which stages fit, and seconds of their recomputation; 0 and infinity where none is found.

        The first way of the problem to recompute is nothing, the last one all layers: what a stage keeps falls with
        their number.

        Args:
            layers: of the chain.
            kind: int64 [stages], the kind of each stage's place.
            span: the first block of all stages, and the last block of each.
            needs: [stages] micro-batches in flight, bytes needed beside activations, and bytes offered.
            below_s: [stages] seconds; slower recomputation is not looked for.

        O(stages log(layers)) at most; mostly the first number tried is the right one.
        """
        problem, (first, last) = self.problem, span
        in_flight, resident_bytes, offered_bytes = needs
        lacking = (resident_bytes + in_flight * problem.saved_bytes[0][kind, first, last] - offered_bytes) / in_flight
        before = int(layers.first[first])
        few, most = np.zeros(len(last), dtype=np.int64), layers.count(first, last + 1) - 1
        for each in np.unique(kind).tolist():
            rows = kind == each
            few[rows] = np.searchsorted(self._freed_bytes[each, first, before:], lacking[rows]) + 1
        counts, seconds = np.zeros(len(last), dtype=np.int64), np.full(len(last), np.inf)
        rows = np.flatnonzero(few <= most)
        while len(rows):
            kept_from = layers.ends[before + few[rows] - 1]
            repeat_s = problem.repeat_s[-1][kind[rows], first, kept_from - 1]
            faster = repeat_s < below_s[rows]
            rows, kept_from, repeat_s = rows[faster], kept_from[faster], repeat_s[faster]
            tables = problem.saved_bytes[-1], problem.working_bytes[-1]
            saved, working = first_layers_bytes(
                tables, problem.saved_bytes[0], (kind[rows],), (first, last[rows]), kept_from
            )
            fits = resident_bytes[rows] + working + in_flight[rows] * saved <= offered_bytes[rows]
            counts[rows[fits]], seconds[rows[fits]] = few[rows[fits]], repeat_s[fits]
            rows = rows[~fits]
            few[rows] += 1
            rows = rows[few[rows] <= most[rows]]
        return counts, seconds


def stage_prices(problem: StageProblem) -> StagePrices:
    """The prices of a problem's stages; O(R^2 W n)."""
    tied_s = problem.tied_s.min(axis=0) if len(problem.tied_s) else np.zeros(problem.place.shape)
    return StagePrices(problem, *_least_transfers(problem), tied_s)


_At = tuple[np.ndarray, int, np.ndarray | slice]
"""Place, first and last block of stages."""


def _exposed(problem: StageProblem, backward_s: np.ndarray, at: _At) -> np.ndarray:
    """Seconds of synchronisation that the last backward does not hide, after it hid its own exchanges."""
    hiding = problem.overlap * backward_s
    if len(problem.exchange_backward_s):
        hiding = np.maximum(hiding - problem.exchange_backward_s[at], 0.0)
    return np.asarray(np.maximum(problem.sync_s[at] - hiding, 0.0))


def _with_exchange(
    problem: StageProblem, work_s: np.ndarray, exchange_s: np.ndarray, at: _At, move_s: np.ndarray | None = None
) -> np.ndarray:
    """Seconds of a pass with the part of its exchanges and of its copies to or from the host that it does not hide."""
    beside_s = exchange_s[at] if len(exchange_s) else move_s
    if beside_s is None:
        return work_s
    longest_s = beside_s if move_s is None else np.maximum(beside_s, move_s)
    return np.asarray(work_s + np.maximum(longest_s - problem.overlap * work_s, 0.0))


def _least_transfers(problem: StageProblem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`receive_s`, `return_s` and `transfer_s` of `StagePrices`."""
    parts = problem.receive_s, problem.return_s, problem.receive_s + problem.return_s
    links, after = np.unique(np.unique(problem.link, axis=0), axis=1, return_inverse=True)
    receive, back, both = (np.full((*links.shape[1:], problem.blocks + 1), np.inf) for _ in parts)
    for classes in links:
        reachable = classes >= 0
        for least, seconds in zip((receive, back, both), parts, strict=True):
            least[reachable] = np.minimum(least[reachable], seconds[classes[reachable]])
    for least in (receive, back, both):
        least[:, :, 0] = 0.0
    options = after.reshape(-1)
    return receive[options], back[options], both[options]
