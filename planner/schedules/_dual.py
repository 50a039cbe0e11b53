"""The eight phases of DualPipe for one worker: two directions, forwards and backwards run as one where both are there.

`near` is the number of workers between a worker and the one in the middle where the directions meet. Direction 0 is the
one that begins nearer to the worker, direction 1 the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from planner.schedules.types import Action, ActionKind

Place = Callable[[int, int], tuple[int, int]]
"""Stage and micro-batch number of the k-th micro-batch of a direction."""


class DualWorker:
    """One worker's actions, phase by phase.

    Args:
        near: workers between it and the middle.
        half: workers from one end to the middle.
        share: micro-batches of each direction.
        place: stage and micro-batch of a direction's k-th.
    """

    def __init__(self, near: int, half: int, share: int, place: Place) -> None:
        self._near, self._half, self._share, self._place = near, half, share, place
        self._forwards, self._backwards = [0, 0], [0, 0]
        self._waiting: list[tuple[int, int]] = []

    def actions(self) -> Iterator[Action]:
        """All forwards, backwards (whole or split) and weight gradients, in order."""
        near, outer = self._near, self._half - self._near
        for _ in range(2 * near):
            yield self._forward(0)
        for _ in range(outer):
            yield self._forward(0)
            yield self._forward(1)
        for _ in range(near):
            yield self._input_grad(1)
            yield self._weight_grad()
            yield self._forward(1)
        for step in range(self._share - 2 * self._half + outer):
            apart = step == 0 and near == 0
            yield self._forward(0)
            yield self._backward(1, paired=not apart)
            yield self._forward(1)
            yield self._backward(0, paired=True)
        for _ in range(near):
            yield self._backward(1)
            yield self._forward(1)
            yield self._backward(0, paired=True)
        yield from self._drain(outer)

    def _drain(self, outer: int) -> Iterator[Action]:
        """Backwards of both directions, from the middle on in two parts; then the weight gradients that are left."""
        odd = (self._half - 1 - self._near) % 2 == 1
        split = False
        for step in range(outer):
            split = split or (step == outer // 2 and odd)
            yield self._input_grad(1) if split else self._backward(1)
            split = split or (step == outer // 2 and not odd)
            yield self._input_grad(0) if split else self._backward(0)
        for _ in range(self._near):
            yield self._weight_grad()
            yield self._input_grad(0)
        while self._waiting:
            yield self._weight_grad()

    def _forward(self, direction: int) -> Action:
        stage, m = self._place(direction, self._forwards[direction])
        self._forwards[direction] += 1
        return Action(ActionKind.FORWARD, stage, m)

    def _backward(self, direction: int, paired: bool = False) -> Action:
        stage, m = self._place(direction, self._backwards[direction])
        self._backwards[direction] += 1
        return Action(ActionKind.BACKWARD, stage, m, paired=paired)

    def _input_grad(self, direction: int) -> Action:
        stage, m = self._place(direction, self._backwards[direction])
        self._backwards[direction] += 1
        self._waiting.append((stage, m))
        return Action(ActionKind.INPUT_GRAD, stage, m)

    def _weight_grad(self) -> Action:
        stage, m = self._waiting.pop(0)
        return Action(ActionKind.WEIGHT_GRAD, stage, m)
