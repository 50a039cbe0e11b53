"""LLaMA: decoder-only Transformers with rotary positions, grouped-query attention, gated MLP and RMSNorm.

Written with the fused operators of operator set 23 (RMSNormalization, RotaryEmbedding, Attention). The rotary tables
are computed once and shared by all layers. Weights have the names and layouts of the Hugging Face checkpoints.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from . import _layers as layers
from . import _ops as ops
from ._graph import ElementType, GraphBuilder, Value
from ._moe import MoE, mixture
from ._types import Entry, ModelInfo

OPSET = 23


@dataclass(frozen=True, slots=True)
class LlamaSize:
    """Sizes of a LLaMA.

    Attributes:
        layers: number of decoder layers.
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key and value heads.
        ffn: inner width of the gated MLP.
        vocab: words.
        theta: base of the rotary wavelengths.
        head_dim: width of one head; 0 for hidden / heads.
        epsilon: of the normalisations.
        tied: the head is the transposed word embedding.
        qk_norm: normalise each head's queries and keys (Qwen3).
        moe: some layers have experts in place of the MLP.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    theta: float = 10_000.0
    head_dim: int = 0
    epsilon: float = 1e-5
    tied: bool = False
    qk_norm: bool = False
    moe: MoE | None = None

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden // self.heads


@dataclass(frozen=True, slots=True)
class _Rotary:
    """Tables that turn queries and keys: cosines and sines [s, head size / 2], and position ids [b, s]."""

    cos: Value
    sin: Value
    ids: Value


def construct(size: LlamaSize, g: GraphBuilder, batch: int, seq: int) -> None:
    """Add a LLaMA that reads `input_ids` [batch, seq] and ends at logits [batch, seq, vocab]."""
    ids = g.input("input_ids", (batch, seq), ElementType.INT64)
    with g.scope("model"):
        x, words = layers.embedding(g, ids, size.vocab, size.hidden, "embed_tokens")
        with g.scope("rotary_emb"):
            rotary = _rotary_tables(size, g, ids)
        for layer in range(size.layers):
            with g.scope(f"layers.{layer}"):
                x = _layer(size, g, x, rotary, layer)
        x = layers.rms_norm(g, x, "norm", epsilon=size.epsilon)
    if size.tied:
        with g.scope("lm_head"):
            g.output(layers.tied_linear(g, x, words))
    else:
        g.output(layers.linear(g, x, size.vocab, "lm_head", bias=False))


def _rotary_tables(size: LlamaSize, g: GraphBuilder, ids: Value) -> _Rotary:
    half = size.head_size // 2
    frequencies = [math.exp(-math.log(size.theta) * i / half) for i in range(half)]
    positions = ops.arange(g, ids.shape[1])
    column = ops.unsqueeze(g, ops.cast(g, positions, ElementType.FLOAT), 1)
    angles = ops.mul(g, column, g.constant([frequencies], ElementType.FLOAT))
    position_ids = ops.expand_batch(g, ops.unsqueeze(g, positions, 0), ids)
    return _Rotary(ops.unary(g, "Cos", angles), ops.unary(g, "Sin", angles), position_ids)


def _layer(size: LlamaSize, g: GraphBuilder, x: Value, rotary: _Rotary, layer: int) -> Value:
    """One decoder layer of [b, s, hidden]."""
    normed = layers.rms_norm(g, x, "input_layernorm", epsilon=size.epsilon)
    with g.scope("self_attn"):
        attended = _attention(size, g, normed, rotary)
    x = ops.add(g, x, attended)
    normed = layers.rms_norm(g, x, "post_attention_layernorm", epsilon=size.epsilon)
    with g.scope("mlp"):
        if size.moe is not None and size.moe.is_sparse(layer):
            changed = mixture(g, normed, size.moe, size.ffn, layers.silu)
        else:
            changed = _gated_mlp(size, g, normed)
    return ops.add(g, x, changed)


def _attention(size: LlamaSize, g: GraphBuilder, x: Value, rotary: _Rotary) -> Value:
    width = size.head_size
    q = layers.split_heads(g, layers.linear(g, x, size.heads * width, "q_proj", bias=False), size.heads)
    k = layers.split_heads(g, layers.linear(g, x, size.kv_heads * width, "k_proj", bias=False), size.kv_heads)
    v = layers.split_heads(g, layers.linear(g, x, size.kv_heads * width, "v_proj", bias=False), size.kv_heads)
    if size.qk_norm:
        q = layers.rms_norm(g, q, "q_norm", epsilon=size.epsilon)
        k = layers.rms_norm(g, k, "k_norm", epsilon=size.epsilon)
    q, k = (g.node("RotaryEmbedding", [part, rotary.cos, rotary.sin, rotary.ids], part.shape) for part in (q, k))
    attended = g.node("Attention", [q, k, v], q.shape, is_causal=1, scale=1.0 / math.sqrt(width))
    return layers.linear(g, layers.merge_heads(g, attended), size.hidden, "o_proj", bias=False)


def _gated_mlp(size: LlamaSize, g: GraphBuilder, x: Value) -> Value:
    gate = layers.linear(g, x, size.ffn, "gate_proj", bias=False)
    with g.scope("act_fn"):
        gate = layers.silu(g, gate)
    up = layers.linear(g, x, size.ffn, "up_proj", bias=False)
    return layers.linear(g, ops.mul(g, gate, up), size.hidden, "down_proj", bias=False)


_LLAMA1 = "Touvron et al. 2023, LLaMA: Open and Efficient Foundation Language Models, table 2"
_LLAMA2 = "Touvron et al. 2023, Llama 2; released checkpoints"
_LLAMA3 = "Grattafiori et al. 2024, The Llama 3 Herd of Models, table 3; released checkpoints"
_MISTRAL = "Jiang et al. 2023, Mistral 7B, table 1; released checkpoint"

_SIZES = {
    "llama-7b": (LlamaSize(32, 4096, 32, 32, 11008, 32000), 6_738_415_616, 2048, "LLaMA", _LLAMA1),
    "llama-13b": (LlamaSize(40, 5120, 40, 40, 13824, 32000), 13_015_864_320, 2048, "LLaMA", _LLAMA1),
    "llama-33b": (LlamaSize(60, 6656, 52, 52, 17920, 32000), 32_528_943_616, 2048, "LLaMA", _LLAMA1),
    "llama-65b": (LlamaSize(80, 8192, 64, 64, 22016, 32000), 65_285_660_672, 2048, "LLaMA", _LLAMA1),
    "llama2-7b": (LlamaSize(32, 4096, 32, 32, 11008, 32000), 6_738_415_616, 4096, "Llama 2", _LLAMA2),
    "llama2-13b": (LlamaSize(40, 5120, 40, 40, 13824, 32000), 13_015_864_320, 4096, "Llama 2", _LLAMA2),
    "llama2-70b": (LlamaSize(80, 8192, 64, 8, 28672, 32000), 68_976_648_192, 4096, "Llama 2", _LLAMA2),
    "llama3.2-1b": (
        LlamaSize(16, 2048, 32, 8, 8192, 128256, 500_000.0, tied=True),
        1_235_814_400, 8192, "Llama 3.2, head tied to the embedding", _LLAMA3,
    ),
    "llama3.2-3b": (
        LlamaSize(28, 3072, 24, 8, 8192, 128256, 500_000.0, tied=True),
        3_212_749_824, 8192, "Llama 3.2, head tied to the embedding", _LLAMA3,
    ),
    "llama3-8b": (LlamaSize(32, 4096, 32, 8, 14336, 128256, 500_000.0), 8_030_261_248, 8192, "Llama 3", _LLAMA3),
    "llama3-70b": (LlamaSize(80, 8192, 64, 8, 28672, 128256, 500_000.0), 70_553_706_496, 8192, "Llama 3", _LLAMA3),
    "llama3-405b": (
        LlamaSize(126, 16384, 128, 8, 53248, 128256, 500_000.0), 405_853_388_800, 8192, "Llama 3.1", _LLAMA3,
    ),
    "mistral-7b": (
        LlamaSize(32, 4096, 32, 8, 14336, 32000), 7_241_732_096, 4096, "Mistral, within its attention window", _MISTRAL,
    ),
}  # fmt: skip

MODELS = {
    name: Entry(
        ModelInfo(name, "llama", text, size.layers, count, seq, None, source),
        OPSET,
        functools.partial(construct, size),
    )
    for name, (size, count, seq, text, source) in _SIZES.items()
}
