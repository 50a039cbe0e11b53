"""DAPPLE's early backward: stage i runs K(i) forwards, then one backward and one forward in turn.

K(i) = min(p - i, what fits in memory), or min(2 (p - i) - 1, what fits) where transfers are slow (policies A and B of
Fan et al., PPoPP 2021). The bubble is that of GPipe; only K(i) micro-batches are kept instead of all. Policy A without
a limit is 1F1B with a flush.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def pivot_latency_s(
    forward_s: Sequence[float], backward_s: Sequence[float], micro_batches: int, sync_s: Sequence[float]
) -> float:
    """DAPPLE's estimate of an iteration: warm-up to the pivot stage, its steady phase, and the ending; O(stages^2).

    L = sum_{s<=Q} F_s + (m - 1)(F_Q + B_Q) + max_s (AR_s + sum_{s<=a<=Q} B_a, or AR_s - sum_{Q<a<=s} B_a for s > Q).
    The pivot Q is found from the last stage to the first: stage s takes over when its own steady phase is longer than
    that of Q with the stages in between. Exact when the pivot is the critical stage, too low when an early stage is
    slow.
    """
    each = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    pivot = len(each) - 1
    for stage in reversed(range(pivot)):
        between = sum(each[stage + 1 : pivot])
        if (micro_batches - 1) * each[stage] > (micro_batches - 1) * each[pivot] + between:
            pivot = stage
    ending = max(
        sync + (sum(backward_s[s : pivot + 1]) if s <= pivot else -sum(backward_s[pivot + 1 : s + 1]))
        for s, sync in enumerate(sync_s)
    )
    return sum(forward_s[: pivot + 1]) + (micro_batches - 1) * each[pivot] + ending


SCHEDULES.register("dapple", Dapple())
