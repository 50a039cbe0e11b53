"""Hierarchical: scatter inside, run across with one shard a rank, gather inside; for groups with even levels.

Source: Jia et al., 2018 (arXiv 1807.11205).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from planner.hardware.algorithms import ALGORITHMS, Algorithm, Hops
from planner.hardware.tiers import Affine, LinkTier, Span, measured_fit, moved_bytes
from planner.hardware.types import Collective

_ROUNDS = {Collective.ALL_REDUCE: 2, Collective.REDUCE_SCATTER: 1, Collective.ALL_GATHER: 1}


def _affine(kind: Collective, span: Span, tiers: Sequence[LinkTier]) -> Affine | None:
    """Not for gathers that must use a ring (`Level.gather_ports`)."""
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
        s_per_byte += rounds * beta / tier.ranks
    return latency_s, s_per_byte


def _hops(ranks: Sequence[int], sizes: Sequence[int], group: np.ndarray) -> Hops:
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


ALGORITHMS.register("hierarchical", Algorithm(3, _affine, _hops, alone="ring"))
