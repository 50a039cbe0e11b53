"""Weights that the model reads with their dimensions in another order than the file stores them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from planner.importers.onnx_graph.work import WorkGraph

_SAME_ORDER = frozenset(("Identity", "Cast", "CastLike"))


def permuted_weights(work: WorkGraph, tensors: Mapping[str, object]) -> Mapping[str, tuple[int, ...]]:
    """For weight tensors that are one stored weight transposed: for each dimension, the stored one's.

    Tensors in the stored order and those computed otherwise are not in it. O(folded operators).
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, sources in work.weight_sources.items():
        order = _order(work, name, sources) if name in tensors else None
        if order is not None and order != tuple(range(len(order))):
            found[name] = order
    return MappingProxyType(found)


def _order(work: WorkGraph, tensor: str, sources: tuple[str, ...]) -> tuple[int, ...] | None:
    rank = len(work.types[tensor].shape)
    order, name = tuple(range(rank)), tensor
    while name in work.region:
        node = work.region[name]
        if node.op == "Transpose":
            given = node.attributes.get("perm")
            perm = [int(axis) for axis in given] if isinstance(given, (tuple, list)) else list(range(rank))[::-1]
            order = tuple(perm[axis] for axis in order)
        elif node.op not in _SAME_ORDER:
            return None
        name = node.inputs[0]
    return order if sources == (name,) else None
