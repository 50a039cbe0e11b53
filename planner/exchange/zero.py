"""ZeRO: model state in shards over the ranks, gathered and scattered while the step runs.

The step is simulated as one line of computation and one link. A unit (a bucket of variables of consecutive layers)
cannot compute before its weights are gathered; its gradients are scattered when its backward is done; gathers are
issued when the computation `prefetch` units earlier begins. The link serves transfers in order of issue.

ZeRO-1 shards the optimizer state. Gradients are scattered, each rank updates its shard, weights are gathered. The bytes
are those of an all-reduce, 2(n-1)/n M (Rajbhandari et al., SC 2020). Gradients accumulate in full and travel once a
step; the gather follows the update, so it is exposed unless the next forward waits for it unit by unit.

ZeRO-2 shards optimizer state and gradients: 2(n-1)/n M in a step of one micro-batch (Rajbhandari et al., SC 2020). A
rank has no room for full gradients, so every micro-batch scatters its own: m micro-batches move (m+1)(n-1)/n M.

ZeRO-3 (FSDP) shards weights, gradients and optimizer state; weights are gathered unit by unit when needed: 3(n-1)/n M
in a step of one micro-batch (Rajbhandari et al., SC 2020; Zhao et al., PyTorch FSDP, VLDB 2023). Every micro-batch
gathers weights in the forward and again in the backward, and scatters gradients. Units are gathered `prefetch` units
ahead of the computation, which takes the memory of as many more units.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.exchange import SCHEMES
from planner.exchange.collectives import plan_recipe, priced
from planner.exchange.fabric import Fabric
from planner.exchange.recipe import Content, ExchangeStep, Group, Phase, Recipe
from planner.exchange.scheme import MEGABYTE, Bucket, MessagePlan, Scheme, SchemeSummary, exchange_of, pack, require
from planner.exchange.types import Exchange, MemoryFactors, Step
from planner.hardware import Collective


@dataclass(frozen=True, slots=True)
class UnitPass:
    """Forward or backward of one unit: seconds of computation, of the gather before it and of the scatter after it."""

    compute_s: float
    gather_s: float = 0.0
    scatter_s: float = 0.0


def play_sharded(passes: Sequence[UnitPass], prefetch: int) -> float:
    """Seconds until all passes, in order, and all their transfers are done; O(passes).

    Args:
        passes: in the order of computation.
        prefetch: how many passes ahead gathers are issued, when a pass begins; 0 issues a gather when the pass before
            has ended, after that pass's scatter.
    """
    link = clock = 0.0
    gathered = [0.0] * len(passes)
    issued = 0

    def issue(upto: int, now: float) -> None:
        nonlocal link, issued
        while issued < min(upto, len(passes)):
            duration = passes[issued].gather_s
            if duration > 0:
                link = max(link, now) + duration
            gathered[issued] = link if duration > 0 else now
            issued += 1

    issue(1, 0.0)
    for i, unit_pass in enumerate(passes):
        start = max(clock, gathered[i])
        issue(i + 1 + prefetch, start)
        clock = start + unit_pass.compute_s
        if unit_pass.scatter_s > 0:
            link = max(link, clock) + unit_pass.scatter_s
        issue(i + 2, clock)
    return max(clock, link)


@dataclass(frozen=True, slots=True)
class Unit:
    """A bucket: the computation of its layers, and the seconds of its transfers by content and phase."""

    forward_s: float
    backward_s: float
    moves_s: dict[tuple[Content, Phase], float]

    def moved_s(self, content: Content, *phases: Phase) -> float:
        """Seconds of the transfers of some content in some phases."""
        return sum(self.moves_s.get((content, phase), 0.0) for phase in phases)


def units_of(fabric: Fabric, step: Step, recipe: Recipe, bucket_bytes: float) -> tuple[tuple[Unit, ...], float, float]:
    """Units in backward order, and the forward and backward time of layers without weights before the first unit.

    A unit's backward runs from the arrival of the gradients before it to that of its own; its forward is the same part
    of the forward, in the opposite order.
    """
    units, before = [], 0.0
    scale = step.forward_s / step.backward_s if step.backward_s > 0 else 0.0
    for bucket in pack(step, bucket_bytes):
        backward_s, before = max(0.0, bucket.ready_s - before), max(before, bucket.ready_s)
        units.append(Unit(backward_s * scale, backward_s, _moves_s(fabric, recipe, bucket)))
    tail_s = max(0.0, step.backward_s - before)
    return tuple(units), step.forward_s - sum(u.forward_s for u in units), tail_s


def _moves_s(fabric: Fabric, recipe: Recipe, bucket: Bucket) -> dict[tuple[Content, Phase], float]:
    moves_s: dict[tuple[Content, Phase], float] = {}
    for part in recipe.steps:
        _, seconds = priced(fabric, part, part.payload(bucket))
        moves_s[part.content, part.phase] = moves_s.get((part.content, part.phase), 0.0) + seconds
    return moves_s


def passes_of(step: Step, units: Sequence[Unit], head_s: float, tail_s: float, *, opening: bool) -> Iterator[UnitPass]:
    """The passes of a step in order, with their transfers.

    Gathers come before a pass, scatters after a backward. Of the transfers that run once an iteration, the weights come
    before the first forward and the gradients after the last backward.

    Args:
        step: the training step.
        units: in backward order.
        head_s: forward time of each micro-batch that belongs to no unit.
        tail_s: backward time of each micro-batch that belongs to no unit.
        opening: whether weights that are gathered once are gathered unit by unit during the first forward.
    """
    weights, gradients = Content.WEIGHTS, Content.GRADIENTS
    for m in range(step.micro_batches):
        before = (Phase.FORWARD, Phase.END) if opening and m == 0 else (Phase.FORWARD,)
        behind = (Phase.BACKWARD, Phase.END) if m == step.micro_batches - 1 else (Phase.BACKWARD,)
        yield UnitPass(head_s)
        yield from (UnitPass(u.forward_s, u.moved_s(weights, *before)) for u in reversed(units))
        for u in units:
            yield UnitPass(u.backward_s, u.moved_s(weights, Phase.BACKWARD), u.moved_s(gradients, *behind))
        yield UnitPass(tail_s)


def price_sharded(
    scheme: Scheme, fabric: Fabric, step: Step, bucket_bytes: float, prefetch: int = 0, *, overlap: bool = False
) -> Exchange:
    """The cost of one step, its gathers and scatters simulated beside its computation.

    Args:
        scheme: the scheme with the recipe.
        fabric: the ranks and their ports.
        step: the training step.
        bucket_bytes: size of a unit.
        prefetch: units that are gathered ahead.
        overlap: weights that are gathered once are gathered during the first forward, else before it begins.

    Raises:
        UsageError: the fabric cannot run the scheme, or an option makes no sense.
    """
    require(scheme, fabric)
    units, head_s, tail_s = units_of(fabric, step, scheme.recipe, bucket_bytes)
    passes = list(passes_of(step, units, head_s, tail_s, opening=overlap))
    compute_s = math.fsum(w.compute_s for w in passes)
    link_s = math.fsum(w.gather_s + w.scatter_s for w in passes)
    opening_s = 0.0 if overlap else sum(u.moved_s(Content.WEIGHTS, Phase.END) for u in units)
    end_s = play_sharded(passes, len(passes) if overlap else prefetch) + opening_s
    return exchange_of(scheme, step, scheme.plan_messages(fabric, step), link_s + opening_s, end_s - compute_s)


@dataclass(frozen=True, slots=True)
class Sharded(Scheme):
    """A scheme that shards model state over the ranks.

    Attributes:
        bucket_bytes: size of a unit, the gradients and weights that travel together.
    """

    bucket_bytes: float = 25 * MEGABYTE

    per_tensor = False

    def memory(self, fabric: Fabric, step: Step) -> MemoryFactors:
        """Shards; beside them, in full, the gathered units and the gradients of one unit before they are scattered."""
        recipe, units, transient_bytes = self.recipe, pack(step, self.bucket_bytes), 0.0
        if recipe.weights is not None:
            sizes = sorted((u.weight_bytes for u in units), reverse=True)
            transient_bytes += sum(sizes[: recipe.gathered_units or None])
        if recipe.gradients is not None:
            transient_bytes += max((u.gradient_bytes for u in units), default=0.0)
        return dataclasses.replace(Scheme.memory(self, fabric, step), transient_bytes=transient_bytes)

    def plan_messages(self, fabric: Fabric, step: Step) -> MessagePlan:
        """One message a bucket, with the traffic of all gathers and scatters of a step."""
        return plan_recipe(fabric, step, self.recipe, self.bucket_bytes, method=self.key)


@dataclass(frozen=True, slots=True)
class GatheredOnce(Sharded):
    """A sharding scheme that gathers the weights once a step, at its start.

    Attributes:
        bucket_bytes: size of a unit, the gradients and weights that travel together.
        overlap_gather: weights are gathered while the next forward runs.
    """

    overlap_gather: bool = False

    def price(self, fabric: Fabric, step: Step) -> Exchange:
        """Scatters after the backward of each unit, gathers before the first forward; errors as of `price_sharded`."""
        return price_sharded(self, fabric, step, self.bucket_bytes, overlap=self.overlap_gather)


_GATHER_ONCE = ExchangeStep(Collective.ALL_GATHER, Content.WEIGHTS)
_GATHER = ExchangeStep(Collective.ALL_GATHER, Content.WEIGHTS, Phase.FORWARD)
_GATHER_AGAIN = ExchangeStep(Collective.ALL_GATHER, Content.WEIGHTS, Phase.BACKWARD)
_SCATTER = ExchangeStep(Collective.REDUCE_SCATTER, Content.GRADIENTS, Phase.BACKWARD)


@dataclass(frozen=True, slots=True)
class ShardedOptimizer(GatheredOnce):
    """ZeRO-1."""

    key = "zero1"
    zero = 1
    recipe = Recipe(
        (ExchangeStep(Collective.REDUCE_SCATTER, Content.GRADIENTS), _GATHER_ONCE), optimizer=Group.REPLICAS
    )
    facts = SchemeSummary(
        decides="buckets; whether the gather overlaps with the next forward",
        time="(n-1)/n M/B to scatter, as much to gather",
        traffic="2(n-1)/n M",
        source="Rajbhandari et al., ZeRO, SC 2020",
        memory="optimizer state 1/n",
    )


SCHEMES.register("zero1", ShardedOptimizer())


@dataclass(frozen=True, slots=True)
class ShardedGradients(GatheredOnce):
    """ZeRO-2."""

    key = "zero2"
    zero = 2
    recipe = Recipe((_SCATTER, _GATHER_ONCE), gradients=Group.REPLICAS, optimizer=Group.REPLICAS)
    facts = SchemeSummary(
        decides="buckets; whether the gather overlaps with the next forward",
        time="(n-1)/n M/B to scatter each micro-batch, as much to gather once",
        traffic="2(n-1)/n M; (m+1)(n-1)/n M for m micro-batches",
        source="Rajbhandari et al., ZeRO, SC 2020",
        memory="optimizer state and gradients 1/n",
    )


SCHEMES.register("zero2", ShardedGradients())


@dataclass(frozen=True, slots=True)
class ShardedWeights(Sharded):
    """ZeRO-3.

    Attributes:
        bucket_bytes: size of a unit, the variables that are gathered together.
        prefetch: units gathered ahead; 0 gathers a unit when the one before it is done.
        keep_gathered: weights stay gathered from the forward to the backward.
    """

    bucket_bytes: float = 100 * MEGABYTE
    prefetch: int = 1
    keep_gathered: bool = False

    key = "zero3"
    zero = 3
    facts = SchemeSummary(
        decides="units, prefetch, whether weights stay gathered until the backward",
        time="(n-1)/n M/B for each of two gathers and a scatter",
        traffic="3(n-1)/n M a micro-batch",
        source="Rajbhandari et al., SC 2020; Zhao et al., FSDP, VLDB 2023",
        memory="all 1/n, and the gathered units",
    )

    @property
    def recipe(self) -> Recipe:
        """All state in shards; one or two gathers and one scatter for each micro-batch."""
        return Recipe(
            (_GATHER, _SCATTER) if self.keep_gathered else (_GATHER, _GATHER_AGAIN, _SCATTER),
            weights=Group.REPLICAS,
            gradients=Group.REPLICAS,
            optimizer=Group.REPLICAS,
            gathered_units=0 if self.keep_gathered else 1 + self.prefetch,
        )

    def price(self, fabric: Fabric, step: Step) -> Exchange:
        """Gathers ahead of each unit's computation, scatters after its backward; errors as of `price_sharded`."""
        return price_sharded(self, fabric, step, self.bucket_bytes, self.prefetch)


SCHEMES.register("zero3", ShardedWeights())
