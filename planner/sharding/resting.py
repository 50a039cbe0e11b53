"""Where tensors and weights may rest between the operators that make and use them."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from planner.sharding.layout import PARTIAL, REPLICATED, Part, TensorLayout, layout_text, layouts, refusal


@dataclass(frozen=True, slots=True)
class TensorChoice:
    """Where a tensor rests: its value's layout and its gradient's (None where it has none)."""

    value: TensorLayout
    gradient: TensorLayout | None

    def __str__(self) -> str:
        return layout_text(self.value) + ("" if self.gradient is None else f"/{layout_text(self.gradient)}")


@dataclass(frozen=True, slots=True)
class WeightChoice:
    """Where a weight's working copy, its gradient and its optimizer state rest."""

    weight: TensorLayout
    gradient: TensorLayout
    optimizer: TensorLayout

    def __str__(self) -> str:
        return "/".join(map(layout_text, (self.weight, self.gradient, self.optimizer)))


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes that a parameter takes: working copy, gradient, optimizer state (master copy included)."""

    weight: float = 2.0
    gradient: float = 2.0
    optimizer: float = 12.0


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


@functools.lru_cache(maxsize=4096)
def weight_choices(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    tags: tuple[Part, ...],
    *,
    trained: bool,
    sharded_states: bool,
    padded: bool,
) -> tuple[WeightChoice, ...]:
    """For each axis: whole, its gradient reduced at once or once a step; state cut; gradient too; all cut."""
    cuts = [Part(d) for d in range(len(shape))] + list(tags)
    first = next((c for c in cuts[: len(shape)] for n in sizes if n > 1 and not refusal(
        shape, (c,), (n,), padded=padded)), None)  # fmt: skip
    per_axis: list[list[tuple[Part, Part, Part]]] = []
    for n in sizes:
        options = [(REPLICATED, REPLICATED, REPLICATED)]
        if n > 1:
            options += [(c, c, c) for c in cuts]
            if trained:
                options.append((REPLICATED, PARTIAL, REPLICATED))
            if trained and sharded_states and first is not None:
                options += [(REPLICATED, PARTIAL, first), (REPLICATED, first, first)]
        per_axis.append(options)
    found = []
    for parts in itertools.product(*per_axis):
        choice = WeightChoice(*(tuple(p[i] for p in parts) for i in range(3)))
        if not any(refusal(shape, layout, sizes, padded=padded)
                   for layout in (choice.weight, choice.gradient, choice.optimizer)):  # fmt: skip
            found.append(choice)
    return tuple(found)
