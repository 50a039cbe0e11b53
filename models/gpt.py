"""GPT: decoder-only Transformers with learned positions and LayerNorm before each layer (GPT-2, GPT-3, Megatron-LM).

Attention is written out (two matrix products and a softmax) under one causal mask that all blocks share. Weights have
the names and layouts of the GPT-2 checkpoints: `transformer.h.7.mlp.c_fc.weight` is [inputs, outputs].
"""

from __future__ import annotations

from dataclasses import dataclass

from . import _layers as layers
from . import _ops as ops
from ._config import Config, Key, size_from, sized, typed
from ._graph import ElementType, GraphBuilder, Value
from ._moe import Dispatch, MoE, mixture
from .decoders import activation

OPSET = 20


@dataclass(frozen=True, slots=True)
class GPTSize:
    """Sizes of a GPT.

    Attributes:
        layers: number of blocks.
        hidden: width of the residual stream.
        heads: attention heads.
        vocab: size of the vocabulary.
        positions: rows of the position table, the longest sequence.
        head_dim: width of one head; 0 for hidden / heads.
        ffn: inner width of the feed-forward layer; 0 for four times hidden.
        tied: the head's weight is the word embedding, `lm_head`; else `output_layer` with a weight of its own.
        activation: a name of `ACTIVATIONS`.
        moe: some blocks have experts in place of the feed-forward layer.
    """

    layers: int = sized("n_layer")
    hidden: int = sized("n_embd")
    heads: int = sized("n_head")
    vocab: int = sized("vocab_size", Key(int, 50257))
    positions: int = sized("n_positions", Key(int, 1024))
    head_dim: int = sized("head_dim", default=0)
    ffn: int = sized("n_inner", default=0)
    tied: bool = sized("tie_word_embeddings", default=True)
    activation: str = sized("activation_function", default="gelu_new")
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
    ffn, activate = size.ffn or 4 * size.hidden, layers.ACTIVATIONS[size.activation]
    if size.moe is not None and size.moe.is_sparse(layer):
        return mixture(g, x, size.moe, ffn, activate)
    return _conv1d(g, activate(g, _conv1d(g, x, ffn, "c_fc")), size.hidden, "c_proj")


def _conv1d(g: GraphBuilder, x: Value, features: int, name: str) -> Value:
    """A linear layer whose weight is kept as [inputs, outputs]."""
    with g.scope(name):
        product = ops.matmul(g, x, g.parameter("weight", (x.shape[-1], features)))
        return ops.add(g, product, g.parameter("bias", (features,), fill=0.0))


def _size(c: Config) -> object:
    moe = None
    if c.get("num_experts"):
        top_k, every = c["num_experts_per_tok"], c["expert_layer_period"]
        moe = MoE(c["num_experts"], top_k, every=every, dispatch=Dispatch.EINSUM)
    return size_from(GPTSize, c, activation=activation(c, "activation_function"), moe=moe)


MODEL_TYPES = typed({"gpt2": _size, "opt": _size}, GPTSize)
