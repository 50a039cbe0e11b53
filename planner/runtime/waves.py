"""Weights of copies that run ahead of each other: HetPipe's wave-synchronous parallel training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from planner.errors import PlanError
from planner.runtime.interpreter import Values
from planner.runtime.weights import StageWeights


class WaveWeights(StageWeights):
    """Weights of one stage in one virtual worker, which updates them by itself and exchanges what a wave changed.

    A push (`G`) sends the sum of the worker's updates since the last one, a pull (`S`) adds those of the other workers
    in the wave of its number to all versions that are kept. Passes under way keep the weights that their forward read.
    No parameter server is started: a push is an all-reduce that nobody waits for before the pull.
    """

    def __init__(self, pieces: dict[str, torch.Tensor], **options: Any) -> None:  # noqa: ANN401
        super().__init__(pieces, **options)
        self._wave, self._inside = torch.zeros_like(self.flat), False
        self._pushed: dict[int, tuple[Callable[[], None], torch.Tensor, torch.Tensor]] = {}

    def update(self, factor: float = 1.0) -> None:
        """Apply the worker's own gradients, multiplied by a factor, and go on to the next version."""
        before = self.flat.detach().clone()
        self.rows[0].summed = self.rows[0].take_sums(self._finish)
        super().update(factor)
        self._wave += self.flat.detach() - before
        self._inside = True

    def launch(self, number: int = -1) -> None:
        """Push the updates of a wave."""
        own, total = self._wave, self._wave.clone()
        wait = self._group.begin_sum(total) if self._group is not None else lambda: None
        self._pushed[number] = wait, own, total
        self._wave, self._inside = torch.zeros_like(own), False

    def exchange(self, number: int = -1) -> None:
        """Pull the updates of the other workers in a wave: wait until all have pushed it."""
        wait, own, total = self._pushed.pop(number)
        if self._group is None:
            return
        wait()
        others = total - own
        self.flat.data.add_(others)
        row = self.rows[0]
        self._kept = {version: row.leaves(row.packed(kept) + others) for version, kept in self._kept.items()}
        self.leaves = self._kept[self.version]

    def drain(self) -> None:
        """Pull all waves that are left, so that all workers have the weights of the parameter servers."""
        for number in sorted(self._pushed):
            self.exchange(number)
        super().drain()

    def state(self) -> tuple[Values, dict[str, Values]]:
        """As of `StageWeights`; the optimizer's state is this worker's own.

        Raises:
            PlanError: some updates were not pushed: the workers have different weights.
        """
        if self._inside:
            message = "no checkpoint inside a wave: the copies have different weights until all have pushed it"
            raise PlanError(message, where="schedule", hint="let orders end with whole waves")
        return super().state()
