"""A list scheduler: each free worker takes the most urgent action that can run; the order it finds is what is kept.

Schedules that are published as a rule of choice rather than a pattern are generated with actions of equal length.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.errors import PlanError
from planner.schedules.types import Action

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
