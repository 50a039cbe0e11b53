"""Count the activations that workers keep at the same time along their orders: their own, and those of others."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.schedules.evictions import AWAY, BACK, guest_units_of
from planner.schedules.types import Action, ActionKind

_NOTHING = np.zeros((0, 0), np.int64)
_TAKES = (ActionKind.FORWARD, BACK)
_GIVES = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD, AWAY)


Sizes = Mapping[int, float] | Sequence[float]
"""By stage, bytes of one unit (micro-batch or part of one)."""


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Bytes of one unit (micro-batch or part of one) from its forward to the end of its backward, by stage.

    Attributes:
        kept: from the forward to the backward, or to the first half of a split one.
        turning: at most while that runs.
        waiting: from the first half to the second: operands of products with weights, gradients of their results
            (M_W of Qi et al., ICLR 2024, section 2; `kept` is their M_B).
    """

    kept: Sizes
    turning: Sizes
    waiting: Sizes


@dataclass(frozen=True, slots=True, eq=False)
class HeldUnits:
    """Units (micro-batches, chunks, parts) that a worker keeps at the same time, by stage.

    Attributes:
        stages: stage of each column; the worker's own first, then those whose activations others move to it.
        units: int64 [moments, stages], the Pareto set of moments: none keeps as much of every stage as another.
        guests: number of last columns that belong to other workers.
        waiting: those of the units that wait for the second half of their backward; empty where none does.
        turning: 1 where one of the units is in its backward, or in the first half of it; likewise.
    """

    stages: tuple[int, ...]
    units: np.ndarray
    guests: int = 0
    waiting: np.ndarray = field(default_factory=lambda: _NOTHING)
    turning: np.ndarray = field(default_factory=lambda: _NOTHING)

    @staticmethod
    def of(stage: int, units: int) -> HeldUnits:
        """The units of a single stage at a single moment."""
        return HeldUnits((stage,), np.array([[units]], np.int64))

    def most(self, unit_bytes: Sequence[float] | np.ndarray) -> float:
        """Peak bytes kept at the same time, given the bytes of a unit by stage."""
        return float((self.units @ np.asarray(unit_bytes, float)[list(self.stages)]).max(initial=0.0))

    @property
    def splits(self) -> bool:
        """Whether backwards are split, so that `most_of` says more than `most`."""
        return len(self.waiting) > 0

    def most_of(self, sizes: UnitSizes) -> float:
        """Peak bytes kept at the same time, where backwards are split."""
        kept, turning, waiting = (
            np.array([each[s] for s in self.stages], float) for each in (sizes.kept, sizes.turning, sizes.waiting)
        )
        held_bytes = self.units @ kept + self.waiting @ (waiting - kept) + self.turning @ (turning - kept)
        return float(held_bytes.max(initial=0.0))

    def of_stage(self, stage: int) -> HeldUnits:
        """The units of one stage alone."""
        return _of_stage(self, stage)

    @property
    def total(self) -> int:
        """Peak number of units of all stages together."""
        return int(self.units.sum(axis=1).max(initial=0))

    def own(self) -> dict[int, int]:
        """Peak number of units of each of the worker's own stages."""
        count = len(self.stages) - self.guests
        return dict(zip(self.stages[:count], self.units.max(axis=0, initial=0).tolist(), strict=False))


@functools.lru_cache(maxsize=4096)
def _of_stage(held: HeldUnits, stage: int) -> HeldUnits:
    """The units of one stage alone; cached, since many plans have the orders of one schedule."""
    at = held.stages.index(stage)
    rows = np.stack([table[:, at] for table in (held.units, held.waiting, held.turning)], axis=1)
    return _split_moments((stage,), np.unique(rows, axis=0))


def count_held(orders: Sequence[Sequence[Action]], hosted: Sequence[Sequence[int]]) -> tuple[HeldUnits, ...]:
    """Count what each worker keeps along its order; O(actions).

    Activations that others move to a worker count with their peak at every moment, since the orders do not say when
    that peak is reached.

    Args:
        orders: the order of each worker.
        hosted: the stages of each worker.
    """
    guests = guest_units_of(orders)
    held = []
    for worker, (order, stages) in enumerate(zip(orders, hosted, strict=True)):
        guest_units = guests.get(worker, {})
        if any(action.kind is ActionKind.INPUT_GRAD for action in order) and not guest_units:
            held.append(_split_moments(tuple(stages), _moments_of_halves(order, stages)))
            continue
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


def _moments_of_halves(order: Sequence[Action], stages: Sequence[int]) -> np.ndarray:
    """int64 [moments, 3 x stages], units kept, those of them that wait, and the one in its backward, before each
    action that gives something back; what lies between is no more."""
    column, count = {stage: at for at, stage in enumerate(stages)}, len(stages)
    kept, waiting = [0] * count, [0] * count
    moments = dict[tuple[int, ...], None]()
    for action in order:
        at = column.get(action.stage, -1)
        if action.kind in _TAKES:
            kept[at] += 1
        elif action.kind is ActionKind.INPUT_GRAD or action.kind in _GIVES:
            turns = action.kind in (ActionKind.INPUT_GRAD, ActionKind.BACKWARD)
            moments[(*kept, *waiting, *(int(turns and place == at) for place in range(count)))] = None
            if action.kind is ActionKind.INPUT_GRAD:
                waiting[at] += 1
                continue
            kept[at] -= 1
            waiting[at] -= action.kind is ActionKind.WEIGHT_GRAD
    return np.array(list(moments), np.int64).reshape(-1, 3 * count)


def _split_moments(stages: tuple[int, ...], rows: np.ndarray) -> HeldUnits:
    """The moments of rows of units, waiting units, and units in their backward that no other row dominates."""
    units, waiting, turning = np.hsplit(rows, 3)
    front = _pareto(np.hstack([units - waiting, waiting, turning]))
    rest, waiting, turning = np.hsplit(front, 3)
    return HeldUnits(stages, rest + waiting, 0, waiting, turning)


def _pareto(rows: np.ndarray) -> np.ndarray:
    """The rows that no other row dominates (is at least as large in every column)."""
    rows = rows[np.argsort(-rows.sum(axis=1), kind="stable")]
    front: list[int] = []
    for at, row in enumerate(rows):
        if not (rows[front] >= row).all(axis=1).any():
            front.append(at)
    return np.asarray(rows[front])


def own_bytes(lane: Iterable[Action], sizes: UnitSizes, room: float = float("inf")) -> tuple[float, int]:
    """Peak bytes of a worker's own activations along its order, up to the first action that exceeds `room`.

    Of a backward that is not split only what is kept before it counts.

    Returns:
        (bytes, index of that action or -1 if all fit).
    """
    held = peak = 0.0
    for index, action in enumerate(lane):
        stage, most = action.stage, held
        if action.kind in _TAKES:
            held = most = held + sizes.kept[stage]
        elif action.kind is ActionKind.INPUT_GRAD:
            most = held + sizes.turning[stage] - sizes.kept[stage]
            held += sizes.waiting[stage] - sizes.kept[stage]
        elif action.kind in _GIVES:
            held -= (sizes.waiting if action.kind is ActionKind.WEIGHT_GRAD else sizes.kept)[stage]
        peak = max(peak, most)
        if most > room:
            return peak, index
    return peak, -1
