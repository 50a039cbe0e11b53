"""DeepSeek-V2 and V3, Kimi K2: latent attention, many small experts beside a shared one, further tokens predicted."""

from __future__ import annotations

from ._attention import LatentAttention, Rotary
from ._config import Config, ModelBuildError, size_from, typed
from ._decoder import DecoderSize, Experts, FeedForward, transformer_layer
from ._moe import MoE
from .llama import activation, decoder_of


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


MODEL_TYPES = typed({"deepseek_v2": _size, "deepseek_v3": _size, "kimi_k2": _size}, LatentAttention)
