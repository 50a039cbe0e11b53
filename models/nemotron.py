"""Nemotron-H and 3: a pattern of Mamba-2, attention, feed-forward and experts; Mamba-2 alone."""

from __future__ import annotations

from collections.abc import Mapping

from ._config import Config, ModelBuildError, size_from, typed
from ._decoder import Block, Branch, DecoderSize, Experts, FeedForward, Layer
from ._moe import MoE
from ._scan import Mamba2
from .llama import activation, attention_of, decoder_of, head_width


def _blocks(c: Config) -> Mapping[str, Block]:
    """The block that each letter of the pattern stands for."""
    act = activation(c, "mlp_hidden_act")
    mamba = size_from(Mamba2, c, bias=c["mamba_proj_bias"] or c["use_bias"])
    width = head_width({**c, "head_dim": c["head_dim"] or c["attention_head_dim"]})
    attention = attention_of(c, head_dim=width)
    blocks: dict[str, Block] = {"M": mamba, "*": attention}
    if c["intermediate_size"]:
        blocks["-"] = FeedForward(c["intermediate_size"], act, gated=False, bias=c["mlp_bias"])
    if c["n_routed_experts"] and c["moe_intermediate_size"]:
        moe = MoE(
            c["n_routed_experts"],
            c["num_experts_per_tok"],
            renormalise=c["norm_topk_prob"],
            sigmoid=True,
            correction=True,
            scale=float(c["routed_scaling_factor"]),
            latent=c["moe_latent_size"] or 0,
        )
        width = c["moe_shared_expert_intermediate_size"] * c["n_shared_experts"]
        shared = FeedForward(width, act, gated=False) if width else None
        blocks["E"] = Experts(moe, c["moe_intermediate_size"], act, shared)
    return blocks


def _layers(pattern: str, blocks: Mapping[str, Block]) -> tuple[Layer, ...]:
    unknown = [letter for letter in pattern if letter not in blocks]
    if unknown:
        raise ModelBuildError(
            f"the pattern of layers holds {unknown[0]!r}, which has no sizes",
            "M: Mamba-2, *: attention, -: feed-forward (intermediate_size), "
            "E: experts (n_routed_experts, moe_intermediate_size)",
        )
    return tuple((Branch("norm", "mixer", blocks[letter]),) for letter in pattern)


def _size(c: Config) -> DecoderSize:
    blocks, pattern = _blocks(c), c["hybrid_override_pattern"].replace("|", "")
    if len(pattern) != c["num_hidden_layers"]:
        raise ModelBuildError(
            f"hybrid_override_pattern has {len(pattern)} letters for {c['num_hidden_layers']} layers",
            "give one letter for each layer",
        )
    predictors = (c["mtp_hybrid_override_pattern"],) * c["num_nextn_predict_layers"]
    return decoder_of(
        c,
        _layers(pattern, blocks),
        predictors=tuple(_layers(part, blocks) for part in predictors),
        one_predictor=c["mtp_use_repeated_layer"],
    )


def _mamba2(c: Config) -> DecoderSize:
    layer = (Branch("norm", "mixer", size_from(Mamba2, c, bias=c["use_bias"])),)
    return decoder_of({**c, "rms_norm_eps": c["layer_norm_epsilon"]}, (layer,) * c["num_hidden_layers"])


MODEL_TYPES = typed({"nemotron_h": _size, "mamba2": _mamba2}, Mamba2)
