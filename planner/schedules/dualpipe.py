"""DualPipe: two directions through the same workers, a forward of one run together with a backward of the other.

Worker w has stages w and p-1-w, two copies of the model in all, and keeps p + 1 micro-batches. With F&B the time of an
overlapped pair and B the whole backward the bubble is (p/2 - 1)(F&B + B - 3W) (DeepSeek-AI, 2024); for F&B < F + B that
is the worst worker's, as the outer ones wait less. Needs an even number of workers and of micro-batches, 2p or more.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules._defaults import Facts, finish
from planner.schedules._dual import DualWorker
from planner.schedules._families import BothWays
from planner.schedules.types import Action, Pipeline


@dataclass(frozen=True, slots=True)
class DualPipe(BothWays):
    """Two directions with overlapped pairs."""

    key = "dualpipe"
    split_backward = True
    facts = Facts(
        decides="two directions, forward and backward as overlapped pairs",
        bubble="(p/2-1)(F&B+B-3W), in time",
        memory="p+1 micro-batches, 2 stages' weights",
        staleness="0",
        source="DeepSeek-AI, 2024",
    )

    def refuses(self, pipeline: Pipeline) -> str:
        """An odd number of stages or micro-batches, fewer than 2p micro-batches."""
        if pipeline.stages % 2:
            return f"{self.key} needs an even number of stages, not {pipeline.stages}"
        if pipeline.micro_batches % 2 or pipeline.micro_batches < 2 * pipeline.stages:
            return (
                f"{self.key} over {pipeline.stages} workers needs an even number of micro-batches, at least "
                f"{2 * pipeline.stages}, not {pipeline.micro_batches}"
            )
        return ""

    def held(self, pipeline: Pipeline) -> tuple[int, ...]:
        """p + 1 micro-batches on every worker."""
        return (pipeline.stages + 1,) * sum(pipeline.replicas)

    def deferred(self, pipeline: Pipeline) -> int:
        """All that a worker keeps."""
        return pipeline.stages + 1

    def wait_s(self, pipeline: Pipeline, forward_s: float, backward_s: float, weight_s: float) -> float:
        """(p/2 - 1)(F&B + B - 3W), with F&B = F + B: nothing of a pair overlaps."""
        return bubble_s(pipeline.stages, forward_s + backward_s, backward_s, weight_s)

    def line(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """Eight phases, SYNC and UPDATE of both stages; even micro-batches go down, odd ones up."""
        depth, half = pipeline.stages, pipeline.stages // 2

        def worker(w: int) -> tuple[Action, ...]:
            mirrored = w >= half

            def place(direction: int, k: int) -> tuple[int, int]:
                up = (direction == 1) != mirrored
                return (depth - 1 - w if up else w), 2 * k + up

            near = half - 1 - min(w, depth - 1 - w)
            own = DualWorker(near, half, pipeline.micro_batches // 2, place).actions()
            return (*own, *finish(sorted((w, depth - 1 - w))))

        return tuple(worker(w) for w in range(depth))


def bubble_s(stages: int, pair_s: float, backward_s: float, weight_grad_s: float) -> float:
    """(p/2 - 1)(F&B + B - 3W)."""
    return (stages / 2 - 1) * (pair_s + backward_s - 3 * weight_grad_s)


SCHEDULES.register("dualpipe", DualPipe())
