"""ZeRO: model state in shards over the ranks, gathered and scattered while the step runs.

The step is played as one line of computation and one link. A unit (a bucket of variables whose layers follow each
other) cannot compute before its weights are gathered; its gradients are scattered when its backward is done; gathers
are issued when the computation `prefetch` units earlier begins. The link serves in order of issue.

ZeRO stage 1: the optimizer state in shards. Gradients are scattered, each rank updates its shard, weights gathered.

Bytes are those of an all-reduce, 2(n-1)/n M (Rajbhandari et al., SC 2020). Gradients accumulate whole and travel once a
step; the gather follows the update, so it is exposed unless the next forward waits for it unit by unit.

ZeRO stage 2: optimizer state and gradients in shards.

2(n-1)/n M a step of one micro-batch (Rajbhandari et al., SC 2020). A rank has no room for whole gradients, so every
micro-batch scatters its own: m micro-batches move (m+1)(n-1)/n M.

ZeRO stage 3, FSDP: weights, gradients and optimizer state in shards; weights are gathered unit by unit when needed.

3(n-1)/n M a step of one micro-batch (Rajbhandari et al., SC 2020; Zhao et al., PyTorch FSDP, VLDB 2023): gathered in
the forward, again in the backward, and gradients scattered, for every micro-batch. Units are gathered `prefetch` ahead
of the computation, for the memory of as many more units.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.errors import UsageError
from planner.exchange import SCHEMES
from planner.exchange._defaults import MEGABYTE, Defaults, require
from planner.exchange.collectives import draft_recipe, priced
from planner.exchange.fabric import Fabric
from planner.exchange.messages import Bucket, pack
from planner.exchange.recipe import Content, ExchangeStep, Group, Phase, Recipe, parts_of
from planner.exchange.types import Draft, Exchange, Facts, MemoryFactors, Scheme, Step
from planner.hardware import Collective


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of computation with what the link must bring before it and take away after it, in seconds."""

    compute_s: float
    gather_s: float = 0.0
    scatter_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Played:
    """When all is done, and how much of that was computation and use of the link."""

    end_s: float
    compute_s: float
    link_s: float

    @property
    def exposed_s(self) -> float:
        """Time in which nothing was computed."""
        return max(0.0, self.end_s - self.compute_s)


def play_sharded(works: Sequence[Work], prefetch: int) -> Played:
    """Play pieces of work in order; O(works).

    Args:
        works: in the order of computation.
        prefetch: how many pieces ahead gathers are issued, when the piece begins; 0 issues one when the piece before
            it has ended, after that piece's scatter.
    """
    link = clock = 0.0
    gathered = [0.0] * len(works)
    issued = 0

    def issue(upto: int, now: float) -> None:
        nonlocal link, issued
        while issued < min(upto, len(works)):
            duration = works[issued].gather_s
            if duration > 0:
                link = max(link, now) + duration
            gathered[issued] = link if duration > 0 else now
            issued += 1

    issue(1, 0.0)
    for i, work in enumerate(works):
        start = max(clock, gathered[i])
        issue(i + 1 + prefetch, start)
        clock = start + work.compute_s
        if work.scatter_s > 0:
            link = max(link, clock) + work.scatter_s
        issue(i + 2, clock)
    used = math.fsum(w.gather_s + w.scatter_s for w in works)
    return Played(max(clock, link), math.fsum(w.compute_s for w in works), used)


@dataclass(frozen=True, slots=True)
class Unit:
    """A bucket with the computation of its layers and the cost of moving it, by what moves and when."""

    forward_s: float
    backward_s: float
    moves_s: dict[tuple[Content, Phase], float]

    def moved_s(self, content: Content, *phases: Phase) -> float:
        """Seconds of what moves in some phases."""
        return sum(self.moves_s.get((content, phase), 0.0) for phase in phases)


def units_of(fabric: Fabric, step: Step, recipe: Recipe, bucket_bytes: float) -> tuple[tuple[Unit, ...], float, float]:
    """Units in backward order, and the forward and backward time that belongs to none (before the first weights).

    A unit's backward runs from the arrival of the gradients before it to that of its own; its forward is the same part
    of the forward, in the opposite order.
    """
    found, before = [], 0.0
    scale = step.forward_s / step.backward_s if step.backward_s > 0 else 0.0
    for bucket in pack(step, bucket_bytes):
        backward_s, before = max(0.0, bucket.ready_s - before), max(before, bucket.ready_s)
        found.append(Unit(backward_s * scale, backward_s, _moves_s(fabric, recipe, bucket)))
    tail_s = max(0.0, step.backward_s - before)
    return tuple(found), step.forward_s - sum(u.forward_s for u in found), tail_s


def _moves_s(fabric: Fabric, recipe: Recipe, bucket: Bucket) -> dict[tuple[Content, Phase], float]:
    found: dict[tuple[Content, Phase], float] = {}
    for part in recipe.steps:
        _, seconds = priced(fabric, part, part.payload(bucket))
        found[part.content, part.phase] = found.get((part.content, part.phase), 0.0) + seconds
    return found


def works_of(fabric: Fabric, step: Step, recipe: Recipe, bucket_bytes: float, *, opening: bool) -> Iterator[Work]:
    """A step's computation in order.

    Args:
        fabric: where.
        step: what.
        recipe: what moves beside it: gathers before a pass, scatters behind a backward, and of what moves once an
            iteration the weights before the first forward, the gradients behind the last backward.
        bucket_bytes: size of a unit.
        opening: weights that are gathered once are gathered unit by unit under the first forward.
    """
    units, head_s, tail_s = units_of(fabric, step, recipe, bucket_bytes)
    weights, gradients = Content.WEIGHTS, Content.GRADIENTS
    for m in range(step.micro_batches):
        before = (Phase.FORWARD, Phase.END) if opening and m == 0 else (Phase.FORWARD,)
        behind = (Phase.BACKWARD, Phase.END) if m == step.micro_batches - 1 else (Phase.BACKWARD,)
        yield Work(head_s)
        yield from (Work(u.forward_s, u.moved_s(weights, *before)) for u in reversed(units))
        for u in units:
            yield Work(u.backward_s, u.moved_s(weights, Phase.BACKWARD), u.moved_s(gradients, *behind))
        yield Work(tail_s)


def price_sharded(
    scheme: Scheme, fabric: Fabric, step: Step, bucket_bytes: float, prefetch: int = 0, *, overlap: bool = False
) -> Exchange:
    """What one step costs, all its gathers and scatters played beside its computation.

    Args:
        scheme: whose recipe is played.
        fabric: where.
        step: what.
        bucket_bytes: size of a unit.
        prefetch: units that are gathered ahead.
        overlap: what is gathered once is gathered under the first forward, else before it begins.

    Raises:
        UsageError: the fabric cannot run the scheme.
    """
    require(scheme, fabric)
    works = list(works_of(fabric, step, scheme.recipe, bucket_bytes, opening=overlap))
    played = play_sharded(works, len(works) if overlap else prefetch)
    units, _, _ = units_of(fabric, step, scheme.recipe, bucket_bytes)
    opening_s = 0.0 if overlap else sum(u.moved_s(Content.WEIGHTS, Phase.END) for u in units)
    played = Played(played.end_s + opening_s, played.compute_s, played.link_s + opening_s)
    draft = scheme.draft(fabric, step)
    return Exchange(
        scheme=scheme.name,
        seconds=played.link_s,
        exposed_s=played.exposed_s,
        traffic=draft.traffic,
        memory=scheme.memory(fabric, step),
        staleness=scheme.staleness(step),
        transfers=(),
        methods=draft.methods,
        notes=draft.notes,
    )


@dataclass(frozen=True, slots=True)
class Sharded(Defaults):
    """A scheme that keeps model state in shards.

    Attributes:
        bucket_bytes: gradients and weights that travel together.
    """

    bucket_bytes: float = 25 * MEGABYTE

    per_tensor = False

    def memory(self, fabric: Fabric, step: Step) -> MemoryFactors:
        """Shards, and beside them whole: gathered units, and the gradients of one unit before they are scattered."""
        recipe, units, whole = self.recipe, pack(step, self.bucket_bytes), 0.0
        if recipe.weights is not None:
            sizes = sorted((u.weight_bytes for u in units), reverse=True)
            whole += sum(sizes[: recipe.gathered_units or None])
        if recipe.gradients is not None:
            whole += max((u.gradient_bytes for u in units), default=0.0)
        weights, gradients, optimizer = (1 / parts_of(fabric.cluster, fabric.ranks, group) for group in recipe.held)
        return MemoryFactors(weights, gradients, optimizer, transient_bytes=whole)

    def draft(self, fabric: Fabric, step: Step) -> Draft:
        """Bucket by bucket, with the bytes of all gathers and scatters of a step."""
        return draft_recipe(fabric, step, self.recipe, self.bucket_bytes, method=self.key)


@dataclass(frozen=True, slots=True)
class GatheredOnce(Sharded):
    """Shards of a scheme whose weights are gathered once a step, at its start.

    Attributes:
        bucket_bytes: gradients and weights that travel together.
        overlap_gather: weights are gathered while the next forward runs.
    """

    overlap_gather: bool = False

    def price(self, fabric: Fabric, step: Step) -> Exchange:
        """Scatters behind the backward of each unit, gathers before the first forward.

        Raises:
            UsageError: the fabric cannot run the scheme.
        """
        return price_sharded(self, fabric, step, self.bucket_bytes, overlap=self.overlap_gather)


@dataclass(frozen=True, slots=True)
class ShardedOptimizer(GatheredOnce):
    """ZeRO-1."""

    key = "zero1"
    zero = 1
    recipe = Recipe(
        (
            ExchangeStep(Collective.REDUCE_SCATTER, Content.GRADIENTS),
            ExchangeStep(Collective.ALL_GATHER, Content.WEIGHTS),
        ),
        optimizer=Group.REPLICAS,
    )
    facts = Facts(
        decides="buckets; whether the gather overlaps with the next forward",
        time="(n-1)/n M/B to scatter, as much to gather",
        traffic="2(n-1)/n M",
        memory="optimizer state 1/n",
        source="Rajbhandari et al., ZeRO, SC 2020",
    )


SCHEMES.register("zero1", ShardedOptimizer())


@dataclass(frozen=True, slots=True)
class ShardedGradients(GatheredOnce):
    """ZeRO-2."""

    key = "zero2"
    zero = 2
    recipe = Recipe(
        (
            ExchangeStep(Collective.REDUCE_SCATTER, Content.GRADIENTS, Phase.BACKWARD),
            ExchangeStep(Collective.ALL_GATHER, Content.WEIGHTS),
        ),
        gradients=Group.REPLICAS,
        optimizer=Group.REPLICAS,
    )
    facts = Facts(
        decides="buckets; whether the gather overlaps with the next forward",
        time="(n-1)/n M/B to scatter each micro-batch, as much to gather once",
        traffic="2(n-1)/n M; (m+1)(n-1)/n M for m micro-batches",
        memory="optimizer state and gradients 1/n",
        source="Rajbhandari et al., ZeRO, SC 2020",
    )


SCHEMES.register("zero2", ShardedGradients())


_GATHER = ExchangeStep(Collective.ALL_GATHER, Content.WEIGHTS, Phase.FORWARD)
_GATHER_AGAIN = ExchangeStep(Collective.ALL_GATHER, Content.WEIGHTS, Phase.BACKWARD)
_SCATTER = ExchangeStep(Collective.REDUCE_SCATTER, Content.GRADIENTS, Phase.BACKWARD)


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
    facts = Facts(
        decides="units, prefetch, whether weights stay gathered until the backward",
        time="(n-1)/n M/B for each of two gathers and a scatter",
        traffic="3(n-1)/n M a micro-batch",
        memory="all 1/n, and the gathered units",
        source="Rajbhandari et al., SC 2020; Zhao et al., FSDP, VLDB 2023",
    )

    @property
    def recipe(self) -> Recipe:
        """Everything in shards; one or two gathers and one scatter for each micro-batch."""
        return Recipe(
            (_GATHER, _SCATTER) if self.keep_gathered else (_GATHER, _GATHER_AGAIN, _SCATTER),
            weights=Group.REPLICAS,
            gradients=Group.REPLICAS,
            optimizer=Group.REPLICAS,
            gathered_units=0 if self.keep_gathered else 1 + self.prefetch,
        )

    def price(self, fabric: Fabric, step: Step) -> Exchange:
        """Gathers ahead of each unit's computation, scatters behind its backward.

        Raises:
            UsageError: the fabric cannot run the scheme, or a negative prefetch.
        """
        if self.prefetch < 0:
            raise UsageError(f"prefetch is {self.prefetch}", where=self.name, hint="use 0 or more")
        return price_sharded(self, fabric, step, self.bucket_bytes, self.prefetch)


SCHEMES.register("zero3", ShardedWeights())
