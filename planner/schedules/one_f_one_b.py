"""1F1B with a flush: warm-up forwards, then one backward and one forward in turn, then the remaining backwards.

Same bubble as GPipe for equal stages, (S-1)/(M+S-1) of total time, with at most S-i micro-batches kept by stage i
(Narayanan et al., SOSP 2019 and ICML 2021; DAPPLE's early backward).

Unequal replication. Let stage i have r(i) replicas, each with w(i) forwards before its first backward, n(i) = r(i) w(i)
in all. A replica's first backward needs its own w forwards, so every stage before must let n(i) micro-batches pass
before it waits for a gradient itself, and have one more in work on each of its replicas to keep pace:

    w(last) = 1        w(i) = 1 + ceil(n(i+1) / r(i))        (never more than a replica's micro-batches)

For equal replicas this is S - i, and n(i) is the number of workers from stage i to the end. The number of workers
from here to the end, divided by r(i) and rounded up, is the smallest warm-up for which nothing deadlocks, but where
few replicas feed many that feed few it lets the many wait for each other's gradients: with replicas (1, 8, 1) and
balanced stages an iteration then takes four times as long. The rule above keeps within a few per cent of the ideal
(see docs/simulate.md).

No deadlock: stage i+1 runs the backward of micro-batch m after the forward of m + n(i+1) - r(i+1); stage i runs that
forward after the backward of m + n(i+1) - r(i+1) - n(i) < m. Each wait is for work of a smaller micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from planner.schedules import SCHEDULES
from planner.schedules._defaults import Defaults, Facts, finish
from planner.schedules._lines import one_forward_one_backward, paced_warm_up
from planner.schedules.types import Action, Pipeline


@dataclass(frozen=True, slots=True)
class OneFOneB(Defaults):
    """One forward, one backward; one weight version; flush at the end of the iteration."""

    key = "1f1b"
    closed_form = True
    facts = Facts(
        decides="one forward, one backward; flush",
        bubble="(p-1)/(m+p-1)",
        memory="p-i micro-batches at stage i",
        staleness="0",
        source="Narayanan et al., SOSP 2019 and ICML 2021",
    )

    def supports(self, pipeline: Pipeline) -> str:
        """Any replication."""
        return ""

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """The warm-up of each stage, at most M / r."""
        return tuple(
            min(pipeline.micro_batches // count, forwards)
            for count, forwards in zip(pipeline.replicas, warm_up(pipeline.replicas), strict=True)
        )

    def held(self, pipeline: Pipeline) -> tuple[int, ...]:
        """The same by worker."""
        kept = self.in_flight(pipeline)
        return tuple(kept[stage] for stage, _ in pipeline.workers())

    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """Warm-up, alternation, drain, SYNC, UPDATE, for each worker; O(actions)."""
        forwards = self.in_flight(pipeline)
        return tuple(
            (
                *one_forward_one_backward(stage, pipeline.micro_batches_of(stage, replica), forwards[stage]),
                *finish((stage,)),
            )
            for stage, replica in pipeline.workers()
        )

    def critical_s(
        self, pipeline: Pipeline, forward_s: Sequence[float], backward_s: Sequence[float], tail_s: Sequence[float]
    ) -> float:
        """Longest of the chains that stay at one stage but for its first and last micro-batch; O(stages^2).

        For stage i with m micro-batches a replica, warm-up w, t = f + b, and later = sum of t over the later stages:

            sum_{j<i} t_j  +  m t_i  +  (later - (w-1) f_i)_+  +  (later - (w-1) b_i)_+

        The two last terms are the wait for the first gradient, of which (w-1) forwards fill a part, and the wait for
        the last one, of which (w-1) backwards fill a part; when m <= w only the longer of the two can be had. The chain
        ends with the tail of stage i or of an earlier one, or leaves after the last forward for the tail of a later
        one. Equal to the simulated time for stages of similar length and equal replicas (see docs/simulate.md).
        """
        both_s = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
        lead_s = [0.0, *accumulate(backward_s)]
        before, later, longest = 0.0, sum(both_s), 0.0
        for i, forwards in enumerate(self.in_flight(pipeline)):
            f, b, mine = forward_s[i], backward_s[i], pipeline.micro_batches // pipeline.replicas[i]
            later -= both_s[i]
            first, last = max(later - (forwards - 1) * f, 0.0), max(later - (forwards - 1) * b, 0.0)
            if mine <= forwards:
                first, last = 0.0, max(first, last)
            stay = before + mine * both_s[i] + first + last
            leave = before + mine * both_s[i] - forwards * b + first + later + b
            for k, tail in enumerate(tail_s):
                longest = max(longest, (stay if k <= i else leave) - lead_s[k] + tail)
            before += both_s[i]
        return longest


def warm_up(replicas: Sequence[int]) -> tuple[int, ...]:
    """Forwards that a replica of each stage runs before its first backward, when there are micro-batches enough."""
    return paced_warm_up(replicas)


SCHEDULES.register("1f1b", OneFOneB())
