"""Gemma 1 to 3: a scaled embedding tied to the head, wide heads, gated GELU; windows and norms after blocks in 2 and 3.

RMSNorm's scale is written as one weight, where Gemma adds 1 to it.
"""

from __future__ import annotations

import math

from ._attention import Rotary
from ._config import Config, typed
from ._decoder import DecoderSize, FeedForward, Layer, transformer_layer
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


MODEL_TYPES = typed({"gemma": _first, "gemma2": _second, "gemma3_text": _third, "gemma3": _third})
