"""The problem of cutting a chain into stages, as numbers only.

Problems of several shardings can be merged into one, in which each stage picks its own sharding (`joined`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from planner.space.configuration import RecomputeChoice
from planner.space.layers import Layers
from planner.space.repeats import least_prices
from planner.space.types import BlockCosts, Configuration, StageChoice


@dataclass(frozen=True, eq=False)
class StageProblem:
    """Cut n blocks into stages for one micro-batch size, number of copies, schedule and ZeRO stage.

    A copy of the pipeline has `slice_devices` = W devices in line; `a` counts devices from the start of the slice, and
    the last stage ends at a = W. A stage is blocks i..j (inclusive) on the r = replicas[o] devices a..a+r-1. What that
    costs depends on the devices only through a *place* (levels spanned, device types, r): `place[o, a]`.

    Where `ranks` devices share every operator, they count as one here: all numbers of devices are of such groups, and
    all bytes of one rank.

    Attributes:
        micro_batch: samples a replica runs at a time.
        micro_batches: micro-batches per iteration in one copy.
        copies: copies of the pipeline.
        slice_devices: devices of one copy.
        schedule: name of the schedule.
        zero: ZeRO stage.
        ways: [Q] how a stage may keep activations or recompute them, the fastest first.
        max_stages: most stages; 0 means no limit.
        overlap: fraction of the last micro-batch's backward behind which synchronisation hides.
        replicas: int64 [R], the replicas that each option of a stage has; ascending among those of a sharding.
        shardings: int64 [R], the number of the way in which ranks share operators, by option.
        place: int64 [R, W], -1 where a + r > W.
        place_kind: int64 [P], the kind (set of device types) of each place.
        forward_s: [K, n, n] forward of blocks i..j on the slowest type of a kind; backward_s likewise, not recomputed.
        repeat_s: [Q, K, n, n] what recomputation adds to the backward: forward work of those blocks that is repeated.
        least_s: [n + 1] forward and backward of the blocks before p, each on the fastest type that any place has.
        sync_s: [P, n, n] gradient synchronisation.
        exchange_forward_s: [P or 0, n, n] what replicas exchange in a forward pass (ZeRO-3), if anything.
        exchange_backward_s: the same in a backward pass (ZeRO-2 and 3).
        update_s: [P, n, n] optimizer step, sharded where ZeRO is.
        resident_bytes: [P, n, n] weights, gradients, optimizer state and workspace of a device; infinite where blocks
            i..j may be no stage.
        capacity_bytes: [K] plannable memory of the smallest device of a kind.
        saved_bytes: [Q, K, n, n] activations kept for one micro-batch.
        working_bytes: [Q, K, n, n] what a recomputed stage needs beside for the micro-batch whose forward it repeats.
        moved_bytes: [Q or 0, K, n, n] activations of one micro-batch that lie in the host's memory, if any may.
        host_byte_per_s: [K] rate of the slowest link of a kind's devices to their hosts, each way.
        host_bytes: a device's share of its host's memory.
        in_flight: int64 [R, X + 1], micro-batches kept by a replica of a stage with replicas[o] when x of them pass the
            stage after it before that one's first backward (0 for the last stage; x never falls below the number of
            devices of all later stages, except where it does not matter).
        passing: int64 [R, X + 1], how many then pass this stage before its own first backward; capped at X.
        filling: int64 [R, X + 1], forwards that a replica then has left to run while a micro-batch is on its way to the
            last stage and back.
        link: int64 [R, R, W + 1], class of the boundary at a between a stage with replicas[o'] and one with replicas[o]
            after it (-1 where they do not fit); all transfers of a class take the same time.
        tied_s: [T, R, W] time to sum the gradients of the weights that the first and the last block share, where these
            are in different stages: for a first stage with replicas[o] at a, by class of the last stage; infinite where
            the two overlap. No class (T = 0) without such weights.
        tied_class: int64 [R], class of a last stage with replicas[o].
        stage_counts: int64, allowed numbers of stages, ascending; empty means any.
        pins: int64 [pins, 2], blocks that must be on a stage and the stage's number (negative: from the last).
        ranks: devices that act as one.
        context, expert: of those, ranks that share the sequence, and to which samples and experts are dealt.
        uniform: all stages have the same number of replicas.
        alike: all stages have the same sharding and recompute alike.
        layers: the layers of the chain, of which a stage may recompute the first ones, as many as it takes; None where
            it recomputes all or none. The first of the ways is then nothing, the last one all layers.
        same_layers: decisions have the same number of recomputed layers in all stages, the largest that one needs.
        tied_elsewhere: other blocks share weights too; the judge prices summing their gradients, the problem does not.
        receive_s: [C, n + 1] time of the transfer over boundary p before block p; return_s likewise for its gradient.
    """

    micro_batch: int
    micro_batches: int
    copies: int
    slice_devices: int
    schedule: str
    zero: int
    ways: tuple[RecomputeChoice, ...]
    max_stages: int
    overlap: float
    replicas: np.ndarray
    shardings: np.ndarray
    place: np.ndarray
    place_kind: np.ndarray
    forward_s: np.ndarray
    backward_s: np.ndarray
    repeat_s: np.ndarray
    least_s: np.ndarray
    sync_s: np.ndarray
    exchange_forward_s: np.ndarray
    exchange_backward_s: np.ndarray
    update_s: np.ndarray
    resident_bytes: np.ndarray
    capacity_bytes: np.ndarray
    saved_bytes: np.ndarray
    working_bytes: np.ndarray
    moved_bytes: np.ndarray
    host_byte_per_s: np.ndarray
    host_bytes: float
    in_flight: np.ndarray
    passing: np.ndarray
    filling: np.ndarray
    link: np.ndarray
    tied_s: np.ndarray
    tied_class: np.ndarray
    tied_elsewhere: bool
    receive_s: np.ndarray
    return_s: np.ndarray
    stage_counts: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    pins: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    ranks: int = 1
    context: int = 1
    expert: int = 1
    uniform: bool = False
    alike: bool = False
    layers: Layers | None = None
    same_layers: bool = False

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return int(self.saved_bytes.shape[-1])

    def stage(self, start: int, stop: int, option: int, way: int, layers: int = 0) -> StageChoice:
        """The stage of blocks `start` to `stop` (exclusive) with an option and a way to recompute.

        With `layers` it recomputes the first so many of its layers.
        """
        replicas, sharding, choice = int(self.replicas[option]), int(self.shardings[option]), self.ways[way]
        shared, kept = (self.ranks, sharding, self.context, self.expert), (choice.repeats, choice.offload)
        return StageChoice(start, stop, replicas, choice.recompute, *shared, *kept, layers or choice.layers)

    def with_ways(self, ways: Sequence[int]) -> dict[str, Any]:
        """Some of the ways only, with their tables."""
        tables = {name: table[ways] if len(table := getattr(self, name)) else table for name in BY_WAY_AND_KIND}
        return {"ways": tuple(self.ways[way] for way in ways), **tables}

    def _with_same_layers(self, stages: tuple[StageChoice, ...]) -> tuple[StageChoice, ...]:
        """The stages with as many recomputed layers in each as one of them needs at most."""
        if self.layers is None or not any(stage.recompute for stage in stages):
            return stages
        counts = [int(self.layers.count(stage.start, stage.stop)) for stage in stages]
        most = max(s.layers or count for s, count in zip(stages, counts, strict=True) if s.recompute)
        layers = most if most < max(counts) else 0
        return tuple(replace(stage, recompute=True, layers=layers) for stage in stages)

    def decision(self, stages: tuple[StageChoice, ...]) -> Configuration:
        """The configuration with these stages."""
        stages = self._with_same_layers(stages) if self.same_layers else stages
        full = sum(stage.replicas for stage in stages) == self.slice_devices
        return Configuration(
            stages=stages,
            copies=self.copies,
            micro_batch=self.micro_batch,
            micro_batches=self.micro_batches,
            schedule=self.schedule,
            zero=self.zero,
            slice_devices=0 if full else self.slice_devices * self.ranks,
        )


BY_OPTION = ("replicas", "in_flight", "passing", "filling", "tied_class", "shardings")
BY_PLACE = ("sync_s", "exchange_forward_s", "exchange_backward_s", "update_s", "resident_bytes")
BY_KIND = ("forward_s", "backward_s", "capacity_bytes", "host_byte_per_s")
BY_WAY_AND_KIND = ("repeat_s", "saved_bytes", "working_bytes", "moved_bytes")
"""Tables of a problem by what their first axis counts, and by way those that have kinds along the second."""

_LEAST = (
    "forward_s",
    "backward_s",
    "update_s",
    "parameter_elements",
    "saved_bytes",
    "checkpoint_bytes",
    "boundary_bytes",
    "gradient_boundary_bytes",
    "workspace_bytes",
    "kept_bytes",
    "step_s",
    "gather_s",
    "gradient_gather_s",
    "shard_elements",
)


def alike(costs: Sequence[BlockCosts]) -> list[tuple[BlockCosts, ...]]:
    """Group costs between which each stage of a plan can choose independently, in the order of their first members.

    The costs of a group have one micro-batch size, mesh and layout of boundaries. They also have the same elements of
    tied weights: the bytes of tied gradients must not depend on which stages sum them.
    """
    groups: dict[tuple[object, ...], list[BlockCosts]] = {}
    for block_costs in costs:
        groups.setdefault((block_costs.micro_batch, block_costs.ranks, block_costs.label, block_costs.ties), []).append(
            block_costs
        )
    return [tuple(group) for group in groups.values()]


def least_of(costs: Sequence[BlockCosts]) -> BlockCosts:
    """Lower bound, figure by figure, on several costs of one group of `alike`."""
    first = costs[0]
    if len(costs) == 1:
        return first
    values = {name: [getattr(c, name) for c in costs] for name in _LEAST}
    least: dict[str, Any] = {
        n: None if columns[0] is None else np.minimum.reduce(columns) for n, columns in values.items()
    }
    inner = tuple(
        replace(entry, elements=np.minimum.reduce([c.inner_replicas[k].elements for c in costs]))
        for k, entry in enumerate(first.inner_replicas)
    )
    selective = [c.selective for c in costs if c.selective is not None]
    prices = least_prices(selective) if len(selective) == len(costs) else None
    return replace(first, **least, inner_replicas=inner, selective=prices)


def joined(problems: Sequence[StageProblem]) -> StageProblem:
    """Merge problems of several shardings into one, so that each stage can pick its own sharding.

    The problems differ only in costs of one group of `alike`. Options, places and kinds of the second follow those of
    the first, and so on.
    """
    first, count = problems[0], len(problems)
    if count == 1:
        return first
    places, kinds = len(first.place_kind), len(first.capacity_bytes)

    def after(name: str, step: int) -> np.ndarray:
        shifted = [np.where(getattr(p, name) < 0, -1, getattr(p, name) + k * step) for k, p in enumerate(problems)]
        return np.concatenate(shifted)

    def all_of(name: str) -> np.ndarray:
        return np.concatenate([getattr(p, name) for p in problems])

    stacked: dict[str, Any] = {name: all_of(name) for name in (*BY_OPTION, *BY_PLACE, *BY_KIND)}
    stacked |= {name: np.concatenate([getattr(p, name) for p in problems], axis=1) for name in BY_WAY_AND_KIND}
    return replace(
        first,
        **stacked,
        place=after("place", places),
        place_kind=after("place_kind", kinds),
        least_s=np.concatenate([[0.0], np.cumsum(np.min([np.diff(p.least_s) for p in problems], axis=0))]),
        link=np.tile(first.link, (count, count, 1)),
        tied_s=np.tile(first.tied_s, (1, count, 1)),
    )
