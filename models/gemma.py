"""Gemma 1 to 4: a scaled embedding tied to the head, wide heads, gated GELU; windows and norms after blocks from 2 on.

RMSNorm's scale is written as one weight, where Gemma 1 to 3 add 1 to it. In Gemma 4 with experts the router reads what
the experts read, where the model normalises for the router anew; constant factors on a layer's result, on the router's
input and on each expert's weight are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from . import _layers as layers
from . import _ops as ops
from ._attention import Attention, Rotary, Shared
from ._config import Config, ModelBuildError, typed
from ._decoder import Branch, DecoderSize, Experts, FeedForward, Layer, transformer_layer
from ._graph import GraphBuilder, Value
from ._moe import MoE
from .llama import activation, attention_of, decoder_of, head_width, local_layers


def _feed_forward(c: Config) -> FeedForward:
    return FeedForward(c["intermediate_size"], activation(c, "hidden_activation"))


def _decoder(c: Config, layers: tuple[Layer, ...], softcap: float = 0.0) -> DecoderSize:
    return decoder_of(c, layers, embedding_scale=math.sqrt(c["hidden_size"]), softcap=softcap)


def _first(c: Config) -> DecoderSize:
    layer = transformer_layer(attention_of(c), _feed_forward(c))
    return _decoder(c, (layer,) * c["num_hidden_layers"])


def _second(c: Config) -> DecoderSize:
    scale, cap = c["query_pre_attn_scalar"] ** -0.5, float(c["attn_logit_softcapping"] or 0.0)
    full, local = (
        transformer_layer(attention_of(c, window=window, scale=scale, softcap=cap), _feed_forward(c), norms="both")
        for window in (0, c["sliding_window"] or 0)
    )
    layers = tuple(local if is_local else full for is_local in local_layers(c, 2))
    return _decoder(c, layers, float(c["final_logit_softcapping"] or 0.0))


def _third(c: Config) -> DecoderSize:
    near = Rotary(float(c["rope_local_base_freq"]), head_width(c))
    scale = c["query_pre_attn_scalar"] ** -0.5
    full = attention_of(c, qk_norm=True, scale=scale)
    local = attention_of(c, qk_norm=True, scale=scale, rotary=near, window=c["sliding_window"] or 0)
    pair = [transformer_layer(attention, _feed_forward(c), norms="both") for attention in (full, local)]
    return _decoder(c, tuple(pair[is_local] for is_local in local_layers(c, c["sliding_window_pattern"])))


@dataclass(frozen=True, slots=True)
class _BothFeeds:
    """A feed-forward layer and a mixture of experts side by side, each with normalisations of its own (Gemma 4)."""

    dense: FeedForward
    experts: Experts

    def add(self, g: GraphBuilder, x: Value, shared: Shared) -> Value:
        """Add the layer to the graph: [b, s, hidden] to [b, s, hidden]."""
        results = []
        for block, scope, before, after in (
            (self.dense, "dense", "pre_feedforward_layernorm", "post_feedforward_layernorm_1"),
            (self.experts, "moe", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"),
        ):
            normed = layers.rms_norm(g, x, before, epsilon=shared.epsilon)
            with g.scope(scope):
                result = block.add(g, normed, shared)
            results.append(layers.rms_norm(g, result, after, epsilon=shared.epsilon))
        return ops.add(g, *results)


def _fourth(c: Config) -> DecoderSize:
    for key in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        if c[key]:
            raise ModelBuildError(f"{key} is {c[key]}", "export the model: keys of other layers are not built here")
    far_width, heads = c["global_head_dim"], c["num_global_key_value_heads"] if c["attention_k_eq_v"] else None
    far = Rotary(c["rope_theta"], int(far_width * c["partial_rotary_factor"]))
    near = Rotary(float(c["rope_local_base_freq"]), head_width(c))
    alike = {"qk_norm": True, "value_unit": True, "scale": 1.0}
    local = attention_of(c, rotary=near, window=c["sliding_window"], **alike)
    full = attention_of(
        c, head_dim=far_width, kv_heads=heads or local.kv_heads, rotary=far,
        keys_as_values=c["attention_k_eq_v"], **alike,
    )  # fmt: skip
    pair = [_fourth_layer(c, attention) for attention in (full, local)]
    is_local = local_layers(c, c["sliding_window_pattern"])
    return _decoder(c, tuple(pair[each] for each in is_local), float(c["final_logit_softcapping"] or 0.0))


def _fourth_layer(c: Config, attention: Attention) -> Layer:
    dense = _feed_forward(c)
    if not c["enable_moe_block"]:
        return transformer_layer(attention, dense, norms="both")
    moe = MoE(c["num_experts"], c["top_k_experts"], gated=True)
    both = _BothFeeds(dense, Experts(moe, c["moe_intermediate_size"], dense.activation))
    first, _ = transformer_layer(attention, both, norms="both")
    return first, Branch("", "mlp", both, "post_feedforward_layernorm")


MODEL_TYPES = typed({"gemma": _first, "gemma2": _second, "gemma3_text": _third, "gemma3": _third, "gemma4": _fourth})
