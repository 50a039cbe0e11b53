"""What transfers and collectives cost on a cluster: start-up plus bytes over bandwidth, for the cheapest algorithm.

Every algorithm is affine in the payload (the alpha-beta model of Thakur, Rabenseifner and Gropp, IJHPCA 2005):
`seconds = latency_s + s_per_byte * payload_bytes`. The alternatives stay side by side, because which one is cheapest
depends on the size. Payloads are bytes a rank: the whole reduced tensor for all-reduce and reduce-scatter, the gathered
one for all-gather, all that a rank sends (its own share included) for all-to-all.

How links are shared: data that crosses a level passes through the ports of all levels below it too; a device drives
at most `device_byte_per_s`, and the ranks of one child share `byte_per_s` with each other and with sibling groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from planner.hardware import algorithms
from planner.hardware.span import Span, contiguous_shapes, span_of, strided_shapes
from planner.hardware.tiers import Affine, direct, link_tiers, measured_fit
from planner.hardware.types import Cluster, Collective, Level

DIRECT, MEASURED = "direct", "measured"
ALGORITHMS = (DIRECT, *algorithms.algorithm_names(), MEASURED)
"""Columns of `Terms`; an algorithm that a group cannot use has infinite latency."""

_FREE: Affine = (0.0, 0.0)


@dataclass(frozen=True)
class Terms:
    """Affine costs of one or many groups, one column an algorithm (`ALGORITHMS`); the cost is the least of them.

    Attributes:
        latency_s: seconds for an empty payload, float64 [..., algorithms]; inf where an algorithm does not apply.
        s_per_byte: seconds for one more byte, float64 [..., algorithms].
    """

    latency_s: np.ndarray
    s_per_byte: np.ndarray

    def seconds(self, payload_bytes: np.ndarray | float) -> np.ndarray:
        """Seconds for payloads of any shape that broadcasts with the groups', never less for more bytes."""
        payload = np.asarray(payload_bytes, dtype=np.float64)[..., None]
        return np.asarray((self.latency_s + self.s_per_byte * payload).min(axis=-1))

    def algorithm(self, payload_bytes: float) -> str:
        """The cheapest algorithm of a single group for that payload."""
        return ALGORITHMS[int(np.argmin(self.latency_s + self.s_per_byte * payload_bytes))]


def collective_terms(
    cluster: Cluster, kind: Collective, ranks: Sequence[int] | np.ndarray, concurrent: int = 1
) -> Terms:
    """Cost of a collective among any ranks.

    Args:
        cluster: the machine.
        kind: which collective; `SEND` takes two ranks.
        ranks: each rank once, in any order; a single rank costs nothing.
        concurrent: groups of this shape at work at the same time on the same ports; capped at how many fit there.

    Returns:
        Terms of shape [algorithms].

    Raises:
        ValueError: ranks that are not a group of the cluster.
    """
    return _table(cluster, kind, [span_of(cluster, ranks)], np.asarray(0), concurrent)


def collective_s(
    cluster: Cluster, kind: Collective, ranks: Sequence[int] | np.ndarray, payload_bytes: float, concurrent: int = 1
) -> float:
    """Seconds of one collective: the least of `collective_terms` at that payload."""
    return float(collective_terms(cluster, kind, ranks, concurrent).seconds(payload_bytes))


def contiguous_terms(
    cluster: Cluster, kind: Collective, start: np.ndarray | int, count: np.ndarray | int, concurrent: int = 1
) -> Terms:
    """Costs of a collective on the runs `start .. start + count - 1`, of shape [n, algorithms]; O(n * levels).

    Raises:
        ValueError: a run that leaves the cluster.
    """
    first, length, _ = _columns(cluster, start, count)
    shapes, index = contiguous_shapes(cluster, first.reshape(-1), length.reshape(-1))
    return _table(cluster, kind, shapes, index.reshape(first.shape), concurrent)


def strided_terms(
    cluster: Cluster,
    kind: Collective,
    start: np.ndarray | int,
    count: np.ndarray | int,
    stride: np.ndarray | int,
    concurrent: int = 1,
) -> Terms:
    """Costs of a collective on the groups `start, start + stride, ..` of `count` ranks, of shape [n, algorithms].

    Raises:
        ValueError: a group that leaves the cluster, or a stride below 1.
    """
    first, length, step = _columns(cluster, start, count, stride)
    shapes, index = strided_shapes(cluster, first.reshape(-1), length.reshape(-1), step.reshape(-1))
    return _table(cluster, kind, shapes, index.reshape(first.shape), concurrent)


def send_terms(cluster: Cluster, source: np.ndarray | int, target: np.ndarray | int, concurrent: int = 1) -> Terms:
    """Cost of handing a payload from one rank to another, for arrays of ranks that broadcast; to itself it is free.

    Where nodes have links of their own, those of the slowest count. Beside the transfer, the hosts hand over
    (`Device.handover_s`, the slowest device type's).

    Args:
        cluster: the machine.
        source: sending ranks.
        target: receiving ranks.
        concurrent: devices of one child that send at the same time (the whole tensor-parallel group of a stage, say).
    """
    first, second = np.broadcast_arrays(np.asarray(source, dtype=np.int64), np.asarray(target, dtype=np.int64))
    sizes = np.asarray((1, *cluster.group_sizes()))
    # The number of group sizes that tell the two ranks apart is one more than the level that joins them.
    depth = (first[..., None] // sizes != second[..., None] // sizes).sum(axis=-1)
    handover_s = max(device.handover_s for device in cluster.devices)
    latency, slope = _sends(cluster.levels, handover_s, concurrent)
    return Terms(latency[depth], slope[depth])


@lru_cache(maxsize=1 << 10)
def _sends(levels: tuple[Level, ...], handover_s: float, concurrent: int) -> tuple[np.ndarray, np.ndarray]:
    """Latency and slope, [1 + levels, algorithms]: to itself, and to a rank that each level joins."""
    straight = [direct(levels, top, concurrent) for top in range(len(levels))]
    table = [_FREE] + [(latency_s + handover_s, s_per_byte) for latency_s, s_per_byte in straight]
    latency, slope = np.full((2, len(table), len(ALGORITHMS)), math.inf)
    slope[:] = 0.0
    latency[:, 0], slope[:, 0] = np.asarray(table).T
    return latency, slope


def _columns(
    cluster: Cluster, start: np.ndarray | int, count: np.ndarray | int, stride: np.ndarray | int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arguments as int64 arrays of one shape, checked to lie in the cluster."""
    arrays = [np.asarray(a, dtype=np.int64) for a in (start, count, stride)]
    first, length, step = np.broadcast_arrays(*arrays)
    last = first + (length - 1) * step
    if first.size and (first.min() < 0 or length.min() < 1 or step.min() < 1 or last.max() >= cluster.device_count):
        raise ValueError(f"a group is empty or leaves the {cluster.device_count} devices of {cluster.name}")
    return first, length, step


def _table(cluster: Cluster, kind: Collective, shapes: Sequence[Span], index: np.ndarray, concurrent: int) -> Terms:
    """Terms of each distinct shape, handed out to the groups that have it."""
    latency = np.full((len(shapes), len(ALGORITHMS)), math.inf)
    slope = np.zeros_like(latency)
    for row, span in enumerate(shapes):
        for name, (alpha, beta) in _alternatives(cluster.links(span.types), kind, span, concurrent).items():
            column = ALGORITHMS.index(name)
            latency[row, column], slope[row, column] = alpha, beta
    return Terms(latency[index], slope[index])


@lru_cache(maxsize=1 << 16)
def _alternatives(levels: tuple[Level, ...], kind: Collective, span: Span, concurrent: int) -> Mapping[str, Affine]:
    """The algorithms that a group of that shape can use, each with its affine cost."""
    if span.ranks == 1:
        return {DIRECT: _FREE}
    if kind is Collective.SEND:
        if span.ranks != 2:
            raise ValueError(f"a send joins two ranks, not {span.ranks}")
        return {DIRECT: direct(levels, len(span.tiers) - 1, concurrent)}
    tiers = link_tiers(levels, span, concurrent)
    fit = measured_fit(levels[0], kind, span.ranks) if len(tiers) == 1 else None
    if fit is not None:
        return {MEASURED: fit}
    found = ((name, entry.affine(kind, span, tiers)) for name, entry in algorithms.ALGORITHMS.items())
    return {name: affine for name, affine in found if affine is not None}
