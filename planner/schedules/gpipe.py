"""GPipe: all forwards, then all backwards, then one synchronous update.

Bubble over total time (S-1)/(M+S-1) for S equal stages and M micro-batches (Huang et al., NeurIPS 2019). Every stage
keeps all of its micro-batches. The backwards run in the order of the forwards; the reverse order takes the same time
and memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules.types import Action, ActionKind, ActivationUnit, Pipeline, WeightPolicy


@dataclass(frozen=True, slots=True)
class GPipe:
    """All forwards, then all backwards."""

    name: str = "gpipe"
    weight_policy: WeightPolicy = WeightPolicy.SYNC
    activation_unit: ActivationUnit = ActivationUnit.MICRO_BATCH

    def weight_versions(self, pipeline: Pipeline) -> tuple[int, ...]:
        """One version of the weights at every stage."""
        return (1,) * pipeline.stages

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """All micro-batches of a replica: M / r."""
        return tuple(pipeline.micro_batches // count for count in pipeline.replicas)

    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """All forwards, all backwards, SYNC, UPDATE, for each worker; O(actions)."""
        return tuple(
            (
                *(Action(ActionKind.FORWARD, stage, m) for m in pipeline.micro_batches_of(stage, replica)),
                *(Action(ActionKind.BACKWARD, stage, m) for m in pipeline.micro_batches_of(stage, replica)),
                Action(ActionKind.SYNC, stage),
                Action(ActionKind.UPDATE, stage),
            )
            for stage, replica in pipeline.workers()
        )

    def critical_s(
        self, pipeline: Pipeline, forward_s: Sequence[float], backward_s: Sequence[float], tail_s: Sequence[float]
    ) -> float:
        """Longest chain of waits; equal to the simulated time when all stages have equal replicas. O(stages).

        The last stage begins its backwards when its forwards are done: the slowest stage of each direction counts, so
        this exceeds the sum over stages plus (M/r - 1) times the slowest stage where those are two different stages.
        """
        share = [pipeline.micro_batches // count for count in pipeline.replicas]
        before = pipeline.micro_batches - pipeline.replicas[-1]
        forwards = sum(forward_s) + max(
            before // count * f for count, f in zip(pipeline.replicas, forward_s, strict=True)
        )
        total = drained = slowest = 0.0
        for mine, b, tail in zip(reversed(share), reversed(backward_s), reversed(tail_s), strict=True):
            drained += b
            slowest = max(slowest, (mine - 1) * b)
            total = max(total, forwards + drained + slowest + tail)
        return total


SCHEDULES.register("gpipe", GPipe())
