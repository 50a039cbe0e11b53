"""Tiny models with random weights, run and compared with the same model written out in numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import models
from models import t5
from models._graph import ElementType, GraphBuilder
from models._moe import MoE, mixture
from tests.models.graphs import check, gpt, run, values, with_scans_written_out

pytest.importorskip("onnxruntime")

Array = np.ndarray
Weights = Mapping[str, Array]
BATCH, SEQ, VOCAB = 2, 8, 50


SMALL = {
    "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
}  # fmt: skip


def _decoder(model_type: str = "llama", **changes: Any) -> Any:
    """Sizes of a tiny decoder."""
    return models.size_of(model_type=model_type, **(SMALL | changes))


def _bert(**changes: Any) -> Any:
    """Sizes of a tiny BERT."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 32}
    return models.size_of(model_type="bert", **sizes, vocab_size=VOCAB, max_position_embeddings=16, **changes)


def _resnet(first: int, *, bottleneck: bool) -> Any:
    """Sizes of a tiny ResNet."""
    sizes = {"blocks": [first, 1, 1, 1], "num_labels": 10, "image_size": 32}
    return models.size_of(model_type="resnet", bottleneck=bottleneck, **sizes)


def _ids(rows: int = VOCAB, *shape: int) -> Array:
    return np.random.default_rng(7).integers(0, rows, shape or (BATCH, SEQ)).astype(np.int64)


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _layer_norm(w: Weights, name: str, x: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def _rms_norm(w: Weights, name: str, x: Array) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"]


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _causal_attention(q: Array, k: Array, v: Array) -> Array:
    """[b, heads, s, d] each."""
    scores = np.einsum("bhsd,bhtd->bhst", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    return np.einsum("bhst,bhtd->bshd", _softmax(scores), v).reshape(q.shape[0], q.shape[2], -1)


def _heads(x: Array, heads: int) -> Array:
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def _numpy_gpt(w: Weights, ids: Array, layers: int, heads: int) -> Array:
    x = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][: ids.shape[1]]
    for layer in range(layers):
        block = f"transformer.h.{layer}"

        def conv(name: str, y: Array, block: str = block) -> Array:
            return y @ w[f"{block}.{name}.weight"] + w[f"{block}.{name}.bias"]

        qkv = np.split(conv("attn.c_attn", _layer_norm(w, f"{block}.ln_1", x)), 3, axis=-1)
        x = x + conv("attn.c_proj", _causal_attention(*(_heads(part, heads) for part in qkv)))
        x = x + conv("mlp.c_proj", _gelu(conv("mlp.c_fc", _layer_norm(w, f"{block}.ln_2", x))))
    return _layer_norm(w, "transformer.ln_f", x) @ w["transformer.wte.weight"].T


def _rotate(x: Array, theta: float) -> Array:
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[2])[:, None] * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)


def _numpy_llama(w: Weights, ids: Array, layers: int, heads: int, kv_heads: int, theta: float) -> Array:
    x = w["model.embed_tokens.weight"][ids]
    group = heads // kv_heads
    for layer in range(layers):
        block = f"model.layers.{layer}"
        y = _rms_norm(w, f"{block}.input_layernorm", x)
        q, k, v = (
            _heads(y @ w[f"{block}.self_attn.{name}_proj.weight"].T, count)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, k = _rotate(q, theta), _rotate(k, theta)
        attended = _causal_attention(q, k.repeat(group, 1), v.repeat(group, 1))
        x = x + attended @ w[f"{block}.self_attn.o_proj.weight"].T
        y = _rms_norm(w, f"{block}.post_attention_layernorm", x)
        gate = y @ w[f"{block}.mlp.gate_proj.weight"].T
        inner = gate / (1 + np.exp(-gate)) * (y @ w[f"{block}.mlp.up_proj.weight"].T)
        x = x + inner @ w[f"{block}.mlp.down_proj.weight"].T
    return _rms_norm(w, "model.norm", x) @ w["lm_head.weight"].T


def test_gpt_equals_numpy() -> None:
    model = models.build_custom(gpt(2, 16, 4, VOCAB, 16), batch=BATCH, seq=SEQ, seed=1)
    ids = _ids()
    (logits,) = run(model, {"input_ids": ids})
    np.testing.assert_allclose(logits, _numpy_gpt(values(model), ids, 2, 4), atol=2e-5)


def test_llama_equals_numpy() -> None:
    model = models.build_custom(_decoder(rope_theta=500.0), batch=BATCH, seq=SEQ, seed=1)
    ids = _ids()
    (logits,) = run(model, {"input_ids": ids})
    np.testing.assert_allclose(logits, _numpy_llama(values(model), ids, 2, 4, 2, 500.0), atol=2e-5)


def _mixture(moe: MoE, x: Array, ffn: int) -> tuple[Array, Weights]:
    """One layer of experts with ReLU, run on its own."""
    g = GraphBuilder("moe", opset=20, seed=3)
    value = g.input("x", x.shape, ElementType.FLOAT)
    g.output(mixture(g, value, moe, ffn, lambda g, y: g.node("Relu", [y], y.shape)))
    model = g.finish()
    check(model)
    return run(model, {"x": x})[0], values(model)


def _numpy_mixture(w: Weights, moe: MoE, x: Array) -> Array:
    """Each token to its best experts in turn, first choices of all tokens before second ones."""
    result = np.zeros_like(x)
    for sample in range(x.shape[0]):
        gates = _softmax(x[sample] @ w["gate.weight"].T)
        order = np.argsort(-gates, axis=-1)[:, : moe.top_k]
        used = dict.fromkeys(range(moe.experts), 0)
        for choice in range(moe.top_k):
            for token, expert in enumerate(order[:, choice]):
                used[expert] += 1
                if used[expert] > moe.capacity(x.shape[1]):
                    continue
                gate = gates[token, expert]
                if moe.renormalise:
                    gate = gate / gates[token, order[token]].sum()
                inner = np.maximum(w["experts.wi"][expert] @ x[sample, token], 0)
                result[sample, token] += gate * (w["experts.wo"][expert] @ inner)
    return result


@settings(deadline=None, max_examples=25)
@given(
    experts=st.integers(2, 6),
    top_k=st.integers(1, 2),
    factor=st.sampled_from([0.5, 1.0, 1.5]),
    renormalise=st.booleans(),
    one_hot=st.booleans(),
    seq=st.integers(1, 12),
)
def test_experts_equal_numpy_with_and_without_dropped_tokens(
    experts: int, top_k: int, factor: float, renormalise: bool, one_hot: bool, seq: int
) -> None:
    moe = MoE(experts, top_k, factor, renormalise=renormalise, one_hot=one_hot)
    x = np.random.default_rng(seq).standard_normal((2, seq, 6)).astype(np.float32)
    result, weights = _mixture(moe, x, 8)
    np.testing.assert_allclose(result, _numpy_mixture(weights, moe, x), atol=1e-5)


@pytest.mark.parametrize(
    ("bidirectional", "distance", "bucket"),
    [
        (True, 0, 0), (True, -7, 7), (True, -8, 8), (True, -16, 10), (True, -127, 15), (True, -500, 15),
        (True, 1, 17), (True, 7, 23), (True, 64, 30), (True, 500, 31),
        (False, 3, 0), (False, 0, 0), (False, -15, 15), (False, -16, 16), (False, -32, 21), (False, -64, 26),
        (False, -127, 31), (False, -500, 31),
    ],
)  # fmt: skip
def test_buckets_of_relative_positions(bidirectional: bool, distance: int, bucket: int) -> None:
    # 16 exact buckets one way (8 of 16 each way when bidirectional), then logarithmic up to a distance of 128.
    g = GraphBuilder("buckets", opset=20)
    value = g.input("distance", (1,), ElementType.INT64)
    g.output(t5._buckets(g, value, bidirectional=bidirectional))
    (found,) = run(g.finish(), {"distance": np.array([distance], dtype=np.int64)})
    assert found[0] == bucket


def test_padding_does_not_reach_the_words() -> None:
    model = models.build_custom(_bert(), batch=1, seq=SEQ, seed=1)
    mask = np.array([[1, 1, 1, 1, 1, 0, 0, 0]], dtype=np.int64)
    first, second = _ids(VOCAB, 1, SEQ), _ids(VOCAB, 1, SEQ)
    second[:, 5:] = (second[:, 5:] + 1) % VOCAB
    feeds = {"attention_mask": mask, "token_type_ids": np.zeros_like(mask)}
    a, b = (run(model, {"input_ids": ids, **feeds})[0] for ids in (first, second))
    np.testing.assert_allclose(a[:, :5], b[:, :5], atol=1e-5)
    assert not np.allclose(a[:, 5:], b[:, 5:], atol=1e-3)


LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2,
    "v_head_dim": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
MAMBA = {
    "mamba_num_heads": 4, "mamba_head_dim": 3, "ssm_state_size": 5, "n_groups": 2, "hybrid_override_pattern": "ME*-",
    "num_hidden_layers": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6,
    "moe_shared_expert_intermediate_size": 8,
}  # fmt: skip
SPARSE = {"num_experts_per_tok": 2, "moe_intermediate_size": 6}
DELTA = {
    "shared_expert_intermediate_size": 6, "full_attention_interval": 2, "head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 3, "linear_value_head_dim": 5,
}  # fmt: skip
LLAMA4 = {
    "head_dim": 4, "num_experts_per_tok": 2, "attention_chunk_size": 3, "intermediate_size_mlp": 20,
    "interleave_moe_layer_step": 2, "num_hidden_layers": 4,
}  # fmt: skip
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 3}
GEMMA4 = {
    "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "sliding_window": 3, "num_hidden_layers": 6, "top_k_experts": 2, "moe_intermediate_size": 12,
}  # fmt: skip


def _newer(experts: int) -> dict[str, Any]:
    """Tiny sizes of each kind of decoder, of which two experts are chosen for a token."""
    return {
        "mistral, window": _decoder("mistral", sliding_window=3),
        "qwen2": _decoder("qwen2", use_sliding_window=True, sliding_window=3, max_window_layers=1),
        "mixtral": _decoder("mixtral", num_local_experts=experts),
        "qwen3, experts": _decoder("qwen3_moe", **SPARSE, num_experts=experts),
        "qwen3-next": _decoder("qwen3_next", **SPARSE, **DELTA, num_experts=experts),
        "gemma": _decoder("gemma", head_dim=8),
        "gemma 2": _decoder("gemma2", **GEMMA),
        "gemma 3": _decoder("gemma3_text", **GEMMA, num_hidden_layers=6),
        "gemma 4": _decoder("gemma4_text", **GEMMA4),
        "gemma 4, experts": _decoder("gemma4_text", **GEMMA4, enable_moe_block=True, num_experts=experts),
        "gpt-oss": _decoder("gpt_oss", head_dim=8, num_local_experts=experts, num_experts_per_tok=2, sliding_window=3),
        "llama 4": _decoder("llama4_text", **LLAMA4, num_local_experts=experts),
        "deepseek": _decoder("deepseek_v3", **LATENT, n_routed_experts=experts),
        "deepseek 2": _decoder("deepseek_v2", **LATENT | {"q_lora_rank": None}, n_routed_experts=experts),
        "nemotron": _decoder("nemotron_h", **MAMBA, n_routed_experts=experts),
        "nemotron, narrow experts": _decoder("nemotron_h", **MAMBA, moe_latent_size=7, n_routed_experts=experts),
        "gpt-neox": _decoder("gpt_neox", hidden_size=32),
        "nemotron 4": _decoder("nemotron", hidden_size=32),
    }


NEWER = _newer(4)
CAUSAL = {
    "gpt": gpt(2, 16, 4, VOCAB, 16),
    "llama": _decoder(),
    "qwen3": _decoder("qwen3", head_dim=8, tie_word_embeddings=True),
    **_newer(2),  # where all experts are chosen no token is dropped for a later one's sake
}


@pytest.mark.parametrize("case", CAUSAL)
def test_words_do_not_see_later_ones(case: str) -> None:
    model = models.build_custom(CAUSAL[case], batch=1, seq=SEQ, seed=1)
    ids = _ids(VOCAB, 1, SEQ)
    changed = ids.copy()
    changed[0, -1] = (ids[0, -1] + 1) % VOCAB
    model = with_scans_written_out(model)
    a, b = (run(model, {"input_ids": each})[0] for each in (ids, changed))
    np.testing.assert_allclose(a[:, :-1], b[:, :-1], atol=1e-5)
    assert not np.allclose(a[:, -1], b[:, -1], atol=1e-3)


def _image(side: int) -> Array:
    return np.random.default_rng(5).standard_normal((BATCH, 3, side, side)).astype(np.float32)


SEGMENTS = {"attention_mask": np.ones((BATCH, SEQ), np.int64), "token_type_ids": _ids(2)}
TARGET = {"decoder_input_ids": _ids(VOCAB, BATCH, 2)}
T5 = {"num_layers": 2, "d_model": 16, "num_heads": 4, "d_kv": 4, "d_ff": 32, "vocab_size": VOCAB}
SWITCH = {**T5, "model_type": "switch_transformers", "num_experts": 4, "feed_forward_proj": "gated-gelu"}
VIT = {
    "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 32, "patch_size": 8,
    "image_size": 16, "num_labels": 10,
}  # fmt: skip
TINY: dict[str, tuple[Any, dict[str, Array], tuple[int, ...]]] = {
    "bert": (_bert(), {"input_ids": _ids(), **SEGMENTS}, (BATCH, SEQ, VOCAB)),
    "bert, next sentence": (
        _bert(tie_word_embeddings=False, next_sentence=True),
        {"input_ids": _ids(), **SEGMENTS},
        (BATCH, SEQ, VOCAB),
    ),
    "t5": (models.size_of(model_type="t5", **T5), {"input_ids": _ids(), **TARGET}, (BATCH, 2, VOCAB)),
    "switch": (
        models.size_of(**SWITCH),
        {"input_ids": _ids(), **TARGET},
        (BATCH, 2, VOCAB),
    ),
    "gshard": (
        gpt(2, 16, 4, VOCAB, 16, head_dim=8, activation_function="relu", num_experts=4),
        {"input_ids": _ids()},
        (BATCH, SEQ, VOCAB),
    ),
    **{name: (size, {"input_ids": _ids()}, (BATCH, SEQ, VOCAB)) for name, size in NEWER.items()},
    "deepseek, predictor of a second token": (
        _decoder("deepseek_v3", **LATENT, n_routed_experts=4, num_nextn_predict_layers=1),
        {"input_ids": _ids(), "input_ids_1": _ids()},
        (BATCH, SEQ, VOCAB),
    ),
    "nemotron, one predictor of two tokens": (
        _decoder("nemotron_h", **MAMBA, n_routed_experts=4, num_nextn_predict_layers=2, mtp_use_repeated_layer=True),
        {"input_ids": _ids(), "input_ids_1": _ids(), "input_ids_2": _ids()},
        (BATCH, SEQ, VOCAB),
    ),
    "vit": (models.size_of(model_type="vit", **VIT), {"pixel_values": _image(16)}, (BATCH, 10)),
    "resnet": (_resnet(1, bottleneck=True), {"image": _image(32)}, (BATCH, 10)),
    "resnet, two convolutions": (_resnet(2, bottleneck=False), {"image": _image(32)}, (BATCH, 10)),
    "vgg": (
        models.size_of(model_type="vgg", groups=[1, 1, 1, 1, 1], num_labels=10, image_size=32),
        {"image": _image(32)},
        (BATCH, 10),
    ),
    "gnmt": (
        models.size_of(model_type="gnmt", num_layers=3, hidden_size=8, vocab_size=20),
        {"src": _ids(20), "tgt": _ids(20)},
        (BATCH, SEQ, 20),
    ),
    "dlrm": (
        models.size_of(model_type="dlrm", tables=[5, 7, 9], width=4, bottom=[8, 4], top=[8, 1]),
        {"dense": np.ones((BATCH, 13), np.float32), "sparse": _ids(5, BATCH, 3)},
        (BATCH, 1),
    ),
}


@pytest.mark.parametrize("case", sorted(TINY))
def test_tiny_models_run_and_give_finite_logits(case: str) -> None:
    size, feeds, shape = TINY[case]
    model = models.build_custom(size, batch=BATCH, seq=SEQ, seed=1)
    check(model)
    logits = run(with_scans_written_out(model), feeds)[0]
    assert logits.shape == shape
    assert np.isfinite(logits).all()
    assert logits.std() > 1e-3


@pytest.mark.parametrize("case", sorted(TINY))
def test_nothing_inside_a_graph_is_tied_to_its_batch(case: str) -> None:
    size, feeds, _ = TINY[case]
    wide = {name: np.concatenate([array, array[:1]]) for name, array in feeds.items()}
    expected = run(with_scans_written_out(models.build_custom(size, batch=BATCH + 1, seq=SEQ, seed=1)), wide)
    model = with_scans_written_out(models.build_custom(size, batch=BATCH, seq=SEQ, seed=1))
    del model.graph.value_info[:]
    for tensor in [*model.graph.input, *model.graph.output]:
        tensor.type.tensor_type.shape.dim[0].dim_value = BATCH + 1
    for found, wanted in zip(run(model, wide), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)
