"""DualPipe and DualPipeV: two directions in eight phases, with paired forwards and backwards of opposite directions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules.bidirectional import BidirectionalSchedule
from planner.schedules.chunks import ChunkedSchedule
from planner.schedules.types import Action, ActionKind, Facts, Pipeline

MicroBatchOf = Callable[[int, int], tuple[int, int]]
"""(direction, k) to the stage and number of the direction's k-th micro-batch."""


class DualWorker:
    """Builds the actions of one worker, phase by phase; direction 0 is the one that begins nearer to the worker.

    Args:
        near: number of workers between it and the middle, where the directions meet.
        half: number of workers from one end to the middle.
        share: number of micro-batches of each direction.
        place: stage and number of a direction's k-th micro-batch.
    """

    def __init__(self, near: int, half: int, share: int, place: MicroBatchOf) -> None:
        self._near, self._half, self._share, self._place = near, half, share, place
        self._forwards, self._backwards = [0, 0], [0, 0]
        self._postponed: list[Action] = []

    def actions(self) -> Iterator[Action]:
        """All forwards, backwards (whole or split) and weight gradients, in order."""
        near, outer = self._near, self._half - self._near
        for _ in range(2 * near):
            yield self._forward(0)
        for _ in range(outer):
            yield self._forward(0)
            yield self._forward(1)
        for _ in range(near):
            yield self._input_grad(1)
            yield self._weight_grad()
            yield self._forward(1)
        for step in range(self._share - 2 * self._half + outer):
            unpaired = step == 0 and near == 0
            yield self._forward(0)
            yield self._backward(1, paired=not unpaired)
            yield self._forward(1)
            yield self._backward(0, paired=True)
        for _ in range(near):
            yield self._backward(1)
            yield self._forward(1)
            yield self._backward(0, paired=True)
        yield from self._drain(outer)

    def _drain(self, outer: int) -> Iterator[Action]:
        """Remaining backwards of both directions, split from the middle on; then the postponed weight gradients."""
        odd = (self._half - 1 - self._near) % 2 == 1
        split = False
        for step in range(outer):
            split = split or (step == outer // 2 and odd)
            yield self._input_grad(1) if split else self._backward(1)
            split = split or (step == outer // 2 and not odd)
            yield self._input_grad(0) if split else self._backward(0)
        for _ in range(self._near):
            yield self._weight_grad()
            yield self._input_grad(0)
        while self._postponed:
            yield self._weight_grad()

    def _next(self, kind: ActionKind, counts: list[int], direction: int, paired: bool = False) -> Action:
        """The action for the next micro-batch of a direction; advances its count."""
        stage, m = self._place(direction, counts[direction])
        counts[direction] += 1
        return Action(kind, stage, m, paired=paired)

    def _forward(self, direction: int) -> Action:
        return self._next(ActionKind.FORWARD, self._forwards, direction)

    def _backward(self, direction: int, paired: bool = False) -> Action:
        return self._next(ActionKind.BACKWARD, self._backwards, direction, paired)

    def _input_grad(self, direction: int) -> Action:
        self._postponed.append(self._next(ActionKind.INPUT_GRAD, self._backwards, direction))
        return self._postponed[-1]

    def _weight_grad(self) -> Action:
        return self._postponed.pop(0)._replace(kind=ActionKind.WEIGHT_GRAD)


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
        decides="two directions, forward and backward as overlapped pairs",
        source="DeepSeek-AI, 2024",
        kept="p+1",
        kept_note="with 2 stages' weights",
        idle="(p/2-1)*(F+B+B-3*W)",
        idle_holds="W <= F and B-W == F",
        idle_note="with the time of a pair for F+B where pairs overlap",
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
        depth, half = pipeline.stages, pipeline.stages // 2

        def worker(w: int) -> Iterable[Action]:
            mirrored = w >= half

            def place(direction: int, k: int) -> tuple[int, int]:
                up = (direction == 1) != mirrored
                return (depth - 1 - w if up else w), 2 * k + up

            near = half - 1 - min(w, depth - 1 - w)
            return DualWorker(near, half, pipeline.micro_batches // 2, place).actions()

        return map(worker, range(depth))


@dataclass(frozen=True, slots=True)
class DualPipeV(ChunkedSchedule):
    """DualPipeV: DualPipe cut in half, one copy of the model in a V over half the workers.

    Worker w of p has stages w and 2p-1-w; the two halves of the V are what the two directions of DualPipe are. Same
    bubble as DualPipe over 2p stages, on half of the devices. Needs 2p or more micro-batches.
    """

    key = "dualpipe-v"
    split_backward = True
    facts = Facts(
        decides="V of two chunks a worker, forward and backward as overlapped pairs",
        source="Sea AI Lab and DeepSeek-AI, 2025",
        kept="2*p+1",
        idle="(p-1)*(F+2*B-3*W)",
        idle_holds="W <= F and B-W == F",
        idle_note="with the time of a pair for F+B where pairs overlap",
    )

    chunks_per_worker = 2

    def refuses(self, pipeline: Pipeline) -> str:
        """Refuses odd numbers of stages, and fewer micro-batches than stages."""
        if not (reason := ChunkedSchedule.refuses(self, pipeline)) and pipeline.micro_batches < pipeline.stages:
            return f"{self.key} needs at least {pipeline.stages} micro-batches, not {pipeline.micro_batches}"
        return reason

    def worker_orders(self, pipeline: Pipeline) -> Iterable[Iterable[Action]]:
        """Eight phases."""
        last, workers = pipeline.stages - 1, pipeline.stages // 2

        def worker(w: int) -> Iterable[Action]:
            def place(direction: int, k: int) -> tuple[int, int]:
                return (last - w if direction else w), k

            return DualWorker(workers - 1 - w, workers, pipeline.micro_batches, place).actions()

        return map(worker, range(workers))


SCHEDULES.register("dualpipe", DualPipe())
SCHEDULES.register("dualpipe-v", DualPipeV())
