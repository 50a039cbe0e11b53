"""GPT: decoder-only Transformers with learned positions and LayerNorm before each layer (GPT-2, GPT-3, Megatron-LM).

Attention is written out (two matrix products and a softmax) under one causal mask that all blocks share. Weights have
the names and layouts of the GPT-2 checkpoints: `transformer.h.7.mlp.c_fc.weight` is [inputs, outputs].
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from . import _layers as layers
from . import _ops as ops
from ._graph import ElementType, GraphBuilder, Value
from ._moe import MoE, mixture
from ._types import Entry, ModelInfo

OPSET = 20


@dataclass(frozen=True, slots=True)
class GPTSize:
    """Sizes of a GPT.

    Attributes:
        layers: number of blocks.
        hidden: width of the residual stream.
        heads: attention heads.
        vocab: words.
        positions: rows of the position table, the longest sequence.
        head_dim: width of one head; 0 for hidden / heads.
        ffn: inner width of the feed-forward layer; 0 for four times hidden.
        tied: the head is the transposed word embedding, `lm_head`; else `output_layer` with a weight of its own.
        relu: ReLU instead of GELU.
        moe: some blocks have experts in place of the feed-forward layer.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    positions: int
    head_dim: int = 0
    ffn: int = 0
    tied: bool = True
    relu: bool = False
    moe: MoE | None = None


def construct(size: GPTSize, g: GraphBuilder, batch: int, seq: int) -> None:
    """Add a GPT that reads `input_ids` [batch, seq] and ends at logits [batch, seq, vocab]."""
    ids = g.input("input_ids", (batch, seq), ElementType.INT64)
    with g.scope("transformer"):
        x, words = layers.embedding(g, ids, size.vocab, size.hidden, "wte")
        places, _ = layers.embedding(g, layers.positions(g, seq), size.positions, size.hidden, "wpe")
        x = ops.add(g, x, places)
        mask = layers.causal_mask(g, seq)
        for layer in range(size.layers):
            with g.scope(f"h.{layer}"):
                x = _block(size, g, x, mask, layer)
        x = layers.layer_norm(g, x, "ln_f")
    if size.tied:
        with g.scope("lm_head"):
            g.output(layers.tied_linear(g, x, words))
    else:
        g.output(layers.linear(g, x, size.vocab, "output_layer", bias=False))


def _block(size: GPTSize, g: GraphBuilder, x: Value, mask: Value, layer: int) -> Value:
    """One block of [b, s, hidden]."""
    inner = (size.head_dim or size.hidden // size.heads) * size.heads
    normed = layers.layer_norm(g, x, "ln_1")
    with g.scope("attn"):
        parts = ops.split(g, _conv1d(g, normed, 3 * inner, "c_attn"), (inner, inner, inner), 2)
        q, k, v = (layers.split_heads(g, part, size.heads) for part in parts)
        merged = layers.merge_heads(g, layers.attention(g, q, k, v, bias=mask))
        attended = _conv1d(g, merged, size.hidden, "c_proj")
    x = ops.add(g, x, attended)
    normed = layers.layer_norm(g, x, "ln_2")
    with g.scope("mlp"):
        return ops.add(g, x, _feed_forward(size, g, normed, layer))


def _feed_forward(size: GPTSize, g: GraphBuilder, x: Value, layer: int) -> Value:
    ffn = size.ffn or 4 * size.hidden
    if size.moe is not None and size.moe.is_sparse(layer):
        return mixture(g, x, size.moe, ffn, functools.partial(_activation, size))
    return _conv1d(g, _activation(size, g, _conv1d(g, x, ffn, "c_fc")), size.hidden, "c_proj")


def _activation(size: GPTSize, g: GraphBuilder, x: Value) -> Value:
    return ops.unary(g, "Relu", x) if size.relu else layers.gelu(g, x, tanh=True)


def _conv1d(g: GraphBuilder, x: Value, features: int, name: str) -> Value:
    """A linear layer whose weight is kept as [inputs, outputs]."""
    with g.scope(name):
        product = ops.matmul(g, x, g.parameter("weight", (x.shape[-1], features)))
        return ops.add(g, product, g.parameter("bias", (features,), fill=0.0))


_GPT2 = "Radford et al. 2019, Language Models are Unsupervised Multitask Learners; released checkpoints"
_GPT3 = "Brown et al. 2020, Language Models are Few-Shot Learners, table 2.1"
_MEGATRON = "Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters, table 1"
_SHOEYBI = "Shoeybi et al. 2019, Megatron-LM, table 2"
_CHIMERA = "Li and Hoefler 2021, Chimera, table 4"


def _sizes() -> list[tuple[str, GPTSize, int, int, str, str]]:
    """Name, size, published parameters, default sequence, description, source."""
    gpt2 = [
        ("gpt2", 12, 768, 12, 124_439_808),
        ("gpt2-medium", 24, 1024, 16, 354_823_168),
        ("gpt2-large", 36, 1280, 20, 774_030_080),
        ("gpt2-xl", 48, 1600, 25, 1_557_611_200),
    ]
    gpt3 = [
        ("gpt3-125m", 12, 768, 12, 125_000_000),
        ("gpt3-350m", 24, 1024, 16, 350_000_000),
        ("gpt3-760m", 24, 1536, 16, 760_000_000),
        ("gpt3-1.3b", 24, 2048, 16, 1_300_000_000),
        ("gpt3-2.7b", 32, 2560, 32, 2_700_000_000),
        ("gpt3-6.7b", 32, 4096, 32, 6_700_000_000),
        ("gpt3-13b", 40, 5120, 40, 13_000_000_000),
        ("gpt3-175b", 96, 12288, 96, 175_000_000_000),
    ]
    megatron = [
        ("megatron-1.7b", 24, 2304, 24, 1_700_000_000),
        ("megatron-3.6b", 30, 3072, 32, 3_600_000_000),
        ("megatron-7.5b", 36, 4096, 32, 7_500_000_000),
        ("megatron-18b", 40, 6144, 48, 18_400_000_000),
        ("megatron-39b", 48, 8192, 64, 39_100_000_000),
        ("megatron-76b", 60, 10240, 80, 76_100_000_000),
        ("megatron-145b", 80, 12288, 96, 145_600_000_000),
        ("megatron-310b", 96, 16384, 128, 310_100_000_000),
        ("megatron-530b", 105, 20480, 128, 529_600_000_000),
        ("megatron-1t", 128, 25600, 160, 1_008_000_000_000),
    ]
    rows = [(n, GPTSize(a, h, k, 50257, 1024), p, 1024, "GPT-2", _GPT2) for n, a, h, k, p in gpt2]
    note = "GPT-3, all attention dense; 13b at width 5120, 1.3b with 16 heads"
    rows += [(n, GPTSize(a, h, k, 50257, 2048), p, 2048, note, _GPT3) for n, a, h, k, p in gpt3]
    rows += [(n, GPTSize(a, h, k, 51200, 2048), p, 2048, "Megatron-LM GPT", _MEGATRON) for n, a, h, k, p in megatron]
    rows.append(
        ("megatron-8.3b", GPTSize(72, 3072, 32, 51200, 1024), 8_300_000_000, 1024, "Megatron-LM GPT-2", _SHOEYBI)
    )
    wide = GPTSize(64, 1280, 20, 50257, 1024, tied=False)
    rows.append(("gpt2-64", wide, 1_389_327_360, 632, "GPT-2 of 64 blocks, head not tied", _CHIMERA))
    return rows


MODELS = {
    name: Entry(
        ModelInfo(name, "gpt", text, size.layers, count, seq, size.positions, source),
        OPSET,
        functools.partial(construct, size),
    )
    for name, size, count, seq, text, source in _sizes()
}
