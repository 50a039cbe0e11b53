"""Programs over tensors with named dimensions, as Mesh-TensorFlow's layout optimizer sees them: what is alive when."""

from __future__ import annotations

import heapq
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
    """An order of operations by a greedy list scheduler: of those ready, the one after which fewest bytes are alive.

    Complexity: O(operands * log operations); growth is reckoned again only where the last reader of a result changed.
    """
    size = {t.name: t.item_bytes * math.prod(t.sizes) for t in program.tensors}
    operations = program.operations
    made = {name: i for i, op in enumerate(operations) for name in op.outputs}
    readers: dict[str, set[int]] = {name: set() for name in made}
    waits = []
    for i, op in enumerate(operations):
        inputs = {name for name in op.inputs if name in made}
        waits.append({made[name] for name in inputs} - {i})
        for name in inputs:
            readers[name].add(i)

    def growth(i: int) -> tuple[float, int]:
        op = operations[i]
        freed = sum(size[n] for n in dict.fromkeys(op.inputs) if n in made and not readers[n] - {i})
        return sum(size[n] for n in op.outputs) - freed, i

    current = {i: growth(i) for i, need in enumerate(waits) if not need}
    heap = sorted(current.values())
    done: list[int] = []
    while heap:
        entry = heapq.heappop(heap)
        i = entry[1]
        if current.get(i) != entry:
            continue
        del current[i]
        done.append(i)
        changed = [r for n in operations[i].outputs for r in readers[n] if r != i]
        for r in changed:
            waits[r].discard(i)
        for name in operations[i].inputs:
            if name in made:
                readers[name].discard(i)
                changed += readers[name] if len(readers[name]) == 1 else ()
        for r in sorted(set(changed)):
            if not waits[r]:
                current[r] = growth(r)
                heapq.heappush(heap, current[r])
    return tuple(done)


def fed(program: Program) -> tuple[str, ...]:
    """Tensors that no operation writes; they are in memory always."""
    made = {name for op in program.operations for name in op.outputs}
    return tuple(t.name for t in program.tensors if t.name not in made)


def alive(program: Program, order: Sequence[int]) -> list[frozenset[str]]:
    """Results in memory while each scheduled operation runs: from the one that writes them to the last that reads."""
    made = {name for op in program.operations for name in op.outputs}
    last: dict[str, int] = {}
    for at, i in enumerate(order):
        op = program.operations[i]
        last.update((name, at) for name in (*op.inputs, *op.outputs) if name in made)
    ends: list[list[str]] = [[] for _ in order]
    for name, at in last.items():
        ends[at].append(name)
    held: set[str] = set()
    found = []
    for at, i in enumerate(order):
        held.update(program.operations[i].outputs)
        found.append(frozenset(held))
        held.difference_update(ends[at])
    return found


def peak_bytes(program: Program, mesh: Mapping[str, int], assignment: Assignment) -> float:
    """Most bytes that a rank holds at any point of the schedule."""
    held = {
        t.name: t.item_bytes * math.prod(t.sizes) / math.prod(mesh[assignment[d]] for d in t.dims if d in assignment)
        for t in program.tensors
    }
    most = max((sum(held[n] for n in sorted(names)) for names in alive(program, schedule(program))), default=0.0)
    return sum(held[n] for n in fed(program)) + most
