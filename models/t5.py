"""T5: encoder-decoder Transformers with relative position bias and RMSNorm; Switch puts experts into them.

The bias of each stack belongs to its first block and is added to the scores of all its blocks; the encoder's result
feeds every decoder block. The target is a quarter of the source sequence. Weights have the names and layouts of the
Hugging Face checkpoints.
"""

from __future__ import annotations

import math

from . import _layers as layers
from . import _ops as ops
from ._config import Config, ModelBuildError, typed
from ._graph import ElementType, GraphBuilder, Value
from ._moe import MoE, mixture

OPSET = 23
EPSILON = 1e-6
BUCKETS = 32
MAX_DISTANCE = 128
_GATED = {"relu": False, "gated-gelu": True}
"""Whether feed-forward layers are gated with GELU (version 1.1) instead of plain with ReLU, by `feed_forward_proj`."""


def construct(c: Config, g: GraphBuilder, batch: int, seq: int) -> None:
    """Add a T5 that reads source [batch, seq] and target ids [batch, seq / 4] and ends at logits of the target.

    Raises:
        ModelBuildError: the configuration has another form than T5's.
    """
    _require_form(c)
    source = g.input("input_ids", (batch, seq), ElementType.INT64)
    target = g.input("decoder_input_ids", (batch, max(1, seq // 4)), ElementType.INT64)
    with g.scope("shared"):
        words = g.parameter("weight", (c["vocab_size"], c["d_model"]))
    encoded = _stack(c, g, words, source, None)
    decoded = _stack(c, g, words, target, encoded)
    if not c["tie_word_embeddings"]:
        g.output(layers.linear(g, decoded, c["vocab_size"], "lm_head", bias=False))
        return
    decoded = ops.scale(g, decoded, c["d_model"] ** -0.5)
    with g.scope("lm_head"):
        g.output(layers.tied_linear(g, decoded, words))


def _require_form(c: Config) -> None:
    """Refuse configurations of forms that are not built.

    Raises:
        ModelBuildError: unknown feed-forward layers, stacks of unequal length, other buckets of positions.
    """
    if c["feed_forward_proj"] not in _GATED:
        raise ModelBuildError(
            f"feed_forward_proj {c['feed_forward_proj']!r} is not known", f"known: {', '.join(_GATED)}"
        )
    if c["num_decoder_layers"] not in (None, c["num_layers"]):
        raise ModelBuildError(
            f"{c['num_layers']} encoder layers and {c['num_decoder_layers']} of the decoder", "give the same number"
        )
    if (c["relative_attention_num_buckets"], c["relative_attention_max_distance"]) != (BUCKETS, MAX_DISTANCE):
        raise ModelBuildError(
            "relative positions in other buckets than T5's", f"{BUCKETS} up to {MAX_DISTANCE} are known"
        )


def _stack(c: Config, g: GraphBuilder, words: Value, ids: Value, encoded: Value | None) -> Value:
    """The encoder, or the decoder if the encoder's result is given."""
    with g.scope("encoder" if encoded is None else "decoder"):
        with g.scope("embed_tokens"):
            x = ops.gather(g, words, ids)
        with g.scope("block.0"), g.scope("layer.0.SelfAttention"):
            bias = _position_bias(c, g, ids.shape[1], bidirectional=encoded is None)
        if encoded is not None:
            bias = ops.add(g, bias, layers.causal_mask(g, ids.shape[1]))
        for layer in range(c["num_layers"]):
            with g.scope(f"block.{layer}"):
                x = _block(c, g, x, bias, encoded, layer)
        return layers.rms_norm(g, x, "final_layer_norm", epsilon=EPSILON)


def _block(c: Config, g: GraphBuilder, x: Value, bias: Value, encoded: Value | None, layer: int) -> Value:
    """One block of [b, s, hidden]: self-attention, attention to the encoder in the decoder, feed-forward."""
    with g.scope("layer.0"):
        normed = layers.rms_norm(g, x, "layer_norm", epsilon=EPSILON)
        x = ops.add(g, x, _attention(c, g, normed, normed, "SelfAttention", bias))
    if encoded is not None:
        with g.scope("layer.1"):
            normed = layers.rms_norm(g, x, "layer_norm", epsilon=EPSILON)
            x = ops.add(g, x, _attention(c, g, normed, encoded, "EncDecAttention", None))
    with g.scope("layer.1" if encoded is None else "layer.2"):
        normed = layers.rms_norm(g, x, "layer_norm", epsilon=EPSILON)
        return ops.add(g, x, _feed_forward(c, g, normed, layer))


def _attention(c: Config, g: GraphBuilder, x: Value, memory: Value, name: str, bias: Value | None) -> Value:
    """Attention of `x` to `memory`; T5 does not divide the scores by the root of the head's width."""
    heads = c["num_heads"]
    inner = heads * c["d_kv"]
    with g.scope(name):
        q, k, v = (
            layers.split_heads(g, layers.linear(g, part, inner, each, bias=False), heads)
            for each, part in (("q", x), ("k", memory), ("v", memory))
        )
        merged = layers.merge_heads(g, layers.attention(g, q, k, v, bias=bias, scaled=False))
        return layers.linear(g, merged, c["d_model"], "o", bias=False)


def _feed_forward(c: Config, g: GraphBuilder, x: Value, layer: int) -> Value:
    ffn, gated = c["d_ff"], _GATED[c["feed_forward_proj"]]
    if c.get("num_experts") and (layer + 1) % c["encoder_sparse_step"] == 0:
        moe = MoE(c["num_experts"], 1, 1.25, renormalise=False, one_hot=True, gated=gated)
        with g.scope("mlp"):
            return mixture(g, x, moe, ffn, layers.gelu if gated else layers.relu)
    with g.scope("DenseReluDense"):
        if gated:
            gate = layers.gelu(g, layers.linear(g, x, ffn, "wi_0", bias=False), tanh=True)
            inner = ops.mul(g, gate, layers.linear(g, x, ffn, "wi_1", bias=False))
        else:
            inner = layers.relu(g, layers.linear(g, x, ffn, "wi", bias=False))
        return layers.linear(g, inner, c["d_model"], "wo", bias=False)


def _position_bias(c: Config, g: GraphBuilder, seq: int, *, bidirectional: bool) -> Value:
    """[1, heads, s, s] learned bias by the bucket of the distance from query to key."""
    places = ops.arange(g, seq)
    distance = ops.binary(g, "Sub", ops.unsqueeze(g, places, 0), ops.unsqueeze(g, places, 1))
    bias, _ = layers.embedding(
        g, _buckets(g, distance, bidirectional=bidirectional), BUCKETS, c["num_heads"], "relative_attention_bias"
    )
    return ops.unsqueeze(g, ops.transpose(g, bias, (2, 0, 1)), 0)


def _buckets(g: GraphBuilder, distance: Value, *, bidirectional: bool) -> Value:
    """Bucket numbers: exact for short distances, logarithmic up to the longest; keys after the query apart."""
    buckets, zero = BUCKETS, g.constant(0)
    offset: Value | None = None
    if bidirectional:
        buckets //= 2
        after = ops.cast(g, ops.binary(g, "Greater", distance, zero, ElementType.BOOL), ElementType.INT64)
        offset = ops.mul(g, after, g.constant(buckets))
        distance = ops.unary(g, "Abs", distance)
    else:
        distance = ops.unary(g, "Neg", ops.binary(g, "Min", distance, zero))
    exact = buckets // 2
    far = ops.cast(g, ops.binary(g, "Max", distance, g.constant(exact)), ElementType.FLOAT)
    growth = (buckets - exact) / math.log(MAX_DISTANCE / exact)
    steps = ops.scale(g, ops.unary(g, "Log", ops.scale(g, far, 1.0 / exact)), growth)
    large = ops.add(g, ops.cast(g, steps, ElementType.INT64), g.constant(exact))
    large = ops.binary(g, "Min", large, g.constant(buckets - 1))
    near = ops.binary(g, "Less", distance, g.constant(exact), ElementType.BOOL)
    bucket = ops.where(g, near, distance, large)
    return bucket if offset is None else ops.add(g, bucket, offset)


MODEL_TYPES = typed({"t5": construct, "switch_transformers": construct}, OPSET)
