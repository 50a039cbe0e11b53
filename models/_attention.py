"""Causal attention of decoders: grouped-query attention, multi-head latent attention, and shared rotary tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from . import _layers as layers
from . import _ops as ops
from ._config import Key, ModelBuildError, sized
from ._graph import ElementType, GraphBuilder, Value


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
        if self.theta <= 0 or self.dim <= 0 or self.dim % 2:
            raise ModelBuildError(
                f"rotary positions of base {self.theta} over {self.dim} elements of a head",
                "give a positive base and an even number of elements",
            )


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """Tables that rotate queries and keys: cosines and sines [s, dim / 2], and position ids [b, s]."""

    cos: Value
    sin: Value
    ids: Value


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
    return RotaryTables(ops.unary(g, "Cos", angles), ops.unary(g, "Sin", angles), position_ids)


def _rotate(g: GraphBuilder, x: Value, rotary: Rotary, shared: Shared, *, heads: int = 0) -> Value:
    """Rotate queries or keys [b, heads, s, d], or [b, s, heads * d] if `heads` is given."""
    tables = shared.tables[rotary]
    attributes = {"num_heads": heads} if heads else {}
    width = x.shape[-1] // heads if heads else x.shape[-1]
    if rotary.dim < width:
        attributes["rotary_embedding_dim"] = rotary.dim
        attributes.setdefault("num_heads", x.shape[1])
    inputs = [x, tables.cos, tables.sin, tables.ids]
    return g.node_with("RotaryEmbedding", inputs, [(x.shape, x.dtype)], attributes=attributes)[0]


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
        keys_as_values: values are what keys are before their normalisation, without a projection of their own (Gemma 4).
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

    def add(self, g: GraphBuilder, x: Value, shared: Shared) -> Value:
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
        v = k if self.keys_as_values else layers.split_heads(g, self._projected(g, x, "v", self.kv_heads), self.kv_heads)
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
        batch, seq, _ = x.shape
        q = self._projected(g, x, "q", self.heads)
        k = self._projected(g, x, "k", self.kv_heads)
        v = self._projected(g, x, "v", self.kv_heads)
        if self.rotary is not None:
            q = _rotate(g, q, self.rotary, shared, heads=self.heads)
            k = _rotate(g, k, self.rotary, shared, heads=self.kv_heads)
        last = ops.expand_batch(g, g.constant([seq - 1], ElementType.INT32), x)
        total = g.constant(seq, ElementType.INT32)
        sinks = g.parameter("sinks", (self.heads,), fill=0.0)
        attributes: dict[str, int | float] = {"num_heads": self.heads, "kv_num_heads": self.kv_heads}
        attributes["scale"] = self.scale or 1.0 / math.sqrt(self.head_dim)
        if 0 < self.window < seq:
            attributes["local_window_size"] = self.window
        return g.node_with(
            "com.microsoft.GroupQueryAttention",
            [q, k, v, None, None, last, total, None, None, None, None, sinks],
            [((batch, seq, self.heads * self.head_dim), x.dtype)],
            attributes=attributes,
        )[0]


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
    attributes: dict[str, int | float] = {"is_causal": 1, "scale": scale}
    if 0 < window < q.shape[2]:
        g.require_opset(25)
        attributes["left_window_size"] = window - 1
    if softcap:
        attributes["softcap"] = softcap
    return g.node_with("Attention", [q, k, v], [((*q.shape[:3], v.shape[3]), q.dtype)], attributes=attributes)[0]


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
    heads: int = sized("num_attention_heads")
    q_rank: int = sized("q_lora_rank", Key(int, 0))
    kv_rank: int = sized("kv_lora_rank", Key(int, 512))
    plain: int = sized("qk_nope_head_dim", Key(int, 128))
    value: int = sized("v_head_dim", Key(int, 128))
    bias: bool = sized("attention_bias", default=False)

    def add(self, g: GraphBuilder, x: Value, shared: Shared) -> Value:
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
