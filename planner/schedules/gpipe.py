"""GPipe: all forwards, then all backwards, then one synchronous update.

Bubble over total time (S-1)/(M+S-1) for S equal stages and M micro-batches (Huang et al., NeurIPS 2019). Every stage
keeps all of its micro-batches. The backwards run in the order of the forwards; the reverse order takes the same time
and memory.

Re-materialisation keeps only a stage's input for each micro-batch and recomputes the forward before the backward. With
`recompute` the order has actions for it: after the gradient has arrived, or with `early` while the stage waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from planner.schedules import SCHEDULES
from planner.schedules.critical_chains import Flow, PassSeconds
from planner.schedules.orders import finish
from planner.schedules.schedule import StagePerWorkerSchedule
from planner.schedules.types import Action, ActionKind, Facts, Pipeline


@dataclass(frozen=True, slots=True)
class GPipe(StagePerWorkerSchedule):
    """All forwards, then all backwards.

    Attributes:
        recompute: the order recomputes each forward before its backward.
        early: the recomputation does not wait for the gradient.
    """

    recompute: bool = False
    early: bool = False

    key = "gpipe"
    closed_form = True
    facts = Facts(
        source="Huang et al., NeurIPS 2019",
        kept="m",
    )

    def supports(self, pipeline: Pipeline) -> str:
        """Any replication."""
        return ""

    def recomputed_stages(self, pipeline: Pipeline) -> frozenset[int]:
        """All stages with `recompute`, else none."""
        return frozenset(range(pipeline.stages)) if self.recompute else frozenset()

    def warm_up_after(
        self, replicas: np.ndarray, passing: np.ndarray, micro_batches: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """M / r, independent of the later stages.

        Backwards begin when each replica of the last stage has run its last forward.
        """
        kept = np.broadcast_to(micro_batches // replicas, np.broadcast_shapes(replicas.shape, passing.shape))
        through = np.where(passing > 0, passing, replicas)
        return kept.copy(), through, np.maximum(-(-passing // replicas) - 1, 0)

    def exact(self, pipeline: Pipeline) -> bool:
        """True for equal replicas without recompute actions."""
        return len(set(pipeline.replicas)) == 1 and not self.recompute

    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """All forwards, all backwards, SYNC, UPDATE, for each worker; O(actions)."""
        last = pipeline.stages - 1
        return tuple(
            (
                *(Action(ActionKind.FORWARD, stage, m) for m in pipeline.micro_batches_of(stage, replica)),
                *self._backwards(stage, stage == last, pipeline.micro_batches_of(stage, replica)),
                *finish((stage,)),
            )
            for stage, replica in pipeline.workers()
        )

    def _backwards(self, stage: int, last: bool, micro_batches: range) -> Iterator[Action]:
        """Backwards of a stage, with recomputation if the order has it."""
        for m in micro_batches:
            if self.recompute and not self.early and not last:
                yield Action(ActionKind.RECEIVE_GRADIENT, stage, m)
            if self.recompute:
                yield Action(ActionKind.RECOMPUTE, stage, m)
            yield Action(ActionKind.BACKWARD, stage, m)
            if self.recompute and not self.early and stage:
                yield Action(ActionKind.SEND_GRADIENT, stage, m)

    def flow(self, pipeline: Pipeline) -> Flow:
        """With `early`, all forwards may be recomputed before the last gradient arrives."""
        return replace(StagePerWorkerSchedule.flow(self, pipeline), early=self.early)

    def chain_s(self, pipeline: Pipeline, times: PassSeconds) -> float:
        """Longest chain of waits; equal to the simulated time when all stages have equal replicas. O(stages).

        With `recompute` the backward is given with its recomputation; when that is early, only the busiest worker
        counts. The last stage begins its backwards when its forwards are done: the slowest stage of each direction
        counts, so this exceeds the sum over stages plus (M/r - 1) times the slowest stage where those are two. Where
        the last stage has several replicas, the first of them begins its backwards before the last micro-batch has
        come, and the last one ends no earlier than that micro-batch's way back; a stage of few replicas between
        stages of more may be the busiest.
        """
        busiest = StagePerWorkerSchedule.chain_s(self, pipeline, times)
        if self.early:
            return busiest
        share = [pipeline.micro_batches // count for count in pipeline.replicas]
        before = pipeline.micro_batches - pipeline.replicas[-1]
        forwards = sum(times.forward) + max(
            before // count * f for count, f in zip(pipeline.replicas, times.forward, strict=True)
        )
        last = sum(times.forward) + max((count - 1) * f for count, f in zip(share, times.forward, strict=True))
        last += (share[-1] - 1) * times.gradient[-1]
        total, drained, slowest = busiest, 0.0, 0.0
        for count, b, tail in zip(reversed(share), reversed(times.gradient), reversed(times.tail), strict=True):
            drained += b
            slowest = max(slowest, (count - 1) * b)
            total = max(total, forwards + drained + slowest + tail, last + drained + tail)
        return total


SCHEDULES.register("gpipe", GPipe())
