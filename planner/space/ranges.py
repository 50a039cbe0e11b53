"""Costs of stages of blocks i..j, wherever they lie: sums and maxima over ranges of blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.exchange import RankGroup
from planner.memory import most_that_fit
from planner.space.blocks import range_sums, range_table, repeated_bytes
from planner.space.configuration import KEEP_ALL, RecomputeChoice
from planner.space.layers import Layers
from planner.space.recompute_choices import ways_of
from planner.space.repeats import BUFFERS, selective_costs
from planner.space.types import BlockCosts

_Table = Callable[[np.ndarray], np.ndarray]

PARTS = 4
"""Ranges of the number of recomputed layers that bounds tell apart."""


@dataclass(frozen=True, slots=True, eq=False)
class StageWay:
    """Costs of one way to keep or to recompute a stage's activations, by ranges of blocks i..j.

    Attributes:
        choice: the way.
        repeat_s: [t, n, n] seconds of recomputation in the backward.
        saved_bytes: [n, n] activation bytes of each micro-batch in flight.
        working_bytes: [n, n] further activation bytes of the micro-batch whose forward is being repeated.
        moved_bytes: [n, n] activation bytes of each micro-batch in flight that lie in the host's memory; None where
            nothing does.
    """

    choice: RecomputeChoice
    repeat_s: np.ndarray
    saved_bytes: np.ndarray
    working_bytes: np.ndarray
    moved_bytes: np.ndarray | None = None


def first_layers_bytes(
    all_layers: tuple[np.ndarray, np.ndarray],
    plain_bytes: np.ndarray,
    at: tuple[np.ndarray | int, ...],
    span: tuple[np.ndarray | int, np.ndarray],
    kept_from: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Activation bytes of stages that recompute their layers before a block, and keep the blocks behind whole.

    The blocks behind have freed their activations by the time that a layer is repeated.

    Args:
        all_layers: [.., n, n] `saved_bytes` and `working_bytes` of stages that recompute all their layers.
        plain_bytes: [.., n, n] `saved_bytes` of stages that recompute nothing.
        at: indices of the tables' leading axes.
        span: first and last block of each stage.
        kept_from: the first block behind; the one after the last for none.

    Returns: `saved_bytes` and `working_bytes` as of `StageWay`.
    """
    first, last = span
    saved_bytes, working_bytes = (table[(*at, first, kept_from - 1)] for table in all_layers)
    behind = plain_bytes[(*at, np.minimum(kept_from, last), last)]
    behind_bytes = np.where(kept_from <= last, behind, 0.0)
    return saved_bytes + behind_bytes, np.maximum(working_bytes - behind_bytes, 0.0)


class Ranges:
    """Sums and maxima over blocks i..j; [.., n, n], by device type where times are; meaningful for i <= j.

    Args:
        costs: costs of the blocks.
        by_block: of blocks instead, [.., n] everywhere: `np.diagonal` for stages of one block, `least_added` for what
            a block adds to any stage at the least.

    Attributes:
        forward_s, backward_s: seconds of all blocks, without recomputation.
        update_s: seconds of the optimizer step, unsharded.
        step_s: seconds of communication inside a replica once an update.
        elements: trainable elements of a stage, tied ones counted once.
        shard_elements: elements of a rank's shard where ranks of a replica hold the same elements and split them.
        inner_shards: number of such shards, averaged over the stage's elements; [1, 1] ones if there are none.
        inner: elements of a stage by entry of `BlockCosts.inner_replicas`.
        workspace_bytes: largest workspace of a block.
        saved_bytes: activation bytes of a micro-batch in flight, without recomputation.
        exchanged: number of blocks that exchange elements in a pass (ZeRO-2 and 3), and of these elements.
    """

    def __init__(self, costs: BlockCosts, *, by_block: _Table | None = None) -> None:
        self._costs, self._alone = costs, by_block is not None
        self._sums: _Table = np.asarray if self._alone else range_sums
        self._maxima: _Table = np.asarray if self._alone else range_maxima
        self._table: _Table = by_block or np.asarray
        self._ways: dict[tuple[RecomputeChoice, bool], StageWay] = {}
        self.forward_s, self.backward_s = self._sums(costs.forward_s), self._sums(costs.backward_s)
        block_sums = self._sums(costs.parameter_elements)
        self.elements = block_sums - self._repeated([(tie.elements, tie.blocks) for tie in costs.ties])
        self.shard_elements, self.inner_shards = self.elements, np.ones((1, 1))
        if costs.shard_elements is not None:
            tied_shards = [(tie.shard_elements, tie.blocks) for tie in costs.ties]
            self.shard_elements = self._sums(costs.shard_elements) - self._repeated(tied_shards)
            held = self.shard_elements > 0
            self.inner_shards = np.divide(self.elements, self.shard_elements, out=np.ones_like(block_sums), where=held)
        self.inner = tuple(
            self._sums(inner.elements) - self._repeated([(tie.elements, tie.blocks) for tie in inner.ties])
            for inner in costs.inner_replicas
        )
        held = np.divide(self.elements, block_sums, out=np.zeros_like(block_sums), where=block_sums > 0)
        self.update_s = self._sums(costs.update_s) * held
        self.step_s = self._sums(_or_zeros(costs.step_s, block_sums))
        self.workspace_bytes = self._maxima(costs.workspace_bytes)
        self.saved_bytes = self._table(costs.saved_bytes)
        exchanged = costs.exchanged_elements
        self.exchanged = self._sums(exchanged > 0), self._sums(exchanged)

    def _repeated(self, tied: Sequence[tuple[float, tuple[int, ...]]]) -> np.ndarray:
        """Tied elements that the sum over blocks i..j counts more than once."""
        return self._table(np.triu(range_table(tied, len(self._costs.parameter_elements))[1]))

    def parts(self, replicas: np.ndarray, group: RankGroup | None) -> np.ndarray:
        """[.., n or 1, n or 1] number of shards that a group makes of stages with so many replicas [..]."""
        shards = replicas[..., None, None]
        return np.asarray(shards if group is None else shards * self.inner_shards)

    def ways(self, choice: str, *, whole_stages: bool = False) -> tuple[StageWay, ...]:
        """The ways to recompute that a choice allows, fastest first.

        Args:
            choice: as in `Job.recompute`.
            whole_stages: a recomputed stage repeats its whole forward from its input, instead of layer by layer.

        Raises:
            UsageError: modules are named, and their prices are not known.
            JobError: the model has no module of a name.
        """
        return tuple(self.way(each, whole_stages=whole_stages) for each in ways_of(choice, self._costs))

    def way(self, choice: RecomputeChoice, *, whole_stages: bool = False) -> StageWay:
        """One way to keep or to recompute a stage's activations; see `ways`."""
        key = choice, whole_stages
        if key not in self._ways:
            kept = self._sums(_or_zeros(self._costs.kept_bytes, self._costs.parameter_elements))
            if choice == KEEP_ALL:
                nothing = np.zeros_like(self.saved_bytes)
                way = StageWay(choice, np.zeros_like(self.forward_s), self.saved_bytes, nothing)
            elif not choice.recompute:
                way = self._selective(choice, kept)
            else:
                way = self._layers(choice, kept, whole_stages=whole_stages)
                way = self._first_layers(way) if choice.layers else way
                way = self._without_inputs(way, kept) if choice.offload else way
            self._ways[key] = way
        return self._ways[key]

    def halves(self, choice: RecomputeChoice, *, whole_stages: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Activation bytes of a micro-batch whose backward is split: between its halves, and most in the first half.

        In the first half blocks before the one at work are as the forward left them, those behind it wait, and a layer
        or module that is recomputed is all there while it runs. As `space.terms` has it; O(n^2).
        """
        costs, way = self._costs, self.way(choice, whole_stages=whole_stages)
        if costs.waiting_bytes is None:
            return way.saved_bytes, way.saved_bytes + way.working_bytes
        waiting, plain = self._sums(costs.waiting_bytes), np.diagonal(costs.saved_bytes)
        if choice.repeats or (choice.offload and not choice.recompute):
            prices = selective_costs(costs, choice.repeats, choice.offload)
            turning = self._turning(np.diagonal(prices.saved_bytes), prices.working_bytes)
        elif whole_stages or not choice.recompute:
            turning = self._turning(plain, np.zeros_like(plain))
        else:
            turning = self._turning_of_layers(choice, waiting, plain)
        turning = np.maximum(turning, np.maximum(way.saved_bytes, waiting))
        return waiting, turning + way.saved_bytes if choice.recompute and whole_stages else turning

    def _turning(self, before: np.ndarray, again: np.ndarray) -> np.ndarray:
        """Most bytes in the first half of a split backward, from [n] those of blocks before their backward, and those
        that they make again for it."""
        if self._alone or self._costs.waiting_bytes is None:
            return np.asarray(before + again)
        change = np.concatenate([[0.0], np.cumsum(before - self._costs.waiting_bytes)])
        most = range_maxima(change[1:] + again) - change[:-1, None]
        return np.asarray(np.triu(range_sums(self._costs.waiting_bytes) + most))

    def _turning_of_layers(self, choice: RecomputeChoice, waiting: np.ndarray, plain: np.ndarray) -> np.ndarray:
        """The same of stages that recompute layers, all of them or the first so many."""
        costs, block = self._costs, np.arange(len(plain))
        starts = block if costs.layer_starts is None else costs.layer_starts
        repeated = np.ones(len(plain), bool) if costs.repeated is None else costs.repeated
        inputs = np.where((block == starts) & (not choice.offload), np.diagonal(costs.checkpoint_bytes), 0.0)
        before = np.where(repeated, inputs, _or_zeros(costs.kept_bytes, plain))
        turning = self._turning(before, np.where(repeated, costs.saved_bytes[starts, block], 0.0))
        if not choice.layers or self._alone:
            return turning
        first, last = np.triu_indices(len(plain))
        kept_from = costs.layers.kept_from(first, last + 1, choice.layers)
        behind = np.minimum(kept_from, last), last
        some = np.maximum(
            range_sums(before)[first, kept_from - 1] + self._turning(plain, np.zeros_like(plain))[behind],
            turning[first, kept_from - 1] + waiting[behind],
        )
        table = turning.copy()
        table[first, last] = np.where(kept_from <= last, some, turning[first, last])
        return table

    def _selective(self, choice: RecomputeChoice, kept: np.ndarray) -> StageWay:
        prices = selective_costs(self._costs, choice.repeats, choice.offload)
        # By the time a module is recomputed, the micro-batch has freed the activations of the last block.
        working = np.maximum(self._maxima(prices.working_bytes) - kept, 0.0)
        way = StageWay(choice, self._sums(prices.repeat_s), self._table(prices.saved_bytes), working)
        if not choice.offload:
            return way
        return self._offloaded(way, self._table(prices.moved_bytes), prices.block_moved_bytes)

    def _without_inputs(self, all_layers: StageWay, kept: np.ndarray) -> StageWay:
        """The way to recompute all layers whose inputs lie in the host's memory: what is left is kept whole."""
        inputs = self._costs.checkpoint_bytes
        way = replace(all_layers, saved_bytes=kept)
        return self._offloaded(way, self._table(inputs), np.diagonal(inputs))

    def _offloaded(self, way: StageWay, moved_bytes: np.ndarray, of_blocks: np.ndarray) -> StageWay:
        """A way with what moves to the host, of which that of `BUFFERS` blocks is on the device."""
        buffered_bytes = np.minimum(moved_bytes, BUFFERS * self._maxima(of_blocks))
        return replace(way, working_bytes=way.working_bytes + buffered_bytes, moved_bytes=moved_bytes)

    def _layers(self, choice: RecomputeChoice, kept: np.ndarray, *, whole_stages: bool) -> StageWay:
        costs = self._costs
        if whole_stages:
            saved = np.broadcast_to(costs.boundary_bytes[:-1, None], costs.saved_bytes.shape)
            return StageWay(choice, self.forward_s, self._table(saved), self.saved_bytes)
        repeat_s = self._sums(costs.forward_s if costs.repeated is None else costs.forward_s * costs.repeated)
        working = np.maximum(self._table(repeated_bytes(costs)) - kept, 0.0)
        return StageWay(choice, repeat_s, self._table(costs.checkpoint_bytes) + kept, working)

    def _first_layers(self, all_layers: StageWay) -> StageWay:
        """The way to recompute the first layers of a stage, as many as it says; one block is of one layer at most."""
        if self._alone:
            return all_layers
        count = len(self.saved_bytes)
        first, last = (np.broadcast_to(np.arange(count)[axis], (count, count)) for axis in ((..., None), (None, ...)))
        last = np.maximum(first, last)
        kept_from = self._costs.layers.kept_from(first, last + 1, all_layers.choice.layers)
        tables = all_layers.saved_bytes, all_layers.working_bytes
        saved, working = first_layers_bytes(tables, self.saved_bytes, (), (first, last), kept_from)
        repeat_s = all_layers.repeat_s[:, first, kept_from - 1]
        return StageWay(all_layers.choice, repeat_s, np.triu(saved), np.triu(working))

    def least_needs(self, choices: Iterable[RecomputeChoice], layers: Layers | None) -> Iterator[StageWay]:
        """Lower bounds on some ways to recompute.

        Args:
            choices: the ways, fastest first.
            layers: the layers of the chain, where stages may recompute the first ones: a bound for each of `PARTS`
                ranges of their number, with the time of the fewest and the memory of the most. None where they may not.
        """
        ways = [self.way(each) for each in choices]
        yield from ways
        if layers is None:
            return
        all_layers, n = ways[-1], len(self.saved_bytes)
        span = np.triu_indices(n)
        count = layers.count(span[0], span[1] + 1)
        tables = all_layers.saved_bytes, all_layers.working_bytes
        edges = [-(-count * part // PARTS) for part in range(PARTS + 1)]
        for few, most in itertools.pairwise(edges):
            fewest, largest = (layers.kept_from(span[0], span[1] + 1, each) for each in (few + 1, most))
            kept, _ = first_layers_bytes(tables, self.saved_bytes, (), span, largest)
            _, working = first_layers_bytes(tables, self.saved_bytes, (), span, fewest)
            repeat_s, saved_bytes, working_bytes = np.zeros_like(self.forward_s), np.zeros((n, n)), np.zeros((n, n))
            repeat_s[:, *span] = all_layers.repeat_s[:, span[0], fewest - 1]
            saved_bytes[span], working_bytes[span] = kept, working
            yield StageWay(all_layers.choice, repeat_s, saved_bytes, working_bytes)


def _or_zeros(values: np.ndarray | None, like: np.ndarray) -> np.ndarray:
    return np.zeros(len(like)) if values is None else values


@dataclass(frozen=True, eq=False)
class StageNeeds:
    """Lower bounds on time and memory of stages of blocks i..j at any place; [n, n] by last block j, then first i.

    They never fall when a stage gets more blocks.

    Attributes:
        whole_s: seconds of forward and backward of all blocks, each on its fastest device type.
        forward_before_s: [n] forward seconds of the blocks before i.
        before_s: [n] forward and backward seconds of the blocks before i.
        transfer_s: [n] seconds to send activations to a stage that begins with the block, and gradients back.
        forward_s: forward seconds.
        backward_s: backward seconds without recomputation.
        plain_s: forward and backward seconds without recomputation.
        repeat_s: [ways, n, n] seconds of recomputation.
        hiding_s: backward seconds of the whole model with the slowest recomputation: no stage's backward is longer.
        limit: [ways, n, n] most micro-batches in flight that fit in memory; 0 where none does.
        update_s: seconds of the optimizer step, sharded only over ranks of a replica that hold the same elements.
        elements: trainable elements that replicas exchange.
        exchanged: [2, n, n] number of blocks that exchange elements in a pass, and of these elements.
    """

    whole_s: float
    forward_before_s: np.ndarray
    before_s: np.ndarray
    transfer_s: np.ndarray
    forward_s: np.ndarray
    backward_s: np.ndarray
    plain_s: np.ndarray
    repeat_s: np.ndarray
    hiding_s: float
    limit: np.ndarray
    update_s: np.ndarray
    elements: np.ndarray
    exchanged: np.ndarray
    _first: dict[int, np.ndarray] = field(default_factory=dict, repr=False)

    def first_blocks(self, kept: np.ndarray) -> np.ndarray:
        """int64 [ways, len(kept), n] first block of the longest stage that fits in memory; n where none does.

        By way to recompute, micro-batches in flight and last block.
        """
        for each in set(kept.tolist()) - self._first.keys():
            self._first[each] = first_true(self.limit >= each)
        return np.stack([self._first[each] for each in kept.tolist()], axis=1)


def stage_needs(
    ranges: Ranges,
    resident_bytes: np.ndarray,
    capacity_bytes: float,
    ways: Iterable[StageWay],
    transfer_s: np.ndarray,
    group: RankGroup | None = None,
) -> StageNeeds:
    """Lower bounds on what stages need; O(n^2).

    Args:
        ranges: costs of blocks i..j.
        resident_bytes: [n, n] lower bound on the bytes of weights, gradients, optimizer state and workspace.
        capacity_bytes: memory of the largest device.
        ways: lower bounds on the ways to recompute.
        transfer_s: [n] lower bound on the transfers before a stage.
        group: ranks over which the update is sharded.
    """
    update_s = ranges.update_s.min(axis=0) / ranges.parts(np.ones(()), group)
    both_s = ranges.forward_s + ranges.backward_s
    plain_s = both_s.min(axis=0)
    limits, repeats_s, hiding_s = list[np.ndarray](), list[np.ndarray](), 0.0
    for way in ways:
        limit = _most_in_flight(resident_bytes + way.working_bytes, way.saved_bytes, capacity_bytes)
        repeat_s = way.repeat_s.min(axis=0)
        faster = [known for known, known_s in zip(limits, repeats_s, strict=True) if (known_s <= repeat_s).all()]
        if not faster or (limit > np.maximum.reduce(faster)).any():  # else a faster way fits wherever this one does
            limits.append(limit)
            repeats_s.append(repeat_s)
            hiding_s = max(hiding_s, float((ranges.backward_s + way.repeat_s).max(axis=0)[0, -1]))
    forward_s, each_s = (np.diagonal(t, axis1=1, axis2=2).min(axis=0) for t in (ranges.forward_s, both_s))
    return StageNeeds(
        whole_s=float(each_s.sum()),
        forward_before_s=np.cumsum(forward_s) - forward_s,
        before_s=np.cumsum(each_s) - each_s,
        transfer_s=transfer_s,
        forward_s=_by_last(ranges.forward_s.min(axis=0)),
        backward_s=_by_last(ranges.backward_s.min(axis=0)),
        plain_s=_by_last(plain_s),
        repeat_s=np.stack([_by_last(repeat_s) for repeat_s in repeats_s]),
        hiding_s=hiding_s,
        limit=np.stack([_by_last(limit) for limit in limits]),
        update_s=_by_last(_min_of_longer(update_s)),
        elements=_by_last(_min_of_longer(ranges.shard_elements)),
        exchanged=np.stack([_by_last(table) for table in ranges.exchanged]),
    )


def _most_in_flight(fixed_bytes: np.ndarray, each_bytes: np.ndarray, capacity_bytes: float) -> np.ndarray:
    limit = np.maximum(most_that_fit(fixed_bytes, each_bytes, capacity_bytes), 0).astype(np.float64)
    return -_min_of_longer(-np.triu(limit))


def _min_of_longer(table: np.ndarray) -> np.ndarray:
    """For each stage, the least value among itself and all stages with the same first block and more blocks."""
    return np.asarray(np.minimum.accumulate(table[:, ::-1], axis=1)[:, ::-1])


def _by_last(table: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(table.T)


def first_true(holds: np.ndarray) -> np.ndarray:
    """Index of the first true along the last axis; the axis length if there is none."""
    return np.asarray(np.where(holds.any(axis=-1), holds.argmax(axis=-1), holds.shape[-1]))


def least_added(table: np.ndarray) -> np.ndarray:
    """[n, n] over blocks i..j to [n]: what a block adds at the least to any stage that it ends, never below zero.

    The sum over the blocks of a stage is no more than its entry, also where blocks share what they keep.
    """
    before = np.pad(table, ((0, 0), (1, 0)))[:, :-1]
    stages = np.where(np.tri(len(table), dtype=bool).T, table - before, math.inf)
    return np.asarray(np.maximum(stages.min(axis=0), 0.0))


def range_maxima(values: np.ndarray) -> np.ndarray:
    """[n] to [n, n]: the maximum over i..j, zero for i > j."""
    n = len(values)
    spread = np.where(np.arange(n)[None, :] >= np.arange(n)[:, None], values[None, :], -math.inf)
    return np.triu(np.maximum.accumulate(spread, axis=1))


def framed(table: np.ndarray) -> np.ndarray:
    """[n, n] over blocks i..j inclusive to [n + 1, n + 1] over i..j-1; zero for i >= j."""
    frame = np.zeros((len(table) + 1, len(table) + 1))
    frame[:-1, 1:] = np.triu(table)
    return frame
