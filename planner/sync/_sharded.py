"""ZeRO: model state in shards over the ranks, gathered and scattered while the step runs.

The step is played as one line of computation and one link. A unit (a bucket of variables whose layers follow each
other) cannot compute before its weights are gathered; its gradients are scattered when its backward is done; gathers
are issued when the computation `prefetch` units earlier begins. The link serves in order of issue.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from planner.hardware import Collective, collective_s
from planner.sync._collectives import FLOWS, cheapest
from planner.sync._defaults import MEGABYTE, Defaults, dense_note, require
from planner.sync.buckets import Bucket, pack
from planner.sync.fabric import Fabric
from planner.sync.formulas import zero_parts
from planner.sync.messages import Message, Phase
from planner.sync.traffic import nothing
from planner.sync.types import Draft, Exchange, MemoryFactors, Scheme, Step


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
    """A bucket with the computation of its layers and the cost of moving it."""

    bucket: Bucket
    forward_s: float
    backward_s: float
    gather_s: float
    scatter_s: float


def units_of(fabric: Fabric, step: Step, bucket_bytes: float) -> tuple[tuple[Unit, ...], float, float]:
    """Units in backward order, and the forward and backward time that belongs to none (before the first weights).

    A unit's backward runs from the arrival of the gradients before it to that of its own; its forward is the same part
    of the forward, in the opposite order.
    """
    found, before = [], 0.0
    scale = step.forward_s / step.backward_s if step.backward_s > 0 else 0.0
    for bucket in pack(step, bucket_bytes):
        backward_s, before = max(0.0, bucket.ready_s - before), max(before, bucket.ready_s)
        gather_s = collective_s(
            fabric.cluster, Collective.ALL_GATHER, fabric.ranks, bucket.pulled_bytes, fabric.concurrent
        )
        scatter_s = collective_s(
            fabric.cluster, Collective.REDUCE_SCATTER, fabric.ranks, bucket.payload_bytes, fabric.concurrent
        )
        found.append(Unit(bucket, backward_s * scale, backward_s, gather_s, scatter_s))
    tail_s = max(0.0, step.backward_s - before)
    return tuple(found), step.forward_s - sum(u.forward_s for u in found), tail_s


def sharded_memory(fabric: Fabric, stage: int, transient_bytes: float = 0.0) -> MemoryFactors:
    """Weights, gradients and optimizer state in 1/N parts from stages 3, 2 and 1 on."""
    return MemoryFactors(*zero_parts(len(fabric.ranks), stage), transient_bytes=transient_bytes)


def draft_sharded(fabric: Fabric, step: Step, key: str, bucket_bytes: float, gathers: int, scatters: int) -> Draft:
    """Buckets that are scattered and gathered once, with the bytes of all gathers and scatters of a step."""
    units, _, _ = units_of(fabric, step, bucket_bytes)
    moved: dict[str, float] = {}
    for u in units:
        for kind, size, times in (
            (Collective.ALL_GATHER, u.bucket.pulled_bytes, gathers),
            (Collective.REDUCE_SCATTER, u.bucket.payload_bytes, scatters),
        ):
            algorithm, _ = cheapest(fabric, kind, size)
            moved[algorithm] = moved.get(algorithm, 0.0) + size * times
    traffic = nothing(fabric)
    for algorithm, size in moved.items():
        traffic = traffic + FLOWS[algorithm](fabric) * (size / 2)  # half of what an all-reduce moves
    messages = tuple(
        Message(u.bucket.variables, key, u.bucket.payload_bytes, u.bucket.ready_s, _legs(fabric, u)) for u in units
    )
    methods = {v: key for u in units for v in u.bucket.variables}
    return Draft(messages, traffic, methods, notes=dense_note(step))


def settle_sharded(scheme: Scheme, fabric: Fabric, step: Step, draft: Draft, played: Played) -> Exchange:
    """What one step costs, all its gathers and scatters played beside its computation."""
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


def _legs(fabric: Fabric, unit: Unit) -> tuple[Phase, ...]:
    return tuple(Phase(fabric.everything(s)) for s in (unit.scatter_s, unit.gather_s) if s > 0)


def works_of(
    fabric: Fabric,
    step: Step,
    bucket_bytes: float,
    *,
    gathers: tuple[bool, bool, bool],
    every_scatter: bool,
) -> Iterator[Work]:
    """A step's computation in order.

    Args:
        fabric: where.
        step: what.
        bucket_bytes: size of a unit.
        gathers: whether weights are gathered in the first forward, in the later forwards, and in every backward.
        every_scatter: gradients are scattered after every micro-batch, else after the last alone.
    """
    units, head_s, tail_s = units_of(fabric, step, bucket_bytes)
    first, later, backward = gathers
    for m in range(step.micro_batches):
        forward = first if m == 0 else later
        scatter = every_scatter or m == step.micro_batches - 1
        yield Work(head_s)
        yield from (Work(u.forward_s, u.gather_s * forward) for u in reversed(units))
        yield from (Work(u.backward_s, u.gather_s * backward, u.scatter_s * scatter) for u in units)
        yield Work(tail_s)


def play_gathered_once(
    fabric: Fabric, step: Step, bucket_bytes: float, overlap_gather: bool, *, every_scatter: bool
) -> Played:
    """A step that gathers its weights once, at its start: unit by unit under the forward, or before it begins."""
    works = list(works_of(fabric, step, bucket_bytes, gathers=(True, False, False), every_scatter=every_scatter))
    if overlap_gather:
        return play_sharded(works, prefetch=len(works))
    bare = works_of(fabric, step, bucket_bytes, gathers=(False, False, False), every_scatter=every_scatter)
    played = play_sharded(list(bare), prefetch=0)
    gather_s = sum(w.gather_s for w in works)
    return Played(played.end_s + gather_s, played.compute_s, played.link_s + gather_s)


@dataclass(frozen=True, slots=True)
class GatheredOnce(Defaults):
    """ZeRO whose weights are gathered once a step, at its start.

    Attributes:
        bucket_bytes: gradients and weights that travel together.
        overlap_gather: weights are gathered while the next forward runs.
        every_scatter: gradients are scattered after every micro-batch, else after the last alone.
    """

    bucket_bytes: float = 25 * MEGABYTE
    overlap_gather: bool = False

    per_tensor = False
    every_scatter: ClassVar[bool]

    def draft(self, fabric: Fabric, step: Step) -> Draft:
        """One gather, and as many scatters as there are."""
        scatters = step.micro_batches if self.every_scatter else 1
        return draft_sharded(fabric, step, self.key, self.bucket_bytes, gathers=1, scatters=scatters)

    def price(self, fabric: Fabric, step: Step) -> Exchange:
        """Scatters behind the backward of each unit, gathers before the first forward.

        Raises:
            UsageError: the fabric cannot run the scheme.
        """
        require(self, fabric)
        played = play_gathered_once(
            fabric, step, self.bucket_bytes, self.overlap_gather, every_scatter=self.every_scatter
        )
        return settle_sharded(self, fabric, step, self.draft(fabric, step), played)
