"""BERT: encoder-only Transformers with a masked-word head, and with the next-sentence head where the source has it.

LayerNorm follows each layer. The padding mask is an input that all layers share. Weights have the names and layouts of
the Hugging Face checkpoints.
"""

from __future__ import annotations

from . import _layers as layers
from . import _ops as ops
from ._config import Config, typed
from ._graph import ElementType, GraphBuilder, Value

OPSET = 20
EPSILON = 1e-12


def construct(c: Config, g: GraphBuilder, batch: int, seq: int) -> None:
    """Add a BERT that reads word ids, padding mask and segment ids [batch, seq]; logits are [batch, seq, vocab].

    With `next_sentence` there is a second output [batch, 2], of the pooler and a head of its own.
    """
    ids = g.input("input_ids", (batch, seq), ElementType.INT64)
    padding = g.input("attention_mask", (batch, seq), ElementType.INT64)
    segments = g.input("token_type_ids", (batch, seq), ElementType.INT64)
    with g.scope("bert"):
        with g.scope("embeddings"):
            x, words = _embeddings(c, g, ids, segments)
        mask = _padding_mask(g, padding)
        for layer in range(c["num_hidden_layers"]):
            with g.scope(f"encoder.layer.{layer}"):
                x = _layer(c, g, x, mask)
        pooled = _pooler(g, x) if c["next_sentence"] else None
    with g.scope("cls"):
        with g.scope("predictions"):
            g.output(_head(c, g, x, words))
        if pooled is not None:
            g.output(layers.linear(g, pooled, 2, "seq_relationship"))


def _embeddings(c: Config, g: GraphBuilder, ids: Value, segments: Value) -> tuple[Value, Value]:
    x, words = layers.embedding(g, ids, c["vocab_size"], c["hidden_size"], "word_embeddings")
    segment, _ = layers.embedding(g, segments, c["type_vocab_size"], c["hidden_size"], "token_type_embeddings")
    places = layers.positions(g, ids.shape[1])
    position, _ = layers.embedding(g, places, c["max_position_embeddings"], c["hidden_size"], "position_embeddings")
    x = ops.add(g, ops.add(g, x, segment), position)
    return layers.layer_norm(g, x, "LayerNorm", epsilon=EPSILON), words


def _padding_mask(g: GraphBuilder, padding: Value) -> Value:
    """[b, 1, 1, s] to add to attention scores: 0 for a word, the lowest float for padding."""
    absent = ops.binary(g, "Sub", g.constant(1.0, ElementType.FLOAT), ops.cast(g, padding, ElementType.FLOAT))
    return ops.unsqueeze(g, ops.unsqueeze(g, ops.scale(g, absent, layers.MASKED), 1), 2)


def _layer(c: Config, g: GraphBuilder, x: Value, mask: Value) -> Value:
    """One encoder layer of [b, s, hidden]."""
    with g.scope("attention"):
        with g.scope("self"):
            q, k, v = (
                layers.split_heads(g, layers.linear(g, x, c["hidden_size"], name), c["num_attention_heads"])
                for name in ("query", "key", "value")
            )
            attended = layers.merge_heads(g, layers.attention(g, q, k, v, bias=mask))
        with g.scope("output"):
            x = ops.add(g, layers.linear(g, attended, c["hidden_size"], "dense"), x)
            x = layers.layer_norm(g, x, "LayerNorm", epsilon=EPSILON)
    with g.scope("intermediate"):
        inner = layers.gelu(g, layers.linear(g, x, c["intermediate_size"], "dense"))
    with g.scope("output"):
        x = ops.add(g, layers.linear(g, inner, c["hidden_size"], "dense"), x)
        return layers.layer_norm(g, x, "LayerNorm", epsilon=EPSILON)


def _pooler(g: GraphBuilder, x: Value) -> Value:
    """The first word's state through a tanh layer, [b, hidden]."""
    with g.scope("pooler"):
        first = ops.gather(g, x, g.constant(0), axis=1)
        return ops.unary(g, "Tanh", layers.linear(g, first, x.shape[-1], "dense"))


def _head(c: Config, g: GraphBuilder, x: Value, words: Value) -> Value:
    """Logits of words, by their embeddings if the head is tied to them."""
    with g.scope("transform"):
        x = layers.gelu(g, layers.linear(g, x, c["hidden_size"], "dense"))
        x = layers.layer_norm(g, x, "LayerNorm", epsilon=EPSILON)
    if not c["tie_word_embeddings"]:
        return layers.linear(g, x, c["vocab_size"], "output_layer")
    with g.scope("decoder"):
        return ops.add(g, layers.tied_linear(g, x, words), g.parameter("bias", (c["vocab_size"],), fill=0.0))


MODEL_TYPES = typed(dict.fromkeys(("bert", "roberta", "xlm-roberta"), construct), OPSET)
