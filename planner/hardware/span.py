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


def contiguous_shapes(cluster: Cluster, start: np.ndarray, count: np.ndarray) -> tuple[list[Span], np.ndarray]:
    """Shapes of the runs `start .. start + count - 1`, each distinct shape once.

    Args:
        cluster: the machine.
        start: first ranks, int64 [n].
        count: lengths, at least 1, int64 [n].

    Returns:
        The distinct shapes and, for each run, the index of its own, int64 [n]. O(n * levels).
    """
    sizes = child_sizes(cluster)
    columns = [count]
    for below, above in pairwise(sizes):
        first, last = start // below, (start + count - 1) // below
        fewest, most = _partial(start, count, below)
        width = _partial(first, last - first + 1, above // below)[1]
        columns += [width, fewest, most]
    for kind in range(len(cluster.unlike)):
        upto = np.concatenate([[0], np.cumsum(cluster.device_types == kind)])
        columns.append(upto[start + count] > upto[start])
    table, index = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    return [_span_of_row(row, len(cluster.unlike)) for row in table.tolist()], index.reshape(-1)


def _partial(start: np.ndarray, count: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Fewest and most items of the run `start .. start + count - 1` in any block of `block` that it touches."""
    head = block - start % block
    tail = (start + count - 1) % block + 1
    touched = (start + count - 1) // block - start // block + 1
    fewest = np.where(touched == 1, count, np.minimum(head, tail))
    most = np.where(touched == 1, count, np.where(touched == 2, np.maximum(head, tail), block))
    return fewest, most


def _span_of_row(row: list[int], kinds: int) -> Span:
    """A span of its ranks, the figures of its tiers, and whether each of so many device types is in it."""
    end = len(row) - kinds
    tiers = [Tier(*row[i : i + 3]) for i in range(1, end, 3)]
    while len(tiers) > 1 and tiers[-1].fewest == row[0]:
        tiers.pop()
    return Span(row[0], tuple(tiers), tuple(kind for kind in range(kinds) if row[end + kind]))


def strided_shapes(
    cluster: Cluster, start: np.ndarray, count: np.ndarray, stride: np.ndarray
) -> tuple[list[Span], np.ndarray]:
    """Shapes of the groups `start, start + stride, ...` of `count` ranks, each distinct shape once.

    Moving a group by whole nodes of the outermost level keeps its shape where nodes are alike, so only the distinct
    (start within such a node, count, stride) are looked at.

    Returns:
        The distinct shapes and, for each group, the index of its own, int64 [n].
    """
    period = child_sizes(cluster)[-2] if cluster.levels else 1
    if cluster.unlike:
        period = cluster.device_count
    keys, index = np.unique(np.stack([start % period, count, stride], axis=1), axis=0, return_inverse=True)
    shapes: dict[Span, int] = {}
    which = np.empty(len(keys), dtype=np.int64)
    for i, (first, length, step) in enumerate(keys.tolist()):
        span = span_of(cluster, first + step * np.arange(length))
        which[i] = shapes.setdefault(span, len(shapes))
    return list(shapes), which[index.reshape(-1)]


def doublings(width: int) -> int:
    """Steps in which a tree reaches `width` members: ceil(log2(width))."""
    return math.ceil(math.log2(width)) if width > 1 else 0
