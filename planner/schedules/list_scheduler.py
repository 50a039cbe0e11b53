"""A list scheduler: each free worker takes the most urgent task that can run; the order it finds is what is kept.

Schedules that are published as a rule of choice rather than a pattern are generated with nominal times.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.errors import PlanError

_Heap = list[tuple[tuple[int, ...], int]]


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work for the list scheduler.

    Attributes:
        worker: who runs it.
        duration: nominal, in whole ticks.
        urgency: lower is taken first.
        needs: numbers of the tasks that it waits for.
        opens: whether it takes memory, so that it asks before it runs. When the most urgent of a worker's may not run,
            none of its others may.
    """

    worker: int
    duration: int
    urgency: tuple[int, ...]
    needs: tuple[int, ...]
    opens: bool = False


def list_schedule(
    tasks: Sequence[Task],
    workers: int,
    may_open: Callable[[int], bool],
    taken: Callable[[int], None],
) -> list[list[int]]:
    """The tasks of each worker in the order in which it takes them; O(tasks log tasks).

    Args:
        tasks: numbered by their place.
        workers: how many.
        may_open: whether a task that opens may run now, by its number.
        taken: told of each task when it is taken.

    Raises:
        PlanError: some tasks can never run, because the ones that take memory are refused for ever.
    """
    missing = [len(task.needs) for task in tasks]
    feeds: list[list[int]] = [[] for _ in tasks]
    ready: list[tuple[_Heap, _Heap]] = [([], []) for _ in range(workers)]
    for number, task in enumerate(tasks):
        for need in task.needs:
            feeds[need].append(number)
        if not task.needs:
            heapq.heappush(ready[task.worker][not task.opens], (task.urgency, number))
    orders: list[list[int]] = [[] for _ in range(workers)]
    running: list[tuple[int, int, int]] = []
    idle = set(range(workers))
    now, left = 0, len(tasks)
    while left:
        for worker in sorted(idle):
            number = _choose(*ready[worker], may_open)
            if number >= 0:
                idle.discard(worker)
                taken(number)
                orders[worker].append(number)
                left -= 1
                heapq.heappush(running, (now + tasks[number].duration, worker, number))
        if not running:
            raise PlanError(f"{left} actions can never run", hint="allow more memory")
        now = running[0][0]
        while running and running[0][0] == now:
            _, worker, number = heapq.heappop(running)
            idle.add(worker)
            for fed in feeds[number]:
                missing[fed] -= 1
                if not missing[fed]:
                    task = tasks[fed]
                    heapq.heappush(ready[task.worker][not task.opens], (task.urgency, fed))
    return orders


def _choose(opening: _Heap, other: _Heap, may_open: Callable[[int], bool]) -> int:
    """Take the most urgent task that may run; -1 when there is none."""
    first = opening and (not other or opening[0][0] < other[0][0])
    if first and may_open(opening[0][1]):
        return heapq.heappop(opening)[1]
    if other:
        return heapq.heappop(other)[1]
    return -1
