"""Mixture-of-experts language models: GShard on the GPT builder, Mixtral and Qwen3 on LLaMA's, Switch on T5's.

Work counts the places that experts have: `top_k * capacity_factor` expert passes a token, however many experts. An
expert has at least one place for each sample, so that 2048 experts on a sample of 512 tokens compute 2048 places.
"""

from __future__ import annotations

import functools

from . import gpt, llama, t5
from ._moe import Dispatch, MoE
from ._types import Entry, ModelInfo

_MIXTRAL = "Jiang et al. 2024, Mixtral of Experts, table 1; released checkpoints"
_QWEN3 = "Yang et al. 2025, Qwen3 Technical Report, table 2; released checkpoints"
_GSHARD = "Lepikhin et al. 2020, GShard, table 1: model dimension 1024, hidden 8192, 16 heads of 128, top-2"
_SWITCH = "Fedus et al. 2021, Switch Transformers, table 9; released checkpoints"


def _gshard(layers: int, experts: int) -> gpt.GPTSize:
    """GShard's sizes as one decoder stack; the paper does not state the vocabulary, 32000 is assumed."""
    moe = MoE(experts, top_k=2, every=2, dispatch=Dispatch.EINSUM)
    return gpt.GPTSize(layers, 1024, 16, 32000, 2048, head_dim=128, ffn=8192, relu=True, moe=moe)


def _mixtral(layers: int, hidden: int, heads: int, ffn: int) -> llama.LlamaSize:
    return llama.LlamaSize(layers, hidden, heads, 8, ffn, 32000, 1_000_000.0, moe=MoE(experts=8, top_k=2, gated=True))


def _qwen3(layers: int, hidden: int, heads: int, ffn: int) -> llama.LlamaSize:
    moe = MoE(experts=128, top_k=8, gated=True)
    return llama.LlamaSize(
        layers, hidden, heads, 4, ffn, 151936, 1_000_000.0, head_dim=128, epsilon=1e-6, qk_norm=True, moe=moe
    )


def _switch(size: tuple[int, int, int, int, int], experts: int, *, every: int = 2, gated: bool = False) -> t5.T5Size:
    moe = MoE(experts, 1, 1.25, every, renormalise=False, dispatch=Dispatch.EINSUM, gated=gated)
    layers, hidden, heads, head_dim, ffn = size
    return t5.T5Size(layers, hidden, heads, head_dim, ffn, gated=gated, moe=moe)


_ON_LLAMA = {
    "mixtral-8x7b": (_mixtral(32, 4096, 32, 14336), 46_702_792_704, 4096, "8 experts, 2 a token", _MIXTRAL),
    "mixtral-8x22b": (_mixtral(56, 6144, 48, 16384), 140_620_634_112, 4096, "8 experts, 2 a token", _MIXTRAL),
    "qwen3-30b-a3b": (_qwen3(48, 2048, 32, 768), 30_532_122_624, 4096, "128 experts, 8 a token", _QWEN3),
    "qwen3-235b-a22b": (_qwen3(94, 4096, 64, 1536), 235_093_634_560, 4096, "128 experts, 8 a token", _QWEN3),
}
_ON_GPT = {
    "gshard-12.5b": (_gshard(12, 128), 12_500_000_000),
    "gshard-37b": (_gshard(36, 128), 37_000_000_000),
    "gshard-50b": (_gshard(12, 512), 50_000_000_000),
    "gshard-150b": (_gshard(36, 512), 150_000_000_000),
    "gshard-200b": (_gshard(12, 2048), 200_000_000_000),
    "gshard-600b": (_gshard(36, 2048), 600_000_000_000),
}
_ON_T5 = {
    "switch-base-128": (_switch((12, 768, 12, 64, 3072), 128), 7_400_000_000),
    "switch-large-128": (_switch((24, 1024, 16, 64, 4096), 128), 26_300_000_000),
    "switch-xxl-128": (_switch((24, 4096, 64, 64, 10240), 128, gated=True), 395_000_000_000),
    "switch-c-2048": (_switch((15, 2080, 32, 64, 6144), 2048, every=1), 1_571_000_000_000),
}


def _models() -> dict[str, Entry]:
    models = {}
    for name, (decoder, count, seq, text, source) in _ON_LLAMA.items():
        info = ModelInfo(name, "moe", text, decoder.layers, count, seq, None, source)
        models[name] = Entry(info, llama.OPSET, functools.partial(llama.construct, decoder))
    for name, (stack, count) in _ON_GPT.items():
        experts = stack.moe.experts if stack.moe else 0
        text = f"GShard's sizes as one decoder stack, {experts} experts in every other block, 2 a token"
        info = ModelInfo(name, "moe", text, stack.layers, count, 1024, stack.positions, _GSHARD)
        models[name] = Entry(info, gpt.OPSET, functools.partial(gpt.construct, stack))
    for name, (pair, count) in _ON_T5.items():
        text = "T5 with experts, 1 a token; the target is a quarter of the sequence"
        info = ModelInfo(name, "moe", text, 2 * pair.layers, count, 512, None, _SWITCH)
        models[name] = Entry(info, t5.OPSET, functools.partial(t5.construct, pair))
    return models


MODELS = _models()
