"""Zero-bubble orders of one stage a worker: forwards as far ahead as memory allows, weight gradients in the gaps.

A worker takes a forward if it may, else an input gradient, else a weight gradient. It may run a forward while fewer
than 2 (p - i) - 1 of its forwards lack their input gradient (more cannot help: so long is the way to the end and back)
and fewer than `limit` lack their weight gradient (those are what its memory holds). With equal times this gives the
published costs: (p-1)(F+B-W) above the ideal for a limit of p, none for 2p - 1, in between for limits in between.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from planner.schedules._greedy import Task, list_schedule
from planner.schedules.types import Action, ActionKind

_KINDS = (ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)


@lru_cache(maxsize=8)
def split_backward_order(stages: int, micro_batches: int, limit: int) -> tuple[tuple[Action, ...], ...]:
    """Forwards, input gradients and weight gradients of each stage, in order; O(actions log actions).

    Args:
        stages: one for each worker.
        micro_batches: of one iteration.
        limit: micro-batches that a worker keeps at the most.
    """
    forwards, inputs, weights = [0] * stages, [0] * stages, [0] * stages
    counts = (forwards, inputs, weights)

    def number(kind: int, stage: int, m: int) -> int:
        return (kind * stages + stage) * micro_batches + m

    def may_open(task: int) -> bool:
        stage = task // micro_batches
        ahead = forwards[stage] - inputs[stage] < 2 * (stages - stage) - 1
        return ahead and forwards[stage] - weights[stage] < limit

    def taken(task: int) -> None:
        counts[task // micro_batches // stages][task // micro_batches % stages] += 1

    tasks = [
        Task(stage, 1, (kind, m), _needs(kind, stage, m, stages, number), kind == 0)
        for kind in range(3)
        for stage in range(stages)
        for m in range(micro_batches)
    ]
    orders = list_schedule(tasks, stages, may_open, taken)
    return tuple(
        tuple(Action(_KINDS[t // micro_batches // stages], worker, t % micro_batches) for t in order)
        for worker, order in enumerate(orders)
    )


def _needs(kind: int, stage: int, m: int, stages: int, number: Callable[[int, int, int], int]) -> tuple[int, ...]:
    needs = [number(kind, stage, m - 1)] if m else []
    if kind == 0 and stage:
        needs.append(number(0, stage - 1, m))
    if kind == 1:
        needs.append(number(0, stage, m))
        if stage < stages - 1:
            needs.append(number(1, stage + 1, m))
    if kind == 2:
        needs.append(number(1, stage, m))
    return tuple(needs)
