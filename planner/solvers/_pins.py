"""Blocks that must be on a certain stage, as a search that adds stages in front sees them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from planner.space.problem import StageProblem


@dataclass(frozen=True, slots=True)
class Pins:
    """What pinned blocks mean for a new first stage.

    Attributes:
        first: last block that must be on the first stage; -1 where none must.
        behind: blocks, and how many stages come after the one that each must be on.
    """

    first: int
    behind: tuple[tuple[int, int], ...]

    @staticmethod
    def of(problem: StageProblem) -> Pins:
        """The pins of a problem; those counted from the front need its number of stages (`by_count`)."""
        first = max((b for b, stage in problem.pins.tolist() if stage == 0), default=-1)
        total = int(problem.stage_counts[0]) if len(problem.stage_counts) else 0
        behind = tuple(
            (b, -stage - 1 if stage < 0 else total - 1 - stage) for b, stage in problem.pins.tolist() if stage
        )
        return Pins(first, behind)

    def allow(self, i: int, stop: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Whether stages of blocks i..stop-1 may stand before so many others; bool of the shape of both."""
        allowed = np.full(stop.shape, i == 0 or i > self.first)
        for block, number in self.behind:
            allowed &= (after != number) | ((i <= block) & (stop > block))
            allowed &= (after >= number) | (i > block)
            allowed &= number >= 0  # there are not so many stages
        return allowed


def by_count(problem: StageProblem) -> tuple[StageProblem, ...]:
    """The problem, or one for each number of stages where a pin counts from the front and so needs to know it."""
    if len(problem.stage_counts) == 1 or not (problem.pins[:, 1] > 0).any():
        return (problem,)
    most = min(problem.blocks, problem.slice_devices, problem.max_stages or problem.blocks)
    counts = [n for n in range(1, most + 1) if not len(problem.stage_counts) or n in problem.stage_counts]
    return tuple(replace(problem, stage_counts=np.array([n]), max_stages=n) for n in counts)
