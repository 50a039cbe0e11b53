"""Follow the batch dimension through a graph, from each node's operands to its results.

A mark (`BatchFactor`) says that a dimension contains the batch: its size is `outer * batch * inner`. Marks travel along
the iteration dimensions of an operator's loop nests: an iteration dimension that indexes a marked dimension of an
operand follows the batch, and so do all other dimensions that it indexes. Operators that move, merge or pick dimensions
by a constant operand carry marks by a function of their own (`Rule.travel`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from planner.errors import ModelError
from planner.graph import Graph, Node, Tensor, TensorKind
from planner.operators.entry import OpCall, rule_of
from planner.operators.specs import graph_specs
from planner.operators.types import Access, Dim, DimKind, LoopNest


class BatchFactor(NamedTuple):
    """The batch as a factor of one dimension, whose size is `outer * batch * inner`."""

    outer: int = 1
    inner: int = 1


BatchFactors = tuple[BatchFactor | None, ...]


@dataclass
class Flow:
    """State of one walk that marks the dimensions of a graph's tensors that follow the batch.

    Attributes:
        graph: the graph.
        batch: the batch its shapes are for.
        marks: marks of every tensor that has any.
        edits: for a node's constant operand, by (node, position): which of its values are proportional to the batch.
        guesses: index of the place to take for the batch where several fit, by situation; the first if absent.
        open: ambiguous situations met so far, and how many places fit in each.
        picked: error to raise about a node that picks fixed positions of the batch, if no result follows the batch.
        late: number of computed tensors marked because a reader requires it, not because their operands are.
    """

    graph: Graph
    batch: int
    marks: dict[str, BatchFactors] = field(default_factory=dict)
    edits: dict[tuple[int, int], tuple[bool, ...]] = field(default_factory=dict)
    guesses: dict[Hashable, int] = field(default_factory=dict)
    open: dict[Hashable, int] = field(default_factory=dict)
    late: int = 0
    picked: ModelError | None = None

    def call(self, i: int) -> OpCall:
        """A node's call, for reading its attributes and constant operands."""
        return OpCall.of(self.graph, self.graph.nodes[i])

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor at the graph's own batch."""
        return self.graph.tensors[name].shape

    def of(self, name: str) -> BatchFactors:
        """Marks of a tensor, one entry a dimension."""
        marks = self.marks.get(name)
        return marks if marks is not None else (None,) * len(self.graph.tensors[name].shape)

    def set(self, name: str, marks: Sequence[BatchFactor | None]) -> None:
        """Write the marks of a result; results nobody reads have no tensor and are skipped."""
        if name and name in self.graph.tensors and any(marks):
            self.marks[name] = tuple(marks)

    def guess(self, situation: Hashable, fitting: Sequence[tuple[int, BatchFactor]]) -> tuple[int, BatchFactor]:
        """Choose one of several places that the batch may take; equal situations get the same choice."""
        if len(fitting) > 1:
            self.open.setdefault(situation, len(fitting))
        return fitting[self.guesses.get(situation, 0)]

    def other_guesses(self) -> dict[Hashable, int] | None:
        """The next combination of guesses to try after this one failed, the latest changed first; None without one."""
        situations = list(self.open)
        for k in reversed(range(len(situations))):
            guess = self.guesses.get(situations[k], 0)
            if guess + 1 < self.open[situations[k]]:
                return {**{s: self.guesses.get(s, 0) for s in situations[:k]}, situations[k]: guess + 1}
        return None

    def fail(self, i: int, why: str) -> ModelError:
        """The error that names a node which stops the batch."""
        node = self.graph.nodes[i]
        return ModelError(
            f"the batch size cannot be changed: {node.op} {why}",
            where=node.name or node.key,
            hint=f"plan at the exported batch size {self.batch}, or export the model with a dynamic batch axis",
        )

    def require(self, i: int, name: str, dim: int, mark: BatchFactor) -> None:
        """Mark an operand's dimension that is not marked yet, because another operand or the result follows the batch.

        Possible for constants, for weights that an exporter repeated for each sample (a class token), and for tensors
        computed from these; impossible for tensors computed from inputs.

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
        if tensor.kind is TensorKind.PARAMETER and mark != BatchFactor() and not self._is_repeated(tensor):
            raise self.fail(i, f"reads the weight {name!r}, whose dimension {dim} runs over all samples")
        self.marks[name] = (*marks[:dim], mark, *marks[dim + 1 :])
        self.late += at is not None
        if at is not None and repeated:
            self.note_shape(at, 1, name)

    def _is_repeated(self, tensor: Tensor) -> bool:
        """Whether a tensor is computed from weights of fewer elements, so that it holds the same ones several times."""
        sources = self.graph.sources.get(tensor.name, ())
        held = sum(weight.elements for weight in self.graph.parameters if weight.name in sources)
        return 2 * held <= tensor.elements

    def _repeats(self, at: int, name: str, dim: int, mark: BatchFactor) -> bool:
        """Whether a node repeats its operand along a dimension of its result; it may then do so once a sample."""
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

    def _trace_back(self, i: int, at: int, name: str, dim: int, mark: BatchFactor) -> None:
        """Mark the operands that a tensor's dimension is computed from: constants, and weights repeated once a sample.

        Raises:
            ModelError: the tensor is computed from an input, or no operand has that dimension.
        """
        node, described = self.graph.nodes[at], graph_specs(self.graph)[at]
        source = node.inputs[0]
        if described.view and source not in self.marks:  # the same elements in row-major order
            below = mark.inner * math.prod(self.shape(name)[dim + 1 :])
            fitting = places(below, self.batch, self.shape(source))
            if fitting:
                fitting.sort(key=lambda place: place[1] != BatchFactor())
                self.require(i, source, *self.guess((at, dim, mark), fitting))
                return
        travel = _Travel(self, at, node, described.nests)
        indices = next((access.dims[dim] for made, access in travel.writes() if made == name), ())
        if len(indices) == 1:
            travel.marked[indices[0]] = mark
        reads = ((read, d, travel.mark_of(within, self.shape(read)[d])) for read, d, within in travel.reads())
        operands = [(read, d, inner) for read, d, inner in reads if inner is not None]
        following = {operand for operand, d, inner in operands if self.of(operand)[d] == inner}
        sources = node.inputs[:1] if rule_of(node.op).overlays else node.inputs
        if not operands or any(read in self.marks and read not in following for read in sources):
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

    def share(self, i: int, operands: Sequence[tuple[str, int]]) -> BatchFactor | None:
        """Mark all of some (operand, dimension) pairs of equal extent if one is marked, and return that mark."""
        mark = next((m for name, d in operands if (m := self.of(name)[d]) is not None), None)
        if mark is not None:
            for name, d in operands:
                self.require(i, name, d, mark)
        return mark


def places(below: int, batch: int, shape: Sequence[int]) -> list[tuple[int, BatchFactor]]:
    """The dimensions of a row-major shape that can hold a factor `batch` with `below` elements under it, in order.

    Above 1 at most one dimension fits, up to dimensions of size 1. A batch of 1 fits in many places.
    """
    fitting: list[tuple[int, BatchFactor]] = []
    suffix = math.prod(shape)
    for d, size in enumerate(shape):
        suffix = suffix // size if size else 0
        if not suffix or below % suffix:
            continue
        inner = below // suffix
        if size % (inner * batch) == 0 and inner * batch <= size:
            fitting.append((d, BatchFactor(size // (inner * batch), inner)))
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
    """Carries marks through one node; `marked` holds the iteration dimensions that contain the batch."""

    def __init__(self, flow: Flow, i: int, node: Node, nests: Sequence[LoopNest]) -> None:
        self.flow, self.i, self.node, self.nests = flow, i, node, nests
        self.dims: Mapping[str, Dim] = {d.name: d for nest in nests for d in nest.dims}
        self.written = {name for nest in nests for access in nest.writes for names in access.dims for name in names}
        self.marked: dict[str, BatchFactor] = {}

    def accesses(self, names: Sequence[str], groups: Sequence[Sequence[Access]]) -> Iterator[tuple[str, Access]]:
        """Operands or results by name, except those whose rank differs from the nest's (packed weights)."""
        for access in (access for group in groups for access in group):
            name = names[access.position] if access.position < len(names) else ""
            if name in self.flow.graph.tensors and len(self.flow.shape(name)) == len(access.dims):
                yield name, access

    def reads(self) -> Iterator[tuple[str, int, tuple[str, ...]]]:
        """Every dimension of every operand, and what indexes it."""
        for name, access in self.accesses(self.node.inputs, [nest.reads for nest in self.nests]):
            for d, indices in enumerate(access.dims):
                yield name, d, indices

    def writes(self) -> Iterator[tuple[str, Access]]:
        """Every result."""
        return self.accesses(self.node.outputs, [nest.writes for nest in self.nests])

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

    def factor(self, mark: BatchFactor, indices: tuple[str, ...], size: int) -> tuple[str, BatchFactor] | None:
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
        made = next(output for output in self.node.outputs if output)
        before, after = self.flow.shape(name), self.flow.shape(made)
        if len(before) == len(after) and before[d] != after[d]:
            return f"changes dimension {d}, which follows the batch, from {before[d]} to {after[d]}"
        return f"has the batch in dimension {d} of {name!r}, along which it does not compute sample by sample"

    def mark_of(self, indices: tuple[str, ...], size: int) -> BatchFactor | None:
        """Where the batch sits in a dimension, given what indexes it."""
        sizes = [self.dims[name].size for name in indices]
        for k, name in enumerate(indices):
            mark = self.marked.get(name)
            if mark is not None and math.prod(sizes) == size:
                return BatchFactor(math.prod(sizes[:k]) * mark.outer, mark.inner * math.prod(sizes[k + 1 :]))
        return None

    def require(self, broadcast: bool) -> None:
        """Mark the other operands in the dimensions that marked iteration dimensions index."""
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
        """Mark the results; one that no nest writes (the indices of a maximum) takes the marks of one of its shape."""
        flow, marks_by_shape = self.flow, dict[tuple[int, ...], BatchFactors]()
        for name, access in self.writes():
            shape = flow.shape(name)
            marks = [self.mark_of(indices, size) for indices, size in zip(access.dims, shape, strict=True)]
            flow.set(name, [old or new for old, new in zip(flow.of(name), marks, strict=True)])
            marks_by_shape.setdefault(shape, flow.of(name))
        for name in self.node.outputs:
            if name in flow.graph.tensors and name not in flow.marks:
                flow.set(name, marks_by_shape.get(flow.shape(name), ()))


def _first_dimension(flow: Flow, i: int, node: Node) -> None:
    """Carry marks through an operator without a loop nest: the batch must be the first dimension, and stays it."""
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
