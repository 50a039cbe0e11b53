"""Several pipelines through the same workers in both directions, each with its own copy of the stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.schedules._greedy import Task, list_schedule
from planner.schedules.types import Action, ActionKind

_SLOTS = 2
"""Slots of a unit for each worker: a forward and a backward for each of its micro-batches."""


@dataclass(frozen=True, slots=True)
class Lines:
    """2f pipelines over D workers: f down, shifted by D / f workers each, and f up, their mirror images.

    Attributes:
        workers: D.
        pairs: f.
    """

    workers: int
    pairs: int

    @property
    def count(self) -> int:
        """Number of pipelines."""
        return 2 * self.pairs

    def worker(self, line: int, stage: int) -> int:
        """Where a pipeline has a stage."""
        shifted = (stage + line // 2 * (self.workers // self.pairs)) % self.workers
        return shifted if line % 2 == 0 else self.workers - 1 - shifted


def slotted(lines: Lines, micro_batches: int) -> list[list[tuple[int, Action]]]:
    """Chimera's order, unit after unit: (slot, action) by worker, no two in one slot; O(actions).

    A unit is up to D micro-batches, D / 2f in each pipeline. The k-th of a pipeline runs forward through stage s in
    slot s + 2k and backward in slot 2D - 1 - s + 2k; the next unit is 2D slots later, so that its filling takes the
    slots which the draining leaves. For forwards as long as backwards that is the time it takes.
    """
    depth = lines.workers
    orders: list[list[tuple[int, Action]]] = [[] for _ in range(depth)]
    for first in range(0, micro_batches, depth):
        start, m = _SLOTS * first, first
        for line, count in enumerate(dealt(min(depth, micro_batches - first), lines.count)):
            for k in range(count):
                for stage in range(depth):
                    own = orders[lines.worker(line, stage)]
                    own.append((start + stage + 2 * k, Action(ActionKind.FORWARD, stage, m)))
                    own.append((start + 2 * depth - 1 - stage + 2 * k, Action(ActionKind.BACKWARD, stage, m)))
                m += 1
    for own in orders:
        own.sort(key=lambda entry: entry[0])
    return orders


def dealt(micro_batches: int, lines: int) -> Sequence[int]:
    """As evenly as can be, one more for the first pipelines."""
    return [micro_batches // lines + (line < micro_batches % lines) for line in range(lines)]


def doubled(lines: Lines, units: int, halves: bool) -> list[list[Action]]:
    """Forwards of two at a time, so that a forward takes as long as the backward of one; O(actions log actions).

    Args:
        lines: the pipelines; units are dealt to them in turn.
        units: pairs of micro-batches, or micro-batches whose backward runs in two halves.
        halves: which of the two: the second member is part 1 of the same micro-batch.

    A worker takes the forward of the lowest unit that it can, else a backward: of the units that entered first, one in
    each pipeline, the first halves before the second, later stages before earlier ones, for which others wait. A
    pipeline takes in a unit while fewer than D / 2f are under way in it.
    """
    depth, open_units = lines.workers, [0] * lines.count
    tasks = []
    for unit in range(units):
        line = unit % lines.count
        for stage in range(depth):
            worker = lines.worker(line, stage)
            before = (_number(depth, unit, stage - 1, 0),) if stage else ()
            tasks.append(Task(worker, 1, (0, unit, -stage), before, opens=stage == 0))
            for half in (0, 1):
                needs = [_number(depth, unit, stage, 0)]
                if stage < depth - 1:
                    needs.append(_number(depth, unit, stage + 1, 1 + half))
                tasks.append(Task(worker, 1, (1, unit // lines.count, half, -stage, unit), tuple(needs)))

    def may_open(task: int) -> bool:
        return open_units[task // (3 * depth) % lines.count] < max(depth // lines.count, 1)

    def taken(task: int) -> None:
        unit, place = divmod(task, 3 * depth)
        if place == 0:
            open_units[unit % lines.count] += 1
        elif place == 2:
            open_units[unit % lines.count] -= 1

    orders = list_schedule(tasks, depth, may_open, taken)
    return [[action for task in order for action in _actions(depth, task, halves)] for order in orders]


def _number(depth: int, unit: int, stage: int, which: int) -> int:
    return (unit * depth + stage) * 3 + which


def _actions(depth: int, task: int, halves: bool) -> Iterator[Action]:
    place, which = divmod(task, 3)
    unit, stage = divmod(place, depth)

    def member(kind: ActionKind, half: int, paired: bool = False) -> Action:
        if halves:
            return Action(kind, stage, unit, part=half, paired=paired)
        return Action(kind, stage, 2 * unit + half, paired=paired)

    if which:
        yield member(ActionKind.BACKWARD, which - 1)
    else:
        yield member(ActionKind.FORWARD, 0)
        yield member(ActionKind.FORWARD, 1, paired=True)
