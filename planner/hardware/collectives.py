"""Costs of transfers and collectives on a cluster: start-up time plus bytes over bandwidth, by the cheapest algorithm.

Every algorithm is affine in the payload (the alpha-beta model of Thakur, Rabenseifner and Gropp, IJHPCA 2005):
`seconds = latency_s + s_per_byte * payload_bytes`. All algorithms are kept side by side, because the cheapest one
depends on the payload. Payloads are bytes a rank: the full reduced tensor for all-reduce and reduce-scatter, the
gathered one for all-gather, all that a rank sends (its own share included) for all-to-all.

How links are shared: data that crosses a level passes through the ports of all levels below it too; a device drives
at most `device_byte_per_s`, and the ranks of one child share `byte_per_s` with each other and with concurrent groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from planner.hardware import algorithms
from planner.hardware.tiers import Affine, Span, child_sizes, direct, link_tiers, measured_fit, sent_once, span_of
from planner.hardware.types import Cluster, Collective, Level

DIRECT, MEASURED = "direct", "measured"
ALGORITHMS = (DIRECT, *algorithms.ALGORITHMS, MEASURED)
"""Columns of `Terms`; an algorithm that a group cannot use has infinite latency."""

_FREE: Affine = (0.0, 0.0)


@dataclass(frozen=True)
class Terms:
    """Affine costs of one or many groups, one column an algorithm (`ALGORITHMS`); the cost is the minimum over columns.

    Attributes:
        latency_s: seconds for an empty payload, float64 [..., algorithms]; inf where an algorithm does not apply.
        s_per_byte: seconds of each further byte, float64 [..., algorithms].
    """

    latency_s: np.ndarray
    s_per_byte: np.ndarray

    def seconds(self, payload_bytes: np.ndarray | float) -> np.ndarray:
        """Seconds for payloads of any shape that broadcasts with the groups; monotone in the payload."""
        payload = np.asarray(payload_bytes, dtype=np.float64)[..., None]
        return np.asarray((self.latency_s + self.s_per_byte * payload).min(axis=-1))

    def algorithm(self, payload_bytes: float) -> str:
        """The cheapest algorithm of a single group for that payload."""
        return ALGORITHMS[int(np.argmin(self.latency_s + self.s_per_byte * payload_bytes))]


def collective_terms(
    cluster: Cluster, kind: Collective, ranks: Sequence[int] | np.ndarray, concurrent: int = 1, copies: int = 1
) -> Terms:
    """Cost of a collective among any ranks.

    Args:
        cluster: the cluster.
        kind: which collective; `SEND` takes two ranks.
        ranks: each rank once, in any order; a single rank costs nothing.
        concurrent: groups of this shape at work at the same time on the same ports; capped by the size of a child.
        copies: copies of each row in the payload of an all-to-all; a row crosses a link once for all copies in that
            direction (`planner.hardware.tiers.sent_once`). 1 where no rows repeat.

    Returns:
        Terms of shape [algorithms].

    Raises:
        ValueError: the ranks are no group of the cluster.
    """
    latency, slope = np.full((2, len(ALGORITHMS)), math.inf)
    slope[:] = 0.0
    span = span_of(cluster, ranks)
    for name, (alpha, beta) in _alternatives(cluster.links(span.types), kind, span, concurrent, copies).items():
        column = ALGORITHMS.index(name)
        latency[column], slope[column] = alpha, beta
    return Terms(latency, slope)


def collective_s(
    cluster: Cluster, kind: Collective, ranks: Sequence[int] | np.ndarray, payload_bytes: float, concurrent: int = 1
) -> float:
    """Seconds of one collective: the least of `collective_terms` at that payload."""
    return float(collective_terms(cluster, kind, ranks, concurrent).seconds(payload_bytes))


def send_terms(cluster: Cluster, source: np.ndarray | int, target: np.ndarray | int, concurrent: int = 1) -> Terms:
    """Cost of sending a payload from one rank to another, for arrays of ranks that broadcast; to itself it is free.

    If the links of nodes differ, the slowest count. The hand-over of the hosts is added (`Device.handover_s`, that of
    the slowest device type).

    Args:
        cluster: the cluster.
        source: sending ranks.
        target: receiving ranks.
        concurrent: devices of one child that send at the same time (the whole tensor-parallel group of a stage, say).
    """
    first, second = np.broadcast_arrays(np.asarray(source, dtype=np.int64), np.asarray(target, dtype=np.int64))
    sizes = np.asarray(child_sizes(cluster))
    # The number of sizes that separate the two ranks is one more than the index of the level that joins them.
    depth = (first[..., None] // sizes != second[..., None] // sizes).sum(axis=-1)
    handover_s = max(device.handover_s for device in cluster.devices)
    latency, slope = _sends(cluster.levels, handover_s, concurrent)
    return Terms(latency[depth], slope[depth])


@lru_cache(maxsize=1 << 10)
def _sends(levels: tuple[Level, ...], handover_s: float, concurrent: int) -> tuple[np.ndarray, np.ndarray]:
    """Latency and slope, [1 + levels, algorithms]: of a send to itself, and to a rank that each level joins."""
    straight = [direct(levels, top, concurrent) for top in range(len(levels))]
    table = [_FREE] + [(latency_s + handover_s, s_per_byte) for latency_s, s_per_byte in straight]
    latency, slope = np.full((2, len(table), len(ALGORITHMS)), math.inf)
    slope[:] = 0.0
    latency[:, 0], slope[:, 0] = np.asarray(table).T
    return latency, slope


@lru_cache(maxsize=1 << 16)
def _alternatives(
    levels: tuple[Level, ...], kind: Collective, span: Span, concurrent: int, copies: int
) -> Mapping[str, Affine]:
    """By algorithm that a group of some shape can use, its affine cost."""
    if span.ranks == 1:
        return {DIRECT: _FREE}
    if kind is Collective.SEND:
        if span.ranks != 2:
            raise ValueError(f"a send joins two ranks, not {span.ranks}")
        return {DIRECT: direct(levels, len(span.tiers) - 1, concurrent)}
    tiers = link_tiers(levels, span, concurrent, copies)
    fit = measured_fit(levels[0], kind, span.ranks) if len(tiers) == 1 else None
    if fit is not None:
        return {MEASURED: (fit[0], fit[1] * sent_once(copies, span.ranks))}
    costs = ((name, entry.affine(kind, span, tiers)) for name, entry in algorithms.ALGORITHMS.items())
    return {name: affine for name, affine in costs if affine is not None}
