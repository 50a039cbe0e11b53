"""Where tensors and weights may rest between the operators that make and use them, and between blocks sharded apart.

ZeRO needs no formulas of its own: its stages are resting places of a weight (`WeightChoice`), and their communication
is what the changes of layout between the resting place and the use come to.
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
    """Where a tensor rests: its value's layout and its gradient's (None where it has none)."""

    value: TensorLayout
    gradient: TensorLayout | None

    @property
    def layouts(self) -> tuple[TensorLayout, ...]:
        """Layouts of all that it says where it rests: the value, then the gradient where there is one."""
        return (self.value,) if self.gradient is None else (self.value, self.gradient)

    def __str__(self) -> str:
        return "/".join(map(layout_text, self.layouts))


@dataclass(frozen=True, slots=True)
class WeightChoice:
    """Where a weight's working copy, its gradient and its optimizer state rest."""

    weight: TensorLayout
    gradient: TensorLayout
    optimizer: TensorLayout

    @property
    def value(self) -> TensorLayout:
        """Layout in which operators find the weight."""
        return self.weight

    @property
    def layouts(self) -> tuple[TensorLayout, ...]:
        """Layouts of the working copy, the gradient and the optimizer state."""
        return self.weight, self.gradient, self.optimizer

    def __str__(self) -> str:
        return "/".join(map(layout_text, self.layouts))


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes that a parameter takes: working copy, gradient, optimizer state (master copy included)."""

    weight: float = 2.0
    gradient: float = 2.0
    optimizer: float = 12.0

    def held(self, shape: Sequence[int], choice: WeightChoice, sizes: Sequence[int]) -> float:
        """Bytes that a rank of a mesh of these sizes holds of a weight, its gradient and its optimizer state."""
        return (
            self.weight * shard_elements(shape, choice.weight, sizes)
            + self.gradient * shard_elements(shape, choice.gradient, sizes)
            + self.optimizer * shard_elements(shape, choice.optimizer, sizes)
        )


def resting_as(tensor: Tensor, layout: TensorLayout, *, gradient: bool) -> TensorChoice | WeightChoice:
    """A tensor or weight that rests in one layout, its gradient (where it carries one) and optimizer state alike."""
    if tensor.kind is TensorKind.PARAMETER:
        return WeightChoice(layout, layout, layout)
    return TensorChoice(layout, layout if gradient else None)


@functools.lru_cache(maxsize=4096)
def tensor_choices(
    shape: tuple[int, ...], sizes: tuple[int, ...], tags: tuple[Part, ...], *, gradient: bool, padded: bool
) -> tuple[TensorChoice, ...]:
    """Value and gradient are cut alike; where the value is whole its gradient may be partial, and the other way."""
    found = []
    for value in layouts(shape, sizes, padded=padded, interleaved=tags):
        if not gradient:
            found.append(TensorChoice(value, None))
            continue
        per_axis = [
            (part,) if part.cuts else (REPLICATED, PARTIAL) if part == REPLICATED and n > 1 else (REPLICATED,)
            for part, n in zip(value, sizes, strict=True)
        ]
        found += [TensorChoice(value, parts) for parts in itertools.product(*per_axis)]
    return tuple(found)


def summed_along(layout: TensorLayout, axes: Sequence[int]) -> TensorLayout:
    """A layout when the ranks along some axes have added up their partial sums."""
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
    """For each axis: whole, its gradient reduced at once or once a step; state cut; gradient too; all cut.

    An axis that deals out samples or steps leaves a weight whole, and its gradient in partial sums. An expert axis cuts
    the dimension that counts experts, where there is one (not -1).
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
    found = []
    for parts in itertools.product(*per_axis):
        choice = WeightChoice(*(tuple(p[i] for p in parts) for i in range(3)))
        if not any(refusal(shape, layout, sizes, padded=padded) for layout in choice.layouts):
            found.append(choice)
    return tuple(found)


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


_DEALT = {AxisRole.CONTEXT: Boundary.SEQUENCE, AxisRole.EXPERT: Boundary.BATCH}
"""What lies between blocks on axes that deal out steps or samples."""


def variants(
    tensors: Iterable[Tensor],
    allowed: Sequence[Boundary],
    sizes: Sequence[int],
    *,
    padded: bool = False,
    roles: Sequence[AxisRole] = (),
) -> tuple[Boundaries, ...]:
    """All ways to treat the boundaries that differ for at least one of the tensors, the first of equal ones.

    Axes that deal out steps or samples have one treatment. Free ones stand alone: nothing but them is allowed.
    """
    if tuple(allowed) == (Boundary.FREE,):
        return ((Boundary.FREE,) * len(sizes),)
    by_axis = [(_DEALT[role],) if role.deals else allowed for role in roles or (AxisRole.TENSOR,) * len(sizes)]
    one_of = {tensor.shape: tensor for tensor in tensors}
    found: dict[tuple[TensorLayout, ...], Boundaries] = {}
    for each in itertools.product(*by_axis):
        layouts = tuple(canonical_layout(t, each, sizes, padded=padded) for t in one_of.values())
        found.setdefault(layouts, each)
    return tuple(found.values())
