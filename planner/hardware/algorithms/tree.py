"""Trees along the levels, up and down, pipelined, so that each direction moves the payload once.

Two trees of half the payload, in which an inner node of one is a leaf of the other (Sanders, Speck and Traeff, Parallel
Computing 2009).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.hardware.algorithms import ALGORITHMS, Algorithm, Hops
from planner.hardware.tiers import Affine, LinkTier, Span, doublings
from planner.hardware.types import Collective

_ROUNDS = {Collective.ALL_REDUCE: 2, Collective.BROADCAST: 1}


def _affine(kind: Collective, span: Span, tiers: Sequence[LinkTier]) -> Affine | None:
    if kind not in _ROUNDS:
        return None
    latency_s = sum(doublings(tier.width) * tier.latency_s for tier in tiers)
    return _ROUNDS[kind] * latency_s, _ROUNDS[kind] / min(tier.channel for tier in tiers)


def _hops(ranks: Sequence[int], sizes: Sequence[int], group: np.ndarray) -> Hops:
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


ALGORITHMS.register("tree", Algorithm(2, _affine, _hops, measured=False))
