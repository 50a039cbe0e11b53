"""The links of each level for a group of ranks: the shape of the group on the levels, and measured collectives.

Costs depend on the shape of a group, not on its ranks, so thousands of groups share a few dozen shapes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np

from planner.hardware.types import Cluster, Collective, CollectiveFit, Level


@dataclass(frozen=True, slots=True)
class Tier:
    """The shape of a group on one level, which joins children (groups of the level below) into parents.

    Attributes:
        width: largest number of children of one parent with ranks of the group; 1 when the level is not crossed.
        fewest: smallest number of ranks of the group in a child that has any.
        most: largest number of ranks of the group in a child.
    """

    width: int
    fewest: int
    most: int


@dataclass(frozen=True, slots=True)
class Span:
    """The shape of a group of ranks, on each level from the innermost to the lowest that joins all of them.

    Attributes:
        ranks: number of ranks.
        tiers: shape on each level.
        types: device types of its ranks, if links differ by device type; else empty.
    """

    ranks: int
    tiers: tuple[Tier, ...]
    types: tuple[int, ...] = ()

    @property
    def even(self) -> bool:
        """Whether every child holds the same number of ranks on every level."""
        return all(tier.fewest == tier.most for tier in self.tiers)


def child_sizes(cluster: Cluster) -> tuple[int, ...]:
    """Devices in one child of each level, and in the whole cluster: `(1, 8, 64)` for 8 nodes of 8 devices."""
    return (1, *cluster.group_sizes())


def span_of(cluster: Cluster, ranks: Sequence[int] | np.ndarray) -> Span:
    """The shape of any set of ranks; O(ranks * levels).

    Raises:
        ValueError: no rank, a rank twice, or one outside the cluster.
    """
    span = _span(child_sizes(cluster), np.ascontiguousarray(ranks, dtype=np.int64).tobytes())
    return replace(span, types=tuple(np.unique(cluster.device_types[ranks]).tolist())) if cluster.unlike else span


@functools.lru_cache(maxsize=1 << 14)
def _span(sizes: tuple[int, ...], ranks: bytes) -> Span:
    """The shape of int64 ranks; cached, because searches ask for the same groups many times."""
    given = np.frombuffer(ranks, dtype=np.int64)
    members = np.unique(given)
    if not len(members) or len(members) != len(given):
        raise ValueError("a group needs at least one rank, and each rank once")
    if members[0] < 0 or members[-1] >= sizes[-1]:
        raise ValueError(f"ranks {members[0]}..{members[-1]} are not all in a cluster of {sizes[-1]} devices")
    tiers: list[Tier] = []
    for below, above in pairwise(sizes):
        if tiers and members[0] // below == members[-1] // below:
            break
        children, counts = np.unique(members // below, return_counts=True)
        widths = np.unique(children // (above // below), return_counts=True)[1]
        tiers.append(Tier(int(widths.max()), int(counts.min()), int(counts.max())))
    return Span(len(members), tuple(tiers))


def doublings(width: int) -> int:
    """Steps in which a tree reaches `width` members: ceil(log2(width))."""
    return math.ceil(math.log2(width)) if width > 1 else 0


Payload = TypeVar("Payload", float, np.ndarray)

Affine = tuple[float, float]
"""Seconds of an empty payload, and of each further byte."""


@dataclass(frozen=True, slots=True)
class LinkTier(Tier):
    """The links of one level for a group of some shape; bandwidths are achievable, in bytes/s, one direction.

    Attributes:
        latency_s: start-up time of one message.
        device: bandwidth of one device.
        port: bandwidth of one child for this group, after the share of concurrent groups.
        level: the level, for its measured collectives.
    """

    latency_s: float
    device: float
    port: float
    level: Level

    @property
    def stream(self) -> float:
        """Bandwidth of each rank when all ranks of a child send at once."""
        return min(self.device, self.port / self.fewest)

    @property
    def channel(self) -> float:
        """Bandwidth of all ranks of a child together: the rate of rings or trees over all of them."""
        return min(self.port, self.fewest * self.device)

    def middle_s_per_byte(self, ranks: int) -> float:
        """Seconds a byte of each rank's payload needs to pass the middle of a torus: n d / (4 k^(d-1) p); 0 elsewhere.

        n/2 ranks send half of their payload across, n/4 of it one way. d dimensions of side k have 2 k^(d-1) links
        across the middle, of p / 2d each, p being what a child sends over all its 2d links: sqrt(n) / 8b on a square of
        links b.
        """
        dims = self.level.torus
        if not dims or self.width < 2:
            return 0.0
        side: float = self.width ** (1 / dims)
        return ranks * dims / (4 * side ** (dims - 1) * self.port)


def link_tiers(levels: tuple[Level, ...], span: Span, concurrent: int, copies: int = 1) -> list[LinkTier]:
    """The links of each level for a group, innermost first.

    Args:
        levels: levels of the cluster.
        span: shape of the group.
        concurrent: groups of this shape at work at the same time.
        copies: number of random ranks that each row of an all-to-all goes to, where a row crosses a level once for each
            child that holds any of them; the bandwidths are raised by what that saves.
    """
    child, tiers = 1, []
    for level, tier in zip(levels, span.tiers, strict=False):
        siblings = max(1, min(concurrent, child // tier.most))
        port = level.byte_per_s / siblings
        rate = level.efficiency / sent_once(copies, span.ranks / tier.fewest)
        device = level.device_rate(tier.width) * rate
        tiers.append(LinkTier(tier.width, tier.fewest, tier.most, level.latency_s, device, port * rate, level))
        child *= level.size
    return tiers


def sent_once(copies: int, children: float) -> float:
    """Fraction of a row's copies that are sent if each child gets the row once: `n (1 - (1 - 1/n)**k) / k`.

    A row has k copies for experts on n children, each child equally likely; the numerator is the mean number of
    children with at least one of the experts.
    """
    return children * (1 - (1 - 1 / children) ** copies) / copies


def direct(levels: tuple[Level, ...], top: int, concurrent: int) -> Affine:
    """Affine cost of a transfer between two devices that level `top` joins."""
    rate, child = math.inf, 1
    for i, level in enumerate(levels[: top + 1]):
        device = level.device_rate(2 if i == top else 1)
        rate = min(rate, level.efficiency * min(device, level.byte_per_s / max(1, min(concurrent, child))))
        child *= level.size
    return levels[top].latency_s, 1 / rate


def moved_bytes(kind: Collective, payload_bytes: Payload, ranks: int) -> Payload:
    """Bytes that each rank sends in a collective around a ring, or to its peers; payloads as of `collective_terms`.

    2 (n-1)/n of the payload for an all-reduce, (n-1)/n for a reduce-scatter, all-gather or all-to-all, the least
    possible (Patarasuk and Yuan, JPDC 2009); all of it for a send or broadcast, nothing for a single rank.
    """
    if ranks == 1:
        return payload_bytes * 0.0
    if kind in (Collective.SEND, Collective.BROADCAST):
        return payload_bytes
    return (2.0 if kind is Collective.ALL_REDUCE else 1.0) * (ranks - 1) / ranks * payload_bytes


def measured_fit(level: Level, kind: Collective, ranks: int) -> Affine | None:
    """The measured collective of that many ranks; for a scatter or gather else half a measured all-reduce."""
    measured = _find(level, kind, ranks)
    if measured is not None:
        return measured.latency_s, moved_bytes(kind, 1.0, ranks) / measured.byte_per_s
    all_reduce = _find(level, Collective.ALL_REDUCE, ranks)
    if all_reduce is not None and kind in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
        return all_reduce.latency_s / 2, moved_bytes(kind, 1.0, ranks) / all_reduce.byte_per_s
    return None


def _find(level: Level, kind: Collective, ranks: int) -> CollectiveFit | None:
    return next((fit for fit in level.fits if fit.collective is kind and fit.ranks == ranks), None)
