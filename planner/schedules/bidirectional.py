"""Several pipelines through the same workers in both directions, each with its own copy of the stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from planner.schedules import SCHEDULES
from planner.schedules.critical_chains import PassSeconds
from planner.schedules.facts import Facts
from planner.schedules.list_scheduler import Task, list_schedule
from planner.schedules.schedule import Placed, single
from planner.schedules.types import Action, ActionKind, Pipeline

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
    forward, backward = ActionKind.FORWARD, ActionKind.BACKWARD
    tasks = []
    for unit in range(units):
        line = unit % lines.count
        for stage in range(depth):
            worker, own = lines.worker(line, stage), Action(forward, stage, unit)
            tasks.append(Task(own, worker, (0, unit, -stage), (Action(forward, stage - 1, unit),), opens=stage == 0))
            for half in (0, 1):
                urgency = (1, unit // lines.count, half, -stage, unit)
                needs = (own, Action(backward, stage + 1, unit, half))
                tasks.append(Task(Action(backward, stage, unit, half), worker, urgency, needs))

    def may_open(action: Action) -> bool:
        return open_units[action.micro_batch % lines.count] < max(depth // lines.count, 1)

    def taken(action: Action) -> None:
        if action.stage == 0 and action.part != 0:
            open_units[action.micro_batch % lines.count] += 1 if action.kind is forward else -1

    def members(action: Action) -> Iterator[Action]:
        for half in (0, 1) if action.kind is forward else (action.part,):
            m, part = (action.micro_batch, half) if halves else (2 * action.micro_batch + half, -1)
            yield Action(action.kind, action.stage, m, part, paired=action.kind is forward and half == 1)

    orders = list_schedule(tasks, depth, may_open, taken)
    return [[member for action in order for member in members(action)] for order in orders]


class BothWays(Placed, Protocol):
    """Pipelines in both directions through the same workers, each with its own copy of the stages."""

    __slots__ = ()

    def lines(self, pipeline: Pipeline) -> Lines:
        """The pipelines of single replicas: one in each direction."""
        return Lines(pipeline.stages, 1)

    def dealt(self, pipeline: Pipeline) -> Sequence[int]:
        """Micro-batches of each of the pipelines: every other one."""
        return -(-pipeline.micro_batches // 2), pipeline.micro_batches // 2

    def counts(self, pipeline: Pipeline) -> tuple[dict[int, int], ...]:
        """The stages of the pipelines that have micro-batches."""
        lines = self.lines(pipeline)
        found: tuple[dict[int, int], ...] = tuple({} for _ in range(pipeline.stages))
        for line, count in enumerate(self.dealt(pipeline)):
            for stage in range(pipeline.stages if count else 0):
                own = found[lines.worker(line, stage)]
                own[stage] = own.get(stage, 0) + count
        return tuple(dict(sorted(own.items())) for own in found)

    def crossings(self, pipeline: Pipeline) -> tuple[bool, ...]:
        """All but the first: neighbouring stages of a pipeline are on neighbouring workers."""
        return tuple(stage > 0 for stage in range(pipeline.stages))


@dataclass(frozen=True, slots=True)
class Gems(BothWays):
    """GEMS: two copies of the model in opposite directions, one micro-batch under way at a time in each worker.

    The next micro-batch enters from the other end as soon as the worker there has done its backward, p + 1 steps after
    the one before; for F = B = 1 the time is (m-1)(p+1) + 2p.
    """

    key = "gems"
    facts = Facts(
        decides="two directions, one micro-batch at a time",
        source="Jain et al., SC 2020",
        kept="1",
        kept_note="with 2 stages' weights",
        idle="(p-m)*(F+B)+(m-1)*max(p*F+B, F+p*B)",
    )

    def few(self, pipeline: Pipeline) -> Pipeline:
        """One in each direction."""
        return Pipeline(pipeline.replicas, min(pipeline.micro_batches, 2))

    def exact(self, pipeline: Pipeline) -> bool:
        """Always."""
        return True

    def chain_s(self, pipeline: Pipeline, times: PassSeconds) -> float:
        """All forwards, a step for each further micro-batch, all backwards; equal to the simulated time. O(stages).

        The forward of the next micro-batch at stage j waits on its worker for the backward of this one at stage
        p-1-j, so that the step between two last forwards is the longest of b[p-1-j] + ... + b[p-1] + f[j] + ... +
        f[p-1].
        """
        depth, count = pipeline.stages, single(pipeline).micro_batches
        ending = [0.0, *accumulate(reversed(times.gradient))]
        going = [0.0, *accumulate(reversed(times.forward))]
        step = max(ending[j + 1] + going[depth - j] for j in range(depth))
        mirrored = [{k, depth - 1 - k} if count > 1 else {k} for k in range(depth)]
        ends = max(ending[depth - k] + sum(times.tail[s] for s in own) for k, own in enumerate(mirrored))
        return going[depth] + (count - 1) * step + ends

    def line(self, pipeline: Pipeline) -> Iterable[Iterable[Action]]:
        """Micro-batches in turn from the first and from the last worker."""
        depth, lines = pipeline.stages, self.lines(pipeline)
        orders: list[list[tuple[int, Action]]] = [[] for _ in range(depth)]
        for m in range(pipeline.micro_batches):
            start = m * (depth + 1)
            for stage in range(depth):
                own = orders[lines.worker(m % 2, stage)]
                own.append((start + stage, Action(ActionKind.FORWARD, stage, m)))
                own.append((start + 2 * depth - 1 - stage, Action(ActionKind.BACKWARD, stage, m)))
        return ((action for _, action in sorted(own, key=lambda entry: entry[0])) for own in orders)


SCHEDULES.register("gems", Gems())
