"""How a group of ranks lies on the levels of a cluster: the shape that its communication costs follow from.

Costs depend on the shape alone, not on which ranks have it, so thousands of groups share a few dozen shapes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from planner.hardware.types import Cluster


@dataclass(frozen=True, slots=True)
class Tier:
    """The group on one level: the level joins children (groups of the level below) into one parent each.

    Attributes:
        width: most children that one parent holds of the group; 1 when the level is not used.
        fewest: fewest ranks of the group in any child that holds some.
        most: most ranks of the group in any child.
    """

    width: int
    fewest: int
    most: int


@dataclass(frozen=True, slots=True)
class Span:
    """A group of `ranks` devices and its shape on each level from the innermost to the lowest that holds all of it.

    Attributes:
        ranks: how many.
        tiers: by level.
        types: the types of its devices, where nodes of unlike types have links of their own; else empty.
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
    """Shape of int64 ranks: searches ask again and again for the same groups."""
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
