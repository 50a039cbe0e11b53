"""Group normalisation as an instance normalisation of the groups, between two reshapes."""

from __future__ import annotations

from planner.graph import Graph
from planner.operators.formulas import Match
from planner.operators.rewriting import PATTERNS, Attributes, written_out

_GROUPED = "Reshape(InstanceNormalization(Reshape(x), ones, zeros))"


def _groups(graph: Graph, match: Match) -> Attributes | None:
    """Groups are the second dimension of what is normalised; scale and shift are one number a channel."""
    shape = graph.tensors[match.names["x"]].shape
    norm = next(graph.nodes[i] for i in match.nodes if graph.nodes[i].op == "InstanceNormalization")
    grouped = graph.tensors[norm.inputs[0]].shape
    weights = [graph.tensors[match.names[name]] for name in ("scale", "shift") if name in match.names]
    if len(shape) < 3 or len(grouped) != 3 or shape[1] % grouped[1] or grouped[0] != shape[0]:
        return None
    return {"num_groups": grouped[1]} if all(weight.elements == shape[1] for weight in weights) else None


PATTERNS.register(
    "group_norm",
    written_out(
        "GroupNormalization",
        (f"{_GROUPED} * scale + shift", _GROUPED),
        ("x", "scale", "shift"),
        _groups,
    ),
)
