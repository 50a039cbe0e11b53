"""Programs over tensors with named dimensions, as Mesh-TensorFlow's layout optimizer sees them: what is alive when."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Assignment = Mapping[str, str]
"""Mesh axis of each dimension that is split."""


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor with named dimensions."""

    name: str
    dims: tuple[str, ...]
    sizes: tuple[int, ...]
    item_bytes: float = 4.0


@dataclass(frozen=True, slots=True)
class NamedOperation:
    """An operation on named tensors.

    Attributes:
        inputs: names of the tensors read.
        outputs: names of the tensors written.
        unsplittable: dimensions that this operation forbids to split.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    unsplittable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """A program over named tensors, operations in an order that may run."""

    tensors: tuple[NamedTensor, ...]
    operations: tuple[NamedOperation, ...]

    def dims(self) -> tuple[str, ...]:
        """All dimension names in order of first use."""
        return tuple(dict.fromkeys(d for t in self.tensors for d in t.dims))


@dataclass(frozen=True, slots=True)
class LayoutAnswer:
    """A global layout and the peak bytes of a rank under it."""

    assignment: dict[str, str]
    peak_bytes: float

    def __str__(self) -> str:
        return ";".join(f"{dim}:{axis}" for dim, axis in sorted(self.assignment.items()))


def assignments(dims: Sequence[str], axes: Sequence[str]) -> Iterator[dict[str, str]]:
    """All ways to give dimensions of one tensor to axes, no two to one axis; the fewest splits first."""
    for count in range(min(len(dims), len(axes)) + 1):
        for chosen in itertools.combinations(dims, count):
            for where in itertools.permutations(axes, count):
                yield dict(zip(chosen, where, strict=True))


def schedule(program: Program) -> tuple[int, ...]:
    """An order of operations by a greedy list scheduler: of those ready, the one after which fewest bytes are alive."""
    tensors = {t.name: t for t in program.tensors}
    size = {name: t.item_bytes * math.prod(t.sizes) for name, t in tensors.items()}
    readers = {name: {i for i, op in enumerate(program.operations) if name in op.inputs} for name in tensors}
    made = {name: i for i, op in enumerate(program.operations) for name in op.outputs}
    done: list[int] = []
    left = set(range(len(program.operations)))
    while left:
        ready = [i for i in left if all(made.get(n, -1) not in left for n in program.operations[i].inputs)]

        def growth(i: int) -> tuple[float, int]:
            op = program.operations[i]
            freed = sum(size[n] for n in set(op.inputs) if not (readers[n] & left) - {i} and n in made)
            return sum(size[n] for n in op.outputs) - freed, i

        best = min(ready, key=growth)
        done.append(best)
        left.remove(best)
    return tuple(done)


def alive(program: Program, order: Sequence[int]) -> list[frozenset[str]]:
    """Tensors in memory while each scheduled operation runs: the program's inputs always, results while read."""
    place = {i: t for t, i in enumerate(order)}
    made = {name: place[i] for i, op in enumerate(program.operations) for name in op.outputs}
    last = {t.name: len(order) - 1 if t.name not in made else made[t.name] for t in program.tensors}
    for i, op in enumerate(program.operations):
        for name in op.inputs:
            if name in made:
                last[name] = max(last[name], place[i])
    return [
        frozenset(t.name for t in program.tensors if made.get(t.name, 0) <= at <= last[t.name])
        for at in range(len(order))
    ]


def peak_bytes(program: Program, mesh: Mapping[str, int], assignment: Assignment) -> float:
    """Most bytes that a rank holds at any point of the schedule."""
    tensors = {t.name: t for t in program.tensors}

    def held(name: str) -> float:
        t = tensors[name]
        cut = math.prod(mesh[assignment[d]] for d in t.dims if d in assignment)
        return t.item_bytes * math.prod(t.sizes) / cut

    return max((sum(map(held, names)) for names in alive(program, schedule(program))), default=0.0)
