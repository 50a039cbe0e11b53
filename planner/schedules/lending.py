"""What workers keep for others: activations that were evicted to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from planner.schedules.types import Action, ActionKind

_TAKES = (ActionKind.FORWARD, ActionKind.LOAD)
_GIVES = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD, ActionKind.EVICT)

Sizes = Mapping[int, float] | Sequence[float]
"""By stage, bytes of one unit (micro-batch or part of one)."""


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
