"""GPT: decoder-only Transformers with learned positions and LayerNorm before each layer (GPT-2, GPT-3, Megatron-LM).

Attention is written out (two matrix products and a softmax) under one causal mask that all blocks share. Weights have
the names and layouts of the GPT-2 checkpoints: `transformer.h.7.mlp.c_fc.weight` is [inputs, outputs].
"""

from __future__ import annotations

from . import _layers as layers
from . import _ops as ops
from ._config import Config, typed
from ._graph import ElementType, GraphBuilder, Value
from ._moe import MoE, mixture
from .decoders import activation

OPSET = 20


def construct(c: Config, g: GraphBuilder, batch: int, seq: int) -> None:
    """Add a GPT that reads `input_ids` [batch, seq] and ends at logits [batch, seq, vocab]."""
    ids = g.input("input_ids", (batch, seq), ElementType.INT64)
    with g.scope("transformer"):
        x, words = layers.embedding(g, ids, c["vocab_size"], c["n_embd"], "wte")
        places, _ = layers.embedding(g, layers.positions(g, seq), c["n_positions"], c["n_embd"], "wpe")
        x = ops.add(g, x, places)
        mask = layers.causal_mask(g, seq)
        for layer in range(c["n_layer"]):
            with g.scope(f"h.{layer}"):
                x = _block(c, g, x, mask, layer)
        x = layers.layer_norm(g, x, "ln_f")
    if c["tie_word_embeddings"]:
        with g.scope("lm_head"):
            g.output(layers.tied_linear(g, x, words))
    else:
        g.output(layers.linear(g, x, c["vocab_size"], "output_layer", bias=False))


def _block(c: Config, g: GraphBuilder, x: Value, mask: Value, layer: int) -> Value:
    """One block of [b, s, hidden]."""
    hidden, heads = c["n_embd"], c["n_head"]
    inner = (c["head_dim"] or hidden // heads) * heads
    normed = layers.layer_norm(g, x, "ln_1")
    with g.scope("attn"):
        parts = ops.split(g, _conv1d(g, normed, 3 * inner, "c_attn"), (inner, inner, inner), 2)
        q, k, v = (layers.split_heads(g, part, heads) for part in parts)
        merged = layers.merge_heads(g, layers.attention(g, q, k, v, bias=mask))
        attended = _conv1d(g, merged, hidden, "c_proj")
    x = ops.add(g, x, attended)
    normed = layers.layer_norm(g, x, "ln_2")
    with g.scope("mlp"):
        return ops.add(g, x, _feed_forward(c, g, normed, layer))


def _feed_forward(c: Config, g: GraphBuilder, x: Value, layer: int) -> Value:
    ffn = c["n_inner"] or 4 * c["n_embd"]
    activate = layers.ACTIVATIONS[activation(c, "activation_function")]
    if c.get("num_experts") and (layer + 1) % c["expert_layer_period"] == 0:
        return mixture(g, x, MoE(c["num_experts"], c["num_experts_per_tok"], one_hot=True), ffn, activate)
    return _conv1d(g, activate(g, _conv1d(g, x, ffn, "c_fc")), c["n_embd"], "c_proj")


def _conv1d(g: GraphBuilder, x: Value, features: int, name: str) -> Value:
    """A linear layer whose weight is kept as [inputs, outputs]."""
    with g.scope(name):
        product = ops.matmul(g, x, g.parameter("weight", (x.shape[-1], features)))
        return ops.add(g, product, g.parameter("bias", (features,), fill=0.0))


MODEL_TYPES = typed({"gpt2": construct, "opt": construct}, OPSET)
