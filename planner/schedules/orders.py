"""Build and transform orders: alternate passes, list scheduling, replicas, further iterations.

Schedules that are published as a priority rule rather than a pattern are built by a list scheduler with actions of
equal length: each free worker takes the most urgent action that can run.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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


def replicate(orders: Sequence[Sequence[Action]], count: int) -> tuple[tuple[Action, ...], ...]:
    """The orders for `count` replicas, micro-batches dealt round-robin; replicas of a lane are neighbours."""
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
    """The orders of several iterations, with consecutive numbers of micro-batches and exchanges."""
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
    """True if the number of an action is that of a micro-batch."""
    return action.kind not in (ActionKind.SYNC, ActionKind.UPDATE, ActionKind.LAUNCH_SYNC)


@dataclass(frozen=True, slots=True)
class Task:
    """A task of the list scheduler.

    Attributes:
        action: the action; identifies the task.
        worker: the worker that runs it.
        urgency: tasks with lower tuples are taken first.
        needs: actions that it waits for; actions without a task are ignored.
    """

    action: Action
    worker: int
    urgency: tuple[int, ...]
    needs: Sequence[Action]


def admission(lines: int, most: int) -> tuple[Callable[[Action], bool], Callable[[Action], None]]:
    """`may_run` and `taken` of a list schedule that admits a micro-batch while fewer are under way in its pipeline.

    Args:
        lines: pipelines, to which micro-batches are dealt in turn.
        most: micro-batches under way in each.
    """
    under_way = [0] * lines

    def taken(action: Action) -> None:
        if action.stage == 0 and action.part != 0:
            under_way[action.micro_batch % lines] += 1 if action.kind is ActionKind.FORWARD else -1

    def may_run(action: Action) -> bool:
        enters = action.stage == 0 and action.kind is ActionKind.FORWARD
        return not enters or under_way[action.micro_batch % lines] < most

    return may_run, taken


def list_schedule(
    tasks: Sequence[Task],
    workers: int,
    may_run: Callable[[Action], bool],
    taken: Callable[[Action], None],
) -> list[list[Action]]:
    """The actions of each worker in the order in which it takes them; O(tasks log tasks).

    Args:
        tasks: the tasks; ties of urgency are broken by their order. Those that may have to wait for memory should need
            each other in turn, so that few are ready at a time.
        workers: number of workers.
        may_run: True if memory allows an action now.
        taken: called with each action when it is taken.

    Raises:
        PlanError: some tasks can never run, because they are refused for ever.
    """
    number_of = {task.action: number for number, task in enumerate(tasks)}
    needs = [[number_of[need] for need in task.needs if need in number_of] for task in tasks]
    missing = [len(needed) for needed in needs]
    feeds: list[list[int]] = [[] for _ in tasks]
    ready: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in range(workers)]
    for number, needed in enumerate(needs):
        for need in needed:
            feeds[need].append(number)
        if not needed:
            bisect.insort(ready[tasks[number].worker], (tasks[number].urgency, number))
    orders: list[list[Action]] = [[] for _ in range(workers)]
    left = len(tasks)
    while left:
        running = []
        for worker, waiting in enumerate(ready):
            at = next((at for at, (_, number) in enumerate(waiting) if may_run(tasks[number].action)), -1)
            if at >= 0:
                _, number = waiting.pop(at)
                taken(tasks[number].action)
                orders[worker].append(tasks[number].action)
                running.append(number)
        if not running:
            raise PlanError(f"{left} actions can never run", hint="allow more memory")
        left -= len(running)
        for fed in (fed for number in running for fed in feeds[number]):
            missing[fed] -= 1
            if not missing[fed]:
                bisect.insort(ready[tasks[fed].worker], (tasks[fed].urgency, fed))
    return orders
