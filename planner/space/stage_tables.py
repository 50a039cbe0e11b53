"""Tables over stages of blocks i..j-1 without recomputation, for the partition problems of publications."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from planner.costs.precision import Precision
from planner.space.cuts import run_sums
from planner.space.ranges import Ranges
from planner.space.types import BlockCosts, StageChoice


class StageTables:
    """Tables of one micro-batch size, float64 [n + 1, n + 1]; meaningful for i < j.

    Args:
        costs: of the chain's blocks.
        precision: number formats.
        state_bytes: optimizer state of a parameter.

    Attributes:
        costs, precision, state_bytes: as given.
        real: bool, whether i < j.
        stage_s: forward and backward on a device of mean speed; infinite where that is no stage.
        elements: trainable elements, shared ones once.
        saved_bytes: activations of a micro-batch in flight.
        workspace_bytes: the largest of a block.
    """

    def __init__(self, costs: BlockCosts, precision: Precision, state_bytes: float) -> None:
        self.costs, self.precision, self.state_bytes = costs, precision, state_bytes
        ranges = Ranges(costs)
        count = len(costs.parameter_elements) + 1
        self.real = np.arange(count)[:, None] < np.arange(count)[None, :]
        self.stage_s = np.where(self.real, run_sums((costs.forward_s + costs.backward_s).mean(axis=0)), np.inf)
        self.elements, self.saved_bytes, self.workspace_bytes = (
            _framed(table) for table in (ranges.elements, ranges.saved_bytes, ranges.workspace_bytes)
        )

    def needed_bytes(self, in_flight: float, versions: int = 1) -> np.ndarray:
        """What a device of a stage needs, the runtime's reserve left out.

        Args:
            in_flight: micro-batches whose activations it keeps.
            versions: of its weights.
        """
        chosen = self.precision
        state = (chosen.weight_bytes * versions + chosen.gradient_bytes + self.state_bytes) * self.elements
        return np.asarray(state + self.workspace_bytes + in_flight * self.saved_bytes)


def stages_of(boundaries: Iterable[int], replicas: int = 1) -> tuple[StageChoice, ...]:
    """Stages between boundaries."""
    return tuple(StageChoice(a, b, replicas) for a, b in itertools.pairwise(boundaries))


def _framed(values: np.ndarray) -> np.ndarray:
    """[n, n] over i..j inclusive to [n + 1, n + 1] over i..j-1."""
    return np.pad(np.triu(values), ((0, 1), (1, 0)))
