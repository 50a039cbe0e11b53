"""Activations, rotary embedding and norms, as the products and sums that exporters write.

GELU by the error function or by tanh with the cube as products, SiLU and Mish are one kernel each in eager training.
GELU with `Pow(x, 3)` is left alone: models that have it compute it step by step, and keep every step. So is
`x * sigmoid(1.7 x)`.

The gate of a feed-forward layer, SwiGLU or GEGLU, is a kernel of some software: it reads gate and value and writes
their product; backward reads both again with the product's gradient and writes two gradients. The activated gate is
never in memory. Step by step, it is written, read and kept: three tensors of the inner width for each token instead of
four, the input of the next matrix among them.

Rotary embedding comes as products of the input, and of its two halves (or its pairs) swapped, with cosines and sines;
LayerNorm and RMSNorm as operator sets before 17 and 23 write them, where Gemma's scale counts from one; group
normalisation as an instance normalisation of the groups, between two reshapes.

Sources: Megatron Core `fusions/fused_bias_swiglu.py` and `fused_bias_geglu.py` (`SwiGLUFunction` keeps its input alone;
`--no-bias-swiglu-fusion` switches it off, on by default); Hsu et al. 2024, Liger Kernel, section 3.2 (the same for
both); what torch.compile makes of such a pair of operators.
"""

from __future__ import annotations

from planner.graph import Graph
from planner.operators.formulas import Match
from planner.operators.rewriting import PATTERNS, Attributes, one_kernel, written_out

_TANH = ("Tanh(k * (x + k * x * x * x))", "Tanh(k * x * (1 + k * x * x))")
_BY_TANH = tuple(gelu.format(tanh) for tanh in _TANH for gelu in ("k * x * (1 + {})", "x * (k + k * {})"))
_BY_ERF = ("k * x * (1 + Erf(k * x))", "x * (k + k * Erf(k * x))")

PATTERNS.register("gelu", written_out("Gelu", _BY_ERF, ("x",), {"approximate": "none"}))
PATTERNS.register("tanh_gelu", written_out("Gelu", _BY_TANH, ("x",), {"approximate": "tanh"}))
PATTERNS.register("silu", written_out("Swish", ("x * Sigmoid(x)", "x / (1 + Exp(Neg(x)))"), ("x",), {}))
PATTERNS.register("mish", written_out("Mish", ("x * Tanh(Softplus(x))",), ("x",), {}))


PATTERNS.register("gated_activation", one_kernel(("Swish(x) * y", "Gelu(x) * y")))


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
