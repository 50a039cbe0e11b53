"""What mixes the tokens of decoders: grouped-query and multi-head latent attention with shared rotary tables; recurrent
layers, whose state goes from token to token: Mamba-2 and gated DeltaNet.

Implementations of recurrent layers join the projections and short convolutions of several parts. Here each part has its
own, with the same weights and work, so that each can be sharded by heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import _layers as layers
from . import _ops as ops
from ._config import ModelBuildError
from ._graph import ElementType, GraphBuilder, Value

WIDEST = 1 << 16
"""Most elements of a head that are rotated; their frequencies are a constant of the graph."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embedding.

    Attributes:
        theta: base of the wavelengths.
        dim: number of elements of a head that are rotated, counted from the first.
    """

    theta: float
    dim: int

    def __post_init__(self) -> None:
        if self.theta <= 0 or not 0 < self.dim <= WIDEST or self.dim % 2:
            raise ModelBuildError(
                f"rotary positions of base {self.theta} over {self.dim} elements of a head",
                f"give a positive base and an even number of elements, {WIDEST} at the most",
            )


RotaryTables = tuple[Value, Value, Value]
"""Tables that rotate queries and keys: cosines and sines [s, dim / 2], and position ids [b, s]."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Values that all layers of one decoder share.

    Attributes:
        epsilon: epsilon of the normalisations.
        tables: rotary tables by their parameters.
    """

    epsilon: float
    tables: Mapping[Rotary, RotaryTables]


def rotary_tables(g: GraphBuilder, rotary: Rotary, ids: Value) -> RotaryTables:
    """Add the computation of rotary tables for token ids [b, s] to the graph."""
    half = rotary.dim // 2
    frequencies = [math.exp(-math.log(rotary.theta) * i / half) for i in range(half)]
    positions = ops.arange(g, ids.shape[1])
    column = ops.unsqueeze(g, ops.cast(g, positions, ElementType.FLOAT), 1)
    angles = ops.mul(g, column, g.constant([frequencies], ElementType.FLOAT))
    position_ids = ops.expand_batch(g, ops.unsqueeze(g, positions, 0), ids)
    return ops.unary(g, "Cos", angles), ops.unary(g, "Sin", angles), position_ids


def _rotate(g: GraphBuilder, x: Value, rotary: Rotary, shared: Shared, *, heads: int = 0) -> Value:
    """Rotate queries or keys [b, heads, s, d], or [b, s, heads * d] if `heads` is given."""
    attributes: dict[str, Any] = {"num_heads": heads} if heads else {}
    width = x.shape[-1] // heads if heads else x.shape[-1]
    if rotary.dim < width:
        attributes["rotary_embedding_dim"] = rotary.dim
        attributes.setdefault("num_heads", x.shape[1])
    return g.node("RotaryEmbedding", [x, *shared.tables[rotary]], x.shape, **attributes)


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention.

    Attributes:
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of one head.
        rotary: rotary embedding of queries and keys; None for no positions.
        bias: queries, keys and values have biases.
        out_bias: the output projection has one.
        qk_norm: RMSNorm each head's queries and keys.
        wide_norm: RMSNorm the queries, and the keys, of all heads at once (OLMo 2).
        qk_unit: RMSNorm without weights, after the rotation (Llama 4).
        window: number of keys that a query attends to, its own position the last; 0 for all.
        sinks: each head has a learned score that enters the softmax without a value (GPT-OSS).
        gated: the result is multiplied by the sigmoid of a further projection (Qwen3-Next).
        value_unit: RMSNorm each head's values without weights (Gemma 4).
        keys_as_values: values are the keys before their normalisation, not projected themselves (Gemma 4).
        softcap: bound of the scores, by a scaled tanh; 0 for none (Gemma 2).
        scale: factor on the scores; 0 for 1 / sqrt(head_dim).
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary: Rotary | None
    bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    wide_norm: bool = False
    qk_unit: bool = False
    window: int = 0
    sinks: bool = False
    gated: bool = False
    value_unit: bool = False
    keys_as_values: bool = False
    softcap: float = 0.0
    scale: float = 0.0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ModelBuildError(
                f"{self.heads} query heads are not a multiple of {self.kv_heads} key and value heads",
                "give a number of key and value heads that divides that of query heads",
            )

    def __call__(self, g: GraphBuilder, x: Value, shared: Shared) -> Value:
        """Add the layer to the graph: [b, s, hidden] to [b, s, hidden]."""
        merged = self._with_sinks(g, x, shared) if self.sinks else self._by_heads(g, x, shared)
        if self.gated:
            gate = layers.linear(g, x, self.heads * self.head_dim, "gate_proj", bias=False)
            merged = ops.mul(g, merged, ops.unary(g, "Sigmoid", gate))
        return layers.linear(g, merged, x.shape[2], "o_proj", bias=self.out_bias)

    def _projected(self, g: GraphBuilder, x: Value, name: str, heads: int) -> Value:
        return layers.linear(g, x, heads * self.head_dim, f"{name}_proj", bias=self.bias)

    def _heads(self, g: GraphBuilder, x: Value, name: str, heads: int, shared: Shared) -> Value:
        """Queries or keys [b, heads, s, d]."""
        projected = self._projected(g, x, name, heads)
        if self.wide_norm:
            projected = layers.rms_norm(g, projected, f"{name}_norm", epsilon=shared.epsilon)
        return layers.split_heads(g, projected, heads)

    def _by_heads(self, g: GraphBuilder, x: Value, shared: Shared) -> Value:
        """Attention by ONNX's `Attention`: [b, s, hidden] to [b, s, heads * head_dim]."""
        q = self._heads(g, x, "q", self.heads, shared)
        k = self._heads(g, x, "k", self.kv_heads, shared)
        v = k
        if not self.keys_as_values:
            v = layers.split_heads(g, self._projected(g, x, "v", self.kv_heads), self.kv_heads)
        if self.value_unit:
            v = layers.unit_rms(g, v)
        if self.qk_norm:
            q = layers.rms_norm(g, q, "q_norm", epsilon=shared.epsilon)
            k = layers.rms_norm(g, k, "k_norm", epsilon=shared.epsilon)
        if self.rotary is not None:
            q, k = (_rotate(g, part, self.rotary, shared) for part in (q, k))
        if self.qk_unit:
            q, k = (layers.unit_rms(g, part) for part in (q, k))
        scale = self.scale or 1.0 / math.sqrt(self.head_dim)
        return layers.merge_heads(g, fused_attention(g, q, k, v, scale, window=self.window, softcap=self.softcap))

    def _with_sinks(self, g: GraphBuilder, x: Value, shared: Shared) -> Value:
        """Attention with sinks, which only the contrib operator `GroupQueryAttention` supports."""
        seq = x.shape[1]
        q = self._projected(g, x, "q", self.heads)
        k = self._projected(g, x, "k", self.kv_heads)
        v = self._projected(g, x, "v", self.kv_heads)
        if self.rotary is not None:
            q = _rotate(g, q, self.rotary, shared, heads=self.heads)
            k = _rotate(g, k, self.rotary, shared, heads=self.kv_heads)
        last = ops.expand_batch(g, g.constant([seq - 1], ElementType.INT32), x)
        total = g.constant(seq, ElementType.INT32)
        sinks = g.parameter("sinks", (self.heads,), fill=0.0)
        attributes: dict[str, Any] = {"num_heads": self.heads, "kv_num_heads": self.kv_heads}
        attributes["scale"] = self.scale or 1.0 / math.sqrt(self.head_dim)
        if 0 < self.window < seq:
            attributes["local_window_size"] = self.window
        operands = [q, k, v, None, None, last, total, None, None, None, None, sinks]
        return g.node("com.microsoft.GroupQueryAttention", operands, q.shape, **attributes)


def fused_attention(
    g: GraphBuilder, q: Value, k: Value, v: Value, scale: float, *, window: int = 0, softcap: float = 0.0
) -> Value:
    """Add causal attention by ONNX's `Attention`; the result is [b, heads, s, e].

    Args:
        g: the graph.
        q: queries [b, heads, s, d].
        k: keys [b, key heads, s, d].
        v: values [b, key heads, s, e].
        scale: factor on the scores.
        window: number of keys that a query attends to, its own position the last; 0 for all.
        softcap: bound of the scores, by a scaled tanh; 0 for none.
    """
    attributes: dict[str, Any] = {"is_causal": 1, "scale": scale}
    if 0 < window < q.shape[2]:
        g.require_opset(25)
        attributes["left_window_size"] = window - 1
    if softcap:
        attributes["softcap"] = softcap
    return g.node("Attention", [q, k, v], (*q.shape[:3], v.shape[3]), **attributes)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2): keys and values of all heads come from one low-rank vector a token.

    Attributes:
        rotary: the rotated elements of a head; all heads share those of the key.
        heads: attention heads.
        q_rank: width of the low-rank vector that queries are projected from; 0 to project the hidden state.
        kv_rank: width of the low-rank vector that keys and values are projected from.
        plain: elements of a head's query and key that are not rotated.
        value: width of a head's value.
        bias: the projections from and to the hidden state have biases.
    """

    rotary: Rotary
    heads: int
    q_rank: int
    kv_rank: int
    plain: int
    value: int
    bias: bool = False

    def __call__(self, g: GraphBuilder, x: Value, shared: Shared) -> Value:
        """Add the layer to the graph: [b, s, hidden] to [b, s, hidden]."""
        rotated_dim, width = self.rotary.dim, self.plain + self.rotary.dim
        q = layers.split_heads(g, self._queries(g, x, shared, self.heads * width), self.heads)
        q_plain, q_rotated = ops.split(g, q, (self.plain, rotated_dim), 3)
        q = ops.concat(g, (q_plain, _rotate(g, q_rotated, self.rotary, shared)), 3)
        joined = layers.linear(g, x, self.kv_rank + rotated_dim, "kv_a_proj_with_mqa", bias=self.bias)
        latent, k_rotated = ops.split(g, joined, (self.kv_rank, rotated_dim), 2)
        latent = layers.rms_norm(g, latent, "kv_a_layernorm", epsilon=shared.epsilon)
        keys_and_values = layers.linear(g, latent, self.heads * (self.plain + self.value), "kv_b_proj", bias=False)
        k_plain, v = ops.split(g, layers.split_heads(g, keys_and_values, self.heads), (self.plain, self.value), 3)
        k_rotated = _rotate(g, layers.split_heads(g, k_rotated, 1), self.rotary, shared)
        repeated = (k_rotated.shape[0], self.heads, *k_rotated.shape[2:])
        k_rotated = g.node("Expand", [k_rotated, g.constant([1, self.heads, 1, 1])], repeated)
        k = ops.concat(g, (k_plain, k_rotated), 3)
        merged = layers.merge_heads(g, fused_attention(g, q, k, v, 1.0 / math.sqrt(width)))
        return layers.linear(g, merged, x.shape[2], "o_proj", bias=self.bias)

    def _queries(self, g: GraphBuilder, x: Value, shared: Shared, width: int) -> Value:
        if not self.q_rank:
            return layers.linear(g, x, width, "q_proj", bias=False)
        latent = layers.linear(g, x, self.q_rank, "q_a_proj", bias=self.bias)
        latent = layers.rms_norm(g, latent, "q_a_layernorm", epsilon=shared.epsilon)
        return layers.linear(g, latent, width, "q_b_proj", bias=False)


SCAN_OPSET = 27
"""First operator set with `CausalConvWithState` and `LinearAttention`."""


def mamba2(
    g: GraphBuilder, x: Value, shared: Shared, *, heads: int, head_dim: int, state: int, groups: int, kernel: int = 4,
    chunk: int = 128, bias: bool = False, conv_bias: bool = True,
) -> Value:  # fmt: skip
    """A Mamba-2 mixer: one decay per head and token, one pair of directions B and C per group of heads.

    Args:
        g: the graph.
        x: [b, s, hidden].
        shared: what all layers share.
        heads: heads of the state.
        head_dim: width of one head.
        state: size of the state of each element of a head.
        groups: groups of heads that share the directions B and C.
        kernel: taps of the convolution over time.
        chunk: tokens of one block of the scan.
        bias: the projections have biases.
        conv_bias: the convolution has one.

    Raises:
        ModelBuildError: the groups do not divide the heads.
    """
    if heads % groups:
        raise ModelBuildError(
            f"{heads} heads of the state are not a multiple of {groups} groups",
            "give a number of groups that divides that of heads",
        )
    inner, directions = heads * head_dim, groups * state
    z = layers.linear(g, x, inner, "z_proj", bias=bias)
    parts = [
        _convolved(g, layers.linear(g, x, width, f"{name}_proj", bias=bias), name, kernel, conv_bias)
        for name, width in (("x", inner), ("b", directions), ("c", directions))
    ]
    step = layers.linear(g, x, heads, "dt_proj", bias=bias)
    fills = {"A_log": 0.0, "D": 1.0, "dt_bias": 0.0}
    weights = [g.parameter(name, (heads,), fill=fill) for name, fill in fills.items()]
    operands, shape = [*parts, step, *weights], parts[0].shape
    y = g.node("shardplan.StateSpaceScan", operands, shape, num_heads=heads, num_groups=groups, chunk_size=chunk)
    y = ops.mul(g, y, layers.silu(g, z))
    split = ops.reshape(g, y, (0, 0, groups, inner // groups))
    with g.scope("norm"):
        weight = g.parameter("weight", (inner,), fill=1.0)
        y = ops.mul(g, ops.reshape(g, layers.unit_rms(g, split), (0, 0, inner)), weight)
    return layers.linear(g, y, x.shape[2], "out_proj", bias=bias)


def delta_net(
    g: GraphBuilder, x: Value, shared: Shared, *, key_heads: int, value_heads: int, key_dim: int, value_dim: int,
    kernel: int = 4,
) -> Value:  # fmt: skip
    """A gated DeltaNet mixer: a decaying state, in which a token replaces the value of its key (Qwen3-Next).

    Args:
        g: the graph.
        x: [b, s, hidden].
        shared: what all layers share.
        key_heads: heads of queries and keys.
        value_heads: heads of values, each with a state of its own; a multiple of `key_heads`.
        key_dim: width of a query or key head.
        value_dim: width of a value head.
        kernel: taps of the convolution over time.

    Raises:
        ModelBuildError: the heads of keys do not divide those of values.
    """
    if value_heads % key_heads:
        raise ModelBuildError(
            f"{value_heads} value heads are not a multiple of {key_heads} key heads",
            "give a number of key heads that divides that of value heads",
        )
    g.require_opset(SCAN_OPSET)
    keys, values = key_heads * key_dim, value_heads * value_dim
    q, k, v = (
        _convolved(g, layers.linear(g, x, width, f"{name}_proj", bias=False), name, kernel, bias=False)
        for name, width in (("q", keys), ("k", keys), ("v", values))
    )
    z = layers.linear(g, x, values, "z_proj", bias=False)
    beta = ops.unary(g, "Sigmoid", layers.linear(g, x, value_heads, "b_proj", bias=False))
    q, k = (_repeated(g, part, key_heads, value_heads // key_heads) for part in (q, k))
    y = g.node_with(
        "LinearAttention",
        [q, k, v, None, _decay(g, x, value_heads), beta],
        [(v.shape, v.dtype), ((x.shape[0], value_heads, key_dim, value_dim), v.dtype)],
        attributes={"q_num_heads": value_heads, "kv_num_heads": value_heads},
    )[0]
    by_head = ops.reshape(g, y, (0, 0, value_heads, value_dim))
    normed = ops.reshape(g, layers.rms_norm(g, by_head, "norm", epsilon=shared.epsilon), (0, 0, values))
    return layers.linear(g, ops.mul(g, normed, layers.silu(g, z)), x.shape[2], "out_proj", bias=False)


def _repeated(g: GraphBuilder, x: Value, heads: int, times: int) -> Value:
    """Normalise queries or keys to unit length, and repeat each head for the value heads that it serves."""
    width = x.shape[2] // heads
    x = ops.reshape(g, x, (0, 0, heads, width))
    x = g.node("LpNormalization", [x], x.shape, axis=-1, p=2)
    x = ops.unsqueeze(g, x, 3)
    x = g.node("Expand", [x, g.constant([1, 1, 1, times, 1])], (*x.shape[:3], times, width))
    return ops.reshape(g, x, (0, 0, heads * times * width))


def _decay(g: GraphBuilder, x: Value, heads: int) -> Value:
    """Logarithm of the decay of each head's state at each token: `-exp(A_log) softplus(a + dt_bias)`.

    The product is written as the exponential of a sum, so that no operator reads weights alone.
    """
    step = layers.linear(g, x, heads, "a_proj", bias=False)
    step = ops.unary(g, "Softplus", ops.add(g, step, g.parameter("dt_bias", (heads,), fill=0.0)))
    rate = g.parameter("A_log", (heads,), fill=0.0)
    return ops.unary(g, "Neg", ops.unary(g, "Exp", ops.add(g, ops.unary(g, "Log", step), rate)))


def _convolved(g: GraphBuilder, x: Value, name: str, kernel: int, bias: bool) -> Value:
    """Convolve each channel of [b, s, channels] causally over the tokens, then apply SiLU."""
    g.require_opset(SCAN_OPSET)
    batch, _, channels = x.shape
    with g.scope(f"{name}_conv1d"):
        weight = g.parameter("weight", (channels, 1, kernel))
        inputs = [ops.transpose(g, x, (0, 2, 1)), weight]
        if bias:
            inputs.append(g.parameter("bias", (channels,), fill=0.0))
        y = g.node_with(
            "CausalConvWithState",
            inputs,
            [((batch, channels, x.shape[1]), x.dtype), ((batch, channels, kernel - 1), x.dtype)],
            attributes={"activation": "silu"},
        )[0]
        return ops.transpose(g, y, (0, 2, 1))
