"""Chains of waits in closed form: lower bounds on the iteration time that need no order of work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from planner.sums import float_sum

if TYPE_CHECKING:
    from planner.schedules.schedule import Schedule
    from planner.schedules.types import Pipeline


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds by stage for one micro-batch, blocking transfers included.

    Attributes:
        forward: the forward.
        gradient: what the stage before waits for: the whole backward, or the input gradient if the backward is split.
        weight: the weight gradient if it is a separate action, else 0.
        tail: synchronisation and update, once per iteration.
        transfer: the part of forward and gradient that is transfers.
    """

    forward: Sequence[float]
    gradient: Sequence[float]
    weight: Sequence[float]
    tail: Sequence[float]
    transfer: Sequence[float]


def busiest_chain_s(schedule: Schedule, pipeline: Pipeline, times: PassSeconds) -> float:
    """Longest chain through one worker: fill, its work, and its last gradient's path to the first stage.

    A worker begins with the forward of its first stage, after the forwards of all stages before. Its last gradient
    passes back through these stages. With a split backward it may postpone as many weight gradients as its memory
    holds; the chain then ends with the weight gradient of the stage where it ends. The worker where a chain ends
    exchanges and updates all its stages one after the other. An iteration of a schedule that never drains, or whose
    workers count their own iterations (`spans`), is counted from a worker's own first action. O(stages * holders).
    """
    fill = [0.0, *accumulate(f * schedule.forward_step for f in times.forward)]
    placement = schedule.placement(pipeline)
    after = _after(schedule, placement, times)
    longest = 0.0
    for stages, counts in zip(placement, schedule.workload(pipeline), strict=True):
        if not stages:
            continue
        begin, longest_weight_s = fill[stages[0]], max(times.weight[s] for s in stages)
        pairs = list(zip(stages, counts, strict=True))
        passes = float_sum(n * (times.forward[s] + times.gradient[s]) for s, n in pairs)
        weights = float_sum(n * times.weight[s] for s, n in pairs)
        work_s = passes + weights + _tail(schedule, times, stages)
        longest = max(longest, begin + work_s if schedule.drains and not schedule.spans else work_s)
        if stages[0] and schedule.drains and not schedule.early:
            postponed_s = schedule.deferred(pipeline) * longest_weight_s
            longest = max(longest, begin + passes + max(weights - postponed_s, 0.0) + after[stages[0]])
    return longest


def _tail(schedule: Schedule, times: PassSeconds, stages: Sequence[int]) -> float:
    """Least exchange and update time of a worker with these stages after its last gradient."""
    tails = [times.tail[s] for s in stages]
    return min(tails) if schedule.launches else float_sum(tails)


def _after(schedule: Schedule, placement: Sequence[Sequence[int]], times: PassSeconds) -> list[float]:
    """By stage, least time from when its last gradient leaves for the stage before to the end of the iteration.

    If workers count their own iterations (`spans`), up to the end of the first stage's.
    """
    count = len(times.forward)
    tails = [float("inf")] * count
    for stages in placement:
        for stage in stages:
            tails[stage] = min(tails[stage], times.tail[stage] if schedule.launches else _tail(schedule, times, stages))
    after = [0.0] * count
    for stage in range(1, count):
        ends = times.weight[stage - 1] + tails[stage - 1]
        beyond = after[stage - 1] if schedule.spans and stage > 1 else max(after[stage - 1], ends)
        after[stage] = times.gradient[stage - 1] * (1 / schedule.parts) + beyond
    return after


def one_forward_one_backward_s(counts: Sequence[int], warm_up: Sequence[int], times: PassSeconds) -> float:
    """Longest chain that stays at one stage except for its first and last micro-batch; O(stages^2).

    For stage i with m micro-batches a replica, warm-up w, t = f + b, and later = sum of t over the later stages:

        sum_{j<i} t_j  +  m t_i  +  (later - (w-1) f_i)_+  +  (later - (w-1) b_i)_+

    The two last terms are the wait for the first gradient, which (w-1) forwards fill in part, and the wait for the last
    one, which (w-1) backwards fill in part; if m <= w only the longer of the two counts. The chain ends with the tail
    of stage i or of an earlier one, or leaves after the last forward for the tail of a later one. It equals the
    simulated time for stages of similar length and equal replicas (see docs/simulate.md).

    Args:
        counts: by stage, micro-batches of a replica.
        warm_up: by stage, forwards before the first backward.
        times: times by stage.
    """
    both_s = [f + b for f, b in zip(times.forward, times.gradient, strict=True)]
    lead_s = [0.0, *accumulate(times.gradient)]
    before, later, longest = 0.0, float_sum(both_s), 0.0
    for i, (count, warm_up_count) in enumerate(zip(counts, warm_up, strict=True)):
        f, b, forwards = times.forward[i], times.gradient[i], min(count, warm_up_count)
        later -= both_s[i]
        first, last = max(later - (forwards - 1) * f, 0.0), max(later - (forwards - 1) * b, 0.0)
        if count <= forwards:
            first, last = 0.0, max(first, last)
        stay = before + count * both_s[i] + first + last
        leave = before + count * both_s[i] - forwards * b + first + later + b
        for k, tail in enumerate(times.tail):
            longest = max(longest, (stay if k <= i else leave) - lead_s[k] + tail)
        before += both_s[i]
    return longest
