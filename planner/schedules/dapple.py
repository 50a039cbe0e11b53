"""DAPPLE's early backward: stage i runs K(i) forwards, then one backward and one forward in turn.

K(i) = min(p - i, what fits in memory), or min(2 (p - i) - 1, what fits) where transfers are slow (policies A and B of
Fan et al., PPoPP 2021). The bubble is that of GPipe; only K(i) micro-batches are kept instead of all. Policy A without
a limit is 1F1B with a flush.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from planner.schedules import SCHEDULES
from planner.schedules._defaults import Defaults, Facts, finish, require
from planner.schedules._lines import one_forward_one_backward, paced_warm_up
from planner.schedules.types import Action, Pipeline


class WarmUp(StrEnum):
    """How many forwards come first."""

    NEAR = "a"
    """As many as stages follow, and one."""

    FAR = "b"
    """Twice as many, so that transfers run beside computation."""


@dataclass(frozen=True, slots=True)
class Dapple(Defaults):
    """Early backward.

    Attributes:
        policy_of: NEAR (`a`) or FAR (`b`).
        most: micro-batches that fit in memory; 0: no limit.
    """

    policy_of: WarmUp = WarmUp.NEAR
    most: int = 0

    key = "dapple"
    facts = Facts(
        decides="backwards as early as possible; policy_of, most",
        bubble="(p-1)/(m+p-1)",
        memory="min(p-i, most) micro-batches (2(p-i)-1 by policy b)",
        staleness="0",
        source="Fan et al., PPoPP 2021",
    )

    def supports(self, pipeline: Pipeline) -> str:
        """Any replication; a limit or policy B only equal replicas."""
        if self.most < 0:
            return f"a limit of {self.most} micro-batches keeps none"
        if (self.most or self.policy_of is WarmUp.FAR) and len(set(pipeline.replicas)) > 1:
            return f"{self.name} needs the same number of replicas at every stage, not {pipeline.replicas}"
        return ""

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """K of each stage, at most M / r."""
        forwards = paced_warm_up(pipeline.replicas)
        if self.policy_of is WarmUp.FAR:
            forwards = tuple(2 * (pipeline.stages - i) - 1 for i in range(pipeline.stages))
        return tuple(
            min(pipeline.micro_batches // count, k, self.most or k)
            for count, k in zip(pipeline.replicas, forwards, strict=True)
        )

    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """Warm-up, alternation, drain, SYNC, UPDATE, for each worker."""
        require(self, pipeline)
        forwards = self.in_flight(pipeline)
        return tuple(
            (
                *one_forward_one_backward(stage, pipeline.micro_batches_of(stage, replica), forwards[stage]),
                *finish((stage,)),
            )
            for stage, replica in pipeline.workers()
        )


SCHEDULES.register("dapple", Dapple())
