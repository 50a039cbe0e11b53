"""What workers keep at the same time, counted along the orders: of their own, and activations evicted to them."""

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
        stages: of each column; those of the worker itself first, then those whose activations others evict to it.
        units: int64 [moments, stages], the moments at which no other moment has as many of every stage.
        guests: how many of the last columns are of other workers.
    """

    stages: tuple[int, ...]
    units: np.ndarray
    guests: int = 0

    @staticmethod
    def of(units: Mapping[int, int], guests: int = 0) -> HeldUnits:
        """What is kept at one moment, by stage; those of guests last."""
        return HeldUnits(tuple(units), np.array([list(units.values())], np.int64), guests)

    def most(self, unit_bytes: Sequence[float] | np.ndarray) -> float:
        """The most bytes that are kept at the same time, from those of a unit by stage of the model."""
        return float((self.units @ np.asarray(unit_bytes, float)[list(self.stages)]).max(initial=0.0))

    @property
    def total(self) -> int:
        """The most units of all stages together."""
        return int(self.units.sum(axis=1).max(initial=0))

    def own(self) -> dict[int, int]:
        """The most units of each stage of the worker itself."""
        count = len(self.stages) - self.guests
        return dict(zip(self.stages[:count], self.units.max(axis=0, initial=0).tolist(), strict=False))


def count_held(orders: Sequence[Sequence[Action]], hosted: Sequence[Sequence[int]]) -> tuple[HeldUnits, ...]:
    """What each worker keeps along its order; O(actions).

    Of what others evict to a worker the most along their orders counts, since nothing says when that is.

    Args:
        orders: of each worker.
        hosted: the stages of each worker.
    """
    guests: dict[int, dict[int, int]] = {}
    for stage in sorted({a.stage for order in orders for a in order if a.kind is ActionKind.EVICT}):
        of_stage = [[a for a in order if a.stage == stage] for order in orders]
        for peer, count in lent_bytes(of_stage, {stage: 1}).items():
            guests.setdefault(peer, {})[stage] = int(count)
    found = []
    for worker, (order, stages) in enumerate(zip(orders, hosted, strict=True)):
        lent = guests.get(worker, {})
        rows = _pareto(_moments(order, stages))
        beside = np.tile(np.array(list(lent.values()), np.int64), (len(rows), 1))
        found.append(HeldUnits((*stages, *lent), np.hstack([rows, beside]), len(lent)))
    return tuple(found)


def _moments(order: Sequence[Action], stages: Sequence[int]) -> np.ndarray:
    """[forwards that something else follows, stages] units kept after them, each once; [1, stages] where none is."""
    column = {stage: at for at, stage in enumerate(stages)}
    now, rising = [0] * len(stages), False
    seen = set[tuple[int, ...]]()
    for action in order:
        if action.kind in _TAKES:
            now[column[action.stage]] += 1
            rising = True
        elif action.kind in _GIVES:
            if rising:
                seen.add(tuple(now))
            now[column[action.stage]] -= 1
            rising = False
    return np.array(sorted(seen) if seen else [now], np.int64).reshape(-1, len(stages))


def _pareto(rows: np.ndarray) -> np.ndarray:
    """The rows that no other row exceeds or equals everywhere."""
    rows = rows[np.argsort(-rows.sum(axis=1), kind="stable")]
    kept: list[int] = []
    for at, row in enumerate(rows):
        if not (rows[kept] >= row).all(axis=1).any():
            kept.append(at)
    return np.asarray(rows[kept])


def lent_bytes(lanes: Iterable[Sequence[Action]], unit_bytes: Sizes) -> dict[int, float]:
    """By worker, the most that others keep there at the same time; workers that keep nothing are left out.

    For any times of the actions: of each lane the most that it has with a worker along its order, summed over lanes,
    since nothing says when two lanes have their most. O(actions).
    """
    found: dict[int, float] = {}
    for lane in lanes:
        away: dict[tuple[int, int, int], int] = {}
        here: dict[int, float] = {}
        most: dict[int, float] = {}
        for action in lane:
            unit = action.stage, action.micro_batch, action.part
            if action.kind is ActionKind.EVICT and action.peer >= 0:
                away[unit] = action.peer
                here[action.peer] = here.get(action.peer, 0.0) + unit_bytes[action.stage]
                most[action.peer] = max(most.get(action.peer, 0.0), here[action.peer])
            elif action.kind is ActionKind.LOAD and unit in away:
                here[away.pop(unit)] -= unit_bytes[action.stage]
        for peer, size in most.items():
            found[peer] = found.get(peer, 0.0) + size
    return found


def own_bytes(lane: Iterable[Action], unit_bytes: Sizes, room: float = float("inf")) -> tuple[float, int]:
    """The most that a worker keeps of its own along its order, up to the first action that needs more than `room`.

    Returns:
        Bytes, and the place of that action (-1: there is room for all).
    """
    held = most = 0.0
    for at, action in enumerate(lane):
        if action.kind in _TAKES:
            held += unit_bytes[action.stage]
            most = max(most, held)
            if held > room:
                return most, at
        elif action.kind in _GIVES:
            held -= unit_bytes[action.stage]
    return most, -1
