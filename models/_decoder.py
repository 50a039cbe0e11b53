"""The decoder that most families share: a stack of residual branches between an embedding and a head.

A layer is one or two branches, each a normalisation and a block: attention, a scan, a feed-forward layer or a mixture
of experts. The file of a family turns a configuration into branches. Graphs use the fused operators of operator set 23,
and of newer sets if a layer needs them. Weights have the names and layouts of the Hugging Face checkpoints of LLaMA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from . import _layers as layers
from . import _ops as ops
from ._config import Config, named
from ._graph import ElementType, GraphBuilder, Value
from ._mixers import Attention, LatentAttention, Shared, rotary_tables
from ._moe import MoE, mixture

OPSET = 23

Sublayer = Callable[[GraphBuilder, Value, Shared], Value]
"""Adds what a residual branch computes to a graph: [b, s, hidden] to [b, s, hidden]."""


def feed_forward(
    g: GraphBuilder, x: Value, shared: Shared, *, ffn: int, activation: str = "silu", gated: bool = True,
    bias: bool = False,
) -> Value:  # fmt: skip
    """A feed-forward layer; gated if the activation of `gate_proj` multiplies `up_proj`.

    Args:
        g: the graph.
        x: [b, s, hidden].
        shared: what all layers share.
        ffn: inner width.
        activation: a name of `ACTIVATIONS`.
        gated: two inner matrices instead of one.
        bias: all matrices have biases.
    """
    activate = layers.ACTIVATIONS[activation]
    if gated:
        inner = layers.linear(g, x, ffn, "gate_proj", bias=bias)
        with g.scope("act_fn"):
            inner = activate(g, inner)
        inner = ops.mul(g, inner, layers.linear(g, x, ffn, "up_proj", bias=bias))
    else:
        inner = activate(g, layers.linear(g, x, ffn, "up_proj", bias=bias))
    return layers.linear(g, inner, x.shape[2], "down_proj", bias=bias)


def experts(
    g: GraphBuilder, x: Value, shared: Shared, *, moe: MoE, ffn: int, activation: str = "silu",
    shared_expert: Sublayer | None = None, shared_gate: bool = False,
) -> Value:  # fmt: skip
    """A mixture of experts, with a feed-forward layer beside it that every token takes (a shared expert).

    Args:
        g: the graph.
        x: [b, s, hidden].
        shared: what all layers share.
        moe: the mixture.
        ffn: inner width of an expert.
        activation: a name of `ACTIVATIONS`.
        shared_expert: the shared expert; None for none.
        shared_gate: a gate of its own scales the shared expert (Qwen3-Next).
    """
    y = mixture(g, x, moe, ffn, layers.ACTIVATIONS[activation])
    if shared_expert is None:
        return y
    with g.scope("shared_expert"):
        common = shared_expert(g, x, shared)
    if shared_gate:
        gate = layers.linear(g, x, 1, "shared_expert_gate", bias=False)
        common = ops.mul(g, common, ops.unary(g, "Sigmoid", gate))
    return ops.add(g, y, common)


def parallel_feeds(g: GraphBuilder, x: Value, shared: Shared, *, dense: Sublayer, sparse: Sublayer) -> Value:
    """A feed-forward layer and a mixture of experts side by side, each with normalisations of its own (Gemma 4)."""
    results = []
    for name, block, before, after in (
        ("dense", dense, "pre_feedforward_layernorm", "post_feedforward_layernorm_1"),
        ("moe", sparse, "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"),
    ):
        normed = layers.rms_norm(g, x, before, epsilon=shared.epsilon)
        with g.scope(name):
            result = block(g, normed, shared)
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
class Decoder:
    """A decoder.

    Attributes:
        config: its configuration, whose keys say what concerns no single layer: normalisation, factors, the head.
        layers: the layers, in order.
        predictors: layers of each multi-token prediction module (DeepSeek-V3); the first predicts the second token. A
            module reads the hidden state and the embedding of the token before its own; embedding and head are those
            of the main model. With `mtp_use_repeated_layer` all share the weights of the first (Nemotron 3 Super).
    """

    config: Config
    layers: tuple[Layer, ...]
    predictors: tuple[tuple[Layer, ...], ...] = ()


def construct(decoder: Decoder, g: GraphBuilder, batch: int, seq: int) -> None:
    """Add a decoder that reads `input_ids` [batch, seq] and ends at logits [batch, seq, vocab].

    Each prediction module reads `input_ids_1`, ... (the token ids shifted by one more) and adds an output of logits.
    """
    c = decoder.config
    ids = g.input("input_ids", (batch, seq), ElementType.INT64)
    with g.scope("model"):
        x, words = layers.embedding(g, ids, c["vocab_size"], c["hidden_size"], "embed_tokens")
        x = _scaled(g, x, c.get("embedding_multiplier", 1.0))
        shared = _shared(decoder, g, ids)
        for index, layer in enumerate(decoder.layers):
            with g.scope(f"layers.{index}"):
                x = _layer(c, g, x, layer, shared)
        normed = _norm(c, g, x, "norm")
    head = words if c["tie_word_embeddings"] else None
    logits, head = _logits(c, g, normed, head)
    g.output(logits)
    for index, predictor in enumerate(decoder.predictors):
        shifted = g.input(f"input_ids_{index + 1}", (batch, seq), ElementType.INT64)
        again = index and c.get("mtp_use_repeated_layer", False)
        same = g.weights_of("mtp.layers.0") if again else contextlib.nullcontext()
        with g.scope(f"mtp.layers.{index}"), same:
            x, normed = _predicted(c, g, x, ops.gather(g, words, shifted), predictor, shared)
        g.output(_logits(c, g, normed, head)[0])


def _shared(decoder: Decoder, g: GraphBuilder, ids: Value) -> Shared:
    """Rotary tables for every set of parameters that some layer uses, each computed once."""
    stacks = (decoder.layers, *decoder.predictors)
    blocks = [branch.block for stack in stacks for layer in stack for branch in layer]
    kinds = dict.fromkeys(
        block.rotary for block in blocks if isinstance(block, Attention | LatentAttention) and block.rotary
    )
    with g.scope("rotary_emb"):
        return Shared(_epsilon(decoder.config), {kind: rotary_tables(g, kind, ids) for kind in kinds})


def _epsilon(c: Config) -> float:
    return float(c["rms_norm_eps"])


def _norm(c: Config, g: GraphBuilder, x: Value, name: str) -> Value:
    """The normalisation of that name; the value itself if the name is empty."""
    kind = named({"norm_type": "rms_norm", **c}, "norm_type", layers.NORMALISATIONS)
    return layers.NORMALISATIONS[kind](g, x, name, epsilon=_epsilon(c)) if name else x


def _layer(c: Config, g: GraphBuilder, x: Value, layer: Layer, shared: Shared) -> Value:
    """One layer of [b, s, hidden]; with `use_parallel_residual` all its branches read its input (GPT-NeoX)."""
    layer_input, normed_inputs = x, dict[str, Value]()
    for branch in layer:
        if not c.get("use_parallel_residual", False):
            normed = _norm(c, g, x, branch.norm)
        else:
            if branch.norm not in normed_inputs:
                normed_inputs[branch.norm] = _norm(c, g, layer_input, branch.norm)
            normed = normed_inputs[branch.norm]
        with g.scope(branch.name):
            result = branch.block(g, normed, shared)
        result = _norm(c, g, result, branch.after)
        x = ops.add(g, x, _scaled(g, result, c.get("residual_multiplier", 1.0)))
    return x


def _scaled(g: GraphBuilder, x: Value, factor: float) -> Value:
    return x if factor == 1.0 else ops.scale(g, x, factor)


def _logits(c: Config, g: GraphBuilder, x: Value, head: Value | None) -> tuple[Value, Value]:
    """Logits, bounded by a scaled tanh where the configuration says so (Gemma 2), and the head's weight [vocab,
    hidden]; a new weight if none is given."""
    with g.scope("lm_head"):
        if head is None:
            head = g.parameter("weight", (c["vocab_size"], c["hidden_size"]))
        logits = _scaled(g, layers.tied_linear(g, x, head), c.get("logit_scale", 1.0) / c.get("logits_scaling", 1.0))
        if c.get("lm_head_bias", False):
            logits = ops.add(g, logits, g.parameter("bias", (c["vocab_size"],), fill=0.0))
        if cap := float(c.get("final_logit_softcapping") or 0.0):
            bounded = ops.unary(g, "Tanh", ops.scale(g, logits, 1.0 / cap))
            logits = ops.scale(g, bounded, cap)
    return logits, head


def _predicted(
    c: Config, g: GraphBuilder, x: Value, words: Value, stack: tuple[Layer, ...], shared: Shared
) -> tuple[Value, Value]:
    """Hidden state of a prediction module, and the same normalised for the head."""
    both = ops.concat(g, (_norm(c, g, words, "enorm"), _norm(c, g, x, "hnorm")), 2)
    x = layers.linear(g, both, c["hidden_size"], "eh_proj", bias=False)
    for index, layer in enumerate(stack):
        with g.scope(f"layers.{index}"):
            x = _layer(c, g, x, layer, shared)
    return x, _norm(c, g, x, "norm")
