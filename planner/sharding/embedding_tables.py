"""Embedding tables of a recommender dealt over the ranks of a mesh: whole tables to single ranks, or rows to all.

Layouts cut every tensor alike on all ranks; that one table lies here and another there is a decision of its own. A
table on one rank is looked up there for the whole batch, and the vectors go to the ranks that hold the samples: one
all-to-all for all such tables, as slow as the busiest rank. A table whose rows are dealt to all ranks gives partial
sums on each, which are reduced and scattered; backward the gradients come the same ways back. The first sends n times
less in sum, the second holds evenly whatever the table's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from planner.errors import InfeasibleError
from planner.graph import Graph, TensorKind
from planner.hardware import Collective, moved_bytes
from planner.memory import fits
from planner.sharding.mesh import Mesh
from planner.sharding.resting import StateBytes
from planner.units import format_bytes


class TableCut(StrEnum):
    """How a table lies."""

    TABLE = "table"
    """Whole on one rank."""
    ROWS = "rows"
    """Its rows dealt to all ranks."""


@dataclass(frozen=True, slots=True)
class Table:
    """An embedding table: its rows, the width of a vector, and the vectors a batch takes from it."""

    name: str
    rows: int
    width: int
    vectors: int


@dataclass(frozen=True)
class TablePlacement:
    """Where all tables lie.

    Attributes:
        tables: the tables.
        cuts: of each table.
        ranks: of each table the rank that holds it; -1 where all do.
        memory_bytes: [ranks] weights, gradients and optimizer state.
        sent_bytes: [ranks] bytes that a rank sends in the forward pass; backward it receives as many.
        forward_s: seconds of the exchanges of the forward pass.
        backward_s: seconds of those of the backward pass.
        bound_s: no placement with the same tables whole takes less, forward and backward.
    """

    tables: tuple[Table, ...]
    cuts: tuple[TableCut, ...]
    ranks: tuple[int, ...]
    memory_bytes: np.ndarray
    sent_bytes: np.ndarray
    forward_s: float
    backward_s: float
    bound_s: float

    @property
    def gap(self) -> float:
        """How much slower than the bound, as a fraction of it."""
        return (self.forward_s + self.backward_s) / self.bound_s - 1.0 if self.bound_s else 0.0


def embedding_tables(graph: Graph, nodes: Sequence[int] = ()) -> tuple[Table, ...]:
    """The trained tables from which some operators gather vectors, in order of first use; O(nodes)."""
    found: dict[str, Table] = {}
    for i in nodes or range(len(graph.nodes)):
        node = graph.nodes[i]
        table = graph.tensors.get(node.inputs[0]) if node.inputs else None
        if node.op != "Gather" or table is None or table.kind is not TensorKind.PARAMETER or len(table.shape) != 2:
            continue
        vectors = graph.tensors[node.inputs[1]].elements
        vectors += found[table.name].vectors if table.name in found else 0
        found[table.name] = Table(table.name, *table.shape, vectors)
    return tuple(found.values())


class _Placer:
    def __init__(self, tables: Sequence[Table], mesh: Mesh, state: StateBytes, item_bytes: float) -> None:
        self.tables, self.mesh, self.item_bytes = tuple(tables), mesh, item_bytes
        self.ranks = mesh.device_count
        self.axes = tuple(range(len(mesh.axes)))
        self.each = state.weight + state.gradient + state.optimizer

    def held(self, table: Table, cut: TableCut) -> float:
        rows = table.rows if cut is TableCut.TABLE else -(-table.rows // self.ranks)
        return self.each * rows * table.width

    def payload(self, table: Table) -> float:
        """Bytes of the vectors that a batch takes."""
        return self.item_bytes * table.vectors * table.width

    def deal(self, cuts: Sequence[TableCut], limit: float) -> list[int] | None:
        """A rank for each whole table, busiest tables first, each to the least busy rank that has room; None if none.

        -1 stands for tables by rows.
        """
        rows = sum(self.held(t, c) for t, c in zip(self.tables, cuts, strict=True) if c is TableCut.ROWS)
        room = np.full(self.ranks, limit - rows)
        load, ranks = np.zeros(self.ranks), [-1] * len(self.tables)
        whole = [k for k, cut in enumerate(cuts) if cut is TableCut.TABLE]
        for k in sorted(whole, key=lambda k: (-self.payload(self.tables[k]), -self.held(self.tables[k], cuts[k]), k)):
            size = self.held(self.tables[k], TableCut.TABLE)
            open_to = np.flatnonzero(room >= size)
            if not len(open_to):
                return None
            best = int(min(open_to, key=lambda r: (load[r], -room[r], r)))
            ranks[k] = best
            load[best] += self.payload(self.tables[k])
            room[best] -= size
        return ranks

    def placement(self, cuts: Sequence[TableCut], ranks: Sequence[int]) -> TablePlacement:
        memory, load = np.zeros(self.ranks), np.zeros(self.ranks)
        summed = 0.0
        for table, cut, rank in zip(self.tables, cuts, ranks, strict=True):
            where = slice(None) if cut is TableCut.ROWS else rank
            memory[where] += self.held(table, cut)
            if cut is TableCut.ROWS:
                summed += self.payload(table)
            else:
                load[rank] += self.payload(table)
        biggest = max(
            (self.payload(t) for t, c in zip(self.tables, cuts, strict=True) if c is TableCut.TABLE), default=0.0
        )
        least = max(float(load.sum()) / self.ranks, biggest)
        forward = self.seconds(Collective.ALL_TO_ALL, load.max()) + self.seconds(Collective.REDUCE_SCATTER, summed)
        backward = self.seconds(Collective.ALL_TO_ALL, load.max()) + self.seconds(Collective.ALL_GATHER, summed)
        bound = (
            forward
            + backward
            - 2 * (self.seconds(Collective.ALL_TO_ALL, load.max()) - self.seconds(Collective.ALL_TO_ALL, least))
        )
        return TablePlacement(
            self.tables,
            tuple(cuts),
            tuple(ranks),
            memory,
            moved_bytes(Collective.ALL_TO_ALL, load + summed, self.ranks),
            forward,
            backward,
            bound,
        )

    def seconds(self, kind: Collective, payload: float) -> float:
        return float(self.mesh.seconds(kind, self.axes, payload)) if payload else 0.0


def place_tables(
    tables: Sequence[Table],
    mesh: Mesh,
    *,
    memory_bytes: float,
    state: StateBytes | None = None,
    item_bytes: float = 2.0,
) -> TablePlacement:
    """The fastest placement in which the largest tables, however many, lie by rows and the others whole.

    Whole tables are dealt so that all ranks send about as much, each where there is room.

    Args:
        tables: the tables.
        mesh: the ranks; the batch is cut over all of them.
        memory_bytes: what a rank may hold of the tables.
        state: bytes a parameter takes.
        item_bytes: bytes an element of a vector.

    Raises:
        InfeasibleError: even with all rows dealt the tables do not fit.

    Complexity: tables^2 log tables times ranks.
    """
    placer = _Placer(tables, mesh, state or StateBytes(), item_bytes)
    least = sum(placer.held(t, TableCut.ROWS) for t in tables)
    if not fits(least, memory_bytes):
        raise InfeasibleError(
            f"the tables need {format_bytes(least)} a device, {format_bytes(memory_bytes)} are there",
            hint="use more devices, or an optimizer with less state",
        )
    order = sorted(range(len(tables)), key=lambda k: (-placer.held(tables[k], TableCut.TABLE), k))
    found: list[TablePlacement] = []
    for count in range(len(tables) + 1):
        by_rows = set(order[:count])
        cuts = [TableCut.ROWS if k in by_rows else TableCut.TABLE for k in range(len(tables))]
        ranks = placer.deal(cuts, memory_bytes)
        if ranks is not None:
            found.append(placer.placement(cuts, ranks))
    return min(found, key=lambda p: p.forward_s + p.backward_s)
