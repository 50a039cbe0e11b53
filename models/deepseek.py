"""DeepSeek-V2 and V3, Kimi K2: latent attention, many small experts beside a shared one, further tokens predicted.

The same experts with grouped-query attention: GLM 4.5, dots.llm1, MiniMax M2, ERNIE 4.5.
"""

from __future__ import annotations

from ._attention import LatentAttention, Rotary
from ._config import Config, ModelBuildError, size_from, typed
from ._decoder import DecoderSize, Experts, FeedForward, transformer_layer
from ._moe import MoE
from .llama import activation, decoder_of, feed_forward_of, stacked


def _feeds(c: Config) -> tuple[FeedForward | Experts, ...]:
    """The feed-forward block of each layer: experts in every so-many-th from a first one on."""
    dense, sparse, first, step = feed_forward_of(c), _experts(c), c["first_k_dense_replace"], c["moe_layer_freq"]
    return tuple(sparse if i >= first and i % step == 0 else dense for i in range(c["num_hidden_layers"]))


def _size(c: Config) -> DecoderSize:
    attention = size_from(LatentAttention, c, rotary=Rotary(float(c["rope_theta"]), c["qk_rope_head_dim"]))
    layers = tuple(transformer_layer(attention, feed) for feed in _feeds(c))
    predictor = (transformer_layer(attention, _experts(c)),)
    return decoder_of(c, layers, predictors=(predictor,) * c["num_nextn_predict_layers"])


def _grouped(c: Config) -> DecoderSize:
    """Grouped-query attention in place of latent attention."""
    predictor = stacked({**c, "num_hidden_layers": 1, "layer_types": None}, (_experts(c),)).layers
    return stacked(c, _feeds(c), predictors=(predictor,) * c["num_nextn_predict_layers"])


def _experts(c: Config) -> Experts:
    if c["scoring_func"] not in ("sigmoid", "softmax", "noaux_tc"):
        raise ModelBuildError(f"scoring_func {c['scoring_func']!r} is not known", "known: sigmoid, softmax")
    moe = MoE(
        c["n_routed_experts"],
        c["num_experts_per_tok"],
        gated=True,
        renormalise=c["norm_topk_prob"],
        sigmoid=c["scoring_func"] != "softmax",
        correction=c["topk_method"] == "noaux_tc",
        scale=float(c["routed_scaling_factor"]),
    )
    width = c["moe_intermediate_size"]
    shared = FeedForward(width * c["n_shared_experts"], activation(c)) if c["n_shared_experts"] else None
    return Experts(moe, width, activation(c), shared)


MODEL_TYPES = {
    **typed(dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _size), LatentAttention),
    **typed(dict.fromkeys(("glm4_moe", "dots1", "minimax_m2", "ernie4_5_moe"), _grouped)),
}
