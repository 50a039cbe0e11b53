"""Time and memory of stages of blocks i..j in each option: one sharding with one choice of recomputation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from planner.space.configuration import RecomputeChoice
from planner.space.ranges import Ranges
from planner.space.types import BlockCosts, Job

MAX_OPTIONS = 8
"""Options that a stage picks from; more are thinned out evenly between the fastest and the leanest."""

BINS = 1000
"""Bins that a worker's memory is divided into for the knapsack over its stages."""


@dataclass(frozen=True, eq=False)
class StageOptions:
    """Tables by option, device type and range of blocks i..j, both inclusive.

    Attributes:
        shardings: index of the sharding, by option.
        ways: what is recomputed, by option.
        forward_s: [options, types, n, n] of one micro-batch.
        work_s: [options, types, n, n] forward, backward and recomputation of one micro-batch.
        unit_bytes: [options, n, n] kept of each micro-batch in flight.
        working_bytes: [options, n, n] kept in addition of the micro-batch that is recomputed.
        waiting_bytes: [options, n, n] kept of a micro-batch between the halves of a split backward.
        turning_bytes: [options, n, n] kept at most of a micro-batch in the first half.
        workspace_bytes: [options, n, n] scratch memory.
        elements: [options, n, n] trainable elements.
        shard_elements: [options, n, n] elements left to a rank after the ranks of a group divide those they all hold.
    """

    shardings: tuple[int, ...]
    ways: tuple[RecomputeChoice, ...]
    forward_s: np.ndarray
    work_s: np.ndarray
    unit_bytes: np.ndarray
    working_bytes: np.ndarray
    waiting_bytes: np.ndarray
    turning_bytes: np.ndarray
    workspace_bytes: np.ndarray
    elements: np.ndarray
    shard_elements: np.ndarray

    @property
    def blocks(self) -> int:
        """Blocks of the chain."""
        return int(self.elements.shape[-1])

    @functools.cached_property
    def work_each_s(self) -> float:
        """Seconds of one micro-batch through all blocks, each in its fastest option on its fastest device."""
        at = np.arange(self.blocks)
        return float(self.work_s[:, :, at, at].min(axis=(0, 1)).sum())

    def worth(
        self, seconds: float, per_element_s: float, units: float, element_bytes: tuple[float, float]
    ) -> StageOptions:
        """The options on the Pareto front of time and memory, fastest first, at most `MAX_OPTIONS`.

        Args:
            seconds: seconds of an iteration per second of a micro-batch's work.
            per_element_s: exchange time per trainable element.
            units: micro-batches in flight.
            element_bytes: state bytes per trainable element, and per element left to a rank.
        """
        at = np.arange(self.blocks)
        elements, shard_elements = (table[:, at, at].sum(axis=1) for table in (self.elements, self.shard_elements))
        total_s = seconds * self.work_s[:, :, at, at].max(axis=1).sum(axis=1) + per_element_s * shard_elements
        kept_bytes = (
            units * self.unit_bytes[:, at, at].sum(axis=1)
            + element_bytes[0] * elements
            + element_bytes[1] * shard_elements
        )
        front: list[int] = []
        for option in np.lexsort((kept_bytes, total_s)).tolist():
            if not front or kept_bytes[option] < kept_bytes[front[-1]]:
                front.append(option)
        places = np.unique(np.linspace(0, len(front) - 1, min(len(front), MAX_OPTIONS)).round().astype(int))
        return self.only([front[place] for place in places])

    def only(self, options: Sequence[int]) -> StageOptions:
        """Some of the options."""
        shardings, ways, *tables = (getattr(self, field.name) for field in fields(self))
        own_shardings, own_ways = (tuple(each[o] for o in options) for each in (shardings, ways))
        return StageOptions(own_shardings, own_ways, *(table[list(options)] for table in tables))


def stage_options(shardings: Sequence[BlockCosts], job: Job) -> StageOptions:
    """All options of a stage: each sharding with each allowed choice of recomputation. O(options n^2)."""
    options = [
        (number, ranges, way)
        for number, ranges in enumerate(map(Ranges, shardings))
        for way in ranges.ways(job.recompute, whole_stages=job.whole_stages)
    ]
    halves = [ranges.halves(way.choice, whole_stages=job.whole_stages) for _, ranges, way in options]
    return StageOptions(
        shardings=tuple(number for number, _, _ in options),
        ways=tuple(way.choice for _, _, way in options),
        forward_s=np.stack([ranges.forward_s for _, ranges, _ in options]),
        work_s=np.stack([ranges.forward_s + ranges.backward_s + way.repeat_s for _, ranges, way in options]),
        unit_bytes=np.stack([way.saved_bytes for _, _, way in options]),
        working_bytes=np.stack([way.working_bytes for _, _, way in options]),
        waiting_bytes=np.stack([waiting for waiting, _ in halves]),
        turning_bytes=np.stack([turning for _, turning in halves]),
        workspace_bytes=np.stack([ranges.workspace_bytes for _, ranges, _ in options]),
        elements=np.stack([ranges.elements for _, ranges, _ in options]),
        shard_elements=np.stack([ranges.shard_elements for _, ranges, _ in options]),
    )


def run_pairs(edges: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """First and last block of each stage between boundaries."""
    pairs = np.array(list(itertools.pairwise(edges)))
    return pairs[:, 0], pairs[:, 1] - 1


def packed(seconds: np.ndarray, kept_bytes: np.ndarray, room: float) -> np.ndarray | None:
    """Multiple-choice knapsack: one option per stage with the least total seconds whose bytes fit; None if none do.

    Args:
        seconds: [stages, options].
        kept_bytes: [stages, options], rounded to `BINS` parts of `room`.
        room: bytes.

    O(stages * options * BINS).
    """
    if room <= 0:
        return None
    sizes = np.rint(np.minimum(kept_bytes / room, 2.0) * BINS).astype(np.int64)
    best_s, picks = np.zeros(BINS + 1), []
    for stage_s, stage_sizes in zip(seconds, sizes, strict=True):
        total_s = np.full((len(stage_sizes), BINS + 1), np.inf)
        for option, (option_s, size) in enumerate(zip(stage_s.tolist(), stage_sizes.tolist(), strict=True)):
            if size <= BINS:
                total_s[option, size:] = best_s[: BINS + 1 - size] + option_s
        picks.append(total_s.argmin(axis=0))
        best_s = total_s.min(axis=0)
    if not np.isfinite(best_s[BINS]):
        return None
    used, chosen = BINS, []
    for pick, stage_sizes in zip(reversed(picks), sizes[::-1], strict=True):
        chosen.append(int(pick[used]))
        used -= int(stage_sizes[chosen[-1]])
    return np.array(chosen[::-1])
