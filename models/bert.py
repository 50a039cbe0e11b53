"""BERT: encoder-only Transformers with a masked-word head, and with the next-sentence head where the source has it.

LayerNorm follows each layer. The padding mask is an input that all layers share. Weights have the names and layouts of
the Hugging Face checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from . import _layers as layers
from . import _ops as ops
from ._config import size_from, sized, typed
from ._graph import ElementType, GraphBuilder, Value

OPSET = 20
EPSILON = 1e-12


@dataclass(frozen=True, slots=True)
class BertSize:
    """Sizes of a BERT.

    Attributes:
        layers: number of encoder layers.
        hidden: width of the residual stream.
        heads: attention heads.
        ffn: inner width of the feed-forward layer.
        vocab: size of the vocabulary.
        positions: rows of the position table, the longest sequence.
        tied: the head's matrix is the word embedding, `decoder`; else `output_layer` with one of its own.
        segments: rows of the table of segments.
        next_sentence: add the pooler and the next-sentence head, a second output [batch, 2].
    """

    layers: int = sized("num_hidden_layers")
    hidden: int = sized("hidden_size")
    heads: int = sized("num_attention_heads")
    ffn: int = sized("intermediate_size")
    vocab: int = sized("vocab_size", default=30522)
    positions: int = sized("max_position_embeddings", default=512)
    tied: bool = sized("tie_word_embeddings", default=True)
    next_sentence: bool = sized("next_sentence", default=False)
    segments: int = sized("type_vocab_size", default=2)


def construct(size: BertSize, g: GraphBuilder, batch: int, seq: int) -> None:
    """Add a BERT that reads word ids, padding mask and segment ids [batch, seq]; logits are [batch, seq, vocab]."""
    ids = g.input("input_ids", (batch, seq), ElementType.INT64)
    padding = g.input("attention_mask", (batch, seq), ElementType.INT64)
    segments = g.input("token_type_ids", (batch, seq), ElementType.INT64)
    with g.scope("bert"):
        with g.scope("embeddings"):
            x, words = _embeddings(size, g, ids, segments)
        mask = _padding_mask(g, padding)
        for layer in range(size.layers):
            with g.scope(f"encoder.layer.{layer}"):
                x = _layer(size, g, x, mask)
        pooled = _pooler(g, x) if size.next_sentence else None
    with g.scope("cls"):
        with g.scope("predictions"):
            g.output(_head(size, g, x, words))
        if pooled is not None:
            g.output(layers.linear(g, pooled, 2, "seq_relationship"))


def _embeddings(size: BertSize, g: GraphBuilder, ids: Value, segments: Value) -> tuple[Value, Value]:
    x, words = layers.embedding(g, ids, size.vocab, size.hidden, "word_embeddings")
    segment, _ = layers.embedding(g, segments, size.segments, size.hidden, "token_type_embeddings")
    places = layers.positions(g, ids.shape[1])
    position, _ = layers.embedding(g, places, size.positions, size.hidden, "position_embeddings")
    x = ops.add(g, ops.add(g, x, segment), position)
    return layers.layer_norm(g, x, "LayerNorm", epsilon=EPSILON), words


def _padding_mask(g: GraphBuilder, padding: Value) -> Value:
    """[b, 1, 1, s] to add to attention scores: 0 for a word, the lowest float for padding."""
    absent = ops.binary(g, "Sub", g.constant(1.0, ElementType.FLOAT), ops.cast(g, padding, ElementType.FLOAT))
    return ops.unsqueeze(g, ops.unsqueeze(g, ops.scale(g, absent, layers.MASKED), 1), 2)


def _layer(size: BertSize, g: GraphBuilder, x: Value, mask: Value) -> Value:
    """One encoder layer of [b, s, hidden]."""
    with g.scope("attention"):
        with g.scope("self"):
            q, k, v = (
                layers.split_heads(g, layers.linear(g, x, size.hidden, name), size.heads)
                for name in ("query", "key", "value")
            )
            attended = layers.merge_heads(g, layers.attention(g, q, k, v, bias=mask))
        with g.scope("output"):
            x = ops.add(g, layers.linear(g, attended, size.hidden, "dense"), x)
            x = layers.layer_norm(g, x, "LayerNorm", epsilon=EPSILON)
    with g.scope("intermediate"):
        inner = layers.gelu(g, layers.linear(g, x, size.ffn, "dense"))
    with g.scope("output"):
        x = ops.add(g, layers.linear(g, inner, size.hidden, "dense"), x)
        return layers.layer_norm(g, x, "LayerNorm", epsilon=EPSILON)


def _pooler(g: GraphBuilder, x: Value) -> Value:
    """The first word's state through a tanh layer, [b, hidden]."""
    with g.scope("pooler"):
        first = ops.gather(g, x, g.constant(0), axis=1)
        return ops.unary(g, "Tanh", layers.linear(g, first, x.shape[-1], "dense"))


def _head(size: BertSize, g: GraphBuilder, x: Value, words: Value) -> Value:
    with g.scope("transform"):
        x = layers.gelu(g, layers.linear(g, x, size.hidden, "dense"))
        x = layers.layer_norm(g, x, "LayerNorm", epsilon=EPSILON)
    if not size.tied:
        return layers.linear(g, x, size.vocab, "output_layer")
    with g.scope("decoder"):
        return ops.add(g, layers.tied_linear(g, x, words), g.parameter("bias", (size.vocab,), fill=0.0))


MODEL_TYPES = typed(dict.fromkeys(("bert", "roberta", "xlm-roberta"), partial(size_from, BertSize)), BertSize)
