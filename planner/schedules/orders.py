"""How orders are made and changed: forwards and backwards in turn, lists of tasks, copies for replicas, transfers.

Schedules that are published as a rule of choice rather than a pattern are made by a list scheduler with actions of
equal length: each free worker takes the most urgent action that can run; the order it finds is what is kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TypeVar

from planner.errors import PlanError
from planner.schedules.types import Action, ActionKind, Work

_MOVES = (
    ActionKind.SEND_ACTIVATION,
    ActionKind.RECEIVE_ACTIVATION,
    ActionKind.SEND_GRADIENT,
    ActionKind.RECEIVE_GRADIENT,
)
_GRADIENTS = (ActionKind.BACKWARD, ActionKind.INPUT_GRAD)
Place = tuple[bool, int, int, int]
T = TypeVar("T")


def in_turn(forwards: Sequence[T], backwards: Sequence[T], ahead: int) -> Iterator[T]:
    """`ahead` forwards, then a backward and a forward in turn, then the remaining backwards."""
    yield from forwards[:ahead]
    for done, coming in zip_longest(backwards, forwards[ahead:]):
        yield done
        if coming is not None:
            yield coming


def finish(stages: Sequence[int]) -> Iterator[Action]:
    """SYNC of all stages of a worker, then UPDATE of all."""
    yield from (Action(ActionKind.SYNC, stage) for stage in stages)
    yield from (Action(ActionKind.UPDATE, stage) for stage in stages)


def replicate(orders: Sequence[Sequence[Action]], count: int) -> tuple[tuple[Action, ...], ...]:
    """The orders `count` times, micro-batches dealt round-robin; all copies of an order stand together."""
    if count == 1:
        return tuple(tuple(order) for order in orders)
    lane_of = {lane: lane for lane in range(len(orders))}
    return tuple(
        tuple(
            a._replace(
                micro_batch=a.micro_batch * count + replica if _numbered(a) else a.micro_batch,
                peer=lane_of[a.peer] * count + replica if a.peer >= 0 else -1,
            )
            for a in order
        )
        for order in orders
        for replica in range(count)
    )


def follow_on(
    orders: Sequence[Sequence[Action]], micro_batches: int, iterations: int
) -> tuple[tuple[Action, ...], ...]:
    """The orders repeated, with numbers that go on."""
    if iterations == 1:
        return tuple(tuple(order) for order in orders)
    return tuple(
        tuple(
            a._replace(micro_batch=a.micro_batch + i * micro_batches if _numbered(a) else i)
            for i in range(iterations)
            for a in order
        )
        for order in orders
    )


def _numbered(action: Action) -> bool:
    return action.kind not in (ActionKind.SYNC, ActionKind.UPDATE, ActionKind.LAUNCH_SYNC)


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


_Heap = list[tuple[tuple[int, ...], int]]


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work for the list scheduler.

    Attributes:
        action: what is done; names the task.
        worker: who runs it.
        urgency: lower is taken first.
        needs: actions that it waits for; those that are no task's are left out.
        opens: whether it takes memory, so that it asks before it runs. When the most urgent of a worker's may not run,
            none of its others may.
    """

    action: Action
    worker: int
    urgency: tuple[int, ...]
    needs: Sequence[Action]
    opens: bool = False


def list_schedule(
    tasks: Sequence[Task],
    workers: int,
    may_open: Callable[[Action], bool],
    taken: Callable[[Action], None],
) -> list[list[Action]]:
    """The actions of each worker in the order in which it takes them; O(tasks log tasks).

    Args:
        tasks: of equally urgent ones the first is taken.
        workers: how many.
        may_open: whether a task that opens may run now.
        taken: told of each action when it is taken.

    Raises:
        PlanError: some tasks can never run, because the ones that take memory are refused for ever.
    """
    number_of = {task.action: number for number, task in enumerate(tasks)}
    needs = [[number_of[need] for need in task.needs if need in number_of] for task in tasks]
    missing = [len(own) for own in needs]
    feeds: list[list[int]] = [[] for _ in tasks]
    ready: list[tuple[_Heap, _Heap]] = [([], []) for _ in range(workers)]

    def offer(number: int) -> None:
        task = tasks[number]
        heapq.heappush(ready[task.worker][not task.opens], (task.urgency, number))

    for number, own in enumerate(needs):
        for need in own:
            feeds[need].append(number)
        if not own:
            offer(number)
    orders: list[list[Action]] = [[] for _ in range(workers)]
    left = len(tasks)
    while left:
        running = []
        for worker in range(workers):
            number = _choose(*ready[worker], lambda task: may_open(tasks[task].action))
            if number >= 0:
                taken(tasks[number].action)
                orders[worker].append(tasks[number].action)
                running.append(number)
        if not running:
            raise PlanError(f"{left} actions can never run", hint="allow more memory")
        left -= len(running)
        for fed in (fed for number in running for fed in feeds[number]):
            missing[fed] -= 1
            if not missing[fed]:
                offer(fed)
    return orders


def _choose(opening: _Heap, other: _Heap, may_open: Callable[[int], bool]) -> int:
    """Take the most urgent task that may run; -1 when there is none."""
    first = opening and (not other or opening[0][0] < other[0][0])
    if first and may_open(opening[0][1]):
        return heapq.heappop(opening)[1]
    if other:
        return heapq.heappop(other)[1]
    return -1
