"""Build and transform orders: alternate passes, list scheduling, replicas, further iterations.

Schedules that are published as a priority rule rather than a pattern are built by a list scheduler with actions of
equal length: each free worker takes the most urgent action that can run.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import TypeVar

from planner.errors import PlanError
from planner.schedules.types import Action, ActionKind

T = TypeVar("T")


def in_turn(forwards: Sequence[T], backwards: Sequence[T], ahead: int) -> Iterator[T]:
    """`ahead` forwards, then backwards and forwards alternately, then the remaining backwards."""
    yield from forwards[:ahead]
    for done, coming in zip_longest(backwards, forwards[ahead:]):
        yield done
        if coming is not None:
            yield coming


def finish(stages: Sequence[int]) -> Iterator[Action]:
    """SYNC of all stages of a worker, then UPDATE of all stages."""
    yield from (Action(ActionKind.SYNC, stage) for stage in stages)
    yield from (Action(ActionKind.UPDATE, stage) for stage in stages)


def repeated(
    orders: Sequence[Sequence[Action]], replicas: int, micro_batches: int, iterations: int
) -> tuple[tuple[Action, ...], ...]:
    """The orders for several replicas and iterations; replicas of a lane are neighbours.

    Args:
        orders: of one replica in one iteration.
        replicas: replicas, to which micro-batches are dealt round-robin.
        micro_batches: of one replica in one iteration.
        iterations: iterations, whose micro-batches and exchanges are numbered on.
    """
    if replicas == iterations == 1:
        return tuple(map(tuple, orders))
    return tuple(
        tuple(
            a._replace(
                micro_batch=(a.micro_batch + i * micro_batches) * replicas + replica,
                peer=a.peer * replicas + replica if a.peer >= 0 else -1,
            )
            if a.kind not in (ActionKind.SYNC, ActionKind.UPDATE, ActionKind.LAUNCH_SYNC)
            else a._replace(micro_batch=i if iterations > 1 else -1)
            for i in range(iterations)
            for a in order
        )
        for order in orders
        for replica in range(replicas)
    )


Task = tuple[Action, int, tuple[int, ...]]
"""An action of the list scheduler, its worker, and its urgency; lower tuples are taken first."""

Order = list[tuple[int, Action]]
"""(slot, action) of one worker; every action takes one slot."""


def admission(tasks: Sequence[Task], lines: int, most: int) -> tuple[Callable[[int], bool], Callable[[int], None]]:
    """`may_run` and `taken` of a list schedule that admits a micro-batch while fewer are under way in its pipeline.

    Args:
        tasks: the actions.
        lines: pipelines, to which micro-batches are dealt in turn.
        most: micro-batches under way in each.
    """
    under_way = [0] * lines

    def taken(number: int) -> None:
        action, _, _ = tasks[number]
        if action.stage == 0 and action.part != 0:
            under_way[action.micro_batch % lines] += 1 if action.kind is ActionKind.FORWARD else -1

    def may_run(number: int) -> bool:
        action, _, _ = tasks[number]
        enters = action.stage == 0 and action.kind is ActionKind.FORWARD
        return not enters or under_way[action.micro_batch % lines] < most

    return may_run, taken


def waits(tasks: Sequence[Task], lines: int = 1) -> list[list[int]]:
    """By task the numbers of the tasks that it waits for, of micro-batches that are dealt to pipelines in turn."""
    number_of = {action: number for number, (action, _, _) in enumerate(tasks)}
    return [[number_of[need] for need in _needs(action, lines) if need in number_of] for action, _, _ in tasks]


def list_schedule(
    tasks: Sequence[Task],
    needs: Sequence[Sequence[int]],
    may_run: Callable[[int], bool],
    taken: Callable[[int], None],
) -> list[Order]:
    """The actions of each worker in the order in which it takes them; O(tasks log tasks).

    Args:
        tasks: the actions; of equally urgent ones a worker takes first what was ready first.
        needs: by task, numbers of the tasks that it waits for (`waits`).
        may_run: True if memory allows the task of a number now.
        taken: called with the number of each task when it is taken.

    Raises:
        PlanError: some tasks can never run, because they are refused for ever.
    """
    workers = 1 + max(worker for _, worker, _ in tasks)
    missing = list(map(len, needs))
    feeds: list[list[int]] = [[] for _ in tasks]
    ready: list[list[int]] = [[] for _ in range(workers)]

    def becomes_ready(number: int) -> None:
        bisect.insort(ready[tasks[number][1]], number, key=lambda waiting: tasks[waiting][2])

    for number, needed in enumerate(needs):
        for need in needed:
            feeds[need].append(number)
        if not needed:
            becomes_ready(number)
    orders: list[Order] = [[] for _ in range(workers)]
    left = len(tasks)
    for slot in itertools.count():
        running = []
        for order, waiting in zip(orders, ready, strict=True):
            for at, number in enumerate(waiting):
                if may_run(number):
                    del waiting[at]
                    taken(number)
                    order.append((slot, tasks[number][0]))
                    running.append(number)
                    break
        left -= len(running)
        if not left:
            break
        if not running:
            raise PlanError(f"{left} actions can never run", hint="allow more memory")
        for number in running:
            for fed in feeds[number]:
                missing[fed] -= 1
                if not missing[fed]:
                    becomes_ready(fed)
    return orders


def unslotted(orders: Sequence[Order]) -> tuple[tuple[Action, ...], ...]:
    """The orders without their slots."""
    return tuple(tuple(action for _, action in order) for order in orders)


def _needs(action: Action, lines: int) -> tuple[Action, ...]:
    """What an action waits for, in an order whose halves of a backward are parts."""
    kind, stage, m = action.kind, action.stage, action.micro_batch
    if kind is ActionKind.FORWARD:
        return (action._replace(stage=stage - 1),) if stage else (action._replace(micro_batch=m - lines),)
    if kind is ActionKind.WEIGHT_GRAD:
        return (action._replace(kind=ActionKind.INPUT_GRAD),)
    return Action(ActionKind.FORWARD, stage, m), action._replace(stage=stage + 1)
