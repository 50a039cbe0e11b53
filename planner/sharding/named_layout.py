"""Programs over tensors with named dimensions, and the layout of one that holds the fewest bytes.

Mesh-TensorFlow's layout optimizer asks for it. Its published program minimises `(dims + 1) * peak - splits`: the peak
first, of equal ones the most splits. Here both are solved one after the other by CP-SAT, which keeps the numbers small.
Shazeer et al., NeurIPS 2018; the program is that of the library's layout optimizer.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.errors import InfeasibleError

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

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


def _groups(program: Program) -> set[tuple[str, ...]]:
    """Sets of dimensions of which no two may share an axis: those of each tensor and each operation."""
    tensors = {t.name: t for t in program.tensors}
    found = {tuple(sorted(set(t.dims))) for t in program.tensors}
    for op in program.operations:
        found.add(tuple(sorted({d for n in (*op.inputs, *op.outputs) for d in tensors[n].dims})))
    return found


def best_layout(program: Program, mesh: Mapping[str, int], *, unsplittable: Collection[str] = ()) -> LayoutAnswer:
    """The layout of least peak bytes, of those the one that splits most, by CP-SAT.

    Args:
        program: tensors and operations.
        mesh: ranks along each axis.
        unsplittable: dimensions that must stay whole.

    Raises:
        InfeasibleError: the solver gave up; keeping everything whole satisfies the rules.
    """
    search = _Model(program, mesh, unsplittable)
    least = search.solve_peak()
    found = search.solve_splits(least)
    return LayoutAnswer(found, peak_bytes(program, mesh, found))


class _Model:
    """The rules as a CP-SAT model: a choice of axis for each dimension, and one of axes for each tensor's dimensions.

    A tensor's choices add up to those of its dimensions, axis by axis, which keeps the linear relaxation tight.
    """

    def __init__(self, program: Program, mesh: Mapping[str, int], unsplittable: Collection[str]) -> None:
        from ortools.sat.python import cp_model

        self.program, self.mesh, self.axes = program, mesh, list(mesh)
        self.tensors = {t.name: t for t in program.tensors}
        self.fixed = {*unsplittable, *(d for op in program.operations for d in op.unsplittable)}
        self.model = cp_model.CpModel()
        dims = program.dims()
        self.splits = {(d, m): self.model.new_bool_var(f"{d}:{m}") for d in dims for m in self.axes}
        self.chosen: dict[tuple[str, ...], list[tuple[dict[str, str], cp_model.IntVar]]] = {}
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
            self.chosen[key] = [(a, self.model.new_bool_var("")) for a in assignments(key, self.axes)]
            self.model.add_exactly_one(y for _, y in self.chosen[key])
            for d, m in itertools.product(key, self.axes):
                self.model.add(sum(y for a, y in self.chosen[key] if a.get(d) == m) == self.splits[d, m])

    def _held(self, names: Collection[str]) -> cp_model.LinearExpr:
        """Bytes that some tensors take on a rank, times the scale."""
        from ortools.sat.python import cp_model

        weight: dict[int, int] = {}
        variables: dict[int, cp_model.IntVar] = {}
        for t in (self.tensors[name] for name in sorted(names)):
            for a, y in self.chosen[tuple(sorted(set(t.dims)))]:
                cut = math.prod(self.mesh[a[d]] for d in t.dims if d in a)
                weight[y.index] = weight.get(y.index, 0) + round(t.item_bytes * math.prod(t.sizes) * self.scale / cut)
                variables[y.index] = y
        terms = cp_model.LinearExpr.weighted_sum([variables[k] for k in weight], list(weight.values()))
        return cp_model.LinearExpr.sum([terms])

    def _peak(self) -> cp_model.IntVar:
        """At least what is alive at any time. What is always alive is added up once."""
        whole = math.ceil(sum(t.item_bytes * math.prod(t.sizes) for t in self.program.tensors) * self.scale)
        base = self.model.new_int_var(0, whole, "always")
        peak = self.model.new_int_var(0, whole, "peak")
        self.model.add(base == self._held(fed(self.program)))
        self.model.add(base <= peak)
        most: list[frozenset[str]] = []
        for names in sorted(dict.fromkeys(alive(self.program, schedule(self.program))), key=len, reverse=True):
            if not any(names <= other for other in most):
                most.append(names)
                self.model.add(base + self._held(names) <= peak)
        return peak

    def _solve(self) -> cp_model.CpSolver:
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        # presolve of OR-tools 9.15 was seen to cut off optima of other models: keep it from doing so
        solver.parameters.keep_all_feasible_solutions_in_presolve = True
        solver.parameters.symmetry_level = 0
        solver.parameters.presolve_inclusion_work_limit = 0
        status = solver.solve(self.model)
        if status == cp_model.INFEASIBLE:
            # To split nothing is always a layout; with presolve, 9.15 has called models infeasible that are not.
            solver.parameters.cp_model_presolve = False
            status = solver.solve(self.model)
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
        """The layout that splits most at that peak; a tie goes to the earlier dimension and axis, so there is one."""
        self.model.add(self.peak <= peak)
        order = {key: k + 1 for k, key in enumerate(sorted(self.splits))}
        small = sum(order.values()) + 1
        self.model.maximize(sum((small - order[key]) * variable for key, variable in self.splits.items()))
        solver = self._solve()
        return {d: m for (d, m), variable in self.splits.items() if solver.value(variable)}
