"""Layouts of tensors on a mesh: on each axis replicated, cut along a dimension, or partial sums.

A layout is one `Part` for each mesh axis. Where several axes cut one dimension, the outer axis cuts first. A cut may be
interleaved: `S2~3` cuts each third of dimension 2 and gives every rank a piece of all three, as a fused query-key-value
projection needs it. Texts read `S0R` (cut along dimension 0 on the first axis, replicated on the second), `RP` (partial
sums on the second).
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from planner.errors import UsageError
from planner.graph import Node
from planner.operators import LoopNest


class Part(NamedTuple):
    """The layout of a tensor along one mesh axis.

    Attributes:
        dim: the tensor dimension that is cut; -1 for replicated, -2 for partial sums over the ranks.
        blocks: number of equal blocks of the dimension that are each cut by themselves; 1 for a plain cut.
    """

    dim: int
    blocks: int = 1

    @property
    def cuts(self) -> bool:
        """Whether ranks hold different elements."""
        return self.dim >= 0

    def __str__(self) -> str:
        if self.dim < 0:
            return "R" if self.dim == -1 else "P"
        return f"S{self.dim}" + (f"~{self.blocks}" if self.blocks > 1 else "")


REPLICATED = Part(-1)
PARTIAL = Part(-2)

TensorLayout = tuple[Part, ...]
"""One part for each mesh axis, outermost axis first."""

_PART = re.compile(r"R|P|S(\d+)(?:~(\d+))?")


def layout_text(layout: TensorLayout) -> str:
    """The layout as text: `S0R`."""
    return "".join(map(str, layout))


def parse_layout(text: str, axes: int) -> TensorLayout:
    """Parse a layout such as `S0R`.

    Raises:
        UsageError: the text is no layout on that many axes.
    """
    words = list(_PART.finditer(text))
    if "".join(word[0] for word in words) != text or len(words) != axes:
        raise UsageError(
            f"{text!r} is no layout on {axes} mesh axes",
            hint="write for each axis R (replicated), P (partial sums) or S and the dimension, as in S0R",
        )
    plain = {"R": REPLICATED, "P": PARTIAL}
    return tuple(plain[word[0]] if word[0] in plain else Part(int(word[1]), int(word[2] or 1)) for word in words)


def shard_shape(shape: Sequence[int], layout: TensorLayout, sizes: Sequence[int]) -> tuple[int, ...]:
    """Shape of the largest piece that a rank holds; under uneven cuts smaller pieces are padded to it."""
    result = list(shape)
    for part, size in zip(layout, sizes, strict=True):
        if part.cuts:
            result[part.dim] = -(-result[part.dim] // size)
    return tuple(result)


@functools.lru_cache(maxsize=65536)
def shard_elements(shape: tuple[int, ...], layout: TensorLayout, sizes: tuple[int, ...]) -> int:
    """Elements of the largest piece that a rank holds, padding included."""
    return math.prod(shard_shape(shape, layout, sizes))


@functools.lru_cache(maxsize=65536)
def refusal(shape: tuple[int, ...], layout: TensorLayout, sizes: tuple[int, ...], *, padded: bool = False) -> str:
    """Why a tensor cannot have a layout; "" when it can.

    Args:
        shape: shape of the full tensor.
        layout: the layout.
        sizes: ranks along each mesh axis.
        padded: whether uneven cuts are allowed; every rank must still hold at least one element.
    """
    left = list(shape)
    blocks: dict[int, int] = {}
    for part, size in zip(layout, sizes, strict=True):
        if not part.cuts:
            continue
        if part.dim >= len(shape):
            return f"a tensor of {len(shape)} dimensions has no dimension {part.dim}"
        if blocks.setdefault(part.dim, part.blocks) != part.blocks:
            return f"dimension {part.dim} is interleaved in two ways"
        size_left = left[part.dim]
        if size_left % part.blocks:
            return f"dimension {part.dim} of {size_left} has no {part.blocks} equal blocks"
        if size_left // part.blocks % size and (not padded or part.blocks > 1):
            return f"dimension {part.dim} of {size_left} does not divide by {size}"
        left[part.dim] = -(-size_left // size)
        if left[part.dim] * (size - 1) >= size_left:
            return f"dimension {part.dim} of {size_left} leaves a rank of {size} empty"
    return ""


def layouts(
    shape: Sequence[int],
    sizes: Sequence[int],
    *,
    padded: bool = False,
    interleaved: Iterable[Part] = (),
) -> tuple[TensorLayout, ...]:
    """All layouts of a tensor on a mesh, replicated ones first; an axis of one rank is always replicated.

    Args:
        shape: shape of the full tensor.
        sizes: ranks along each mesh axis.
        padded: whether uneven cuts are allowed.
        interleaved: interleaved cuts to consider besides the plain ones.

    Complexity: (dimensions + 2) ** axes.
    """
    cuts = [Part(dim) for dim in range(len(shape))]
    choices = (REPLICATED, PARTIAL, *cuts, *sorted(set(interleaved)))
    per_axis = [choices if size > 1 else (REPLICATED,) for size in sizes]
    candidates = itertools.product(*per_axis)
    return tuple(layout for layout in candidates if not refusal(shape, layout, sizes, padded=padded))


def is_innermost(layout: TensorLayout, axis: int, dim: int) -> bool:
    """Whether no axis after `axis` cuts the dimension, so that its cut on `axis` can be made or undone locally."""
    return all(part.dim != dim for part in layout[axis + 1 :])


def indexed(node: Node, nest: LoopNest) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """For every dimension of each operand and result: the tensor, the dimension, and the iteration dimensions that
    index it."""
    for names, accesses in ((node.inputs, nest.reads), (node.outputs, nest.writes)):
        for access in accesses:
            if access.position < len(names) and names[access.position]:
                yield from ((names[access.position], k, dims) for k, dims in enumerate(access.dims))
