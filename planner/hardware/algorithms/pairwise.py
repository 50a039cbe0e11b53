"""An all-to-all in which each rank sends every other its part; on a torus no faster than what passes its middle."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from planner.hardware.algorithms import ALGORITHMS, Algorithm
from planner.hardware.tiers import Affine, LinkTier, Span
from planner.hardware.types import Collective


def _affine(kind: Collective, span: Span, tiers: Sequence[LinkTier]) -> Affine | None:
    if kind is not Collective.ALL_TO_ALL:
        return None
    ranks = span.ranks
    held = [*(tier.fewest for tier in span.tiers), ranks]
    latency_s = sum((outer - inner) * t.latency_s for (inner, outer), t in zip(pairwise(held), tiers, strict=True))
    s_per_byte = max(tier.middle_s_per_byte(ranks) for tier in tiers)
    for tier, shape in zip(tiers, span.tiers, strict=True):
        busiest = min(max(ranks / 2, shape.fewest), shape.most)  # m (n - m) / n bytes leave a child of m ranks
        crossing = busiest * (ranks - busiest) / ranks / tier.port
        s_per_byte = max(s_per_byte, crossing, (ranks - shape.fewest) / ranks / tier.device)
    return latency_s, s_per_byte


ALGORITHMS.register("pairwise", Algorithm(4, _affine))
