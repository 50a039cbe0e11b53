"""DualPipe and DualPipeV: two directions in eight phases, with paired forwards and backwards of opposite directions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules.bidirectional import BidirectionalSchedule
from planner.schedules.chunks import ChunkedSchedule
from planner.schedules.types import Action, ActionKind, Facts, Pipeline

MicroBatchOf = Callable[[int, int], tuple[int, int]]
"""(direction, k) to the stage and number of the direction's k-th micro-batch."""


def dual_worker(near: int, half: int, share: int, place: MicroBatchOf) -> Iterator[Action]:
    """The actions of one worker, phase by phase: so often these words.

    A word is F, B or I (forward, whole backward, input gradient) of the next micro-batch of a direction, `+` if it is
    paired with the action before, or W, the weight gradient that waits longest. Direction 0 is the one that begins
    nearer to the worker. In the middle of the drain backwards are split from then on.

    Args:
        near: number of workers between it and the middle, where the directions meet.
        half: number of workers from one end to the middle.
        share: number of micro-batches of each direction.
        place: stage and number of a direction's k-th micro-batch.
    """
    outer = half - near
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
        stage, m = place(direction, done[kind is ActionKind.FORWARD, direction])
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
        depth, half = pipeline.stages, pipeline.stages // 2

        def worker(w: int) -> Iterable[Action]:
            mirrored = w >= half

            def place(direction: int, k: int) -> tuple[int, int]:
                up = (direction == 1) != mirrored
                return (depth - 1 - w if up else w), 2 * k + up

            near = half - 1 - min(w, depth - 1 - w)
            return dual_worker(near, half, pipeline.micro_batches // 2, place)

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
        last, workers = pipeline.stages - 1, pipeline.stages // 2

        def worker(w: int) -> Iterable[Action]:
            def place(direction: int, k: int) -> tuple[int, int]:
                return (last - w if direction else w), k

            return dual_worker(workers - 1 - w, workers, pipeline.micro_batches, place)

        return map(worker, range(workers))


SCHEDULES.register("dualpipe", DualPipe())
SCHEDULES.register("dualpipe-v", DualPipeV())
