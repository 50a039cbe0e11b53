"""DualPipeV: DualPipe cut in half, one copy of the model in a V over half the workers.

Worker w of p has stages w and 2p-1-w; the two halves of the V are what the two directions of DualPipe are. Same bubble
as DualPipe over 2p stages, on half of the devices (Sea AI Lab and DeepSeek-AI, 2025). Needs 2p or more micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules._defaults import Facts, finish
from planner.schedules._dual import DualWorker
from planner.schedules._families import Chunked
from planner.schedules.types import Action, Pipeline


@dataclass(frozen=True, slots=True)
class DualPipeV(Chunked):
    """A V with overlapped pairs."""

    key = "dualpipe-v"
    split_backward = True
    facts = Facts(
        decides="V of two chunks a worker, forward and backward as overlapped pairs",
        bubble="(p-1)(F&B+B-3W) for p workers, in time",
        memory="2p+1 chunks",
        staleness="0",
        source="Sea AI Lab and DeepSeek-AI, 2025",
    )

    @property
    def chunks_per_worker(self) -> int:
        """Two."""
        return 2

    def refuses(self, pipeline: Pipeline) -> str:
        """An odd number of stages, fewer micro-batches than stages."""
        if not (reason := Chunked.refuses(self, pipeline)) and pipeline.micro_batches < pipeline.stages:
            return f"{self.key} needs at least {pipeline.stages} micro-batches, not {pipeline.micro_batches}"
        return reason

    def held(self, pipeline: Pipeline) -> tuple[int, ...]:
        """2p + 1 chunks on every worker."""
        return (pipeline.stages + 1,) * (pipeline.stages // 2 * pipeline.replicas[0])

    def deferred(self, pipeline: Pipeline) -> int:
        """All that a worker keeps."""
        return pipeline.stages + 1

    def wait_s(self, pipeline: Pipeline, forward_s: float, backward_s: float, weight_s: float) -> float:
        """(p - 1)(F&B + B - 3W), with F&B = F + B: nothing of a pair overlaps."""
        return (pipeline.stages / 2 - 1) * (forward_s + 2 * backward_s - 3 * weight_s)

    def line(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """Eight phases, SYNC and UPDATE of both chunks."""
        last, workers = pipeline.stages - 1, pipeline.stages // 2

        def worker(w: int) -> tuple[Action, ...]:
            def place(direction: int, k: int) -> tuple[int, int]:
                return (last - w if direction else w), k

            own = DualWorker(workers - 1 - w, workers, pipeline.micro_batches, place).actions()
            return (*own, *finish((w, last - w)))

        return tuple(worker(w) for w in range(workers))


SCHEDULES.register("dualpipe-v", DualPipeV())
