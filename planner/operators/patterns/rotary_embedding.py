"""Rotary embedding as products of the input, and of its two halves (or its pairs) swapped, with cosines and sines."""

from __future__ import annotations

from planner.graph import Graph
from planner.operators.formulas import Match
from planner.operators.rewriting import PATTERNS, Attributes, written_out

_PAIRED = "Reshape(Concat(Unsqueeze({0} * cos - {0} * sin), Unsqueeze({0} * cos + {0} * sin)))"


def _tables(graph: Graph, match: Match) -> Attributes | None:
    """One angle for each position, the same for all heads: tables that lie beside the input's last dimensions."""
    shape = graph.tensors[match.names["x"]].shape
    tables = [graph.tensors[match.names[name]].shape for name in ("cos", "sin")]
    fits = all(len(table) == 4 and table[2] == shape[2] and table[1] == 1 for table in tables)
    return {} if len(shape) == 4 and fits else None


def _paired(graph: Graph, match: Match) -> Attributes | None:
    return None if _tables(graph, match) is None else {"interleaved": 1}


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
PATTERNS.register(
    "interleaved_rotary_embedding",
    written_out(
        "RotaryEmbedding",
        (
            "x * cos + Reshape(Concat(Unsqueeze(Neg(Slice(x))), Unsqueeze(Slice(x)))) * sin",
            *(
                _PAIRED.format(part)
                for part in ("Slice(x)", "Squeeze(Slice(Reshape(x)))", "Squeeze(Split(Reshape(x)))")
            ),
        ),
        ("x", "cos", "sin"),
        _paired,
    ),
)
