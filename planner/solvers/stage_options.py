"""What stages of blocks i..j cost and keep in each way to run one: shared in one way, its forward repeated or not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.space.ranges import Ranges
from planner.space.types import BlockCosts, Job

MOST_OPTIONS = 8
"""Options that a stage picks from: of more, those that lie apart."""


@dataclass(frozen=True, slots=True, eq=False)
class StageOptions:
    """Tables by option, device type and range of blocks i..j, both inclusive.

    Attributes:
        ways: index of the way to share operators, by option.
        again: bool, whether the forward is repeated, by option.
        forward_s: [options, types, n, n] of one micro-batch.
        work_s: [options, types, n, n] forward and backward, and what is repeated.
        unit_bytes: [options, n, n] kept of each micro-batch in flight.
        working_bytes: [options, n, n] kept beside of the micro-batch whose forward is repeated.
        workspace_bytes: [options, n, n].
        elements: [options, n, n] trainable elements.
        shard_elements: [options, n, n] those left to a rank where ranks of a group that hold the same share them out.
    """

    ways: tuple[int, ...]
    again: tuple[bool, ...]
    forward_s: np.ndarray
    work_s: np.ndarray
    unit_bytes: np.ndarray
    working_bytes: np.ndarray
    workspace_bytes: np.ndarray
    elements: np.ndarray
    shard_elements: np.ndarray

    @property
    def blocks(self) -> int:
        """Blocks of the chain."""
        return int(self.elements.shape[-1])

    def worth(
        self, seconds: float, per_element_s: float, units: float, element_bytes: tuple[float, float]
    ) -> StageOptions:
        """Those that no other is both as fast and as lean as, the fastest first; evenly spread where they are many.

        Args:
            seconds: that a second of work takes in an iteration.
            per_element_s: exchange of a trainable element.
            units: micro-batches in flight.
            element_bytes: kept of a trainable element, and of one that is left to a rank.
        """
        at = np.arange(self.blocks)
        elements, left = (table[:, at, at].sum(axis=1) for table in (self.elements, self.shard_elements))
        took = seconds * self.work_s[:, :, at, at].max(axis=1).sum(axis=1) + per_element_s * left
        kept = units * self.unit_bytes[:, at, at].sum(axis=1) + element_bytes[0] * elements + element_bytes[1] * left
        best: list[int] = []
        for option in np.lexsort((kept, took)).tolist():
            if not best or kept[option] < kept[best[-1]]:
                best.append(option)
        places = np.unique(np.linspace(0, len(best) - 1, min(len(best), MOST_OPTIONS)).round().astype(int))
        which = [best[place] for place in places]
        tables = (
            self.forward_s, self.work_s, self.unit_bytes, self.working_bytes, self.workspace_bytes, self.elements,
            self.shard_elements,
        )  # fmt: skip
        return StageOptions(
            tuple(self.ways[o] for o in which), tuple(self.again[o] for o in which), *(table[which] for table in tables)
        )


def stage_options(ways: Sequence[BlockCosts], job: Job) -> StageOptions:
    """All options of stages; O(ways n^2)."""
    known = [(way, again) for way in range(len(ways)) for again in _choices(job)]
    ranges = [Ranges(costs) for costs in ways]
    rows = [_tables(ranges[way], ways[way], job, again=again) for way, again in known]
    columns = [np.stack(column) for column in zip(*rows, strict=True)]
    return StageOptions(tuple(way for way, _ in known), tuple(again for _, again in known), *columns)


def _choices(job: Job) -> tuple[bool, ...]:
    return {"never": (False,), "always": (True,)}.get(job.recompute, (False, True))


def _tables(ranges: Ranges, costs: BlockCosts, job: Job, *, again: bool) -> tuple[np.ndarray, ...]:
    nothing = np.zeros_like(ranges.saved_bytes)
    kept, working, more = ranges.saved_bytes, nothing, 0.0 * ranges.forward_s
    if again and job.whole_stages:
        kept, working, more = np.broadcast_to(costs.boundary_bytes[:-1, None], kept.shape), kept, ranges.forward_s
    elif again:
        kept, working, more = ranges.checkpoint_bytes, ranges.working_bytes, ranges.repeat_s
    work_s = ranges.forward_s + ranges.backward_s + more
    elements = ranges.elements, ranges.shard_elements
    return ranges.forward_s, work_s, kept, working, ranges.workspace_bytes, *elements


def run_pairs(edges: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """First and last block of each stage between boundaries."""
    pairs = np.array(list(itertools.pairwise(edges)))
    return pairs[:, 0], pairs[:, 1] - 1
