"""GPipe: all forwards, then all backwards, then one synchronous update.

Bubble over total time (S-1)/(M+S-1) for S equal stages and M micro-batches (Huang et al., NeurIPS 2019). Every stage
keeps all of its micro-batches. The backwards run in the order of the forwards; the reverse order takes the same time
and memory.

Re-materialisation keeps only a stage's input for each micro-batch and repeats the forward before the backward. With
`recompute` the order has actions for it: after the gradient has come, or with `early` while the stage waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules._defaults import Defaults, Facts, finish
from planner.schedules.types import Action, ActionKind, Pipeline


@dataclass(frozen=True, slots=True)
class GPipe(Defaults):
    """All forwards, then all backwards.

    Attributes:
        recompute: the order repeats each forward before its backward.
        early: it does so without waiting for the gradient.
    """

    recompute: bool = False
    early: bool = False

    key = "gpipe"
    facts = Facts(
        decides="all forwards, then all backwards; recompute, early",
        bubble="(p-1)/(m+p-1)",
        memory="m micro-batches (their inputs and one whole with recompute)",
        staleness="0",
        source="Huang et al., NeurIPS 2019",
    )

    def supports(self, pipeline: Pipeline) -> str:
        """Any replication."""
        return ""

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """All micro-batches of a replica: M / r."""
        return tuple(pipeline.micro_batches // count for count in pipeline.replicas)

    def held(self, pipeline: Pipeline) -> tuple[int, ...]:
        """The same by worker."""
        return tuple(pipeline.micro_batches // pipeline.replicas[stage] for stage, _ in pipeline.workers())

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
        for m in micro_batches:
            if self.recompute and not self.early and not last:
                yield Action(ActionKind.RECEIVE_GRADIENT, stage, m)
            if self.recompute:
                yield Action(ActionKind.RECOMPUTE, stage, m)
            yield Action(ActionKind.BACKWARD, stage, m)
            if self.recompute and not self.early and stage:
                yield Action(ActionKind.SEND_GRADIENT, stage, m)

    def critical_s(
        self, pipeline: Pipeline, forward_s: Sequence[float], backward_s: Sequence[float], tail_s: Sequence[float]
    ) -> float:
        """Longest chain of waits; equal to the simulated time when all stages have equal replicas. O(stages).

        With `recompute` the backward is given with its recomputation; when that is early, only the busiest worker
        counts. The last stage begins its backwards when its forwards are done: the slowest stage of each direction
        counts, so this exceeds the sum over stages plus (M/r - 1) times the slowest stage where those are two. Where
        the last stage has several replicas, the first of them begins its backwards before the last micro-batch has
        come, and the last one ends no earlier than that micro-batch's way back.
        """
        if self.early:
            return Defaults.critical_s(self, pipeline, forward_s, backward_s, tail_s)
        share = [pipeline.micro_batches // count for count in pipeline.replicas]
        before = pipeline.micro_batches - pipeline.replicas[-1]
        forwards = sum(forward_s) + max(
            before // count * f for count, f in zip(pipeline.replicas, forward_s, strict=True)
        )
        last = sum(forward_s) + max((mine - 1) * f for mine, f in zip(share, forward_s, strict=True))
        last += (share[-1] - 1) * backward_s[-1]
        total = drained = slowest = 0.0
        for mine, b, tail in zip(reversed(share), reversed(backward_s), reversed(tail_s), strict=True):
            drained += b
            slowest = max(slowest, (mine - 1) * b)
            total = max(total, forwards + drained + slowest + tail, last + drained + tail)
        return total


SCHEDULES.register("gpipe", GPipe())
