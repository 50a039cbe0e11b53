"""Mesh-TensorFlow's layout optimizer: the layout of a program over named dimensions with the least peak memory.

The published integer program minimises `(dims + 1) * peak - splits`: the peak first, then the most splits. Here the two
objectives are solved one after the other by CP-SAT, which keeps the numbers small. Shazeer et al., NeurIPS 2018; the
program is that of the library's layout optimizer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.cp_sat import careful_solver, solved, weighted_sum
from planner.errors import InfeasibleError
from planner.sums import float_sum

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

Assignment = Mapping[str, str]
"""By dimension that is split, its mesh axis."""


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
        inputs: names of the tensors that it reads.
        outputs: names of the tensors that it writes.
        unsplittable: dimensions that must not be split because of this operation.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    unsplittable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NamedProgram:
    """A program over named tensors, its operations in a topological order."""

    tensors: tuple[NamedTensor, ...]
    operations: tuple[NamedOperation, ...]

    def dims(self) -> tuple[str, ...]:
        """All dimension names in order of first use."""
        return tuple(dict.fromkeys(d for t in self.tensors for d in t.dims))


@dataclass(frozen=True, slots=True)
class LayoutAnswer:
    """A global layout, and the peak bytes of a rank under it."""

    assignment: dict[str, str]
    peak_bytes: float

    def __str__(self) -> str:
        return ";".join(f"{dim}:{axis}" for dim, axis in sorted(self.assignment.items()))


def assignments(dims: Sequence[str], axes: Sequence[str]) -> Iterator[dict[str, str]]:
    """All assignments of a tensor's dimensions to axes, no two to one axis; those with the fewest splits first."""
    for count in range(min(len(dims), len(axes)) + 1):
        for split_dims in itertools.combinations(dims, count):
            for split_axes in itertools.permutations(axes, count):
                yield dict(zip(split_dims, split_axes, strict=True))


def schedule(program: NamedProgram) -> tuple[int, ...]:
    """The order of a greedy list scheduler: next the ready operation after which the fewest bytes are alive.

    Complexity: O(operands), and for each operation O(operands of those that are ready), which are few.
    """
    size = {t.name: t.item_bytes * math.prod(t.sizes) for t in program.tensors}
    operations = program.operations
    writer_of = {name: i for i, op in enumerate(operations) for name in op.outputs}
    readers: dict[str, set[int]] = {name: set() for name in writer_of}
    for i, op in enumerate(operations):
        for name in readers.keys() & set(op.inputs):
            readers[name].add(i)
    waits = [{writer_of[name] for name in op.inputs if name in writer_of} - {i} for i, op in enumerate(operations)]

    def growth(i: int) -> tuple[float, int]:
        op = operations[i]
        freed = float_sum(size[n] for n in dict.fromkeys(op.inputs) if n in writer_of and not readers[n] - {i})
        return float_sum(size[n] for n in op.outputs) - freed, i

    ready = [i for i, need in enumerate(waits) if not need]
    done: list[int] = []
    while ready:
        i = min(ready, key=growth)
        ready.remove(i)
        done.append(i)
        for r in {r for name in operations[i].outputs for r in readers[name]} - {i}:
            waits[r].discard(i)
            ready += [] if waits[r] else [r]
        for name in writer_of.keys() & set(operations[i].inputs):
            readers[name].discard(i)
    return tuple(done)


def fed(program: NamedProgram) -> tuple[str, ...]:
    """Tensors that no operation writes; they are always in memory."""
    results = {name for op in program.operations for name in op.outputs}
    return tuple(t.name for t in program.tensors if t.name not in results)


def alive(program: NamedProgram, order: Sequence[int]) -> list[frozenset[str]]:
    """Results in memory while each scheduled operation runs: from their writer to their last reader."""
    results = {name for op in program.operations for name in op.outputs}
    last_use: dict[str, int] = {}
    for at, i in enumerate(order):
        op = program.operations[i]
        last_use.update((name, at) for name in (*op.inputs, *op.outputs) if name in results)
    ends: list[list[str]] = [[] for _ in order]
    for name, at in last_use.items():
        ends[at].append(name)
    held: set[str] = set()
    alive_at = []
    for at, i in enumerate(order):
        held.update(program.operations[i].outputs)
        alive_at.append(frozenset(held))
        held.difference_update(ends[at])
    return alive_at


def peak_bytes(program: NamedProgram, mesh: Mapping[str, int], assignment: Assignment) -> float:
    """Peak bytes that a rank holds over the schedule."""
    held = {
        t.name: t.item_bytes * math.prod(t.sizes) / math.prod(mesh[assignment[d]] for d in t.dims if d in assignment)
        for t in program.tensors
    }
    peak = max((float_sum(held[n] for n in sorted(names)) for names in alive(program, schedule(program))), default=0.0)
    return float_sum(held[n] for n in fed(program)) + peak


def _groups(program: NamedProgram) -> set[tuple[str, ...]]:
    """Sets of dimensions of which no two may share an axis: those of each tensor and of each operation."""
    tensors = {t.name: t for t in program.tensors}
    groups = {tuple(sorted(set(t.dims))) for t in program.tensors}
    for op in program.operations:
        groups.add(tuple(sorted({d for n in (*op.inputs, *op.outputs) for d in tensors[n].dims})))
    return groups


def best_layout(program: NamedProgram, mesh: Mapping[str, int], *, unsplittable: Collection[str] = ()) -> LayoutAnswer:
    """The layout with the least peak bytes, of these the one with the most splits, by CP-SAT.

    Args:
        program: tensors and operations.
        mesh: ranks along each axis.
        unsplittable: dimensions that must not be split.

    Raises:
        InfeasibleError: the solver gave up (to split nothing is always feasible).
    """
    search = _Model(program, mesh, unsplittable)
    assignment = search.solve_splits(search.solve_peak())
    return LayoutAnswer(assignment, peak_bytes(program, mesh, assignment))


class _Model:
    """The CP-SAT model: an axis for each dimension, and an assignment for the dimensions of each tensor.

    The assignments of a tensor add up to the axes of its dimensions, which keeps the linear relaxation tight.
    """

    def __init__(self, program: NamedProgram, mesh: Mapping[str, int], unsplittable: Collection[str]) -> None:
        from ortools.sat.python import cp_model

        self.program, self.mesh, self.axes = program, mesh, list(mesh)
        self.tensors = {t.name: t for t in program.tensors}
        self.fixed = {*unsplittable, *(d for op in program.operations for d in op.unsplittable)}
        self.model = cp_model.CpModel()
        dims = program.dims()
        self.splits = {(d, m): self.model.new_bool_var(f"{d}:{m}") for d in dims for m in self.axes}
        self.assigned: dict[tuple[str, ...], list[tuple[dict[str, str], cp_model.IntVar]]] = {}
        self.scale = math.lcm(
            *(math.prod(c) for n in range(1, len(self.axes) + 1) for c in itertools.combinations(mesh.values(), n))
        )
        self._rules()
        self._tensors()
        self.peak = self._peak()

    def _rules(self) -> None:
        common: dict[str, int] = {}
        for t in self.program.tensors:
            for d, n in zip(t.dims, t.sizes, strict=True):
                common[d] = math.gcd(common.get(d, 0), n)
        for (d, m), variable in self.splits.items():
            if common[d] % self.mesh[m] or d in self.fixed:
                self.model.add(variable == 0)
        for d in common:
            self.model.add_at_most_one(self.splits[d, m] for m in self.axes)
        for group, m in itertools.product(sorted(_groups(self.program)), self.axes):
            self.model.add_at_most_one(self.splits[d, m] for d in group)

    def _tensors(self) -> None:
        for key in dict.fromkeys(tuple(sorted(set(t.dims))) for t in self.program.tensors):
            self.assigned[key] = [(a, self.model.new_bool_var("")) for a in assignments(key, self.axes)]
            self.model.add_exactly_one(y for _, y in self.assigned[key])
            for d, m in itertools.product(key, self.axes):
                self.model.add(sum(y for a, y in self.assigned[key] if a.get(d) == m) == self.splits[d, m])

    def _held(self, names: Collection[str]) -> cp_model.LinearExprT:
        """Bytes of some tensors on a rank, times the scale."""
        terms = []
        for t in (self.tensors[name] for name in sorted(names)):
            for a, y in self.assigned[tuple(sorted(set(t.dims)))]:
                cut = math.prod(self.mesh[a[d]] for d in t.dims if d in a)
                terms.append((y, round(t.item_bytes * math.prod(t.sizes) * self.scale / cut)))
        return weighted_sum(terms)

    def _peak(self) -> cp_model.IntVar:
        """A variable that is at least the live bytes at any time; tensors that are always alive are added up once."""
        total_bytes = math.ceil(float_sum(t.item_bytes * math.prod(t.sizes) for t in self.program.tensors) * self.scale)
        base = self.model.new_int_var(0, total_bytes, "always")
        peak = self.model.new_int_var(0, total_bytes, "peak")
        self.model.add(base == self._held(fed(self.program)))
        self.model.add(base <= peak)
        largest: list[frozenset[str]] = []
        for names in sorted(dict.fromkeys(alive(self.program, schedule(self.program))), key=len, reverse=True):
            if not any(names <= other for other in largest):
                largest.append(names)
                self.model.add(self._held(names) <= peak - base)
        return peak

    def _solve(self) -> cp_model.CpSolver:
        from ortools.sat.python import cp_model

        solver = careful_solver()
        status = solved(solver, self.model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            raise InfeasibleError(
                f"no layout of named dimensions was found ({solver.status_name(status)})",
                hint="use a smaller mesh or model",
            )
        return solver

    def solve_peak(self) -> int:
        """The least peak, times the scale."""
        self.model.minimize(self.peak)
        return round(self._solve().objective_value)

    def solve_splits(self, peak: int) -> dict[str, str]:
        """The layout with the most splits at that peak; ties go to the earlier dimension and axis, so it is unique."""
        self.model.add(self.peak <= peak)
        order = {key: k + 1 for k, key in enumerate(sorted(self.splits))}
        small = sum(order.values()) + 1
        self.model.maximize(sum((small - order[key]) * variable for key, variable in self.splits.items()))
        solver = self._solve()
        return {d: m for (d, m), variable in self.splits.items() if solver.value(variable)}
