"""Count the activations that workers keep at the same time along their orders: their own, and those evicted to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.schedules.types import Action, ActionKind

_TAKES = (ActionKind.FORWARD, ActionKind.LOAD)
_GIVES = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD, ActionKind.EVICT)


Sizes = Mapping[int, float] | Sequence[float]
"""By stage, bytes of one unit (micro-batch or part of one)."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldUnits:
    """Units (micro-batches, chunks, parts) that a worker keeps at the same time, by stage.

    Attributes:
        stages: stage of each column; the worker's own first, then those whose activations others evict to it.
        units: int64 [moments, stages], the Pareto set of moments: none keeps as much of every stage as another.
        guests: number of last columns that belong to other workers.
    """

    stages: tuple[int, ...]
    units: np.ndarray
    guests: int = 0

    @staticmethod
    def of(units: Mapping[int, int], guests: int = 0) -> HeldUnits:
        """The units of a single moment, by stage; those of other workers last."""
        return HeldUnits(tuple(units), np.array([list(units.values())], np.int64), guests)

    def most(self, unit_bytes: Sequence[float] | np.ndarray) -> float:
        """Peak bytes kept at the same time, given the bytes of a unit by stage."""
        return float((self.units @ np.asarray(unit_bytes, float)[list(self.stages)]).max(initial=0.0))

    @property
    def total(self) -> int:
        """Peak number of units of all stages together."""
        return int(self.units.sum(axis=1).max(initial=0))

    def own(self) -> dict[int, int]:
        """Peak number of units of each of the worker's own stages."""
        count = len(self.stages) - self.guests
        return dict(zip(self.stages[:count], self.units.max(axis=0, initial=0).tolist(), strict=False))


def count_held(orders: Sequence[Sequence[Action]], hosted: Sequence[Sequence[int]]) -> tuple[HeldUnits, ...]:
    """Count what each worker keeps along its order; O(actions).

    Activations that others evict to a worker count with their peak at every moment, since the orders do not say when
    that peak is reached.

    Args:
        orders: the order of each worker.
        hosted: the stages of each worker.
    """
    guests: dict[int, dict[int, int]] = {}
    for stage in sorted({a.stage for order in orders for a in order if a.kind is ActionKind.EVICT}):
        of_stage = [[a for a in order if a.stage == stage] for order in orders]
        for peer, count in lent_bytes(of_stage, {stage: 1}).items():
            guests.setdefault(peer, {})[stage] = int(count)
    held = []
    for worker, (order, stages) in enumerate(zip(orders, hosted, strict=True)):
        guest_units = guests.get(worker, {})
        rows = _pareto(_moments(order, stages))
        guest_columns = np.tile(np.array(list(guest_units.values()), np.int64), (len(rows), 1))
        held.append(HeldUnits((*stages, *guest_units), np.hstack([rows, guest_columns]), len(guest_units)))
    return tuple(held)


def _moments(order: Sequence[Action], stages: Sequence[int]) -> np.ndarray:
    """int64 [moments, stages], distinct local peaks of the units kept along an order; one row if there is none."""
    column = {stage: at for at, stage in enumerate(stages)}
    kept, rising = [0] * len(stages), False
    peaks = set[tuple[int, ...]]()
    for action in order:
        if action.kind in _TAKES:
            kept[column[action.stage]] += 1
            rising = True
        elif action.kind in _GIVES:
            if rising:
                peaks.add(tuple(kept))
            kept[column[action.stage]] -= 1
            rising = False
    return np.array(sorted(peaks) if peaks else [kept], np.int64).reshape(-1, len(stages))


def _pareto(rows: np.ndarray) -> np.ndarray:
    """The rows that no other row dominates (is at least as large in every column)."""
    rows = rows[np.argsort(-rows.sum(axis=1), kind="stable")]
    front: list[int] = []
    for at, row in enumerate(rows):
        if not (rows[front] >= row).all(axis=1).any():
            front.append(at)
    return np.asarray(rows[front])


def lent_bytes(lanes: Iterable[Sequence[Action]], unit_bytes: Sizes) -> dict[int, float]:
    """Peak bytes that other workers have evicted to each worker; workers without any are left out.

    Holds for any times of the actions: the peak of each lane along its order, summed over lanes, since the orders do
    not say when two lanes reach their peaks. O(actions).
    """
    peak_bytes: dict[int, float] = {}
    for lane in lanes:
        evicted_to: dict[tuple[int, int, int], int] = {}
        held_bytes: dict[int, float] = {}
        lane_peak_bytes: dict[int, float] = {}
        for action in lane:
            unit = action.stage, action.micro_batch, action.part
            if action.kind is ActionKind.EVICT and action.peer >= 0:
                evicted_to[unit] = action.peer
                held_bytes[action.peer] = held_bytes.get(action.peer, 0.0) + unit_bytes[action.stage]
                lane_peak_bytes[action.peer] = max(lane_peak_bytes.get(action.peer, 0.0), held_bytes[action.peer])
            elif action.kind is ActionKind.LOAD and unit in evicted_to:
                held_bytes[evicted_to.pop(unit)] -= unit_bytes[action.stage]
        for peer, size in lane_peak_bytes.items():
            peak_bytes[peer] = peak_bytes.get(peer, 0.0) + size
    return peak_bytes


def own_bytes(lane: Iterable[Action], unit_bytes: Sizes, room: float = float("inf")) -> tuple[float, int]:
    """Peak bytes of a worker's own activations along its order, up to the first action that exceeds `room`.

    Returns:
        (bytes, index of that action or -1 if all fit).
    """
    held = peak = 0.0
    for index, action in enumerate(lane):
        if action.kind in _TAKES:
            held += unit_bytes[action.stage]
            peak = max(peak, held)
            if held > room:
                return peak, index
        elif action.kind in _GIVES:
            held -= unit_bytes[action.stage]
    return peak, -1
