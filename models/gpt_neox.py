"""GPT-NeoX and Pythia: LayerNorm, biases, a quarter of each head turned, attention and feed-forward side by side."""

from __future__ import annotations

from ._config import Config, Key, ModelType
from ._decoder import DecoderSize, FeedForward, transformer_layer
from .llama import DECODER, activation, attention_of, decoder_of


def _size(c: Config) -> DecoderSize:
    c = {**c, "num_key_value_heads": None, "head_dim": None, "partial_rotary_factor": c["rotary_pct"]}
    c |= {"rope_theta": c["rotary_emb_base"], "rms_norm_eps": c["layer_norm_eps"]}
    attention = attention_of(c, out_bias=c["attention_bias"])
    feed_forward = FeedForward(c["intermediate_size"], activation(c), gated=False, bias=True)
    layers = (transformer_layer(attention, feed_forward),) * c["num_hidden_layers"]
    return decoder_of(c, layers, layer_norm=True, parallel=c["use_parallel_residual"])


_LEFT_OUT = ("num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps")
_KEYS = {
    **{key: entry for key, entry in DECODER.items() if key not in _LEFT_OUT},
    "hidden_act": Key(str, "gelu"),
    "attention_bias": Key(bool, True),
    "rotary_pct": Key(float, 0.25),
    "rotary_emb_base": Key(float, 10_000.0),
    "layer_norm_eps": Key(float, 1e-5),
    "use_parallel_residual": Key(bool, True),
}

MODEL_TYPES = {"gpt_neox": ModelType("gpt_neox", _KEYS, _size)}
