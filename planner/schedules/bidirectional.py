"""Schedules with pipelines in both directions through the same workers, each with its own copy of the stages.

Chimera: 2f pipelines of D stages, D / 2f micro-batches in each at a time, shifted so that no two want a worker at once
(Li and Hoefler, SC 2021). For N = D the bubble is (D/f - 2) / (2N + D/f - 2) when B = F, and for f = 1 (D-2) / (3N/2 +
D-2) when B = 2F. Each worker holds 2f stages; worker w keeps min(D, D/2 + 1 + min(w, D-1-w)) micro-batches (f = 1).

More micro-batches than D (`over`):
- concat: unit after unit; for B = 2F and N = K D the time is exactly 3N + (K+1)(D-2), as each joint leaves a bubble;
- double: forwards of two micro-batches at a time equal a backward, twice the activations: 3N + 2(D-2) for N = 2 K D;
- halve: the same with backwards of half a micro-batch each: 3N + (D-2) for N = K D.

A stage's gradients are exchanged between the workers that hold it. `eager` launches the exchange right after a worker's
last backward of the stage if a bubble follows on that worker (with doubled forwards: if work follows); otherwise it
waits for the end.

DualPipe and DualPipeV: two directions in eight phases, with paired forwards and backwards of opposite directions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, ClassVar, Protocol

from planner.schedules import SCHEDULES
from planner.schedules.chunks import ChunkedSchedule
from planner.schedules.critical_chains import PassSeconds
from planner.schedules.orders import Order, Task, admission, list_schedule, waits
from planner.schedules.schedule import Schedule, single
from planner.schedules.types import Action, ActionKind, Facts, Pipeline
from planner.sums import float_sum

_SLOTS = 2
"""Slots of a micro-batch on a worker: one forward and one backward."""


@dataclass(frozen=True, slots=True)
class OpposedPipelines:
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
        """The worker that holds a stage of a pipeline."""
        shifted = (stage + line // 2 * (self.workers // self.pairs)) % self.workers
        return shifted if line % 2 == 0 else self.workers - 1 - shifted


def slotted(lines: OpposedPipelines, entries: Iterable[tuple[int, int]]) -> list[Order]:
    """The order of each worker if micro-batches pass their pipelines a slot a stage, and back at once; O(actions).

    Args:
        lines: the pipelines.
        entries: for each micro-batch its pipeline, and the slot in which it enters.
    """
    orders: list[Order] = [[] for _ in range(lines.workers)]
    for m, (line, start) in enumerate(entries):
        for stage in range(lines.workers):
            order = orders[lines.worker(line, stage)]
            order.append((start + stage, Action(ActionKind.FORWARD, stage, m)))
            order.append((start + 2 * lines.workers - 1 - stage, Action(ActionKind.BACKWARD, stage, m)))
    for order in orders:
        order.sort(key=lambda entry: entry[0])
    return orders


def unit_after_unit(lines: OpposedPipelines, micro_batches: int) -> Iterator[tuple[int, int]]:
    """Chimera's entries into its pipelines, no two actions in one slot.

    A unit is up to D micro-batches, D / 2f in each pipeline. The k-th of a pipeline enters in slot 2k; the next unit is
    2D slots later, so that it fills the slots that the drain of the one before leaves. If forwards take as long as
    backwards, slots are times.
    """
    for first in range(0, micro_batches, lines.workers):
        for line, count in enumerate(dealt(min(lines.workers, micro_batches - first), lines.count)):
            yield from ((line, _SLOTS * (first + k)) for k in range(count))


def dealt(micro_batches: int, lines: int) -> Sequence[int]:
    """Deal micro-batches evenly to the pipelines; the first ones get one more."""
    return [micro_batches // lines + (line < micro_batches % lines) for line in range(lines)]


def doubled(lines: OpposedPipelines, units: int, halves: bool) -> list[list[Action]]:
    """Orders that run two forwards at a time, so that a step forward takes as long as one back; O(actions log actions).

    Args:
        lines: the pipelines; units are dealt to them in turn.
        units: number of pairs of micro-batches, or of micro-batches whose backward runs in two halves.
        halves: the two members of a unit are parts of one micro-batch, not two micro-batches.

    A worker takes the forward of the lowest unit that is ready, else a backward: earlier units first, first halves
    before second ones, later stages before earlier ones. A pipeline admits a unit while fewer than D / 2f are under way
    in it.
    """
    depth, forward = lines.workers, ActionKind.FORWARD
    tasks: list[Task] = []
    for unit in range(units):
        line = unit % lines.count
        for stage in range(depth):
            worker = lines.worker(line, stage)
            tasks.append((Action(forward, stage, unit), worker, (0, unit, -stage)))
            for half in (0, 1):
                urgency = (1, unit // lines.count, half, -stage, unit)
                tasks.append((Action(ActionKind.BACKWARD, stage, unit, half), worker, urgency))

    def members(action: Action) -> Iterator[Action]:
        for half in (0, 1) if action.kind is forward else (action.part,):
            m, part = (action.micro_batch, half) if halves else (2 * action.micro_batch + half, -1)
            yield Action(action.kind, action.stage, m, part, paired=action.kind is forward and half == 1)

    orders = list_schedule(
        tasks, waits(tasks, lines.count), *admission(tasks, lines.count, max(depth // lines.count, 1))
    )
    return [[member for _, action in order for member in members(action)] for order in orders]


class BidirectionalSchedule(Schedule, Protocol):
    """A schedule with pipelines in both directions through the same workers, each with its own copy of the stages."""

    __slots__ = ()

    shares_workers: ClassVar[bool] = True

    def lines(self, pipeline: Pipeline) -> OpposedPipelines:
        """The pipelines of a copy of single replicas: one in each direction."""
        return OpposedPipelines(pipeline.stages, 1)

    def dealt(self, pipeline: Pipeline) -> Sequence[int]:
        """Number of micro-batches of each pipeline, dealt alternately."""
        return -(-pipeline.micro_batches // 2), pipeline.micro_batches // 2

    def counts(self, pipeline: Pipeline) -> tuple[dict[int, int], ...]:
        """Micro-batches by stage of each worker, summed over the pipelines that pass it."""
        lines = self.lines(pipeline)
        counts: tuple[dict[int, int], ...] = tuple({} for _ in range(pipeline.stages))
        for line, count in enumerate(self.dealt(single(pipeline))):
            for stage in range(pipeline.stages if count else 0):
                worker_counts = counts[lines.worker(line, stage)]
                worker_counts[stage] = worker_counts.get(stage, 0) + count
        by_worker = [dict(sorted(worker_counts.items())) for worker_counts in counts]
        return tuple(stages for stages in by_worker for _ in range(pipeline.replicas[0]))

    def crossings(self, pipeline: Pipeline) -> tuple[bool, ...]:
        """True for all stages but the first: neighbouring stages are on neighbouring workers."""
        return tuple(stage > 0 for stage in range(pipeline.stages))


@dataclass(frozen=True, slots=True)
class Gems(BidirectionalSchedule):
    """GEMS: two copies of the model in opposite directions, one micro-batch under way at a time in each worker.

    The next micro-batch enters from the other end as soon as the worker there has done its backward, p + 1 steps after
    the one before; for F = B = 1 the time is (m-1)(p+1) + 2p.
    """

    key = "gems"
    facts = Facts(
        source="Jain et al., SC 2020",
        kept="1",
        idle="(p-m)*(F+B)+(m-1)*max(p*F+B, F+p*B)",
    )

    def shortened(self, pipeline: Pipeline) -> Pipeline:
        """One micro-batch in each direction."""
        return Pipeline(pipeline.replicas, min(pipeline.micro_batches, 2))

    def exact(self, pipeline: Pipeline) -> bool:
        """Always."""
        return True

    def chain_s(self, pipeline: Pipeline, times: PassSeconds) -> float:
        """All forwards, one step per further micro-batch, all backwards; equal to the simulated time. O(stages).

        The forward of the next micro-batch at stage j waits on its worker for the backward of this one at stage
        p-1-j, so that the step between two last forwards is the longest of b[p-1-j] + ... + b[p-1] + f[j] + ... +
        f[p-1].
        """
        depth, count = pipeline.stages, single(pipeline).micro_batches
        backward_from_end_s = [0.0, *accumulate(reversed(times.gradient))]
        forward_from_end_s = [0.0, *accumulate(reversed(times.forward))]
        step = max(backward_from_end_s[j + 1] + forward_from_end_s[depth - j] for j in range(depth))
        mirrored = [{k, depth - 1 - k} if count > 1 else {k} for k in range(depth)]
        ends = max(
            backward_from_end_s[depth - k] + float_sum(times.tail[s] for s in stages)
            for k, stages in enumerate(mirrored)
        )
        return forward_from_end_s[depth] + (count - 1) * step + ends

    def worker_orders(self, pipeline: Pipeline) -> Iterable[Iterable[Action]]:
        """Micro-batches that enter alternately at the first and at the last worker."""
        entries = ((m % 2, m * (pipeline.stages + 1)) for m in range(pipeline.micro_batches))
        return ((action for _, action in order) for order in slotted(self.lines(pipeline), entries))


SCHEDULES.register("gems", Gems())


class Over(StrEnum):
    """How Chimera runs more micro-batches than stages; see the module."""

    CONCAT = "concat"
    DOUBLE = "double"
    HALVE = "halve"


@dataclass(frozen=True, slots=True)
class Chimera(BidirectionalSchedule):
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
        source="Li and Hoefler, SC 2021",
        kept="2*p if doubled or halved else p-p/(2*pairs)+1+min(i % (p/pairs), p/pairs-1-i % (p/pairs))",
        kept_bound=True,
        idle="(p-2)*B/2 if halved else (p-2)*B if doubled else "
        "(p-m)*(F+B)+2*(ceil(m/(2*pairs))-1)*B if m < p else max(p/pairs-2, 0)*(B+(ceil(m/p)-1)*max(B-F, 0))",
        idle_holds="B == 2*F and m % (2*p if doubled else p) == 0 and pairs < 2 if doubled or halved else "
        "F <= B and (m <= p or m % p == 0)",
    )

    def refuses(self, pipeline: Pipeline) -> str:
        """Refuses odd numbers of stages, pairs that do not divide half of it, odd numbers of doubled micro-batches."""
        if pipeline.stages % 2:
            return f"{self.key} needs an even number of stages, not {pipeline.stages}"
        if self.pairs < 1 or pipeline.stages // 2 % self.pairs:
            return f"{self.pairs} pairs of pipelines do not divide half of {pipeline.stages} stages"
        if self.over is Over.DOUBLE and pipeline.micro_batches % 2:
            return f"{pipeline.micro_batches} micro-batches do not make pairs"
        return ""

    @property
    def launches(self) -> bool:
        """True if exchanges are eager."""
        return self.eager

    @property
    def parts(self) -> int:
        """2 if backwards are halved, else 1."""
        return 2 if self.over is Over.HALVE else 1

    def options(self, workers: int, micro_batches: int, *, recompute: bool) -> Iterable[dict[str, Any]]:
        """1, 2 and 4 pairs; doubled forwards if stages recompute, so that each keeps little, and are outnumbered."""
        doubled = [{"over": Over.DOUBLE}] if recompute and micro_batches > workers else []
        return ({}, {"pairs": 2}, {"pairs": 4}, *doubled)

    def lines(self, pipeline: Pipeline) -> OpposedPipelines:
        """2f pipelines."""
        return OpposedPipelines(pipeline.stages, self.pairs)

    def dealt(self, pipeline: Pipeline) -> Sequence[int]:
        """Unit after unit, the last one evenly; alternately with doubled forwards."""
        lines, count = self.lines(pipeline), pipeline.micro_batches
        if self.over is Over.CONCAT:
            units, remainder = divmod(count, pipeline.stages)
            return [units * (pipeline.stages // lines.count) + extra for extra in dealt(remainder, lines.count)]
        unit_size = 2 if self.over is Over.DOUBLE else 1
        return [unit_size * units for units in dealt(count // unit_size, lines.count)]

    def shortened(self, pipeline: Pipeline) -> Pipeline:
        """Two units and the remainder if units are concatenated; else as many as can be under way at once.

        These are D / 2f in each of 2f pipelines.
        """
        enough = 2 * pipeline.stages + pipeline.micro_batches % pipeline.stages
        if self.over is not Over.CONCAT:
            enough = pipeline.stages * (2 if self.over is Over.DOUBLE else 1)
        return Pipeline(pipeline.replicas, min(enough, pipeline.micro_batches))

    def terms(self, pipeline: Pipeline) -> dict[str, Any]:
        """Adds `doubled` and `halved`: 1 if `over` says so, else 0."""
        choice = {"doubled": int(self.over is Over.DOUBLE), "halved": int(self.over is Over.HALVE)}
        return {**BidirectionalSchedule.terms(self, pipeline), **choice}

    @property
    def forward_step(self) -> float:
        """Two if doubled."""
        return 1 + (self.over is Over.DOUBLE)

    def worker_orders(self, pipeline: Pipeline) -> Iterable[Iterable[Action]]:
        """The orders of all workers; each holder of a stage runs it for other micro-batches."""
        lines = self.lines(pipeline)
        if self.over is Over.CONCAT:
            return map(self._with_launches, slotted(lines, unit_after_unit(lines, pipeline.micro_batches)))
        halves = self.over is Over.HALVE
        units = pipeline.micro_batches if halves else pipeline.micro_batches // 2
        orders = doubled(lines, units, halves)
        return (self._with_launches([(_SLOTS * at, action) for at, action in enumerate(order)]) for order in orders)

    def _with_launches(self, order: Order) -> Iterator[Action]:
        """A worker's order with each stage's exchange launched after its last backward, if a free slot follows."""
        last = {action.stage: at for at, (_, action) in enumerate(order) if action.kind is ActionKind.BACKWARD}
        for at, (slot, action) in enumerate(order):
            yield action
            free_slots = order[-1][0] - slot - (len(order) - 1 - at)
            if self.eager and last[action.stage] == at and free_slots > 0:
                yield Action(ActionKind.LAUNCH_SYNC, action.stage)


SCHEDULES.register("chimera", Chimera())


def dual_worker(near: int, half: int, directions: Sequence[tuple[int, range]]) -> Iterator[Action]:
    """The actions of one worker, phase by phase: so often these words.

    A word is F, B or I (forward, whole backward, input gradient) of the next micro-batch of a direction, `+` if it is
    paired with the action before, or W, the weight gradient that waits longest. Direction 0 is the one that begins
    nearer to the worker. In the middle of the drain backwards are split from then on.

    Args:
        near: number of workers between it and the middle, where the directions meet.
        half: number of workers from one end to the middle.
        directions: stage and micro-batches of each direction.
    """
    outer, share = half - near, len(directions[0][1])
    pairs, first, whole = share - 2 * half + outer, int(near == 0), outer // 2
    phases = (
        (2 * near, "F0"),
        (outer, "F0 F1"),
        (near, "I1 W F1"),
        (first, "F0 B1 F1 B0+"),
        (pairs - first, "F0 B1+ F1 B0+"),
        (near, "B1 F1 B0+"),
        (whole, "B1 B0"),
        (outer % 2, "B1 I0"),
        (outer - whole - outer % 2, "I1 I0"),
        (near, "W I0"),
        (2 * (outer - whole) - outer % 2, "W"),
    )
    postponed: list[Action] = []
    done = Counter[tuple[bool, int]]()
    for word in (word for times, words in phases for word in words.split() * times):
        if word == "W":
            yield postponed.pop(0)._replace(kind=ActionKind.WEIGHT_GRAD)
            continue
        kind, direction = ActionKind(word[0]), int(word[1])
        stage, micro_batches = directions[direction]
        m = micro_batches[done[kind is ActionKind.FORWARD, direction]]
        done[kind is ActionKind.FORWARD, direction] += 1
        action = Action(kind, stage, m, paired=word.endswith("+"))
        postponed += [action] if kind is ActionKind.INPUT_GRAD else []
        yield action


@dataclass(frozen=True, slots=True)
class DualPipe(BidirectionalSchedule):
    """DualPipe: two directions through the same workers, each forward of one paired with a backward of the other.

    Worker w has stages w and p-1-w, two copies of the model in all. With F&B the time of an overlapped pair and B the
    whole backward the bubble is (p/2 - 1)(F&B + B - 3W); for F&B < F + B that is the worst worker's, as the outer ones
    wait less. Needs an even number of workers and of micro-batches, 2p or more.
    """

    key = "dualpipe"
    split_backward = True
    facts = Facts(
        source="DeepSeek-AI, 2024",
        kept="p+1",
        idle="(p/2-1)*(F+B+B-3*W)",
        idle_holds="W <= F and B-W == F",
    )

    def refuses(self, pipeline: Pipeline) -> str:
        """Refuses odd numbers of stages or micro-batches, and fewer than 2p micro-batches."""
        if pipeline.stages % 2:
            return f"{self.key} needs an even number of stages, not {pipeline.stages}"
        if pipeline.micro_batches % 2 or pipeline.micro_batches < 2 * pipeline.stages:
            return (
                f"{self.key} over {pipeline.stages} workers needs an even number of micro-batches, at least "
                f"{2 * pipeline.stages}, not {pipeline.micro_batches}"
            )
        return ""

    def worker_orders(self, pipeline: Pipeline) -> Iterable[Iterable[Action]]:
        """Eight phases; even micro-batches go down, odd ones up."""
        last, half = pipeline.stages - 1, pipeline.stages // 2
        even, odd = (range(first, pipeline.micro_batches, 2) for first in (0, 1))
        for worker in range(pipeline.stages):
            directions = [(worker, even), (last - worker, odd)]
            near = half - 1 - min(worker, last - worker)
            yield dual_worker(near, half, directions if worker < half else directions[::-1])


@dataclass(frozen=True, slots=True)
class DualPipeV(ChunkedSchedule):
    """DualPipeV: DualPipe cut in half, one copy of the model in a V over half the workers.

    Worker w of p has stages w and 2p-1-w; the two halves of the V are what the two directions of DualPipe are. Same
    bubble as DualPipe over 2p stages, on half of the devices. Needs 2p or more micro-batches.
    """

    key = "dualpipe-v"
    split_backward = True
    facts = Facts(
        source="Sea AI Lab and DeepSeek-AI, 2025",
        kept="2*p+1",
        idle="(p-1)*(F+2*B-3*W)",
        idle_holds="W <= F and B-W == F",
    )

    chunks_per_worker = 2

    def refuses(self, pipeline: Pipeline) -> str:
        """Refuses odd numbers of stages, and fewer micro-batches than stages."""
        if not (reason := ChunkedSchedule.refuses(self, pipeline)) and pipeline.micro_batches < pipeline.stages:
            return f"{self.key} needs at least {pipeline.stages} micro-batches, not {pipeline.micro_batches}"
        return reason

    def worker_orders(self, pipeline: Pipeline) -> Iterable[Iterable[Action]]:
        """Eight phases."""
        workers, every = pipeline.stages // 2, range(pipeline.micro_batches)
        for worker in range(workers):
            directions = [(worker, every), (pipeline.stages - 1 - worker, every)]
            yield dual_worker(workers - 1 - worker, workers, directions)


SCHEDULES.register("dualpipe", DualPipe())
SCHEDULES.register("dualpipe-v", DualPipeV())
