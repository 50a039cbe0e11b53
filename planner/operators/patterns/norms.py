"""LayerNorm and RMSNorm as arithmetic, as operator sets before 17 and 23 write them; Gemma's scale counts from one.

Group normalisation comes as an instance normalisation of the groups, between two reshapes.
"""

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


_CENTRED = "(x - mean(x))"
_ROOT = f"sqrt(mean({_CENTRED} * {_CENTRED}) + k)"
_LAYER_NORM = f"{_CENTRED} / {_ROOT}"
_BY_SQUARES = f"{_CENTRED} / sqrt(mean(x * x) - mean(x) * mean(x) + k)"
_AS_SLOPE = f"x * shared(scale / {_ROOT}) + (shift - mean(x) * shared(scale / {_ROOT}))"
"""As Keras writes it."""
_LAYER_NORMS = (
    *(form.format(norm) for norm in (_LAYER_NORM, _BY_SQUARES) for form in ("{} * scale + shift", "{} * scale", "{}")),
    _AS_SLOPE,
)
_RMS_NORM = "x / sqrt(mean(x * x) + k)"


def _last_dimensions(graph: Graph, match: Match) -> Attributes | None:
    """Scale and shift have the shape of the dimensions that the means are over."""
    shape = graph.tensors[match.names["x"]].shape[-match.axes :]
    weights = (graph.tensors[match.names[name]].shape for name in ("scale", "shift") if name in match.names)
    return {"axis": -match.axes} if all(weight == shape for weight in weights) else None


def _written_rms_norm(graph: Graph, match: Match) -> Attributes | None:
    """Models that spell RMSNorm out run it so: a product with the scale keeps the normalised input as well."""
    found = _last_dimensions(graph, match)
    return None if found is None else {**found, "keeps_normalised": int("scale" in match.names)}


PATTERNS.register(
    "layer_norm",
    written_out(
        "LayerNormalization",
        _LAYER_NORMS,
        ("x", "scale", "shift"),
        _last_dimensions,
    ),
)
PATTERNS.register(
    "rms_norm",
    written_out(
        "RMSNormalization",
        (f"{_RMS_NORM} * scale", f"{_RMS_NORM} * (scale + 1)", _RMS_NORM),
        ("x", "scale"),
        _written_rms_norm,
        after=("layer_norm",),
    ),
)
