"""Causal attention of decoders: grouped-query and multi-head latent attention, and the rotary tables they share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from . import _layers as layers
from . import _ops as ops
from ._config import ModelBuildError
from ._graph import ElementType, GraphBuilder, Value


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary positions.

    Attributes:
        theta: base of the wavelengths.
        dim: how many of a head's elements are turned, the first ones.
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
    """Tables that turn queries and keys: cosines and sines [s, dim / 2], and position ids [b, s]."""

    cos: Value
    sin: Value
    ids: Value


@dataclass(frozen=True, slots=True)
class Shared:
    """What all layers of one decoder use.

    Attributes:
        epsilon: of the normalisations.
        tables: rotary tables by kind.
    """

    epsilon: float
    tables: Mapping[Rotary, RotaryTables]


def rotary_tables(g: GraphBuilder, rotary: Rotary, ids: Value) -> RotaryTables:
    """Tables for the positions of `ids` [b, s], computed in the graph."""
    half = rotary.dim // 2
    frequencies = [math.exp(-math.log(rotary.theta) * i / half) for i in range(half)]
    positions = ops.arange(g, ids.shape[1])
    column = ops.unsqueeze(g, ops.cast(g, positions, ElementType.FLOAT), 1)
    angles = ops.mul(g, column, g.constant([frequencies], ElementType.FLOAT))
    position_ids = ops.expand_batch(g, ops.unsqueeze(g, positions, 0), ids)
    return RotaryTables(ops.unary(g, "Cos", angles), ops.unary(g, "Sin", angles), position_ids)


def _turned(g: GraphBuilder, x: Value, rotary: Rotary, shared: Shared, *, heads: int = 0) -> Value:
    """Queries or keys [b, heads, s, d], or [b, s, heads * d] where the number of heads is given, turned by position."""
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
        rotary: how queries and keys are turned; None for no positions.
        bias: queries, keys and values have biases.
        out_bias: the output projection has one.
        qk_norm: normalise each head's queries and keys.
        qk_unit: the same after they were turned, and without weights (Llama 4).
        window: a query sees that many keys, its own the last; 0 for all before it.
        sinks: each head has a learned score that takes part in the softmax and carries no value (GPT-OSS).
        gated: the result is multiplied by the sigmoid of a further projection (Qwen3-Next).
        softcap: scores are bent to stay within that bound; 0 for none (Gemma 2).
        scale: factor on the scores; 0 for 1 / sqrt(head_dim).
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary: Rotary | None
    bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    qk_unit: bool = False
    window: int = 0
    sinks: bool = False
    gated: bool = False
    softcap: float = 0.0
    scale: float = 0.0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ModelBuildError(
                f"{self.heads} query heads are not a multiple of {self.kv_heads} key and value heads",
                "give a number of key and value heads that divides that of query heads",
            )

    def add(self, g: GraphBuilder, x: Value, shared: Shared) -> Value:
        """What the layer makes of [b, s, hidden]."""
        merged = self._with_sinks(g, x, shared) if self.sinks else self._by_heads(g, x, shared)
        if self.gated:
            gate = layers.linear(g, x, self.heads * self.head_dim, "gate_proj", bias=False)
            merged = ops.mul(g, merged, ops.unary(g, "Sigmoid", gate))
        return layers.linear(g, merged, x.shape[2], "o_proj", bias=self.out_bias)

    def _projected(self, g: GraphBuilder, x: Value, name: str, heads: int) -> Value:
        return layers.linear(g, x, heads * self.head_dim, name, bias=self.bias)

    def _by_heads(self, g: GraphBuilder, x: Value, shared: Shared) -> Value:
        """Attention of [b, s, hidden] by the standard's operator: [b, s, heads * head_dim]."""
        q = layers.split_heads(g, self._projected(g, x, "q_proj", self.heads), self.heads)
        k = layers.split_heads(g, self._projected(g, x, "k_proj", self.kv_heads), self.kv_heads)
        v = layers.split_heads(g, self._projected(g, x, "v_proj", self.kv_heads), self.kv_heads)
        if self.qk_norm:
            q = layers.rms_norm(g, q, "q_norm", epsilon=shared.epsilon)
            k = layers.rms_norm(g, k, "k_norm", epsilon=shared.epsilon)
        if self.rotary is not None:
            q, k = (_turned(g, part, self.rotary, shared) for part in (q, k))
        if self.qk_unit:
            q, k = (layers.unit_rms(g, part) for part in (q, k))
        scale = self.scale or 1.0 / math.sqrt(self.head_dim)
        return layers.merge_heads(g, fused_attention(g, q, k, v, scale, window=self.window, softcap=self.softcap))

    def _with_sinks(self, g: GraphBuilder, x: Value, shared: Shared) -> Value:
        """The same with a score of its own for each head, which only `GroupQueryAttention` knows."""
        batch, seq, _ = x.shape
        q = self._projected(g, x, "q_proj", self.heads)
        k = self._projected(g, x, "k_proj", self.kv_heads)
        v = self._projected(g, x, "v_proj", self.kv_heads)
        if self.rotary is not None:
            q = _turned(g, q, self.rotary, shared, heads=self.heads)
            k = _turned(g, k, self.rotary, shared, heads=self.kv_heads)
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
    """Causal attention by the standard's operator.

    Args:
        g: the graph.
        q: queries [b, heads, s, d].
        k: keys [b, key heads, s, d].
        v: values [b, key heads, s, e].
        scale: factor on the scores.
        window: a query sees that many keys, its own the last; 0 for all before it.
        softcap: bound that scores are bent to; 0 for none.
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
    """Multi-head latent attention (DeepSeek-V2): keys and values of all heads come from one narrow row a token.

    Attributes:
        heads: attention heads.
        q_rank: width of the narrow row that queries come from; 0 where they come from the hidden state.
        kv_rank: width of the narrow row that keys and values come from.
        plain: elements of a head's query and key that are not turned by position.
        rotary: those that are; a key's are shared by all heads.
        value: width of a head's value.
        bias: the projections of the hidden state, and to it, have biases.
    """

    heads: int
    q_rank: int
    kv_rank: int
    plain: int
    rotary: Rotary
    value: int
    bias: bool = False

    def add(self, g: GraphBuilder, x: Value, shared: Shared) -> Value:
        """What the layer makes of [b, s, hidden]."""
        turned, width = self.rotary.dim, self.plain + self.rotary.dim
        q = layers.split_heads(g, self._queries(g, x, shared, self.heads * width), self.heads)
        q_plain, q_turned = ops.split(g, q, (self.plain, turned), 3)
        q = ops.concat(g, (q_plain, _turned(g, q_turned, self.rotary, shared)), 3)
        both = layers.linear(g, x, self.kv_rank + turned, "kv_a_proj_with_mqa", bias=self.bias)
        row, k_turned = ops.split(g, both, (self.kv_rank, turned), 2)
        row = layers.rms_norm(g, row, "kv_a_layernorm", epsilon=shared.epsilon)
        both = layers.linear(g, row, self.heads * (self.plain + self.value), "kv_b_proj", bias=False)
        k_plain, v = ops.split(g, layers.split_heads(g, both, self.heads), (self.plain, self.value), 3)
        k_turned = _turned(g, layers.split_heads(g, k_turned, 1), self.rotary, shared)
        repeated = (k_turned.shape[0], self.heads, *k_turned.shape[2:])
        k_turned = g.node("Expand", [k_turned, g.constant([1, self.heads, 1, 1])], repeated)
        k = ops.concat(g, (k_plain, k_turned), 3)
        merged = layers.merge_heads(g, fused_attention(g, q, k, v, 1.0 / math.sqrt(width)))
        return layers.linear(g, merged, x.shape[2], "o_proj", bias=self.bias)

    def _queries(self, g: GraphBuilder, x: Value, shared: Shared, width: int) -> Value:
        if not self.q_rank:
            return layers.linear(g, x, width, "q_proj", bias=False)
        row = layers.linear(g, x, self.q_rank, "q_a_proj", bias=self.bias)
        row = layers.rms_norm(g, row, "q_a_layernorm", epsilon=shared.epsilon)
        return layers.linear(g, row, width, "q_b_proj", bias=False)
