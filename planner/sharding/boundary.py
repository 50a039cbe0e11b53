"""How the tensors between two blocks lie, so that blocks sharded apart fit together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from enum import StrEnum

from planner.errors import UsageError
from planner.graph import Tensor
from planner.sharding.layout import REPLICATED, Part, TensorLayout, refusal


class Boundary(StrEnum):
    """What a mesh axis does with every tensor between two blocks."""

    REPLICATED = "replicated"
    """Every rank holds all of it."""
    SEQUENCE = "sequence"
    """The second dimension of `[batch, steps, width]` is cut; tensors of another rank stay whole."""
    BATCH = "batch"
    """The first dimension is cut; tensors of one dimension stay whole."""
    FREE = "free"
    """Every tensor lies where whoever shards the whole chain at once puts it; it stands for all axes or none."""


Boundaries = tuple[Boundary, ...]
"""One for each mesh axis, outermost first."""


def _part(tensor: Tensor, boundary: Boundary) -> Part:
    rank = len(tensor.shape)
    if boundary is Boundary.SEQUENCE and rank == 3:
        return Part(1)
    return Part(0) if boundary is Boundary.BATCH and rank > 1 else REPLICATED


def canonical_layout(
    tensor: Tensor, boundaries: Boundaries, sizes: Sequence[int], *, padded: bool = False
) -> TensorLayout:
    """Where a boundary tensor lies; an axis that does not divide the dimension leaves the tensor whole.

    It depends on the tensor's shape alone, so the block that writes the tensor and those that read it agree.

    Args:
        tensor: a tensor that crosses a boundary.
        boundaries: one for each mesh axis, none of them free.
        sizes: ranks along each axis.
        padded: whether uneven cuts count.

    Raises:
        UsageError: boundaries are free: where the tensor lies does not follow from its shape.
    """
    if Boundary.FREE in boundaries:
        raise UsageError(f"where {tensor.name!r} lies between blocks is free", hint="ask the sharding that places it")
    parts = [REPLICATED] * len(sizes)
    for axis, (boundary, size) in enumerate(zip(boundaries, sizes, strict=True)):
        if size > 1:
            parts[axis] = _part(tensor, boundary)
            if refusal(tensor.shape, tuple(parts), sizes, padded=padded):
                parts[axis] = REPLICATED
    return tuple(parts)


def variants(
    tensors: Iterable[Tensor], allowed: Sequence[Boundary], sizes: Sequence[int], *, padded: bool = False
) -> tuple[Boundaries, ...]:
    """All ways to treat the boundaries that differ for at least one of the tensors, the first of equal ones.

    Free ones stand alone: nothing but them is allowed.
    """
    if tuple(allowed) == (Boundary.FREE,):
        return ((Boundary.FREE,) * len(sizes),)
    one_of = {tensor.shape: tensor for tensor in tensors}
    found: dict[tuple[TensorLayout, ...], Boundaries] = {}
    for each in itertools.product(allowed, repeat=len(sizes)):
        layouts = tuple(canonical_layout(t, each, sizes, padded=padded) for t in one_of.values())
        found.setdefault(layouts, each)
    return tuple(found.values())
