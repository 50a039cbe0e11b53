"""Where the batch is in every tensor of a graph, and the walk that finds out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from planner.errors import ModelError
from planner.graph import Graph, TensorKind


@dataclass(frozen=True, slots=True)
class Mark:
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
    """

    graph: Graph
    batch: int
    marks: dict[str, Marks] = field(default_factory=dict)
    edits: dict[tuple[int, int], tuple[bool, ...]] = field(default_factory=dict)
    guesses: dict[Hashable, int] = field(default_factory=dict)
    open: dict[Hashable, int] = field(default_factory=dict)

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

        Constants do, and weights that an exporter repeated once a sample (a class token); computed tensors cannot.

        Raises:
            ModelError: the operand cannot follow.
        """
        marks = self.of(name)
        if marks[dim] is not None:
            return
        tensor = self.graph.tensors[name]
        size = tensor.shape[dim]
        at = self.graph.producer.get(name)
        if at is not None and self.graph.nodes[at].op not in ("Expand", "Tile"):
            raise self.fail(i, f"reads {name!r}, whose dimension {dim} of size {size} does not follow the batch")
        if tensor.kind is TensorKind.PARAMETER and mark != Mark():
            raise self.fail(i, f"reads the weight {name!r}, whose dimension {dim} runs over all samples")
        self.marks[name] = (*marks[:dim], mark, *marks[dim + 1 :])
        if at is not None:
            self.note_shape(at, 1, name)

    def note_shape(self, i: int, position: int, result: str) -> None:
        """Note that a constant operand holds a result's shape: its values at marked dimensions follow the batch."""
        names = self.graph.nodes[i].inputs
        values = self.graph.constants.get(names[position]) if position < len(names) else None
        shape = self.graph.tensors[result].shape
        if values is None or len(values) > len(shape):
            return
        lead = len(shape) - len(values)
        marks = self.of(result)[lead:]
        flags = tuple(m is not None and v == s for m, v, s in zip(marks, values, shape[lead:], strict=True))
        if any(flags):
            self.edits[(i, position)] = flags
