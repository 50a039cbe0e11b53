"""Costs of stages of blocks i..j, wherever they lie: sums and maxima over ranges of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.exchange import Group
from planner.memory import most_that_fit
from planner.space.blocks import range_table, repeated_bytes
from planner.space.types import BlockCosts


class Ranges:
    """Sums and maxima over blocks i..j; [.., n, n], by device type where times are; meaningful for i <= j.

    Attributes:
        forward_s, backward_s: of all blocks.
        repeat_s: forward of those that a recomputed stage repeats.
        update_s: optimizer step, unsharded.
        step_s: communication inside a replica once an update.
        elements: trainable elements that a stage holds.
        shard_elements: those left to a rank where ranks of a group that hold the same share them out.
        alike: ranks of a group that do, on the mean of the stage's elements; 1 by 1 where none do.
        inner: by `BlockCosts.inner_replicas`, the elements of a stage that are held so.
        workspace_bytes: the largest.
        saved_bytes: kept for a micro-batch in flight.
        checkpoint_bytes: the same of a recomputed stage.
        working_bytes: what a recomputed stage needs beside for the micro-batch whose forward it repeats.
    """

    def __init__(self, costs: BlockCosts) -> None:
        self.forward_s = range_sums(costs.forward_s)
        self.backward_s = range_sums(costs.backward_s)
        charged = range_sums(costs.parameter_elements)
        self.elements = charged - _repeated_elements([(tie.elements, tie.blocks) for tie in costs.ties], len(charged))
        self.shard_elements, self.alike = self.elements, np.ones((1, 1))
        if costs.shard_elements is not None:
            shared = [(tie.shard_elements, tie.blocks) for tie in costs.ties]
            self.shard_elements = range_sums(costs.shard_elements) - _repeated_elements(shared, len(charged))
            held = self.shard_elements > 0
            self.alike = np.divide(self.elements, self.shard_elements, out=np.ones_like(charged), where=held)
        self.inner = tuple(
            range_sums(inner.elements)
            - _repeated_elements([(tie.elements, tie.blocks) for tie in inner.ties], len(charged))
            for inner in costs.inner_replicas
        )
        held = np.divide(self.elements, charged, out=np.zeros_like(charged), where=charged > 0)
        self.update_s = range_sums(costs.update_s) * held
        self.step_s = range_sums(np.zeros(len(charged)) if costs.step_s is None else costs.step_s)
        self.workspace_bytes = range_maxima(costs.workspace_bytes)
        repeated = np.ones(len(charged), dtype=bool) if costs.repeated is None else costs.repeated
        kept_bytes = np.zeros(len(charged)) if costs.kept_bytes is None else costs.kept_bytes
        self.repeat_s = range_sums(np.where(repeated, costs.forward_s, 0.0))
        kept = range_sums(kept_bytes)
        self.saved_bytes = costs.saved_bytes
        self.checkpoint_bytes = costs.checkpoint_bytes + kept
        # When a layer's forward is repeated, the micro-batch has freed what was kept of its later blocks.
        self.working_bytes = np.maximum(repeated_bytes(costs) - kept, 0.0)

    def parts(self, replicas: np.ndarray, group: Group | None) -> np.ndarray:
        """[.., n or 1, n or 1] parts into which stages of so many replicas [..] cut what a group shards."""
        cut = replicas[..., None, None]
        return np.asarray(cut if group is None else cut * self.alike)

    def least_activations(self, recompute: str) -> np.ndarray:
        """[n, n] bytes that one micro-batch needs under a recompute choice."""
        kept = {"never": self.saved_bytes, "always": self.checkpoint_bytes + self.working_bytes}
        return np.asarray(kept.get(recompute, np.minimum(*kept.values())))


@dataclass(frozen=True, eq=False)
class StageNeeds:
    """The least that stages of blocks i..j need, wherever they lie; [n, n] each, by last block j and then by first.

    A stage that goes on for more blocks never needs less, by these figures.

    Attributes:
        whole_s: forward and backward of all blocks on the fastest device of each.
        forward_before_s: [n] forward of the blocks before i.
        before_s: [n] forward and backward of the blocks before i.
        transfer_s: [n] handing activations over to a stage that begins with the block, and gradients back.
        forward_s: forward.
        plain_s: forward and backward without recomputation.
        repeat_s: what recomputation adds.
        hiding_s: longest backward that any stage has.
        plain_limit, again_limit: most micro-batches in flight that fit; 0 where none does, or where the choice is not
            allowed.
        update_s: optimizer step, unsharded but over ranks of a group that hold the same.
        elements: trainable elements that replicas exchange.
    """

    whole_s: float
    forward_before_s: np.ndarray
    before_s: np.ndarray
    transfer_s: np.ndarray
    forward_s: np.ndarray
    plain_s: np.ndarray
    repeat_s: np.ndarray
    hiding_s: float
    plain_limit: np.ndarray
    again_limit: np.ndarray
    update_s: np.ndarray
    elements: np.ndarray
    _first: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, repr=False)

    def first_blocks(self, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 [len(kept), n] each: by micro-batches in flight and last block the first block of the longest stage
        that fits without recomputation and with it; n where none does."""
        for each in set(kept.tolist()) - self._first.keys():
            holds = self.plain_limit >= each, self.again_limit >= each
            self._first[each] = tuple(np.where(h.any(axis=1), h.argmax(axis=1), h.shape[1]) for h in holds)
        plain, again = zip(*(self._first[each] for each in kept.tolist()), strict=True)
        return np.array(plain), np.array(again)


def stage_needs(
    ranges: Ranges,
    resident_bytes: np.ndarray,
    capacity_bytes: float,
    recompute: str,
    transfer_s: np.ndarray,
    group: Group | None = None,
) -> StageNeeds:
    """Needs of stages of which the weights and what goes with them take at least `resident_bytes` [n, n], and transfers
    `transfer_s` [n]; `group` is what the update is sharded over. O(n^2)."""
    update_s = ranges.update_s.min(axis=0) / ranges.parts(np.ones(()), group)
    both_s = ranges.forward_s + ranges.backward_s
    plain_s = both_s.min(axis=0)
    nothing, again_bytes = np.zeros(resident_bytes.shape), resident_bytes + ranges.working_bytes
    plain = nothing if recompute == "always" else _limit(resident_bytes, ranges.saved_bytes, capacity_bytes)
    again = nothing if recompute == "never" else _limit(again_bytes, ranges.checkpoint_bytes, capacity_bytes)
    forward_s, each_s = (np.diagonal(t, axis1=1, axis2=2).min(axis=0) for t in (ranges.forward_s, both_s))
    return StageNeeds(
        whole_s=float(each_s.sum()),
        forward_before_s=np.cumsum(forward_s) - forward_s,
        before_s=np.cumsum(each_s) - each_s,
        transfer_s=transfer_s,
        forward_s=_by_last(ranges.forward_s.min(axis=0)),
        plain_s=_by_last(plain_s),
        repeat_s=_by_last(ranges.repeat_s.min(axis=0)),
        hiding_s=float((ranges.backward_s + ranges.repeat_s).max(axis=0)[0, -1]),
        plain_limit=_by_last(plain),
        again_limit=_by_last(again),
        update_s=_by_last(_least_of_longer(update_s)),
        elements=_by_last(_least_of_longer(ranges.shard_elements)),
    )


def _limit(fixed_bytes: np.ndarray, each_bytes: np.ndarray, capacity_bytes: float) -> np.ndarray:
    limit = np.maximum(most_that_fit(fixed_bytes, each_bytes, capacity_bytes), 0).astype(np.float64)
    return -_least_of_longer(-np.triu(limit))


def _least_of_longer(table: np.ndarray) -> np.ndarray:
    """For each stage the least among itself and those that go on for more blocks."""
    return np.asarray(np.minimum.accumulate(table[:, ::-1], axis=1)[:, ::-1])


def _repeated_elements(tied: Sequence[tuple[float, tuple[int, ...]]], count: int) -> np.ndarray:
    """[n, n] elements that blocks i..j are charged for more than once."""
    return np.triu(range_table(tied, count)[1])


def _by_last(table: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(table.T)


def range_sums(values: np.ndarray) -> np.ndarray:
    """[.., n] to [.., n, n]: the sum over i..j, zero for i > j."""
    prefix = np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1, dtype=np.float64)], axis=-1)
    return np.triu(prefix[..., None, 1:] - prefix[..., :-1, None])


def range_maxima(values: np.ndarray) -> np.ndarray:
    """[n] to [n, n]: the maximum over i..j, zero for i > j."""
    n = len(values)
    spread = np.where(np.arange(n)[None, :] >= np.arange(n)[:, None], values[None, :], -math.inf)
    return np.triu(np.maximum.accumulate(spread, axis=1))
