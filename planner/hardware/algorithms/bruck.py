"""An all-to-all in log2(n) rounds of half the payload each, which suits small messages (Bruck et al., TPDS 1997)."""

from __future__ import annotations

from collections.abc import Sequence

from planner.hardware.algorithms import ALGORITHMS, Algorithm
from planner.hardware.tiers import Affine, LinkTier, Span, doublings
from planner.hardware.types import Collective


def _affine(kind: Collective, span: Span, tiers: Sequence[LinkTier]) -> Affine | None:
    if kind is not Collective.ALL_TO_ALL:
        return None
    rounds = doublings(span.ranks)
    narrowest = min(min(t.device, t.port / shape.most) for t, shape in zip(tiers, span.tiers, strict=True))
    middle = max(tier.middle_s_per_byte(span.ranks) for tier in tiers)
    return rounds * max(t.latency_s for t in tiers if t.width > 1), max(rounds / 2 / narrowest, middle)


ALGORITHMS.register("bruck", Algorithm(5, _affine))
