"""DeepSeek-V2 and V3, Kimi K2: latent attention, many small experts beside a shared one, further tokens predicted."""

from __future__ import annotations

from collections.abc import Mapping

from ._attention import LatentAttention, Rotary
from ._config import Config, Key, ModelBuildError, ModelType, keys_of, required, size_from
from ._decoder import DecoderSize, Experts, FeedForward, transformer_layer
from ._moe import MoE
from .llama import DECODER, activation, decoder_of


def _size(c: Config) -> DecoderSize:
    rotary = Rotary(float(c["rope_theta"]), c["qk_rope_head_dim"])
    attention = size_from(LatentAttention, c, rotary=rotary)
    dense = transformer_layer(attention, FeedForward(c["intermediate_size"], activation(c)))
    sparse = transformer_layer(attention, _experts(c))
    first, step = c["first_k_dense_replace"], c["moe_layer_freq"]
    layers = tuple(sparse if i >= first and i % step == 0 else dense for i in range(c["num_hidden_layers"]))
    return decoder_of(c, layers, predictors=((sparse,),) * c["num_nextn_predict_layers"])


def _experts(c: Config) -> Experts:
    if c["scoring_func"] not in ("sigmoid", "softmax"):
        raise ModelBuildError(f"scoring_func {c['scoring_func']!r} is not known", "known: sigmoid, softmax")
    moe = MoE(
        c["n_routed_experts"],
        c["num_experts_per_tok"],
        gated=True,
        renormalise=c["norm_topk_prob"],
        sigmoid=c["scoring_func"] == "sigmoid",
        correction=c["topk_method"] == "noaux_tc",
        scale=float(c["routed_scaling_factor"]),
    )
    width = c["moe_intermediate_size"]
    shared = FeedForward(width * c["n_shared_experts"], activation(c)) if c["n_shared_experts"] else None
    return Experts(moe, width, activation(c), shared)


_KEYS: Mapping[str, Key] = {
    **{key: entry for key, entry in DECODER.items() if key not in ("num_key_value_heads", "head_dim")},
    **keys_of(LatentAttention),
    "qk_rope_head_dim": Key(int, 64),
    "n_routed_experts": required(),
    "num_experts_per_tok": required(),
    "moe_intermediate_size": required(),
    "n_shared_experts": Key(int),
    "first_k_dense_replace": Key(int, 0),
    "moe_layer_freq": Key(int, 1),
    "norm_topk_prob": Key(bool, False),
    "scoring_func": Key(str, "softmax"),
    "topk_method": Key(str, "greedy"),
    "routed_scaling_factor": Key(float, 1.0),
    "num_nextn_predict_layers": Key(int, 0),
}
_V3 = {
    **_KEYS,
    "norm_topk_prob": Key(bool, True),
    "scoring_func": Key(str, "sigmoid"),
    "topk_method": Key(str, "noaux_tc"),
    "routed_scaling_factor": Key(float, 2.5),
}

MODEL_TYPES = {
    "deepseek_v2": ModelType("deepseek", _KEYS, _size),
    "deepseek_v3": ModelType("deepseek", _V3, _size),
    "kimi_k2": ModelType("deepseek", _V3, _size),
}
