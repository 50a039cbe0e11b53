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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from planner.hardware.tiers import (
    Affine,
    LinkTier,
    Span,
    child_sizes,
    direct,
    doublings,
    link_tiers,
    measured_fit,
    moved_bytes,
    sent_once,
    span_of,
)
from planner.hardware.types import Cluster, Collective, Level
from planner.sums import float_sum

Hops = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Senders and receivers (int64, positions of ranks), and bytes."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An algorithm for collectives.

    Attributes:
        affine: affine cost for a group over its links; None where the algorithm cannot run the collective, or the
            group.
        hops: the bytes sent in an all-reduce of one byte, from the ranks by position, the devices in one child of each
            level (`planner.hardware.tiers.child_sizes`), and the positions of the group; None if it runs no all-reduce.
        measured: whether measured collectives replace it, because libraries run it.
        alone: the algorithm that it is equal to where a group crosses one level of links; "" for itself.
    """

    affine: Callable[[Collective, Span, Sequence[LinkTier]], Affine | None]
    hops: Callable[[Sequence[int], Sequence[int], np.ndarray], Hops] | None = None
    measured: bool = True
    alone: str = ""


_ROUNDS = {Collective.ALL_REDUCE: 2, Collective.REDUCE_SCATTER: 1, Collective.ALL_GATHER: 1}
"""Rounds of a ring: to reduce, to gather, or both."""
_PASSES = {Collective.ALL_REDUCE: 2, Collective.BROADCAST: 1}
"""Passes along a tree: up, down, or both."""


def _ring(kind: Collective, span: Span, tiers: Sequence[LinkTier]) -> Affine | None:
    """Ring: n-1 steps to reduce or to gather, each of 1/n of the payload (Patarasuk and Yuan, JPDC 2009).

    n-1 steps a round at the latency of the slowest hop, (n-1)/n of the payload through the narrowest. A gather or
    scatter may be held to fewer ports than there are (`Level.gather_ports`).
    """
    if kind not in _ROUNDS:
        return None
    steps = _ROUNDS[kind] * (span.ranks - 1)
    slowest = max(tier.latency_s for tier in tiers if tier.width > 1)
    ports = [tier.level.gather_ports * tier.device if _ROUNDS[kind] == 1 else 0.0 for tier in tiers]
    rate = min(min(tier.channel, held or math.inf) for tier, held in zip(tiers, ports, strict=True))
    return steps * slowest, moved_bytes(kind, 1.0, span.ranks) / rate


def _ring_hops(ranks: Sequence[int], sizes: Sequence[int], group: np.ndarray) -> Hops:
    """Every rank sends to the next."""
    sent = moved_bytes(Collective.ALL_REDUCE, 1.0, len(group))
    return group, np.roll(group, -1), np.full(len(group), sent)


def _tree(kind: Collective, span: Span, tiers: Sequence[LinkTier]) -> Affine | None:
    """Trees along the levels, up and down, pipelined, so that each direction moves the payload once.

    Two trees of half the payload, in which an inner node of one is a leaf of the other (Sanders, Speck and Traeff,
    Parallel Computing 2009).
    """
    if kind not in _PASSES:
        return None
    latency_s = float_sum(doublings(tier.width) * tier.latency_s for tier in tiers)
    return _PASSES[kind] * latency_s, _PASSES[kind] / min(tier.channel for tier in tiers)


def _tree_hops(ranks: Sequence[int], sizes: Sequence[int], group: np.ndarray) -> Hops:
    """On each level binary trees join the children of one parent; the first rank of a child represents it in one tree,
    the last rank in the other."""
    sources: list[int] = []
    targets: list[int] = []
    for side in (0, -1):
        members = {rank: rank for rank in group.tolist()}
        for size in sizes[1:]:
            groups: dict[int, list[int]] = {}
            for leader in members.values():
                groups.setdefault(ranks[leader] // size, []).append(leader)
            for leaders in groups.values():
                order = leaders if side == 0 else leaders[::-1]
                sources += order[1:]
                targets += [order[(i - 1) // 2] for i in range(1, len(order))]
            members = {parent: leaders[side] for parent, leaders in groups.items()}
    up, down = np.asarray(sources, dtype=np.int64), np.asarray(targets, dtype=np.int64)
    return np.concatenate([up, down]), np.concatenate([down, up]), np.full(2 * len(up), 0.5)


def _hierarchical(kind: Collective, span: Span, tiers: Sequence[LinkTier]) -> Affine | None:
    """Hierarchical: scatter inside, run across with one shard a rank, gather inside; for groups with even levels.

    Not for gathers that must use a ring (`Level.gather_ports`). Source: Jia et al., 2018 (arXiv 1807.11205).
    """
    rounds = _ROUNDS.get(kind, 0)
    held = rounds == 1 and any(tier.level.gather_ports for tier in tiers if tier.width > 1)
    if not rounds or held or not span.even or sum(tier.width > 1 for tier in tiers) < 2:
        return None
    latency_s = s_per_byte = 0.0
    rate = math.inf
    for i, tier in enumerate(tiers):
        rate = min(rate, tier.stream)
        if tier.width == 1:
            continue
        share = moved_bytes(Collective.REDUCE_SCATTER, 1.0, tier.width)
        fit = measured_fit(tier.level, Collective.REDUCE_SCATTER, tier.width) if i == 0 else None
        alpha, beta = fit or ((tier.width - 1) * tier.latency_s, share / rate)
        latency_s += rounds * alpha
        s_per_byte += rounds * beta / tier.fewest
    return latency_s, s_per_byte


def _hierarchical_hops(ranks: Sequence[int], sizes: Sequence[int], group: np.ndarray) -> Hops:
    """Rings inside, then rings across of the ranks with the same shard."""
    hops: list[Hops] = []
    places = np.asarray(ranks)
    for size, above in pairwise(sizes):
        child = places[group] // size
        parents: dict[int, list[np.ndarray]] = {}
        for members in (group[child == c] for c in np.unique(child)):
            parents.setdefault(int(places[members[0]] // above), []).append(members)
        for siblings in parents.values():
            if len(siblings) > 1:
                table = np.stack(siblings)  # [children, ranks of a child]: columns hold the same share
                share = moved_bytes(Collective.ALL_REDUCE, 1.0, len(siblings)) / table.shape[1]
                hops.append((table.reshape(-1), np.roll(table, -1, axis=0).reshape(-1), np.full(table.size, share)))
    if not hops:
        return group[:0], group[:0], np.zeros(0)
    sources, targets, counts = zip(*hops, strict=True)
    return np.concatenate(sources), np.concatenate(targets), np.concatenate(counts)


def _pairwise(kind: Collective, span: Span, tiers: Sequence[LinkTier]) -> Affine | None:
    """An all-to-all in which each rank sends every other its part; on a torus no faster than what passes its middle."""
    if kind is not Collective.ALL_TO_ALL:
        return None
    ranks = span.ranks
    held = [*(tier.fewest for tier in tiers), ranks]
    latency_s = float_sum(
        (outer - inner) * t.latency_s for (inner, outer), t in zip(pairwise(held), tiers, strict=True)
    )
    s_per_byte = max(tier.middle_s_per_byte(ranks) for tier in tiers)
    for tier in tiers:
        busiest = min(max(ranks / 2, tier.fewest), tier.most)  # m (n - m) / n bytes leave a child of m ranks
        crossing = busiest * (ranks - busiest) / ranks / tier.port
        s_per_byte = max(s_per_byte, crossing, (ranks - tier.fewest) / ranks / tier.device)
    return latency_s, s_per_byte


def _bruck(kind: Collective, span: Span, tiers: Sequence[LinkTier]) -> Affine | None:
    """An all-to-all in log2(n) rounds of half the payload each; suits small messages (Bruck et al., TPDS 1997)."""
    if kind is not Collective.ALL_TO_ALL:
        return None
    rounds = doublings(span.ranks)
    narrowest = min(min(tier.device, tier.port / tier.most) for tier in tiers)
    middle = max(tier.middle_s_per_byte(span.ranks) for tier in tiers)
    return rounds * max(t.latency_s for t in tiers if t.width > 1), max(rounds / 2 / narrowest, middle)


ALGORITHMS: Mapping[str, Algorithm] = {
    "ring": Algorithm(_ring, _ring_hops),
    "tree": Algorithm(_tree, _tree_hops, measured=False),
    "hierarchical": Algorithm(_hierarchical, _hierarchical_hops, alone="ring"),
    "pairwise": Algorithm(_pairwise),
    "bruck": Algorithm(_bruck),
}
"""By name; of several with equal cost the first is named."""


DIRECT, MEASURED = "direct", "measured"
COLUMNS = (DIRECT, *ALGORITHMS, MEASURED)
"""Columns of `Terms`; an algorithm that a group cannot use has infinite latency."""

_FREE: Affine = (0.0, 0.0)


@dataclass(frozen=True)
class Terms:
    """Affine costs of one or many groups, one column an algorithm (`COLUMNS`); the cost is the minimum over columns.

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
        return COLUMNS[int(np.argmin(self.latency_s + self.s_per_byte * payload_bytes))]


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
    latency, slope = np.full((2, len(COLUMNS)), math.inf)
    slope[:] = 0.0
    span = span_of(cluster, ranks)
    for name, (alpha, beta) in _alternatives(cluster.links(span.types), kind, span, concurrent, copies).items():
        column = COLUMNS.index(name)
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
    latency, slope = np.full((2, len(table), len(COLUMNS)), math.inf)
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
    costs = ((name, entry.affine(kind, span, tiers)) for name, entry in ALGORITHMS.items())
    return {name: affine for name, affine in costs if affine is not None}
