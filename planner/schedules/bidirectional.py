"""Several pipelines through the same workers in both directions, one filling the bubbles of the other; each has its own
copy of the stages.

Chimera: 2f pipelines of D stages, D / 2f micro-batches in each at a time, shifted so that no two want a worker at once
(Li and Hoefler, SC 2021). For N = D the bubble is (D/f - 2) / (2N + D/f - 2) when B = F, and for f = 1 (D-2) / (3N/2 +
D-2) when B = 2F. Each worker holds 2f stages; worker w keeps min(D, D/2 + 1 + min(w, D-1-w)) micro-batches (f = 1).

More micro-batches than D (`over`):
- concat: unit after unit; for B = 2F and N = K D the time is exactly 3N + (K+1)(D-2), as each joint leaves a bubble;
- double: forwards of two micro-batches at a time equal a backward, twice the activations: 3N + 2(D-2) for N = 2 K D;
- halve: the same with backwards of half a micro-batch each: 3N + (D-2) for N = K D.

A stage's gradients are exchanged between the workers that hold it. `eager` launches that as soon as a worker has done
its last backward of the stage, where a bubble follows on that worker (with doubled forwards, where work follows); the
others wait for the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from typing import Any, Protocol

from planner.schedules import SCHEDULES
from planner.schedules.critical_chains import Flow, PassSeconds
from planner.schedules.facts import Facts
from planner.schedules.orders import Task, list_schedule
from planner.schedules.schedule import Placed, single
from planner.schedules.types import Action, ActionKind, ActivationUnit, Pipeline

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


class Over(StrEnum):
    """What to do with more micro-batches than stages."""

    CONCAT = "concat"
    DOUBLE = "double"
    HALVE = "halve"


@dataclass(frozen=True, slots=True)
class Chimera(BothWays):
    """Bidirectional pipelines.

    Attributes:
        pairs: f, pairs of pipelines in opposite directions; divides D / 2.
        over: what to do with more micro-batches than stages.
        eager: launch the exchange of gradients in bubbles.
    """

    pairs: int = 1
    over: Over = Over.CONCAT
    eager: bool = True

    key = "chimera"
    facts = Facts(
        decides="2f pipelines in two directions; pairs, over, eager",
        source="Li and Hoefler, SC 2021",
        kept="2*p if doubled or halved else p-p/(2*pairs)+1+min(i % (p/pairs), p/pairs-1-i % (p/pairs))",
        kept_bound=True,
        kept_note="for m >= p, with 2 pairs stages' weights",
        idle="(p-2)*B/2 if halved else (p-2)*B if doubled else "
        "(p-m)*(F+B)+2*(ceil(m/(2*pairs))-1)*B if m < p else max(p/pairs-2, 0)*(B+(ceil(m/p)-1)*max(B-F, 0))",
        idle_holds="B == 2*F and m % (2*p if doubled else p) == 0 and pairs < 2 if doubled or halved else "
        "F <= B and (m <= p or m % p == 0)",
    )

    @property
    def activation_unit(self) -> ActivationUnit:
        """Half a micro-batch where backwards are halved."""
        return ActivationUnit.SUB_SEQUENCE if self.over is Over.HALVE else ActivationUnit.MICRO_BATCH

    def refuses(self, pipeline: Pipeline) -> str:
        """An odd number of stages, pairs that do not divide half of it, an odd number of doubled micro-batches."""
        if pipeline.stages % 2:
            return f"{self.key} needs an even number of stages, not {pipeline.stages}"
        if self.pairs < 1 or pipeline.stages // 2 % self.pairs:
            return f"{self.pairs} pairs of pipelines do not divide half of {pipeline.stages} stages"
        if self.over is Over.DOUBLE and pipeline.micro_batches % 2:
            return f"{pipeline.micro_batches} micro-batches do not make pairs"
        return ""

    @property
    def launches(self) -> bool:
        """Where it is eager."""
        return self.eager

    @property
    def parts(self) -> int:
        """Two where backwards are halved."""
        return 2 if self.over is Over.HALVE else 1

    def options(self, *, recompute: bool) -> Iterable[dict[str, Any]]:
        """1, 2 and 4 pairs; forwards of two micro-batches at a time where little is kept of each."""
        return ({}, {"pairs": 2}, {"pairs": 4}, *([{"over": Over.DOUBLE}] if recompute else []))

    def worthwhile(self, workers: int, micro_batches: int) -> bool:
        """Doubling is for more micro-batches than stages."""
        return self.over is Over.CONCAT or micro_batches > workers

    def lines(self, pipeline: Pipeline) -> Lines:
        """2f pipelines."""
        return Lines(pipeline.stages, self.pairs)

    def dealt(self, pipeline: Pipeline) -> Sequence[int]:
        """Unit after unit, the last as evenly as can be; in turn with doubled forwards."""
        lines, count = self.lines(pipeline), pipeline.micro_batches
        if self.over is Over.CONCAT:
            units, rest = divmod(count, pipeline.stages)
            return [units * (pipeline.stages // lines.count) + more for more in dealt(rest, lines.count)]
        each = 2 if self.over is Over.DOUBLE else 1
        return [each * units for units in dealt(count // each, lines.count)]

    def few(self, pipeline: Pipeline) -> Pipeline:
        """Two units and what is left over, when they come one after another; else as many units as can be under way,
        D / 2f in each of 2f pipelines."""
        most = 2 * pipeline.stages + pipeline.micro_batches % pipeline.stages
        if self.over is not Over.CONCAT:
            most = pipeline.stages * (2 if self.over is Over.DOUBLE else 1)
        return Pipeline(pipeline.replicas, min(most, pipeline.micro_batches))

    def terms(self, pipeline: Pipeline) -> dict[str, Any]:
        """With `doubled` and `halved`: 1 by that choice for more micro-batches than stages, else 0."""
        choice = {"doubled": int(self.over is Over.DOUBLE), "halved": int(self.over is Over.HALVE)}
        return {**BothWays.terms(self, pipeline), **choice}

    def flow(self, pipeline: Pipeline) -> Flow:
        """Forwards of two micro-batches at a time where they are doubled, backwards of half where they are halved."""
        double, flow = 1 + (self.over is Over.DOUBLE), BothWays.flow(self, pipeline)
        return replace(flow, forward_step=double, backward_step=1 / self.parts)

    def line(self, pipeline: Pipeline) -> Iterable[Iterable[Action]]:
        """The orders of all workers; stage s runs on each worker that has it, for different micro-batches."""
        lines = self.lines(pipeline)
        if self.over is Over.CONCAT:
            return map(self._closed, slotted(lines, pipeline.micro_batches))
        halves = self.over is Over.HALVE
        units = pipeline.micro_batches if halves else pipeline.micro_batches // 2
        return map(self._launched, doubled(lines, units, halves))

    def _launched(self, own: Sequence[Action]) -> Iterator[Action]:
        """A worker's order with the exchange of each stage launched after its last backward, when it goes on."""
        last = {action.stage: at for at, action in enumerate(own) if action.kind is ActionKind.BACKWARD}
        for at, action in enumerate(own):
            yield action
            if self.eager and last[action.stage] == at < len(own) - 1:
                yield Action(ActionKind.LAUNCH_SYNC, action.stage)

    def _closed(self, own: Sequence[tuple[int, Action]]) -> Iterator[Action]:
        """A worker's order with its exchanges: launched after a stage's last backward where a free slot follows."""
        end = own[-1][0] if own else 0
        last = {action.stage: slot for slot, action in own if action.kind is ActionKind.BACKWARD}
        taken = [slot for slot, _ in own]
        for slot, action in own:
            yield action
            done = action.kind is ActionKind.BACKWARD and last[action.stage] == slot
            if done and self.eager and end - slot > sum(1 for other in taken if other > slot):
                yield Action(ActionKind.LAUNCH_SYNC, action.stage)


SCHEDULES.register("chimera", Chimera())
