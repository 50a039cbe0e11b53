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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

import numpy as np

from planner.hardware.span import Span, contiguous_shapes, doublings, span_of, strided_shapes
from planner.hardware.types import Cluster, Collective, CollectiveFit, Level

ALGORITHMS = ("direct", "ring", "tree", "hierarchical", "pairwise", "measured")
"""Columns of `Terms`; an algorithm that a group cannot use has infinite latency."""

Payload = TypeVar("Payload", float, np.ndarray)

_Affine = tuple[float, float]
_FREE: _Affine = (0.0, 0.0)
_GATHERS = frozenset({Collective.ALL_GATHER, Collective.REDUCE_SCATTER})


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


def moved_bytes(kind: Collective, payload_bytes: Payload, ranks: int) -> Payload:
    """Bytes that each rank sends in a collective around a ring, or to its peers; payloads as in `collective_terms`.

    2 (n-1)/n of the payload for an all-reduce, (n-1)/n for a reduce-scatter, all-gather or all-to-all, the least
    possible (Patarasuk and Yuan, JPDC 2009); all of it for a send or broadcast, nothing for a single rank.
    """
    if ranks == 1:
        return payload_bytes * 0.0
    if kind in (Collective.SEND, Collective.BROADCAST):
        return payload_bytes
    return (2.0 if kind is Collective.ALL_REDUCE else 1.0) * (ranks - 1) / ranks * payload_bytes


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

    Beside the transfer, the hosts hand over (`Device.handover_s`, the slowest device type's).

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
    direct = [_direct(cluster.levels, top, concurrent) for top in range(len(cluster.levels))]
    table = [_FREE] + [(latency_s + handover_s, s_per_byte) for latency_s, s_per_byte in direct]
    latency, slope = np.full((2, len(table), len(ALGORITHMS)), math.inf)
    slope[:] = 0.0
    latency[:, 0], slope[:, 0] = np.asarray(table).T
    return Terms(latency[depth], slope[depth])


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
        for name, (alpha, beta) in _alternatives(cluster.levels, kind, span, concurrent).items():
            column = ALGORITHMS.index(name)
            latency[row, column], slope[row, column] = alpha, beta
    return Terms(latency[index], slope[index])


@dataclass(frozen=True, slots=True)
class _Tier:
    """One level as a group of some shape sees it; bandwidths are achievable ones, in bytes/s, one direction.

    Attributes:
        width: most children of one parent.
        ranks: fewest ranks of the group in a child.
        latency_s: start-up time of one message.
        device: what one device can send.
        port: what one child can send for this group, its siblings' share taken off.
        level: the level, for its measured collectives.
    """

    width: int
    ranks: int
    latency_s: float
    device: float
    port: float
    level: Level

    @property
    def stream(self) -> float:
        """What each rank can send when all ranks of a child send at once."""
        return min(self.device, self.port / self.ranks)

    @property
    def channel(self) -> float:
        """What the ranks of a child can send together: the rate of rings or trees laid over all of them."""
        return min(self.port, self.ranks * self.device)


def _tiers(levels: tuple[Level, ...], span: Span, concurrent: int) -> list[_Tier]:
    child, tiers = 1, []
    for level, tier in zip(levels, span.tiers, strict=False):
        siblings = max(1, min(concurrent, child // tier.most))
        device = level.device_byte_per_s
        if level.peer_byte_per_s is not None and tier.width > 1:
            device = min(device, (tier.width - 1) * level.peer_byte_per_s)
        port = level.byte_per_s / siblings
        tiers.append(
            _Tier(tier.width, tier.fewest, level.latency_s, device * level.efficiency, port * level.efficiency, level)
        )
        child *= level.size
    return tiers


@lru_cache(maxsize=1 << 16)
def _alternatives(levels: tuple[Level, ...], kind: Collective, span: Span, concurrent: int) -> Mapping[str, _Affine]:
    """The algorithms that a group of that shape can use, each with its affine cost."""
    if span.ranks == 1:
        return {"direct": _FREE}
    if kind is Collective.SEND:
        if span.ranks != 2:
            raise ValueError(f"a send joins two ranks, not {span.ranks}")
        return {"direct": _direct(levels, len(span.tiers) - 1, concurrent)}
    tiers = _tiers(levels, span, concurrent)
    fit = _fit(levels[0], kind, span.ranks) if len(tiers) == 1 else None
    if fit is not None:
        return {"measured": fit}
    if kind in _GATHERS and any(tier.level.gather_ports for tier in tiers if tier.width > 1):
        return {"ring": _ring(span, tiers, 1, gathers=True)}
    return _MODELS[kind](span, tiers)


def _direct(levels: tuple[Level, ...], top: int, concurrent: int) -> _Affine:
    """A transfer between two devices that level `top` joins."""
    rate, child = math.inf, 1
    for i, level in enumerate(levels[: top + 1]):
        device = level.device_byte_per_s
        if i == top and level.peer_byte_per_s is not None:
            device = min(device, level.peer_byte_per_s)
        rate = min(rate, level.efficiency * min(device, level.byte_per_s / max(1, min(concurrent, child))))
        child *= level.size
    return levels[top].latency_s, 1 / rate


def _fit(level: Level, kind: Collective, ranks: int) -> _Affine | None:
    """A measured collective of that many ranks, or half a measured all-reduce, which is a scatter and a gather."""
    found = _find(level, kind, ranks)
    if found is not None:
        return found.latency_s, moved_bytes(kind, 1.0, ranks) / found.byte_per_s
    whole = _find(level, Collective.ALL_REDUCE, ranks)
    if whole is not None and kind in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
        return whole.latency_s / 2, moved_bytes(kind, 1.0, ranks) / whole.byte_per_s
    return None


def _find(level: Level, kind: Collective, ranks: int) -> CollectiveFit | None:
    return next((fit for fit in level.fits if fit.collective is kind and fit.ranks == ranks), None)


def _ring(span: Span, tiers: Sequence[_Tier], rounds: int, *, gathers: bool = False) -> _Affine:
    """`rounds` times around: n-1 steps at the pace of the slowest hop, (n-1)/n of the payload through the narrowest.

    A gather may be held to fewer ports than there are (`Level.gather_ports`).
    """
    steps = rounds * (span.ranks - 1)
    slowest = max(tier.latency_s for tier in tiers if tier.width > 1)
    ports = [tier.level.gather_ports * tier.device if gathers else 0.0 for tier in tiers]
    rate = min(min(tier.channel, held or math.inf) for tier, held in zip(tiers, ports, strict=True))
    return steps * slowest, steps / span.ranks / rate


def _tree(span: Span, tiers: Sequence[_Tier], rounds: int) -> _Affine:
    """Up or down a tree that follows the levels, pipelined, so that each direction moves the payload once."""
    latency_s = sum(doublings(tier.width) * tier.latency_s for tier in tiers)
    return rounds * latency_s, rounds / min(tier.channel for tier in tiers)


def _hierarchical(span: Span, tiers: Sequence[_Tier], rounds: int) -> _Affine:
    """Level by level: scatter inside, go across with one share a rank, gather inside (even groups only)."""
    latency_s = s_per_byte = 0.0
    rate = math.inf
    for i, tier in enumerate(tiers):
        rate = min(rate, tier.stream)
        if tier.width == 1:
            continue
        fit = _fit(tier.level, Collective.REDUCE_SCATTER, tier.width) if i == 0 else None
        alpha, beta = fit or ((tier.width - 1) * tier.latency_s, (tier.width - 1) / tier.width / rate)
        latency_s += rounds * alpha
        s_per_byte += rounds * beta / tier.ranks
    return latency_s, s_per_byte


def _all_reduce(span: Span, tiers: Sequence[_Tier]) -> dict[str, _Affine]:
    found = _scatter_or_gather(span, tiers, rounds=2)
    found["tree"] = _tree(span, tiers, 2)
    return found


def _scatter_or_gather(span: Span, tiers: Sequence[_Tier], rounds: int = 1) -> dict[str, _Affine]:
    found = {"ring": _ring(span, tiers, rounds)}
    if span.even and sum(tier.width > 1 for tier in tiers) > 1:
        found["hierarchical"] = _hierarchical(span, tiers, rounds)
    return found


def _broadcast(span: Span, tiers: Sequence[_Tier]) -> dict[str, _Affine]:
    return {"tree": _tree(span, tiers, 1)}


def _all_to_all(span: Span, tiers: Sequence[_Tier]) -> dict[str, _Affine]:
    """Pairwise exchange, or Bruck's in log2(n) rounds of half the payload, which suits small messages.

    On a torus neither is faster than what passes its middle.
    """
    ranks = span.ranks
    held = [*(tier.fewest for tier in span.tiers), ranks]
    latency_s = sum((outer - inner) * t.latency_s for (inner, outer), t in zip(pairwise(held), tiers, strict=True))
    s_per_byte = 0.0
    for tier, shape in zip(tiers, span.tiers, strict=True):
        busiest = min(max(ranks / 2, shape.fewest), shape.most)  # m (n - m) / n bytes leave a child of m ranks
        crossing = busiest * (ranks - busiest) / ranks / tier.port
        s_per_byte = max(s_per_byte, crossing, (ranks - shape.fewest) / ranks / tier.device)
    middle = max(_middle_s_per_byte(ranks, tier) for tier in tiers)
    rounds = doublings(ranks)
    narrowest = min(min(t.device, t.port / shape.most) for t, shape in zip(tiers, span.tiers, strict=True))
    bruck = rounds * max(t.latency_s for t in tiers if t.width > 1), max(rounds / 2 / narrowest, middle)
    return {"pairwise": (latency_s, max(s_per_byte, middle)), "tree": bruck}


def _middle_s_per_byte(ranks: int, tier: _Tier) -> float:
    """Seconds a byte of each rank's payload needs to pass the middle of a torus: n d / (4 k^(d-1) p).

    n/2 ranks send half of their payload across, n/4 of it one way. d dimensions of side k have 2 k^(d-1) links across
    the middle, of p / 2d each, p being what a child sends over all its 2d links: sqrt(n) / 8b on a square of links b.
    """
    dims = tier.level.torus
    if not dims or tier.width < 2:
        return 0.0
    side: float = tier.width ** (1 / dims)
    return ranks * dims / (4 * side ** (dims - 1) * tier.port)


_MODELS: Mapping[Collective, Callable[[Span, Sequence[_Tier]], dict[str, _Affine]]] = {
    Collective.ALL_REDUCE: _all_reduce,
    Collective.REDUCE_SCATTER: _scatter_or_gather,
    Collective.ALL_GATHER: _scatter_or_gather,
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.BROADCAST: _broadcast,
}
