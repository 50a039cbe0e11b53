"""Ring: n-1 steps to reduce or to gather, each of 1/n of the payload (Patarasuk and Yuan, JPDC 2009)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from planner.hardware.algorithms import ALGORITHMS, Algorithm, Hops
from planner.hardware.tiers import Affine, LinkTier, Span, moved_bytes
from planner.hardware.types import Collective

_ROUNDS = {Collective.ALL_REDUCE: 2, Collective.REDUCE_SCATTER: 1, Collective.ALL_GATHER: 1}


def _affine(kind: Collective, span: Span, tiers: Sequence[LinkTier]) -> Affine | None:
    """n-1 steps a round at the latency of the slowest hop, (n-1)/n of the payload through the narrowest.

    A gather or scatter may be held to fewer ports than there are (`Level.gather_ports`).
    """
    if kind not in _ROUNDS:
        return None
    steps = _ROUNDS[kind] * (span.ranks - 1)
    slowest = max(tier.latency_s for tier in tiers if tier.width > 1)
    ports = [tier.level.gather_ports * tier.device if _ROUNDS[kind] == 1 else 0.0 for tier in tiers]
    rate = min(min(tier.channel, held or math.inf) for tier, held in zip(tiers, ports, strict=True))
    return steps * slowest, moved_bytes(kind, 1.0, span.ranks) / rate


def _hops(ranks: Sequence[int], sizes: Sequence[int], group: np.ndarray) -> Hops:
    """Every rank sends to the next."""
    sent = moved_bytes(Collective.ALL_REDUCE, 1.0, len(group))
    return group, np.roll(group, -1), np.full(len(group), sent)


ALGORITHMS.register("ring", Algorithm(1, _affine, _hops))
