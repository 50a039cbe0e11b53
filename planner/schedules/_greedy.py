"""A list scheduler: each free worker takes the most urgent task that can run; the order it finds is what is kept.

Schedules that are published as a rule of choice rather than a pattern are generated with nominal times.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.errors import PlanError


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work for the list scheduler.

    Attributes:
        worker: who runs it.
        duration: nominal, in whole ticks.
        urgency: lower is taken first; the first entry is its class, and only class 0 tasks ask `may_open`.
        needs: numbers of the tasks that it waits for.
        opens: whether it takes memory, so that it asks before it runs.
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
    ready: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in range(workers)]
    for number, task in enumerate(tasks):
        for need in task.needs:
            feeds[need].append(number)
        if not task.needs:
            heapq.heappush(ready[task.worker], (task.urgency, number))
    orders: list[list[int]] = [[] for _ in range(workers)]
    running: list[tuple[int, int, int]] = []
    idle = set(range(workers))
    now = left = 0
    left = len(tasks)
    while left:
        for worker in sorted(idle):
            number = _choose(ready[worker], tasks, may_open)
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
                    heapq.heappush(ready[tasks[fed].worker], (tasks[fed].urgency, fed))
    return orders


def _choose(heap: list[tuple[tuple[int, ...], int]], tasks: Sequence[Task], may_open: Callable[[int], bool]) -> int:
    """Take the most urgent task that may run out of a heap; -1 when there is none."""
    refused: list[tuple[tuple[int, ...], int]] = []
    found = -1
    while heap:
        entry = heapq.heappop(heap)
        if not tasks[entry[1]].opens or may_open(entry[1]):
            found = entry[1]
            break
        refused.append(entry)
        if len(refused) >= _LOOK:
            break
    for entry in refused:
        heapq.heappush(heap, entry)
    return found


_LOOK = 64
"""Refused tasks that are passed over before a worker gives up for now."""
