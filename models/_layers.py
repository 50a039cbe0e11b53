"""Layers that several families share: linear, normalisation, attention, masks, embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

from . import _ops as ops
from ._config import ModelBuildError
from ._graph import ElementType, GraphBuilder, Value

Activation = Callable[[GraphBuilder, Value], Value]

MASKED = -3.4028234663852886e38
"""Added to attention scores that are masked: the lowest float32."""


def linear(g: GraphBuilder, x: Value, features: int, name: str, *, bias: bool = True) -> Value:
    """A linear layer over the last dimension, its weight [features, inputs] as torch keeps it."""
    with g.scope(name):
        weight = g.parameter("weight", (features, x.shape[-1]))
        if x.rank == 2 and bias:
            return ops.gemm(g, x, weight, g.parameter("bias", (features,), fill=0.0))
        result = ops.matmul(g, x, ops.transpose(g, weight, (1, 0)))
        return ops.add(g, result, g.parameter("bias", (features,), fill=0.0)) if bias else result


def embedding(g: GraphBuilder, index: Value, rows: int, features: int, name: str) -> tuple[Value, Value]:
    """Rows of a table by index, and the table itself for a head tied to it."""
    with g.scope(name):
        weight = g.parameter("weight", (rows, features))
        return ops.gather(g, weight, index), weight


def tied_linear(g: GraphBuilder, x: Value, weight: Value) -> Value:
    """Product with the transpose of a weight [features, inputs] that another module owns."""
    return ops.matmul(g, x, ops.transpose(g, weight, (1, 0)))


def layer_norm(g: GraphBuilder, x: Value, name: str, *, epsilon: float = 1e-5, bias: bool = True) -> Value:
    """Layer normalisation over the last dimension with a scale, and with a bias unless it has none."""
    with g.scope(name):
        weights = [g.parameter("weight", (x.shape[-1],), fill=1.0)]
        weights += [g.parameter("bias", (x.shape[-1],), fill=0.0)] if bias else []
        return g.node("LayerNormalization", [x, *weights], x.shape, axis=-1, epsilon=epsilon)


def rms_norm(g: GraphBuilder, x: Value, name: str, *, epsilon: float) -> Value:
    """Root-mean-square normalisation over the last dimension with a scale (operator set 23)."""
    with g.scope(name):
        scale = g.parameter("weight", (x.shape[-1],), fill=1.0)
        return g.node("RMSNormalization", [x, scale], x.shape, axis=-1, epsilon=epsilon)


NORMALISATIONS: Mapping[str, Callable[..., Value]] = {
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "unbiased_layer_norm": partial(layer_norm, bias=False),
}
"""Normalisations by name; each takes a graph, a value, the name of its weights and `epsilon`."""


def unit_rms(g: GraphBuilder, x: Value) -> Value:
    """Root-mean-square normalisation over the last dimension without weights."""
    unit = g.node("LpNormalization", [x], x.shape, axis=-1, p=2)
    return ops.scale(g, unit, math.sqrt(x.shape[-1]))


def gelu(g: GraphBuilder, x: Value, *, tanh: bool = False) -> Value:
    """Gaussian error linear unit, exact or by the tanh approximation."""
    return g.node("Gelu", [x], x.shape, approximate="tanh" if tanh else "none")


def silu(g: GraphBuilder, x: Value) -> Value:
    """`x * sigmoid(x)`."""
    return ops.mul(g, x, ops.unary(g, "Sigmoid", x))


def relu(g: GraphBuilder, x: Value) -> Value:
    """The positive part."""
    return ops.unary(g, "Relu", x)


def squared_relu(g: GraphBuilder, x: Value) -> Value:
    """The square of the positive part (Nemotron)."""
    positive = relu(g, x)
    return ops.mul(g, positive, positive)


ACTIVATIONS: Mapping[str, Activation] = {
    "silu": silu,
    "swish": silu,
    "gelu": gelu,
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), partial(gelu, tanh=True)),
    "relu": relu,
    "relu2": squared_relu,
}
"""Activations by the names that configuration files use."""


def split_heads(g: GraphBuilder, x: Value, heads: int) -> Value:
    """[b, s, heads * d] to [b, heads, s, d].

    Raises:
        ModelBuildError: the width is not a multiple of the number of heads.
    """
    if x.shape[-1] % heads or not x.shape[-1]:
        raise ModelBuildError(f"a width of {x.shape[-1]} is not a multiple of {heads} heads", "give sizes that divide")
    return ops.transpose(g, ops.reshape(g, x, (0, 0, heads, x.shape[-1] // heads)), (0, 2, 1, 3))


def merge_heads(g: GraphBuilder, x: Value) -> Value:
    """[b, heads, s, d] to [b, s, heads * d]."""
    _, heads, _, size = x.shape
    return ops.reshape(g, ops.transpose(g, x, (0, 2, 1, 3)), (0, 0, heads * size))


def attention(
    g: GraphBuilder, q: Value, k: Value, v: Value, *, bias: Value | None = None, scaled: bool = True
) -> Value:
    """Attention written out: scores, mask or position bias added to them, softmax, weighted sum.

    Args:
        g: the graph.
        q: queries [b, heads, s, d].
        k: keys [b, heads, t, d].
        v: values [b, heads, t, d].
        bias: what is added to the scores, broadcasting to [b, heads, s, t].
        scaled: divide the scores by the square root of d.
    """
    if scaled:
        q = ops.scale(g, q, 1.0 / math.sqrt(q.shape[-1]))
    scores = ops.matmul(g, q, ops.transpose(g, k, (0, 1, 3, 2)))
    if bias is not None:
        scores = ops.add(g, scores, bias)
    return ops.matmul(g, ops.softmax(g, scores), v)


def causal_mask(g: GraphBuilder, seq: int) -> Value:
    """[s, s] to add to attention scores: 0 where the key is not after the query, else the lowest float."""
    positions = ops.arange(g, seq)
    key, query = ops.unsqueeze(g, positions, 0), ops.unsqueeze(g, positions, 1)
    allowed = ops.binary(g, "LessOrEqual", key, query, ElementType.BOOL)
    return ops.where(g, allowed, g.constant(0.0, ElementType.FLOAT), g.constant(MASKED, ElementType.FLOAT))


def positions(g: GraphBuilder, seq: int) -> Value:
    """Position ids [1, s]."""
    return ops.unsqueeze(g, ops.arange(g, seq), 0)
