"""Orders with the moments at which tensors are sent and received, as a backend needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from planner.schedules.types import Action, ActionKind, Work

_MOVES = (
    ActionKind.SEND_ACTIVATION,
    ActionKind.RECEIVE_ACTIVATION,
    ActionKind.SEND_GRADIENT,
    ActionKind.RECEIVE_GRADIENT,
)
_GRADIENTS = (ActionKind.BACKWARD, ActionKind.INPUT_GRAD)
Place = tuple[bool, int, int, int]


def with_transfers(work: Work) -> Work:
    """The same orders with a RECEIVE before what needs a tensor of another worker and a SEND after what makes one.

    Sends never wait for their receiver. Played with transfers that take the link, this lasts as long as the orders
    without: there a transfer begins when its tensor is made, and only what needs it waits. Sends and receives that the
    orders have already stay where they are. O(actions).
    """
    home: dict[Place | None, int] = {}
    for worker, lane in zip(work.lane_workers, work.lanes, strict=True):
        for action in lane:
            if action.kind is ActionKind.FORWARD or action.kind in _GRADIENTS:
                home[_place(action)] = worker
    return replace(
        work,
        lanes=tuple(
            tuple(_with_transfers(lane, worker, home))
            for worker, lane in zip(work.lane_workers, work.lanes, strict=True)
        ),
    )


def _with_transfers(lane: Sequence[Action], worker: int, home: Mapping[Place | None, int]) -> Iterator[Action]:
    stated = {action for action in lane if action.kind in _MOVES}
    for group in _groups(lane):
        incoming = [a for a in group if home.get(_source(a), worker) != worker]
        outgoing = [a for a in group if home.get(_sink(a), worker) != worker]
        receives = (_moved(a, ActionKind.RECEIVE_ACTIVATION, ActionKind.RECEIVE_GRADIENT) for a in incoming)
        sends = (_moved(a, ActionKind.SEND_ACTIVATION, ActionKind.SEND_GRADIENT) for a in outgoing)
        yield from (move for move in receives if move not in stated)
        yield from group
        yield from (move for move in sends if move not in stated)


def _groups(lane: Sequence[Action]) -> Iterator[list[Action]]:
    """Actions that run as one."""
    group: list[Action] = []
    for action in lane:
        if group and not action.paired:
            yield group
            group = []
        group.append(action)
    if group:
        yield group


def _place(action: Action, by: int = 0) -> Place:
    return action.kind is ActionKind.FORWARD, action.stage + by, action.micro_batch, action.part


def _source(action: Action) -> Place | None:
    if action.kind is ActionKind.FORWARD:
        return _place(action, -1)
    return _place(action, 1) if action.kind in _GRADIENTS else None


def _sink(action: Action) -> Place | None:
    if action.kind is ActionKind.FORWARD:
        return _place(action, 1)
    return _place(action, -1) if action.kind in _GRADIENTS else None


def _moved(action: Action, activation: ActionKind, gradient: ActionKind) -> Action:
    kind = activation if action.kind is ActionKind.FORWARD else gradient
    return Action(kind, action.stage, action.micro_batch, action.part)
