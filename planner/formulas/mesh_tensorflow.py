"""Mesh-TensorFlow: traffic of a layout, and the layouts, meshes and orders that auto_mtf chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.errors import UsageError
from planner.exchange.formulas import all_reduce_bytes
from planner.formulas.checks import divides, whole
from planner.sharding.named_layout import (
    LayoutAnswer,
    NamedOperation,
    NamedTensor,
    Program,
    assignments,
    best_layout,
    peak_bytes,
    schedule,
)


@dataclass(frozen=True, slots=True)
class FeedForwardElements:
    """Elements that a rank sends in a training step, for activations and for weights."""

    activations: float
    weights: float

    @property
    def total(self) -> float:
        """Both."""
        return self.activations + self.weights


def mesh_tensorflow_feed_forward_elements(
    batch: int, width: int, hidden: int, batch_ranks: int, hidden_ranks: int
) -> FeedForwardElements:
    """All-reduces of two products b x d -> h -> d, batch cut over one mesh dimension and hidden over another.

    Activations: the result forward and the input's gradient backward, 2 x 2(r-1)/r b/r' d for r ranks of the hidden and
    r' of the batch dimension; weights 2(r'-1)/r' 2 d h/r.

    >>> formulas.mesh_tensorflow_feed_forward_elements(512, 1024, 4096, batch_ranks=4, hidden_ranks=4)
    FeedForwardElements(activations=393216.0, weights=3145728.0)
    """
    whole(batch_ranks=batch_ranks, hidden_ranks=hidden_ranks)
    divides("batch", batch, "ranks", batch_ranks)
    divides("hidden", hidden, "ranks", hidden_ranks)
    activations = 2 * all_reduce_bytes(batch / batch_ranks * width, hidden_ranks)
    return FeedForwardElements(activations, all_reduce_bytes(2 * width * hidden / hidden_ranks, batch_ranks))


def mesh_tensorflow_mesh_shapes(devices: int, most_dims: int | None = None) -> tuple[tuple[int, ...], ...]:
    """All shapes of a mesh, dimensions not increasing, at most so many.

    >>> formulas.mesh_tensorflow_mesh_shapes(16, most_dims=2), len(formulas.mesh_tensorflow_mesh_shapes(512))
    (((16,), (8, 2), (4, 4)), 30)
    """
    whole(devices=devices, most_dims=1 if most_dims is None else most_dims)

    def shapes(left: int, largest: int, dims: int) -> list[tuple[int, ...]]:
        if left == 1:
            return [()]
        return [
            (n, *rest)
            for n in range(min(left, largest), 1, -1)
            if dims and left % n == 0
            for rest in shapes(left // n, n, dims - 1)
        ]

    return tuple(shapes(devices, devices, most_dims or devices)) if devices > 1 else ((1,),)


@dataclass(frozen=True, slots=True)
class MeshChoice:
    """A mesh with the layout on it: ranks of each mesh dimension, the layout `a:mesh_1;c:mesh_0`, a rank's peak."""

    mesh: dict[str, int]
    layout: str
    peak_bytes: float


def mesh_tensorflow_layout_and_mesh(
    equations: str | Sequence[str],
    sizes: Mapping[str, int],
    devices: int,
    most_dims: int | None = None,
    unsplittable: Sequence[str] = (),
    item_bytes: float = 4.0,
) -> MeshChoice:
    """The mesh shape and layout of least peak memory on so many devices; among equals the first shape.

    >>> formulas.mesh_tensorflow_layout_and_mesh("ab,bc->ac", {"a": 10, "b": 5, "c": 20}, devices=8)
    MeshChoice(mesh={'mesh_0': 4, 'mesh_1': 2}, layout='a:mesh_1;c:mesh_0', peak_bytes=300.0)
    """
    program = named_program(equations, sizes, item_bytes)
    best: MeshChoice | None = None
    for shape in mesh_tensorflow_mesh_shapes(devices, most_dims):
        mesh = {f"mesh_{i}": ranks for i, ranks in enumerate(shape)}
        found = best_layout(program, mesh, unsplittable=unsplittable)
        if best is None or found.peak_bytes < best.peak_bytes:
            best = MeshChoice(mesh, str(found), found.peak_bytes)
    if best is None:
        raise UsageError(f"{devices} devices make no mesh", hint="use one or more")
    return best


def mesh_tensorflow_layout(
    equations: str | Sequence[str],
    sizes: Mapping[str, int],
    mesh: Mapping[str, int],
    unsplittable: Sequence[str] = (),
    item_bytes: float = 4.0,
) -> LayoutAnswer:
    """The layout of least peak memory, and of those the one that splits most, as auto_mtf chooses it.

    Args:
        equations: einsums over one-letter dimensions; a tensor used twice has a name (`x:ab,bc->y:ac`, `y:ac,cd->ad`).
            Operands that no equation makes are inputs, in memory all the time.
        sizes: of each dimension.
        mesh: ranks of each mesh dimension.
        unsplittable: dimensions that stay whole.
        item_bytes: bytes an element.

    >>> sizes = {"a": 10, "b": 5, "c": 20}
    >>> found = formulas.mesh_tensorflow_layout("ab,bc->ac", sizes, {"m1": 4, "m2": 2})
    >>> str(found), found.peak_bytes
    ('a:m2;c:m1', 300.0)
    """
    return best_layout(named_program(equations, sizes, item_bytes), mesh, unsplittable=unsplittable)


def mesh_tensorflow_peak_bytes(
    equations: str | Sequence[str],
    sizes: Mapping[str, int],
    mesh: Mapping[str, int],
    layout: str,
    item_bytes: float = 4.0,
) -> float:
    """Most bytes that a rank holds at any point of the program under a layout `a:m2;c:m1`.

    >>> formulas.mesh_tensorflow_peak_bytes("ab,bc->ac", {"a": 10, "b": 5, "c": 20}, {"m1": 4, "m2": 2}, "a:m2;c:m1")
    300.0
    """
    where = {dim: axis for dim, _, axis in (item.partition(":") for item in layout.split(";") if item)}
    program = named_program(equations, sizes, item_bytes)
    for dim, axis in where.items():
        if dim not in sizes or axis not in mesh:
            raise UsageError(f"the layout gives {dim!r} to {axis!r}", hint="name a dimension and a mesh dimension")
        divides(f"elements of {dim}", sizes[dim], f"ranks of {axis}", mesh[axis])
    return peak_bytes(program, mesh, where)


def mesh_tensorflow_schedule(equations: Sequence[str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The order in which auto_mtf takes the operations to run: of those ready, the one after which least is alive.

    An equation without operands (`->x:ab`) makes a tensor that is freed after its last use; results that nobody reads
    are kept.

    >>> made = ["->x:ab", "->y:bc", "x:ab,y:bc->z:abc", "x:ab,y:bc->w:ac", "w:ac->v:abc"]
    >>> formulas.mesh_tensorflow_schedule(made, {"a": 3, "b": 4, "c": 5})
    (0, 1, 3, 2, 4)
    """
    return schedule(named_program(equations, sizes))


def mesh_tensorflow_assignments(dims: int, mesh_dims: int) -> int:
    """Ways to give the dimensions of a tensor to mesh dimensions, no two to one: sum over k of C(n,k) m!/(m-k)!.

    >>> formulas.mesh_tensorflow_assignments(3, 2)
    13
    """
    whole(0, dims=dims, mesh_dims=mesh_dims)
    return sum(1 for _ in assignments([f"d{i}" for i in range(dims)], [f"m{i}" for i in range(mesh_dims)]))


def named_program(equations: str | Sequence[str], sizes: Mapping[str, int], item_bytes: float = 4.0) -> Program:
    """A program of einsums over named dimensions; see `mesh_tensorflow_layout`.

    >>> program = formulas.named_program(["x:ab,bc->y:ac", "y:ac,cd->ad"], dict.fromkeys("abcd", 2))
    >>> [t.name for t in program.tensors]
    ['x', 't1', 'y', 't3', 't4']

    Raises:
        UsageError: an equation cannot be read, or a dimension has no size.
    """
    tensors: dict[str, NamedTensor] = {}
    operations = []
    for equation in [equations] if isinstance(equations, str) else equations:
        reads, _, write = equation.replace(" ", "").partition("->")
        names = []
        for term in (*(reads.split(",") if reads else ()), write):
            name, colon, dims = term.partition(":")
            name, dims = (name, dims) if colon else (f"t{len(tensors)}", name)
            missing = [d for d in dims if d not in sizes]
            if not dims or missing:
                raise UsageError(
                    f"cannot read {term!r} in {equation!r}", hint="every letter is a dimension with a size"
                )
            tensors.setdefault(name, NamedTensor(name, tuple(dims), tuple(sizes[d] for d in dims), item_bytes))
            names.append(name)
        operations.append(NamedOperation(tuple(names[:-1]), (names[-1],)))
    return Program(tuple(tensors.values()), tuple(operations))
