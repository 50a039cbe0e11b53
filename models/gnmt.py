"""GNMT: LSTM encoder and decoder with attention, as used for translation by GNMT and by PipeDream.

The first encoder layer reads in both directions; from the third layer on of either side there are residual connections;
the first decoder layer queries the encoder's states and its context feeds every later one. LSTMs run time-major
[seq, batch, features]; the weights of a layer are kept as ONNX wants them: [directions, 4 * hidden, inputs].
"""

from __future__ import annotations

from . import _layers as layers
from . import _ops as ops
from ._config import Config, typed
from ._graph import ElementType, GraphBuilder, Value

OPSET = 20


def construct(c: Config, g: GraphBuilder, batch: int, seq: int) -> None:
    """Add a GNMT that reads source and target ids [batch, seq] and ends at logits [batch, seq, vocab]."""
    source = g.input("src", (batch, seq), ElementType.INT64)
    target = g.input("tgt", (batch, seq), ElementType.INT64)
    with g.scope("encoder"):
        states = _encoder(c, g, _embed(c, g, source))
    with g.scope("decoder"):
        x = _decoder(c, g, _embed(c, g, target), states)
        g.output(layers.linear(g, x, c["vocab_size"], "classifier"))


def _embed(c: Config, g: GraphBuilder, ids: Value) -> Value:
    """[seq, batch, hidden]"""
    words, _ = layers.embedding(g, ids, c["vocab_size"], c["hidden_size"], "embedder")
    return ops.transpose(g, words, (1, 0, 2))


def _encoder(c: Config, g: GraphBuilder, x: Value) -> Value:
    """The encoder's states, batch first."""
    for layer in range(c["num_layers"]):
        y = _lstm(g, x, c["hidden_size"], f"rnn_layers.{layer}", directions=2 if layer == 0 else 1)
        x = ops.add(g, y, x) if layer >= 2 else y
    return ops.transpose(g, x, (1, 0, 2))


def _decoder(c: Config, g: GraphBuilder, x: Value, states: Value) -> Value:
    """The decoder's states, batch first."""
    x = _lstm(g, x, c["hidden_size"], "rnn_layers.0")
    with g.scope("attention"):
        context = _attention(c, g, ops.transpose(g, x, (1, 0, 2)), states)
    for layer in range(1, c["num_layers"]):
        y = _lstm(g, ops.concat(g, (x, context), 2), c["hidden_size"], f"rnn_layers.{layer}")
        x = ops.add(g, y, x) if layer >= 2 else y
    return ops.transpose(g, x, (1, 0, 2))


def _attention(c: Config, g: GraphBuilder, x: Value, states: Value) -> Value:
    """What each decoder step takes from the encoder's states, time-major."""
    query = layers.linear(g, x, c["hidden_size"], "linear_q")
    key = layers.linear(g, states, c["hidden_size"], "linear_k")
    scores = ops.softmax(g, ops.matmul(g, query, ops.transpose(g, key, (0, 2, 1))))
    return ops.transpose(g, ops.matmul(g, scores, states), (1, 0, 2))


def _lstm(g: GraphBuilder, x: Value, hidden: int, name: str, *, directions: int = 1) -> Value:
    """One LSTM layer of [seq, batch, inputs] from zero states: [seq, batch, directions * hidden]."""
    seq, batch, inputs = x.shape
    with g.scope(name):
        weights = (
            g.parameter("weight_ih", (directions, 4 * hidden, inputs)),
            g.parameter("weight_hh", (directions, 4 * hidden, hidden)),
            g.parameter("bias", (directions, 8 * hidden), fill=0.0),
        )
        y = g.node(
            "LSTM",
            [x, *weights],
            (seq, directions, batch, hidden),
            hidden_size=hidden,
            direction="bidirectional" if directions == 2 else "forward",
        )
        if directions == 1:
            return ops.squeeze(g, y, 1)
        return ops.reshape(g, ops.transpose(g, y, (0, 2, 1, 3)), (0, 0, 2 * hidden))


MODEL_TYPES = typed({"gnmt": construct}, OPSET)
