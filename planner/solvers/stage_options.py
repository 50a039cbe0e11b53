"""What stages of blocks i..j cost and keep in each way to run one: sharded in one way, recomputed in one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.space.ranges import Ranges
from planner.space.types import BlockCosts, Job

MOST_OPTIONS = 8
"""Options that a stage picks from: of more, those that lie apart."""

BINS = 1000
"""Parts of a worker's memory in which what its stages keep is counted."""


@dataclass(frozen=True, eq=False)
class StageOptions:
    """Tables by option, device type and range of blocks i..j, both inclusive.

    Attributes:
        ways: index of the way to share operators, by option.
        again: bool, whether all layers are repeated, by option.
        repeats: names of the modules that are repeated, by option.
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
    repeats: tuple[tuple[str, ...], ...]
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

    @functools.cached_property
    def work_each_s(self) -> float:
        """Seconds of a micro-batch's way through all blocks, each in the option and on the device of the least."""
        at = np.arange(self.blocks)
        return float(self.work_s[:, :, at, at].min(axis=(0, 1)).sum())

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
        return self.only([best[place] for place in places])

    def only(self, which: Sequence[int]) -> StageOptions:
        """Some of the options."""
        tables = (
            self.forward_s, self.work_s, self.unit_bytes, self.working_bytes, self.workspace_bytes, self.elements,
            self.shard_elements,
        )  # fmt: skip
        kept = list(which)
        return StageOptions(
            tuple(self.ways[o] for o in kept),
            tuple(self.again[o] for o in kept),
            tuple(self.repeats[o] for o in kept),
            *(table[kept] for table in tables),
        )


def stage_options(ways: Sequence[BlockCosts], job: Job) -> StageOptions:
    """Options among which each stage chooses, or all stages together where they are to be alike. O(ways n^2)."""
    known = [(number, Ranges(costs)) for number, costs in enumerate(ways)]
    found = [
        (number, ranges, way)
        for number, ranges in known
        for way in ranges.ways(job.recompute, whole_stages=job.whole_stages)
    ]
    return StageOptions(
        ways=tuple(number for number, _, _ in found),
        again=tuple(way.recompute for _, _, way in found),
        repeats=tuple(way.repeats for _, _, way in found),
        forward_s=np.stack([ranges.forward_s for _, ranges, _ in found]),
        work_s=np.stack([ranges.forward_s + ranges.backward_s + way.repeat_s for _, ranges, way in found]),
        unit_bytes=np.stack([way.saved_bytes for _, _, way in found]),
        working_bytes=np.stack([way.working_bytes for _, _, way in found]),
        workspace_bytes=np.stack([ranges.workspace_bytes for _, ranges, _ in found]),
        elements=np.stack([ranges.elements for _, ranges, _ in found]),
        shard_elements=np.stack([ranges.shard_elements for _, ranges, _ in found]),
    )


def run_pairs(edges: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """First and last block of each stage between boundaries."""
    pairs = np.array(list(itertools.pairwise(edges)))
    return pairs[:, 0], pairs[:, 1] - 1


def packed(seconds: np.ndarray, kept_bytes_: np.ndarray, room: float) -> np.ndarray | None:
    """An option of each stage, [stages, options] given, of the least seconds whose bytes fit; None where none do.

    Exact but for the bytes, which are rounded to `BINS` parts of the room. O(stages * options * BINS).
    """
    if room <= 0:
        return None
    cost = np.rint(np.minimum(kept_bytes_ / room, 2.0) * BINS).astype(np.int64)
    best, came = np.zeros(BINS + 1), []
    for own_s, own in zip(seconds, cost, strict=True):
        tried = np.full((len(own), BINS + 1), np.inf)
        for option, (each_s, size) in enumerate(zip(own_s.tolist(), own.tolist(), strict=True)):
            if size <= BINS:
                tried[option, size:] = best[: BINS + 1 - size] + each_s
        came.append(tried.argmin(axis=0))
        best = tried.min(axis=0)
    if not np.isfinite(best[BINS]):
        return None
    at, chosen = BINS, []
    for options, own in zip(reversed(came), cost[::-1], strict=True):
        chosen.append(int(options[at]))
        at -= int(own[chosen[-1]])
    return np.array(chosen[::-1])
