"""LayerNorm and RMSNorm as arithmetic, as operator sets before 17 and 23 write them; Gemma's scale counts from one."""

from __future__ import annotations

from planner.graph import Graph
from planner.operators.formulas import Match
from planner.operators.rewriting import PATTERNS, Attributes, written_out

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
