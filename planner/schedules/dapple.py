"""DAPPLE's early backward: stage i runs K(i) forwards, then one backward and one forward in turn.

K(i) = min(p - i, what fits in memory), or min(2 (p - i) - 1, what fits) where transfers are slow (policies A and B of
Fan et al., PPoPP 2021). The bubble is that of GPipe; only K(i) micro-batches are kept instead of all. Policy A without
a limit is 1F1B with a flush.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from planner.schedules import SCHEDULES
from planner.schedules._defaults import Facts
from planner.schedules._families import OneForwardOneBackward
from planner.schedules._lines import paced_after, paced_warm_up
from planner.schedules.types import Pipeline


class WarmUp(StrEnum):
    """How many forwards come first."""

    NEAR = "a"
    """As many as stages follow, and one."""

    FAR = "b"
    """Twice as many, so that transfers run beside computation."""


@dataclass(frozen=True, slots=True)
class Dapple(OneForwardOneBackward):
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

    def warm_up(self, replicas: Sequence[int]) -> tuple[int, ...]:
        """K of each stage."""
        near = self.policy_of is WarmUp.NEAR
        forwards = paced_warm_up(replicas) if near else tuple(2 * k - 1 for k in range(len(replicas), 0, -1))
        return tuple(min(k, self.most or k) for k in forwards)

    def warm_up_after(
        self, replicas: np.ndarray, passing: np.ndarray, micro_batches: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """As 1F1B, by policy A without a limit."""
        usual = self.policy_of is WarmUp.NEAR and not self.most
        return paced_after(replicas, passing, micro_batches) if usual else None


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
