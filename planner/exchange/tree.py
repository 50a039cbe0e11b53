"""Tree all-reduce: sums go up a tree and results down it, in two trees that share the work.

The payload passes every port once up and once down; start-up grows with log(n) (Sanders, Speck and Traeff, 2009).
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.exchange import SCHEMES
from planner.exchange._collectives import OneAlgorithm
from planner.exchange.types import Facts


@dataclass(frozen=True, slots=True)
class Tree(OneAlgorithm):
    """Two binary trees over all ranks, along the levels of the topology."""

    key = "tree"
    facts = Facts(
        decides="buckets of 25 MB in order of arrival",
        time="2 log2(n) latency + 2 M/B",
        traffic="at most 2 M",
        memory="all of it",
        source="Sanders, Speck and Traeff, Parallel Computing 2009",
    )


SCHEMES.register("tree", Tree())
