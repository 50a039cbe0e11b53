"""Algorithms of collectives, one file each: what a group takes with one, and what its ranks send each other.

Every algorithm is affine in the payload. One that is registered here is among those of which every collective takes the
cheapest, wherever collectives are priced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.hardware.tiers import Affine, LinkTier, Span
from planner.hardware.types import Collective
from planner.registry import Registry

Hops = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Who sends, to whom (int64, positions of ranks), and how many bytes."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A way to run collectives.

    Attributes:
        order: place among the algorithms; of several that take equally long the first is named.
        affine: what a group of a shape takes over its links; None where the algorithm cannot serve the collective, or
            the group.
        hops: what is sent in an all-reduce of one byte: of the ranks by position, the devices in one child of each
            level (`planner.hardware.tiers.child_sizes`), and the positions of the group; None where it serves none.
        measured: a measured collective stands for it, being what libraries run.
        alone: the algorithm that it is where a group uses one level of links; "" for itself.
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
