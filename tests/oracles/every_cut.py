"""All cuts of a small graph as plain sets, for solvers that try everything."""

from __future__ import annotations

from planner.errors import UsageError
from planner.space.partition import Layers

MOST_LAYERS = 16
Cut = frozenset[int]


def every_cut(layers: Layers) -> list[Cut]:
    """Sets of layers that hold the producers of all their members, smaller ones first.

    Raises:
        UsageError: more than `MOST_LAYERS` layers.
    """
    if layers.count > MOST_LAYERS:
        raise UsageError(f"{layers.count} layers are too many to try everything", hint=f"at most {MOST_LAYERS}")
    before, _ = layers.neighbours()
    found = [frozenset[int]()]
    for layer in range(layers.count):
        found += [cut | {layer} for cut in found if cut.issuperset(before[layer])]
    return sorted(found, key=lambda cut: (len(cut), sorted(cut)))
