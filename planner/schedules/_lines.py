"""Orders of one stage that alternate forwards and backwards, and warm-ups for any replication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from planner.schedules.types import Action, ActionKind


def one_forward_one_backward(stage: int, micro_batches: Sequence[int], forwards: int) -> Iterator[Action]:
    """`forwards` forwards, then a backward and a forward in turn, then the remaining backwards."""
    for m in micro_batches[:forwards]:
        yield Action(ActionKind.FORWARD, stage, m)
    for done, coming in zip(micro_batches, micro_batches[forwards:], strict=False):
        yield Action(ActionKind.BACKWARD, stage, done)
        yield Action(ActionKind.FORWARD, stage, coming)
    for m in micro_batches[max(len(micro_batches) - forwards, 0) :]:
        yield Action(ActionKind.BACKWARD, stage, m)


def paced_warm_up(replicas: Sequence[int]) -> tuple[int, ...]:
    """Forwards of each stage's replicas before their first backward, so that nobody starves: 1 + ceil(n(i+1) / r(i)).

    n(i) = r(i) w(i) micro-batches pass stage i in its warm-up. The recurrence runs from the last stage to the first,
    so a search that adds stages in front can carry n of the stage added last.
    """
    forwards: list[int] = []
    passing = 0
    for count in reversed(replicas):
        forwards.append(1 + -(-passing // count))
        passing = count * forwards[-1]
    return tuple(reversed(forwards))


def paced_after(
    replicas: np.ndarray, passing: np.ndarray, micro_batches: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The recurrence of `paced_warm_up`: what a replica keeps, what passes the stage before its first backward, and
    the forwards that it runs while it waits for its first gradient."""
    forwards = 1 + -(-passing // replicas)
    kept = np.minimum(micro_batches // replicas, forwards)
    return kept, forwards * replicas, kept - 1


def least_warm_up(replicas: Sequence[int]) -> tuple[int, ...]:
    """Workers from each stage to the end, divided by its replicas and rounded up: the fewest that never deadlock."""
    total, forwards = 0, []
    for count in reversed(replicas):
        total += count
        forwards.append(-(-total // count))
    return tuple(reversed(forwards))
