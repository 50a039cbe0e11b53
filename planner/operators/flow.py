"""Where the batch is in the tensors of a graph, and how it travels from a node's operands to its results.

A mark says where the batch sits inside a dimension: its size is `outer * batch * inner`. It travels along the iteration
dimensions of the operator's loop nests: what indexes the marked dimension of an operand follows the batch, and so do
all other dimensions that it indexes. Operators that move, merge or pick dimensions by a constant operand say how they
do it beside their rule.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from planner.errors import ModelError
from planner.graph import Graph, Node, TensorKind
from planner.operators.site import Site
from planner.operators.specs import graph_specs
from planner.operators.types import Access, Dim, DimKind, LoopNest, OpCall


class Mark(NamedTuple):
    """The batch inside one dimension: its size is `outer * batch * inner`."""

    outer: int = 1
    inner: int = 1


Marks = tuple[Mark | None, ...]


@dataclass
class Flow:
    """State of the walk through a graph.

    Attributes:
        graph: the graph.
        batch: the batch its shapes are for.
        marks: marks of every tensor that has any.
        edits: for a node's constant operand, by (node, position): which of its values are proportional to the batch.
        guesses: which of several possible places the batch takes, by situation; the first where nothing is said.
        open: situations met that leave a choice, and among how many places.
        picked: the error of a node that picks fixed positions of the batch, if all that follows does without the batch.
        late: computed tensors that follow the batch for the sake of a reader, not of what they are computed from.
    """

    graph: Graph
    batch: int
    marks: dict[str, Marks] = field(default_factory=dict)
    edits: dict[tuple[int, int], tuple[bool, ...]] = field(default_factory=dict)
    guesses: dict[Hashable, int] = field(default_factory=dict)
    open: dict[Hashable, int] = field(default_factory=dict)
    late: int = 0
    picked: ModelError | None = None

    def site(self, i: int) -> Site:
        """A node's call, by which its attributes and constant operands are read."""
        return Site(OpCall.of(self.graph, self.graph.nodes[i]), ())

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor at the graph's own batch."""
        return self.graph.tensors[name].shape

    def of(self, name: str) -> Marks:
        """Marks of a tensor, one entry a dimension."""
        found = self.marks.get(name)
        return found if found is not None else (None,) * len(self.graph.tensors[name].shape)

    def set(self, name: str, marks: Sequence[Mark | None]) -> None:
        """Write the marks of a result; results nobody reads have no tensor and are skipped."""
        if name and name in self.graph.tensors and any(marks):
            self.marks[name] = tuple(marks)

    def guess(self, situation: Hashable, fitting: Sequence[tuple[int, Mark]]) -> tuple[int, Mark]:
        """One of several places for the batch; equal situations are decided alike."""
        if len(fitting) > 1:
            self.open.setdefault(situation, len(fitting))
        return fitting[self.guesses.get(situation, 0)]

    def other_guesses(self) -> dict[Hashable, int] | None:
        """The next combination of guesses to try after this one failed, the latest changed first; None without one."""
        met = list(self.open)
        for k in reversed(range(len(met))):
            now = self.guesses.get(met[k], 0)
            if now + 1 < self.open[met[k]]:
                return {**{s: self.guesses.get(s, 0) for s in met[:k]}, met[k]: now + 1}
        return None

    def fail(self, i: int, why: str) -> ModelError:
        """The error that names a node which stops the batch."""
        node = self.graph.nodes[i]
        return ModelError(
            f"the batch size cannot be changed: {node.op} {why}",
            where=node.name or node.key,
            hint=f"plan at the exported batch size {self.batch}, or export the model with a dynamic batch axis",
        )

    def require(self, i: int, name: str, dim: int, mark: Mark) -> None:
        """Make an operand's dimension follow the batch, which nothing said so far.

        Constants do, weights that an exporter repeated once a sample (a class token), and what is computed from such;
        tensors that are computed from inputs cannot.

        Raises:
            ModelError: the operand cannot follow.
        """
        marks = self.of(name)
        if marks[dim] is not None:
            return
        tensor = self.graph.tensors[name]
        at = self.graph.producer.get(name)
        repeated = at is not None and self._repeats(at, name, dim, mark)
        if at is not None and not repeated:
            self._trace_back(i, at, name, dim, mark)
        if tensor.kind is TensorKind.PARAMETER and mark != Mark():
            raise self.fail(i, f"reads the weight {name!r}, whose dimension {dim} runs over all samples")
        self.marks[name] = (*marks[:dim], mark, *marks[dim + 1 :])
        self.late += at is not None
        if at is not None and repeated:
            self.note_shape(at, 1, name)

    def _repeats(self, at: int, name: str, dim: int, mark: Mark) -> bool:
        """Whether a node repeats its operand along a dimension of its result, which may then be once a sample."""
        node, size = self.graph.nodes[at], self.shape(name)[dim]
        if node.op not in ("Expand", "Tile"):
            return False
        source = self.shape(node.inputs[0])
        place = dim - len(self.shape(name)) + len(source)
        before = source[place] if place >= 0 else 1
        if node.op == "Expand":
            return before == 1
        if size // before % self.batch or mark.inner % before:
            return False
        known = self.edits.get((at, 1), (False,) * len(source))
        self.edit(at, 1, [flag or d == dim for d, flag in enumerate(known)])
        return True

    def _trace_back(self, i: int, at: int, name: str, dim: int, mark: Mark) -> None:
        """Make what a tensor is computed from follow the batch: constants and weights, repeated once a sample.

        Raises:
            ModelError: the tensor is computed from an input, or its producer makes that dimension of nothing.
        """
        node, site = self.graph.nodes[at], graph_specs(self.graph)[at]
        indices = [
            access.dims[dim]
            for nest in site.nests
            for access in nest.writes
            if node.outputs[access.position] == name and len(access.dims) == len(self.shape(name))
        ]
        operands = [
            (node.inputs[access.position], d, _within(nest, names, indices[0][0], mark))
            for nest in site.nests
            for access in nest.reads
            if len(access.dims) == len(self.shape(node.inputs[access.position]))
            for d, names in enumerate(access.dims)
            if indices and len(indices[0]) == 1 and indices[0][0] in names
        ]
        following = {operand for operand, d, inner in operands if self.of(operand)[d] == inner}
        if not operands or any(read in self.marks and read not in following for read in node.inputs):
            size = self.shape(name)[dim]
            raise self.fail(i, f"reads {name!r}, whose dimension {dim} of size {size} does not follow the batch")
        for operand, d, inner in operands:
            self.require(i, operand, d, inner)

    def note_shape(self, i: int, position: int, result: str) -> None:
        """Note that a constant operand holds a result's shape: its values at marked dimensions follow the batch."""
        names = self.graph.nodes[i].inputs
        values = self.graph.constants.get(names[position]) if position < len(names) else None
        shape = self.graph.tensors[result].shape
        if values is None or len(values) > len(shape) or self.graph.nodes[i].op == "Tile":
            return
        lead = len(shape) - len(values)
        marks = self.of(result)[lead:]
        self.edit(i, position, [m is not None and v == s for m, v, s in zip(marks, values, shape[lead:], strict=True)])

    def edit(self, i: int, position: int, flags: Sequence[bool]) -> None:
        """Note which values of a constant operand are proportional to the batch."""
        if any(flags):
            self.edits[(i, position)] = tuple(flags)

    def share(self, i: int, operands: Sequence[tuple[str, int]]) -> Mark | None:
        """Make dimensions (operand, dimension) that run together follow the batch if one of them does; their mark."""
        mark = next((m for name, d in operands if (m := self.of(name)[d]) is not None), None)
        if mark is not None:
            for name, d in operands:
                self.require(i, name, d, mark)
        return mark


def _within(nest: LoopNest, names: Sequence[str], name: str, mark: Mark) -> Mark:
    """The mark of a dimension that several iteration dimensions index, one of which has a mark."""
    sizes, at = [nest.dim(each).size for each in names], list(names).index(name)
    return Mark(math.prod(sizes[:at]) * mark.outer, mark.inner * math.prod(sizes[at + 1 :]))


def places(below: int, batch: int, shape: Sequence[int]) -> list[tuple[int, Mark]]:
    """The dimensions of a row-major shape that can hold a factor `batch` with `below` elements under it, in order.

    Above 1 at most one dimension fits, up to dimensions of size 1. A batch of 1 fits in many places.
    """
    fitting: list[tuple[int, Mark]] = []
    suffix = math.prod(shape)
    for d, size in enumerate(shape):
        suffix = suffix // size if size else 0
        if not suffix or below % suffix:
            continue
        inner = below // suffix
        if size % (inner * batch) == 0 and inner * batch <= size:
            fitting.append((d, Mark(size // (inner * batch), inner)))
    return fitting


def along_nests(flow: Flow, i: int, node: Node, *, broadcast: bool = True, refusal: str = "") -> None:
    """Let the batch travel along the iteration dimensions of a node's loop nests.

    Args:
        flow: marks so far; those of the results are added.
        i: index of the node.
        node: the node.
        broadcast: an operand's dimension of size 1 may stay as it is where others follow the batch.
        refusal: what the operator does to a marked dimension that no result has, said where such a dimension stops the
            batch. Without it a dimension that is summed over or coupled may hold the batch.

    Raises:
        ModelError: the batch lies in a dimension that the operator does not iterate over, or that no result has; or an
            operand that has to follow cannot.
    """
    nests = graph_specs(flow.graph)[i].nests
    if not any(nest.reads for nest in nests):
        _first_dimension(flow, i, node)
        return
    travel = _Travel(flow, i, node, nests)
    travel.read(refusal)
    travel.require(broadcast)
    travel.write()


class _Travel:
    """One node's travel; `marked` holds the iteration dimensions that follow the batch."""

    def __init__(self, flow: Flow, i: int, node: Node, nests: Sequence[LoopNest]) -> None:
        self.flow, self.i, self.node, self.nests = flow, i, node, nests
        self.dims: Mapping[str, Dim] = {d.name: d for nest in nests for d in nest.dims}
        self.written = {name for nest in nests for access in nest.writes for names in access.dims for name in names}
        self.marked: dict[str, Mark] = {}

    def accesses(self, names: Sequence[str], groups: Sequence[Sequence[Access]]) -> Iterator[tuple[str, Access]]:
        """Operands or results by name, those whose shape a nest says otherwise (packed weights) left out."""
        for access in (access for group in groups for access in group):
            name = names[access.position] if access.position < len(names) else ""
            if name in self.flow.graph.tensors and len(self.flow.shape(name)) == len(access.dims):
                yield name, access

    def reads(self) -> Iterator[tuple[str, int, tuple[str, ...]]]:
        """Every dimension of every operand, and what indexes it."""
        for name, access in self.accesses(self.node.inputs, [nest.reads for nest in self.nests]):
            for d, indices in enumerate(access.dims):
                yield name, d, indices

    def read(self, refusal: str) -> None:
        """Find the iteration dimensions that follow the batch."""
        for name, d, indices in self.reads():
            mark = self.flow.of(name)[d]
            if mark is None:
                continue
            factor = self.factor(mark, indices, self.flow.shape(name)[d])
            if factor is None or not (factor[0] in self.written or self.may_end(factor[0], refusal)):
                raise self.flow.fail(self.i, refusal or self.loss(name, d))
            self.marked.setdefault(*factor)

    def may_end(self, dim: str, refusal: str) -> bool:
        """Whether the batch may be in a dimension that no result has: one that is summed over, or coupled."""
        return not refusal and self.dims[dim].kind is not DimKind.WHOLE

    def factor(self, mark: Mark, indices: tuple[str, ...], size: int) -> tuple[str, Mark] | None:
        """The iteration dimension that holds the batch of a marked dimension; None where there is none."""
        sizes = [self.dims[name].size for name in indices]
        if not indices or math.prod(sizes) != size:
            return None
        if len(indices) == 1:
            return indices[0], mark
        fitting = places(mark.inner, self.flow.batch, sizes)
        return (indices[fitting[0][0]], fitting[0][1]) if fitting else None

    def loss(self, name: str, d: int) -> str:
        """Why a dimension stops the batch."""
        before, after = self.flow.shape(name), self.flow.shape(self.node.outputs[0])
        if len(before) == len(after) and before[d] != after[d]:
            return f"changes dimension {d}, which follows the batch, from {before[d]} to {after[d]}"
        return f"has the batch in dimension {d} of {name!r}, along which it does not compute sample by sample"

    def mark_of(self, indices: tuple[str, ...], size: int) -> Mark | None:
        """Where the batch sits in a dimension, given what indexes it."""
        sizes = [self.dims[name].size for name in indices]
        for k, name in enumerate(indices):
            mark = self.marked.get(name)
            if mark is not None and math.prod(sizes) == size:
                return Mark(math.prod(sizes[:k]) * mark.outer, mark.inner * math.prod(sizes[k + 1 :]))
        return None

    def require(self, broadcast: bool) -> None:
        """Make all operands follow the batch in the dimensions that those index."""
        flow = self.flow
        for name, d, indices in self.reads():
            tensor, mark = flow.graph.tensors[name], self.mark_of(indices, flow.shape(name)[d])
            if mark is None or flow.of(name)[d] is not None:
                continue
            summed = self.dims[indices[0]].kind is DimKind.REDUCED
            if summed and tensor.kind is TensorKind.PARAMETER:
                raise flow.fail(self.i, f"sums over the batch with the weight {name!r}")
            if summed or not broadcast or tensor.shape[d] != 1:
                flow.require(self.i, name, d, mark)

    def write(self) -> None:
        """Mark the results; one that no nest writes is like one of its shape (places beside maxima)."""
        flow, like = self.flow, dict[tuple[int, ...], Marks]()
        for name, access in self.accesses(self.node.outputs, [nest.writes for nest in self.nests]):
            shape = flow.shape(name)
            found = [self.mark_of(indices, size) for indices, size in zip(access.dims, shape, strict=True)]
            flow.set(name, [old or new for old, new in zip(flow.of(name), found, strict=True)])
            like.setdefault(shape, flow.of(name))
        for name in self.node.outputs:
            if name in flow.graph.tensors and name not in flow.marks:
                flow.set(name, like.get(flow.shape(name), ()))


def _first_dimension(flow: Flow, i: int, node: Node) -> None:
    """Operators without a loop nest: a first dimension that is the batch stays the first dimension."""
    marked = [n for n in node.inputs if n and any(flow.of(n))]
    for name in marked:
        if flow.of(name)[0] is None or any(flow.of(name)[1:]):
            raise flow.fail(i, f"is not known, and {name!r} has the batch in a dimension other than the first")
    mark, size = flow.of(marked[0])[0], flow.shape(marked[0])[0]
    for name in node.inputs:
        shape = flow.shape(name) if name else ()
        constant = bool(name) and flow.graph.tensors[name].kind is TensorKind.CONSTANT
        if constant and mark and shape[:1] == (size,) and size > 1:
            flow.require(i, name, 0, mark)
    for output in node.outputs:
        shape = flow.shape(output) if output in flow.graph.tensors else ()
        if shape[:1] == (size,):
            flow.set(output, (mark, *(None,) * (len(shape) - 1)))
