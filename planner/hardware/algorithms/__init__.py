"""Algorithms of collectives, one file each: the cost for a group, and the bytes that its ranks send each other.

The cost of every algorithm is affine in the payload. A collective is priced by the cheapest registered algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.hardware.tiers import Affine, LinkTier, Span
from planner.hardware.types import Collective
from planner.registry import Registry

Hops = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Senders and receivers (int64, positions of ranks), and bytes."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An algorithm for collectives.

    Attributes:
        order: rank among the algorithms; of several with equal cost the first is named.
        affine: affine cost for a group over its links; None where the algorithm cannot run the collective, or the
            group.
        hops: the bytes sent in an all-reduce of one byte, from the ranks by position, the devices in one child of each
            level (`planner.hardware.tiers.child_sizes`), and the positions of the group; None if it runs no all-reduce.
        measured: whether measured collectives replace it, because libraries run it.
        alone: the algorithm that it is equal to where a group crosses one level of links; "" for itself.
    """

    order: int
    affine: Callable[[Collective, Span, Sequence[LinkTier]], Affine | None]
    hops: Callable[[Sequence[int], Sequence[int], np.ndarray], Hops] | None = None
    measured: bool = True
    alone: str = ""


ALGORITHMS: Registry[Algorithm] = Registry(__name__, "collective algorithm")


def algorithm_names() -> tuple[str, ...]:
    """Names of the algorithms in their order."""
    return tuple(name for name, _ in sorted(ALGORITHMS.items(), key=lambda entry: entry[1].order))
