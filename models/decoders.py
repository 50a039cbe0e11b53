"""Decoders by their `config.json`: LLaMA, and families whose layers differ from LLaMA's by a few sizes or one block.

- Mistral, Mixtral, Qwen2, Qwen3 with and without experts;
- Qwen3-Next: gated DeltaNet in three of four layers, gated attention in the fourth, many small experts. Attention
  rotates a quarter of each head. RMSNorm's scale is written as one weight, where Qwen3-Next adds 1 to it;
- Llama 4: one of many experts a token beside a shared one, layers without positions, the others in chunks of tokens.
  A chunk is written as a window of the same length, which has the same work. A router's weight multiplies an expert's
  result, where Llama 4 multiplies its input;
- GPT-OSS: experts with biases, attention with sinks, a short window in every other layer. The clamps inside the
  experts' activation and its factor 1.702 are left out: no weight and no product depends on them;
- GPT-NeoX and Pythia: LayerNorm, biases, a quarter of each head rotated, attention and feed-forward side by side;
- Phi, GPT-J, Cohere, StableLM, Falcon: the same with one normalisation for both; StarCoder 2 and Nemotron-4: LayerNorm
  in layers one after the other; OLMo 2 and 3 normalise what a block makes, GLM 4 also what it reads;
- Gemma 1 to 4: a scaled embedding tied to the head, wide heads, gated GELU; windows and norms after blocks from 2 on.
  RMSNorm's scale is written as one weight, where Gemma 1 to 3 add 1 to it. Of Gemma 4 constant factors on a layer's
  result, on the router's input and on experts' weights are left out, and the router reads what the experts read;
- DeepSeek-V2 and V3, Kimi K2: latent attention, many small experts beside a shared one, further tokens predicted; the
  same experts with grouped-query attention: GLM 4.5, dots.llm1, MiniMax M2, ERNIE 4.5;
- Nemotron-H and 3: a pattern of Mamba-2, attention, feed-forward and experts; Mamba-2 alone.

`types.toml` states which of these a type does; `stacked` builds what it states. Implementations that join queries, keys
and values, or both inner matrices, into one weight (Phi-3, Falcon) are written with one weight each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ._config import Build, Config, ModelBuildError, named, typed
from ._decoder import (
    NORMS,
    OPSET,
    Branch,
    Decoder,
    Layer,
    Sublayer,
    construct,
    experts,
    feed_forward,
    parallel_feeds,
    transformer_layer,
)
from ._layers import ACTIVATIONS
from ._mixers import Attention, LatentAttention, Rotary, delta_net, mamba2
from ._moe import MoE


def activation(c: Config, key: str = "hidden_act") -> str:
    """Name of the activation in a configuration.

    Raises:
        ModelBuildError: the activation is unknown.
    """
    return named(c, key, ACTIVATIONS)


def head_width(c: Config) -> int:
    """Width of one attention head.

    Raises:
        ModelBuildError: it is not given, and the heads do not divide the hidden state.
    """
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    if not c.get("head_dim") and hidden % heads:
        raise ModelBuildError(f"a width of {hidden} is not a multiple of {heads} heads", "give sizes that divide")
    return int(c.get("head_dim") or hidden // heads)


def rotary_of(c: Config) -> Rotary:
    """The rotary embedding of a configuration, over the first `rotary_dim` elements or a share of each head."""
    width = c.get("rotary_dim") or int(head_width(c) * c.get("partial_rotary_factor", 1.0))
    return Rotary(float(c["rope_theta"]), width)


def attention_of(c: Config, **changes: Any) -> Attention:  # noqa: ANN401
    """The attention of a configuration; `changes` replaces fields."""
    fields = {
        "heads": c["num_attention_heads"],
        "kv_heads": c.get("num_key_value_heads") or c["num_attention_heads"],
        "head_dim": head_width(c),
        "rotary": rotary_of(c) if "rope_theta" in c else None,
        "bias": c["attention_bias"],
        "out_bias": c.get("attention_out_bias", c["attention_bias"]),
        "qk_norm": c.get("use_qk_norm", False),
        "wide_norm": c.get("use_wide_qk_norm", False),
        "scale": c.get("attention_multiplier", 0.0),
    }
    return Attention(**(fields | changes))


def feed_forward_of(c: Config) -> Sublayer:
    """The feed-forward layer of a configuration, four times as wide as the hidden state if it does not say."""
    width = c["intermediate_size"] or 4 * c["hidden_size"]
    form = {"gated": c.get("gated_mlp", True), "bias": c.get("mlp_bias", False)}
    return partial(feed_forward, ffn=width, activation=activation(c), **form)


def kinds_of_layers(c: Config, kinds: Collection[str], every: int) -> tuple[bool, ...]:
    """For each layer, whether its type is among `kinds`: by `layer_types`, else all but every `every`-th layer.

    Raises:
        ModelBuildError: `layer_types` has the wrong length or names an unknown type.
    """
    listed, count, known = c["layer_types"], c["num_hidden_layers"], (*kinds, "full_attention")
    if listed is None:
        return tuple((i + 1) % every != 0 for i in range(count))
    unknown = [kind for kind in listed if kind not in known]
    if unknown:
        raise ModelBuildError(f"layer_types holds {unknown[0]!r}", f"known: {', '.join(known)}")
    if len(listed) != count:
        raise ModelBuildError(f"layer_types has {len(listed)} entries for {count} layers", "give one for each layer")
    return tuple(kind in kinds for kind in listed)


def windowed_layers(c: Config) -> tuple[bool, ...]:
    """For each layer, whether it attends within the window.

    By `layer_types`; else all but every `sliding_window_pattern`-th; else those from `max_window_layers` on if
    `use_sliding_window` (Qwen); else all.
    """
    if c["layer_types"] is not None or "sliding_window_pattern" in c:
        return kinds_of_layers(c, ("sliding_attention", "chunked_attention"), c.get("sliding_window_pattern", 1))
    first = c.get("max_window_layers", 0) if c.get("use_sliding_window", True) else c["num_hidden_layers"]
    return tuple(i >= first for i in range(c["num_hidden_layers"]))


def rotated_layers(c: Config) -> tuple[bool, ...]:
    """For each layer, whether it has rotary positions: by `no_rope_layers`, else all but every so-many-th.

    Raises:
        ModelBuildError: `no_rope_layers` has the wrong length.
    """
    listed, every, count = c.get("no_rope_layers"), c.get("no_rope_layer_interval"), c["num_hidden_layers"]
    if listed and len(listed) != count:
        raise ModelBuildError(f"no_rope_layers has {len(listed)} entries for {count} layers", "give one for each layer")
    return tuple(bool(listed[i]) if listed else not every or (i + 1) % every != 0 for i in range(count))


def stacked(
    c: Config,
    feeds: Sequence[Sublayer],
    attention: Attention | None = None,
    near: Attention | None = None,
) -> tuple[Layer, ...]:
    """Layers of attention and the given feed-forward blocks, one each.

    Args:
        c: the configuration.
        feeds: the feed-forward block of each layer.
        attention: attention of all layers; by default the configuration's.
        near: attention of the layers with a window, which is added; by default that of the others.
    """
    attention = attention or attention_of(c)
    near = replace(near or attention, window=c.get("sliding_window") or 0)
    norms = named({"norms": "before", **c}, "norms", NORMS)
    if norms == "shared" and not c["use_parallel_residual"]:
        norms = "before"
    layers = []
    for feed, is_local, is_rotated in zip(feeds, windowed_layers(c), rotated_layers(c), strict=True):
        mixer = near if is_local else attention
        if not is_rotated or (not is_local and c.get("rope_in_windows_only")):
            mixer = replace(mixer, rotary=None)
        layers.append(transformer_layer(mixer, feed, norms=norms))
    return tuple(layers)


def _dense(c: Config) -> Decoder:
    return Decoder(c, stacked(c, (feed_forward_of(c),) * c["num_hidden_layers"]))


def _sparse(c: Config) -> Decoder:
    """Experts in every layer, or those that `sparse_layers` chooses."""
    return Decoder(c, stacked(c, sparse_layers(c, feed_forward_of(c), _experts_of(c))))


def _mixture(act: str, moe: MoE, width: int, shared: int = 0, *, gated: bool = True, gate: bool = False) -> Sublayer:
    """Experts of a width, and one beside them that every token takes if it has a width; `gate` scales it."""
    beside = partial(feed_forward, ffn=shared, activation=act, gated=gated) if shared else None
    return partial(experts, moe=moe, ffn=width, activation=act, shared_expert=beside, shared_gate=gate)


def _experts_of(c: Config) -> Sublayer:
    """The experts of a configuration; a shared one beside them if it has a width."""
    moe = MoE(c["num_experts"], c["num_experts_per_tok"], gated=True, renormalise=c["norm_topk_prob"])
    shared, gate = c.get("shared_expert_intermediate_size") or 0, c.get("shared_expert_gate", False)
    return _mixture(activation(c), moe, c["moe_intermediate_size"], shared, gate=gate)


def sparse_layers(c: Config, dense: Sublayer, sparse: Sublayer) -> tuple[Sublayer, ...]:
    """The feed-forward block of each layer: experts in every `decoder_sparse_step`-th, except in `mlp_only_layers`."""
    step, only = c["decoder_sparse_step"], set(c["mlp_only_layers"])
    return tuple(sparse if i not in only and (i + 1) % step == 0 else dense for i in range(c["num_hidden_layers"]))


def _gpt_oss(c: Config) -> Decoder:
    moe = MoE(c["num_local_experts"], c["num_experts_per_tok"], gated=True, bias=True)
    feeds = (_mixture(activation(c), moe, c["intermediate_size"]),) * c["num_hidden_layers"]
    return Decoder(c, stacked({**c, "sliding_window_pattern": 2}, feeds, attention_of(c, sinks=True)))


def _llama4(c: Config) -> Decoder:
    width, act, step = c["intermediate_size"], activation(c), c["interleave_moe_layer_step"]
    moe = MoE(c["num_local_experts"], c["num_experts_per_tok"], gated=True, renormalise=False, sigmoid=True)
    mixture = _mixture(act, moe, width, width)
    dense = partial(feed_forward, ffn=c["intermediate_size_mlp"], activation=act)
    attention = attention_of(c)
    near = replace(attention, window=c["attention_chunk_size"] or 0, qk_norm=False, qk_unit=c["use_qk_norm"])
    far = replace(attention, qk_norm=False, rotary=None)
    layers, sparse = [], c["moe_layers"]
    for i, is_rotated in enumerate(rotated_layers(c)):
        is_sparse = i in sparse if sparse is not None else (i + 1) % step == 0
        layers.append(transformer_layer(near if is_rotated else far, mixture if is_sparse else dense))
    return Decoder(c, tuple(layers))


def _qwen3_next(c: Config) -> Decoder:
    mixture = _experts_of({**c, "shared_expert_gate": True})
    attention = attention_of(c, qk_norm=True, gated=True)
    scan = partial(
        delta_net,
        key_heads=c["linear_num_key_heads"],
        value_heads=c["linear_num_value_heads"],
        key_dim=c["linear_key_head_dim"],
        value_dim=c["linear_value_head_dim"],
        kernel=c["linear_conv_kernel_dim"],
    )
    layers = tuple(
        transformer_layer(scan, block, name="linear_attn") if scans else transformer_layer(attention, block)
        for scans, block in zip(
            kinds_of_layers(c, ("linear_attention",), c["full_attention_interval"]),
            sparse_layers(c, feed_forward_of(c), mixture),
            strict=True,
        )
    )
    return Decoder(c, layers)


def _falcon(c: Config) -> Decoder:
    new = c["new_decoder_architecture"]
    kv_heads = c["num_kv_heads"] if new else 1 if c["multi_query"] else c["num_attention_heads"]
    norms = "before" if new and c["num_ln_in_parallel_attn"] != 1 else "shared"
    return _dense({**c, "num_key_value_heads": kv_heads, "norms": norms})


def _gemma(c: Config, attention: Attention | None = None, near: Attention | None = None) -> Decoder:
    act = activation(c, "hidden_activation")
    feed: Sublayer = partial(feed_forward, ffn=c["intermediate_size"], activation=act)
    if c.get("enable_moe_block"):
        mixture = _mixture(act, MoE(c["num_experts"], c["top_k_experts"], gated=True), c["moe_intermediate_size"])
        feed = partial(parallel_feeds, dense=feed, sparse=mixture)
        c = {**c, "norms": "inside"}
    layers = stacked(c, (feed,) * c["num_hidden_layers"], attention, near)
    return Decoder({**c, "embedding_multiplier": math.sqrt(c["hidden_size"])}, layers)


def _gemma1(c: Config) -> Decoder:
    return _gemma({**c, "layer_types": None})


def _gemma2(c: Config) -> Decoder:
    scale, cap = c["query_pre_attn_scalar"] ** -0.5, float(c["attn_logit_softcapping"] or 0.0)
    attention = attention_of(c, scale=scale, softcap=cap)
    return _gemma({**c, "norms": "both", "sliding_window_pattern": 2}, attention)


def _gemma3(c: Config) -> Decoder:
    attention = attention_of(c, qk_norm=True, scale=c["query_pre_attn_scalar"] ** -0.5)
    near = replace(attention, rotary=Rotary(float(c["rope_local_base_freq"]), head_width(c)))
    return _gemma({**c, "norms": "both"}, attention, near)


def _gemma4(c: Config) -> Decoder:
    for key in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        if c[key]:
            raise ModelBuildError(f"{key} is {c[key]}", "layers that read keys or words of others: export the model")
    same, shared = {"qk_norm": True, "value_unit": True, "scale": 1.0}, c["attention_k_eq_v"]
    near = attention_of(c, rotary=Rotary(float(c["rope_local_base_freq"]), head_width(c)), **same)
    width, kv_heads = c["global_head_dim"], c["num_global_key_value_heads"] if shared else None
    rotary = Rotary(c["rope_theta"], int(width * c["partial_rotary_factor"]))
    sizes = {"head_dim": width, "kv_heads": kv_heads or near.kv_heads, "rotary": rotary, "keys_as_values": shared}
    return _gemma({**c, "norms": "both"}, attention_of(c, **sizes, **same), near)


def _dealt_feeds(c: Config) -> tuple[Sublayer, ...]:
    """The feed-forward block of each layer: experts in every so-many-th from a first one on."""
    dense, sparse, first, step = feed_forward_of(c), _routed_experts(c), c["first_k_dense_replace"], c["moe_layer_freq"]
    return tuple(sparse if i >= first and i % step == 0 else dense for i in range(c["num_hidden_layers"]))


def _latent(c: Config) -> Decoder:
    rotary = Rotary(float(c["rope_theta"]), c["qk_rope_head_dim"])
    sizes = ("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "attention_bias")
    attention = LatentAttention(rotary, *(c[key] for key in sizes))
    layers = tuple(transformer_layer(attention, feed) for feed in _dealt_feeds(c))
    predictor = (transformer_layer(attention, _routed_experts(c)),)
    return Decoder(c, layers, (predictor,) * c["num_nextn_predict_layers"])


def _grouped(c: Config) -> Decoder:
    """Grouped-query attention in place of latent attention."""
    predictor = stacked({**c, "num_hidden_layers": 1, "layer_types": None}, (_routed_experts(c),))
    return Decoder(c, stacked(c, _dealt_feeds(c)), (predictor,) * c["num_nextn_predict_layers"])


def _routed_experts(c: Config) -> Sublayer:
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
    return _mixture(activation(c), moe, width, width * (c["n_shared_experts"] or 0))


def _blocks_by_letter(c: Config) -> Mapping[str, Sublayer]:
    """The block that each letter of the pattern stands for."""
    act = activation(c, "mlp_hidden_act")
    mamba = _mamba_of(c, bias=c["mamba_proj_bias"] or c["use_bias"])
    width = head_width({**c, "head_dim": c["head_dim"] or c["attention_head_dim"]})
    attention = attention_of(c, head_dim=width)
    blocks: dict[str, Sublayer] = {"M": mamba, "*": attention}
    if c["intermediate_size"]:
        form = {"gated": False, "bias": c["mlp_bias"]}
        blocks["-"] = partial(feed_forward, ffn=c["intermediate_size"], activation=act, **form)
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
        blocks["E"] = _mixture(act, moe, c["moe_intermediate_size"], width, gated=False)
    return blocks


def _mamba_of(c: Config, *, bias: bool) -> Sublayer:
    return partial(
        mamba2,
        heads=c["mamba_num_heads"],
        head_dim=c["mamba_head_dim"],
        state=c["ssm_state_size"],
        groups=c["n_groups"],
        kernel=c["conv_kernel"],
        chunk=c["chunk_size"],
        bias=bias,
        conv_bias=c["use_conv_bias"],
    )


def _layers_of_pattern(pattern: str, blocks: Mapping[str, Sublayer]) -> tuple[Layer, ...]:
    unknown = [letter for letter in pattern if letter not in blocks]
    if unknown:
        raise ModelBuildError(
            f"the pattern of layers holds {unknown[0]!r}, which has no sizes",
            "M: Mamba-2, *: attention, -: feed-forward (intermediate_size), "
            "E: experts (n_routed_experts, moe_intermediate_size)",
        )
    return tuple((Branch("norm", "mixer", blocks[letter]),) for letter in pattern)


def _nemotron_h(c: Config) -> Decoder:
    blocks, pattern = _blocks_by_letter(c), c["hybrid_override_pattern"].replace("|", "")
    if len(pattern) != c["num_hidden_layers"]:
        raise ModelBuildError(
            f"hybrid_override_pattern has {len(pattern)} letters for {c['num_hidden_layers']} layers",
            "give one letter for each layer",
        )
    predictors = (c["mtp_hybrid_override_pattern"],) * c["num_nextn_predict_layers"]
    stacks = tuple(_layers_of_pattern(part, blocks) for part in predictors)
    return Decoder(c, _layers_of_pattern(pattern, blocks), stacks)


def _mamba2(c: Config) -> Decoder:
    layer = (Branch("norm", "mixer", _mamba_of(c, bias=c["use_bias"])),)
    return Decoder(c, (layer,) * c["num_hidden_layers"])


_DENSE = (
    "llama", "mistral", "qwen2", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_vl", "smollm3", "seed_oss", "granite",
    "phi3", "internlm2", "olmo2", "olmo3", "glm", "glm4", "cohere", "cohere2", "ernie4_5", "gpt_neox", "gptj", "phi",
    "stablelm", "starcoder2", "nemotron",
)  # fmt: skip
_SPARSE = ("mixtral", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "olmoe", "granitemoe", "granitemoeshared")


def _built(family: Callable[[Config], Decoder]) -> Build:
    """What builds the decoder that a family makes of a configuration."""
    return lambda c, g, batch, seq: construct(family(c), g, batch, seq)


_FAMILIES: Mapping[str, Callable[[Config], Decoder]] = {
    **dict.fromkeys(_DENSE, _dense),
    **dict.fromkeys(_SPARSE, _sparse),
    "falcon": _falcon,
    "gpt_oss": _gpt_oss,
    **dict.fromkeys(("llama4_text", "llama4"), _llama4),
    "qwen3_next": _qwen3_next,
    "gemma": _gemma1,
    "gemma2": _gemma2,
    **dict.fromkeys(("gemma3_text", "gemma3"), _gemma3),
    "gemma4": _gemma4,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _latent),
    **dict.fromkeys(("glm4_moe", "dots1", "minimax_m2", "ernie4_5_moe"), _grouped),
    "nemotron_h": _nemotron_h,
    "mamba2": _mamba2,
}
MODEL_TYPES = typed({name: _built(family) for name, family in _FAMILIES.items()}, OPSET)
