"""Ring all-reduce: everyone passes shards to the next, once around to add and once around to spread.

2(n-1)/n M through every port, each direction, in 2(n-1) steps (Patarasuk and Yuan, JPDC 2009).
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.exchange import SCHEMES
from planner.exchange._collectives import OneAlgorithm
from planner.exchange.types import Facts


@dataclass(frozen=True, slots=True)
class Ring(OneAlgorithm):
    """One ring over all ranks."""

    key = "ring"
    facts = Facts(
        decides="buckets of 25 MB in order of arrival",
        time="2(n-1) latency + 2(n-1)/n M/B",
        traffic="2(n-1)/n M",
        memory="all of it",
        source="Patarasuk and Yuan, JPDC 2009",
    )


SCHEMES.register("ring", Ring())
