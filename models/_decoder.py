"""The decoder that most families share: a stack of residual branches between an embedding and a head.

A layer is one or two branches, each a normalisation and a block: attention, a scan, a feed-forward layer or a mixture
of experts. The file of a family turns a configuration into branches. Graphs use the fused operators of operator set 23,
and of newer sets if a layer needs them. Weights have the names and layouts of the Hugging Face checkpoints of LLaMA.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Protocol

from . import _layers as layers
from . import _ops as ops
from ._graph import ElementType, GraphBuilder, Value
from ._mixers import Attention, LatentAttention, Shared, rotary_tables
from ._moe import MoE, mixture

OPSET = 23


class Sublayer(Protocol):
    """The computation of a residual branch."""

    def add(self, g: GraphBuilder, x: Value, shared: Shared) -> Value:
        """Add the layer to the graph: [b, s, hidden] to [b, s, hidden]."""


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A feed-forward layer; gated if the activation of `gate_proj` multiplies `up_proj`.

    Attributes:
        ffn: inner width.
        activation: a name of `ACTIVATIONS`.
        gated: two inner matrices instead of one.
        bias: all matrices have biases.
    """

    ffn: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False

    def add(self, g: GraphBuilder, x: Value, shared: Shared) -> Value:
        """Add the layer to the graph: [b, s, hidden] to [b, s, hidden]."""
        activation = layers.ACTIVATIONS[self.activation]
        if self.gated:
            inner = layers.linear(g, x, self.ffn, "gate_proj", bias=self.bias)
            with g.scope("act_fn"):
                inner = activation(g, inner)
            inner = ops.mul(g, inner, layers.linear(g, x, self.ffn, "up_proj", bias=self.bias))
        else:
            inner = activation(g, layers.linear(g, x, self.ffn, "up_proj", bias=self.bias))
        return layers.linear(g, inner, x.shape[2], "down_proj", bias=self.bias)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts, with a feed-forward layer beside it that every token takes (a shared expert).

    Attributes:
        moe: the mixture.
        ffn: inner width of an expert.
        activation: a name of `ACTIVATIONS`.
        shared_expert: the shared expert; None for none.
        shared_gate: a gate of its own scales the shared expert (Qwen3-Next).
    """

    moe: MoE
    ffn: int
    activation: str = "silu"
    shared_expert: FeedForward | None = None
    shared_gate: bool = False

    def add(self, g: GraphBuilder, x: Value, shared: Shared) -> Value:
        """Add the layer to the graph: [b, s, hidden] to [b, s, hidden]."""
        y = mixture(g, x, self.moe, self.ffn, layers.ACTIVATIONS[self.activation])
        if self.shared_expert is None:
            return y
        with g.scope("shared_expert"):
            common = self.shared_expert.add(g, x, shared)
        if self.shared_gate:
            gate = layers.linear(g, x, 1, "shared_expert_gate", bias=False)
            common = ops.mul(g, common, ops.unary(g, "Sigmoid", gate))
        return ops.add(g, y, common)


@dataclass(frozen=True, slots=True)
class ParallelFeeds:
    """A feed-forward layer and a mixture of experts side by side, each with normalisations of its own (Gemma 4).

    Attributes:
        dense: the feed-forward layer.
        experts: the mixture.
    """

    dense: FeedForward
    experts: Experts

    def add(self, g: GraphBuilder, x: Value, shared: Shared) -> Value:
        """Add the layer to the graph: [b, s, hidden] to [b, s, hidden]."""
        results = []
        for name, block, before, after in (
            ("dense", self.dense, "pre_feedforward_layernorm", "post_feedforward_layernorm_1"),
            ("moe", self.experts, "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"),
        ):
            normed = layers.rms_norm(g, x, before, epsilon=shared.epsilon)
            with g.scope(name):
                result = block.add(g, normed, shared)
            results.append(layers.rms_norm(g, result, after, epsilon=shared.epsilon))
        return ops.add(g, *results)


@dataclass(frozen=True, slots=True)
class Branch:
    """One residual branch: its result is added to the hidden state.

    Attributes:
        norm: name of the normalisation before the block; "" for none (OLMo 2).
        name: name of the block.
        block: the block.
        after: name of a normalisation of the block's result; "" for none.
    """

    norm: str
    name: str
    block: Sublayer
    after: str = ""


Layer = tuple[Branch, ...]


BEFORE = (("input_layernorm", ""), ("post_attention_layernorm", ""))
"""Names of the normalisations before and after each branch of a layer, in LLaMA's order."""
NORMS = {
    "before": BEFORE,
    "after": (("", "post_attention_layernorm"), ("", "post_feedforward_layernorm")),
    "both": (
        ("input_layernorm", "post_attention_layernorm"),
        ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    "shared": (("input_layernorm", ""), ("input_layernorm", "")),
    "inside": (("input_layernorm", "post_attention_layernorm"), ("", "post_feedforward_layernorm")),
}
"""The same by where a family normalises: both branches read one normalised input if it is shared; parts of the second
branch normalise their own input if it is inside."""


def transformer_layer(
    mixer: Sublayer, feed_forward: Sublayer, *, name: str = "self_attn", norms: str = "before"
) -> Layer:
    """A layer of two branches with LLaMA's names, normalised as `NORMS` says."""
    (first, after_first), (second, after_second) = NORMS[norms]
    return Branch(first, name, mixer, after_first), Branch(second, "mlp", feed_forward, after_second)


@dataclass(frozen=True, slots=True)
class DecoderSize:
    """A decoder.

    Attributes:
        hidden: width of the residual stream.
        vocab: size of the vocabulary.
        layers: the layers, in order.
        epsilon: epsilon of the normalisations.
        tied: the head's weight is the word embedding.
        norm: a name of `_layers.NORMALISATIONS`.
        parallel: all branches of a layer read the layer's input (GPT-NeoX).
        head_bias: the head has a bias.
        embedding_scale: factor on the embedding (Gemma).
        residual_scale: factor on the result of each branch (Granite).
        logits_scale: factor on the logits.
        softcap: bound of the logits, by a scaled tanh; 0 for none (Gemma 2).
        predictors: layers of each multi-token prediction module (DeepSeek-V3); the first predicts the second token. A
            module reads the hidden state and the embedding of the token before its own; embedding and head are those
            of the main model.
        one_predictor: all prediction modules share the weights of the first (Nemotron 3 Super).
    """

    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    epsilon: float = 1e-5
    tied: bool = False
    norm: str = "rms_norm"
    parallel: bool = False
    head_bias: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    softcap: float = 0.0
    predictors: tuple[tuple[Layer, ...], ...] = ()
    one_predictor: bool = False


def construct(size: DecoderSize, g: GraphBuilder, batch: int, seq: int) -> None:
    """Add a decoder that reads `input_ids` [batch, seq] and ends at logits [batch, seq, vocab].

    Each prediction module reads `input_ids_1`, ... (the token ids shifted by one more) and adds an output of logits.
    """
    ids = g.input("input_ids", (batch, seq), ElementType.INT64)
    with g.scope("model"):
        x, words = layers.embedding(g, ids, size.vocab, size.hidden, "embed_tokens")
        x = _scaled(g, x, size.embedding_scale)
        shared = _shared(size, g, ids)
        for index, layer in enumerate(size.layers):
            with g.scope(f"layers.{index}"):
                x = _layer(size, g, x, layer, shared)
        normed = _norm(size, g, x, "norm")
    head = words if size.tied else None
    logits, head = _logits(size, g, normed, head)
    g.output(logits)
    for index, predictor in enumerate(size.predictors):
        shifted = g.input(f"input_ids_{index + 1}", (batch, seq), ElementType.INT64)
        same = g.weights_of("mtp.layers.0") if index and size.one_predictor else contextlib.nullcontext()
        with g.scope(f"mtp.layers.{index}"), same:
            x, normed = _predicted(size, g, x, ops.gather(g, words, shifted), predictor, shared)
        g.output(_logits(size, g, normed, head)[0])


def _shared(size: DecoderSize, g: GraphBuilder, ids: Value) -> Shared:
    """Rotary tables for every set of parameters that some layer uses, each computed once."""
    stacks = (size.layers, *size.predictors)
    blocks = [branch.block for stack in stacks for layer in stack for branch in layer]
    kinds = dict.fromkeys(
        block.rotary for block in blocks if isinstance(block, Attention | LatentAttention) and block.rotary
    )
    with g.scope("rotary_emb"):
        return Shared(size.epsilon, {kind: rotary_tables(g, kind, ids) for kind in kinds})


def _norm(size: DecoderSize, g: GraphBuilder, x: Value, name: str) -> Value:
    """The normalisation of that name; the value itself if the name is empty."""
    return layers.NORMALISATIONS[size.norm](g, x, name, epsilon=size.epsilon) if name else x


def _layer(size: DecoderSize, g: GraphBuilder, x: Value, layer: Layer, shared: Shared) -> Value:
    """One layer of [b, s, hidden]."""
    layer_input, normed_inputs = x, dict[str, Value]()
    for branch in layer:
        if not size.parallel:
            normed = _norm(size, g, x, branch.norm)
        else:
            if branch.norm not in normed_inputs:
                normed_inputs[branch.norm] = _norm(size, g, layer_input, branch.norm)
            normed = normed_inputs[branch.norm]
        with g.scope(branch.name):
            result = branch.block.add(g, normed, shared)
        result = _norm(size, g, result, branch.after)
        x = ops.add(g, x, _scaled(g, result, size.residual_scale))
    return x


def _scaled(g: GraphBuilder, x: Value, factor: float) -> Value:
    return x if factor == 1.0 else ops.scale(g, x, factor)


def _logits(size: DecoderSize, g: GraphBuilder, x: Value, head: Value | None) -> tuple[Value, Value]:
    """Logits, and the head's weight [vocab, hidden]; a new weight if none is given."""
    with g.scope("lm_head"):
        if head is None:
            head = g.parameter("weight", (size.vocab, size.hidden))
        logits = _scaled(g, layers.tied_linear(g, x, head), size.logits_scale)
        if size.head_bias:
            logits = ops.add(g, logits, g.parameter("bias", (size.vocab,), fill=0.0))
        if size.softcap:
            bounded = ops.unary(g, "Tanh", ops.scale(g, logits, 1.0 / size.softcap))
            logits = ops.scale(g, bounded, size.softcap)
    return logits, head


def _predicted(
    size: DecoderSize, g: GraphBuilder, x: Value, words: Value, stack: tuple[Layer, ...], shared: Shared
) -> tuple[Value, Value]:
    """Hidden state of a prediction module, and the same normalised for the head."""
    both = ops.concat(g, (_norm(size, g, words, "enorm"), _norm(size, g, x, "hnorm")), 2)
    x = layers.linear(g, both, size.hidden, "eh_proj", bias=False)
    for index, layer in enumerate(stack):
        with g.scope(f"layers.{index}"):
            x = _layer(size, g, x, layer, shared)
    return x, _norm(size, g, x, "norm")
