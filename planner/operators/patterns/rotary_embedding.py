"""Rotary embedding as products of the input, and of its two halves swapped, with cosines and sines."""

from __future__ import annotations

from planner.graph import Graph
from planner.operators.formulas import Match
from planner.operators.rewriting import PATTERNS, Attributes, written_out


def _tables(graph: Graph, match: Match) -> Attributes | None:
    """One angle for each position, the same for all heads: tables that lie beside the input's last dimensions."""
    shape = graph.tensors[match.names["x"]].shape
    tables = [graph.tensors[match.names[name]].shape for name in ("cos", "sin")]
    fits = all(len(table) == 4 and table[2] == shape[2] and table[1] == 1 for table in tables)
    return {} if len(shape) == 4 and fits else None


PATTERNS.register(
    "rotary_embedding",
    written_out(
        "RotaryEmbedding",
        (
            "x * cos + Concat(Neg(Slice(x)), Slice(x)) * sin",
            "x * cos + Concat(Neg(Split(x)), Split(x)) * sin",
            "Concat(Slice(x) * cos - Slice(x) * sin, Slice(x) * cos + Slice(x) * sin)",
            "Concat(Split(x) * cos - Split(x) * sin, Split(x) * cos + Split(x) * sin)",
        ),
        ("x", "cos", "sin"),
        _tables,
    ),
)
