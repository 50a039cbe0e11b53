"""Resting layouts: how tensors and weights lie between the operators that make and use them, and between blocks.

ZeRO needs no formulas of its own: its stages are resting layouts of a weight (`WeightChoice`), and their communication
is the changes of layout between resting and use.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from planner.errors import UsageError
from planner.graph import Tensor, TensorKind
from planner.sharding.layout import (
    PARTIAL,
    REPLICATED,
    Part,
    TensorLayout,
    layout_text,
    layouts,
    refusal,
    shard_elements,
)
from planner.sharding.mesh import AxisRole


@dataclass(frozen=True, slots=True)
class TensorChoice:
    """Resting layouts of a tensor: of its value and of its gradient (None where it has none)."""

    value: TensorLayout
    gradient: TensorLayout | None

    @property
    def layouts(self) -> tuple[TensorLayout, ...]:
        """Layout of the value, then of the gradient where there is one."""
        return (self.value,) if self.gradient is None else (self.value, self.gradient)

    def __str__(self) -> str:
        return "/".join(map(layout_text, self.layouts))


@dataclass(frozen=True, slots=True)
class WeightChoice:
    """Resting layouts of a weight: of the working copy, the gradient and the optimizer state."""

    weight: TensorLayout
    gradient: TensorLayout
    optimizer: TensorLayout

    @property
    def value(self) -> TensorLayout:
        """Layout of the working copy, which operators read."""
        return self.weight

    @property
    def layouts(self) -> tuple[TensorLayout, ...]:
        """Layouts of the working copy, the gradient and the optimizer state."""
        return self.weight, self.gradient, self.optimizer

    def __str__(self) -> str:
        return "/".join(map(layout_text, self.layouts))


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of a parameter: working copy, gradient, optimizer state (with the master copy)."""

    weight: float = 2.0
    gradient: float = 2.0
    optimizer: float = 12.0

    def held(self, shape: Sequence[int], choice: WeightChoice, sizes: Sequence[int]) -> float:
        """Bytes that a rank holds of a weight, its gradient and its optimizer state, on a mesh of these sizes."""
        return (
            self.weight * shard_elements(shape, choice.weight, sizes)
            + self.gradient * shard_elements(shape, choice.gradient, sizes)
            + self.optimizer * shard_elements(shape, choice.optimizer, sizes)
        )


def resting_as(tensor: Tensor, layout: TensorLayout, *, gradient: bool) -> TensorChoice | WeightChoice:
    """A tensor or weight with one layout for all: value, gradient (where it carries one) and optimizer state."""
    if tensor.kind is TensorKind.PARAMETER:
        return WeightChoice(layout, layout, layout)
    return TensorChoice(layout, layout if gradient else None)


@functools.lru_cache(maxsize=4096)
def tensor_choices(
    shape: tuple[int, ...], sizes: tuple[int, ...], tags: tuple[Part, ...], *, gradient: bool, padded: bool
) -> tuple[TensorChoice, ...]:
    """All resting layouts of a tensor.

    Value and gradient are cut alike; if one of them is replicated, the other may be partial.
    """
    choices = []
    for value in layouts(shape, sizes, padded=padded, interleaved=tags):
        if not gradient:
            choices.append(TensorChoice(value, None))
            continue
        per_axis = [
            (part,) if part.cuts else (REPLICATED, PARTIAL) if part == REPLICATED and n > 1 else (REPLICATED,)
            for part, n in zip(value, sizes, strict=True)
        ]
        choices += [TensorChoice(value, parts) for parts in itertools.product(*per_axis)]
    return tuple(choices)


def summed_along(layout: TensorLayout, axes: Sequence[int]) -> TensorLayout:
    """A layout after the ranks along some axes have added up their partial sums."""
    return tuple(REPLICATED if a in axes and part == PARTIAL else part for a, part in enumerate(layout))


@functools.lru_cache(maxsize=4096)
def weight_choices(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    tags: tuple[Part, ...],
    *,
    trained: bool,
    sharded_states: bool,
    padded: bool,
    roles: tuple[AxisRole, ...] = (),
    expert_dim: int = -1,
) -> tuple[WeightChoice, ...]:
    """All resting layouts of a weight.

    On each axis: all replicated; the gradient in partial sums, reduced once a step; only the optimizer state cut
    (ZeRO-1); state and gradient cut (ZeRO-2); all cut. An axis that deals out samples or steps replicates the weight
    and leaves its gradient in partial sums. An expert axis cuts the dimension that counts experts (-1 for none).
    """
    cuts = [Part(d) for d in range(len(shape))] + list(tags)
    plain, cut_axes = cuts[: len(shape)], [n for n in sizes if n > 1]
    first = next((c for c in plain for n in cut_axes if not refusal(shape, (c,), (n,), padded=padded)), None)
    per_axis: list[list[tuple[Part, Part, Part]]] = []
    for axis, n in enumerate(sizes):
        options = [(REPLICATED, REPLICATED, REPLICATED)]
        if roles and roles[axis].deals:
            expert = Part(expert_dim)
            cut = roles[axis] is AxisRole.EXPERT and expert_dim >= 0
            options = [(expert,) * 3 if cut else (REPLICATED, PARTIAL if trained else REPLICATED, REPLICATED)]
        elif n > 1:
            options += [(c, c, c) for c in cuts]
            if trained:
                options.append((REPLICATED, PARTIAL, REPLICATED))
            if trained and sharded_states and first is not None:
                options += [(REPLICATED, PARTIAL, first), (REPLICATED, first, first)]
        per_axis.append(options)
    choices = []
    for parts in itertools.product(*per_axis):
        choice = WeightChoice(*(tuple(p[i] for p in parts) for i in range(3)))
        if not any(refusal(shape, layout, sizes, padded=padded) for layout in choice.layouts):
            choices.append(choice)
    return tuple(choices)


class BoundaryLayout(StrEnum):
    """Layout of the tensors between two blocks on one mesh axis."""

    REPLICATED = "replicated"
    """Every rank holds the full tensor."""
    SEQUENCE = "sequence"
    """The second dimension of `[batch, steps, width]` is cut; tensors not of 3 dimensions are replicated."""
    BATCH = "batch"
    """The first dimension is cut; tensors of one dimension are replicated."""
    FREE = "free"
    """A search over the full graph chooses each layout; must hold for all axes or for none."""


Boundaries = tuple[BoundaryLayout, ...]
"""One for each mesh axis, outermost first."""


def _part(tensor: Tensor, boundary: BoundaryLayout) -> Part:
    rank = len(tensor.shape)
    if boundary is BoundaryLayout.SEQUENCE and rank == 3:
        return Part(1)
    return Part(0) if boundary is BoundaryLayout.BATCH and rank > 1 else REPLICATED


def canonical_layout(
    tensor: Tensor, boundaries: Boundaries, sizes: Sequence[int], *, padded: bool = False
) -> TensorLayout:
    """Layout of a boundary tensor; an axis that does not divide the dimension replicates it.

    The layout depends on the shape alone, so the block that writes the tensor and those that read it agree.

    Args:
        tensor: a tensor that crosses a boundary.
        boundaries: one for each mesh axis, none of them free.
        sizes: ranks along each axis.
        padded: whether uneven cuts are allowed.

    Raises:
        UsageError: a boundary is free: the layout does not follow from the shape.
    """
    if BoundaryLayout.FREE in boundaries:
        raise UsageError(f"where {tensor.name!r} lies between blocks is free", hint="ask the sharding that places it")
    parts = [REPLICATED] * len(sizes)
    for axis, (boundary, size) in enumerate(zip(boundaries, sizes, strict=True)):
        if size > 1:
            parts[axis] = _part(tensor, boundary)
            if refusal(tensor.shape, tuple(parts), sizes, padded=padded):
                parts[axis] = REPLICATED
    return tuple(parts)


_DEALT = {AxisRole.CONTEXT: BoundaryLayout.SEQUENCE, AxisRole.EXPERT: BoundaryLayout.BATCH}
"""Boundaries on axes that deal out steps or samples."""


def variants(
    tensors: Iterable[Tensor],
    allowed: Sequence[BoundaryLayout],
    sizes: Sequence[int],
    *,
    padded: bool = False,
    roles: Sequence[AxisRole] = (),
) -> tuple[Boundaries, ...]:
    """All boundaries that give at least one tensor another layout; of equal ones the first.

    Axes that deal out steps or samples have one boundary. FREE counts only if nothing else is allowed.
    """
    if tuple(allowed) == (BoundaryLayout.FREE,):
        return ((BoundaryLayout.FREE,) * len(sizes),)
    by_axis = [(_DEALT[role],) if role.deals else allowed for role in roles or (AxisRole.TENSOR,) * len(sizes)]
    tensor_of_shape = {tensor.shape: tensor for tensor in tensors}
    boundaries_by_layouts: dict[tuple[TensorLayout, ...], Boundaries] = {}
    for boundaries in itertools.product(*by_axis):
        layouts = tuple(canonical_layout(t, boundaries, sizes, padded=padded) for t in tensor_of_shape.values())
        boundaries_by_layouts.setdefault(layouts, boundaries)
    return tuple(boundaries_by_layouts.values())
