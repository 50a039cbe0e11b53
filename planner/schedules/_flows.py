"""Orders that never drain: forwards and backwards in turn, updates in between, each with the version it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from planner.schedules.types import Action, ActionKind, Pipeline

NEWEST = -1


def flowing(
    stage: int,
    micro_batches: Sequence[int],
    forwards: int,
    read: Callable[[int], int],
    follow: Callable[[int], Iterator[Action]],
    before: Callable[[int], Iterator[Action]] = lambda _: iter(()),
) -> Iterator[Action]:
    """One worker's order: a warm-up, then a backward and a forward in turn, to the end of its micro-batches.

    Args:
        stage: which.
        micro_batches: the worker's own, in order.
        forwards: its warm-up.
        read: version that the forward and backward of own micro-batch j read, -1 for the newest.
        follow: actions after the backward of own micro-batch j.
        before: actions before the forward of own micro-batch j.
    """

    def forward(j: int) -> Iterator[Action]:
        yield from before(j)
        yield Action(ActionKind.FORWARD, stage, micro_batches[j], version=read(j))

    count = len(micro_batches)
    for j in range(min(forwards, count)):
        yield from forward(j)
    for j in range(count):
        yield Action(ActionKind.BACKWARD, stage, micro_batches[j], version=read(j))
        yield from follow(j)
        if j + forwards < count:
            yield from forward(j + forwards)


def update_every(stage: int, replicas: int, period: int) -> Callable[[int], Iterator[Action]]:
    """After each `period` own backwards the replicas exchange gradients, where there are several, and update."""

    def follow(j: int) -> Iterator[Action]:
        if (j + 1) % period == 0:
            number = j // period
            if replicas > 1:
                yield Action(ActionKind.SYNC, stage, number)
            yield Action(ActionKind.UPDATE, stage, number)

    return follow


def own_micro_batches(pipeline: Pipeline, stage: int, replica: int, iterations: int) -> range:
    """Micro-batches of some iterations that one replica works on."""
    return range(replica, pipeline.micro_batches * iterations, pipeline.replicas[stage])


def falling(counts: Sequence[int]) -> bool:
    """Whether no count is larger than the one before."""
    return all(later <= earlier for earlier, later in pairwise(counts))
