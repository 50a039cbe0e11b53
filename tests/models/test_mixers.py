"""Attention and scans of today's decoders, one layer at a time, against the same written as loops in numpy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import pytest

from models._decoder import Sublayer
from models._graph import ElementType, GraphBuilder
from models._mixers import Attention, LatentAttention, Rotary, Shared, delta_net, mamba2, rotary_tables
from tests.models.graphs import check, run, values, with_scans_written_out

pytest.importorskip("onnxruntime")

Array = np.ndarray
Weights = Mapping[str, Array]
BATCH, SEQ, HIDDEN, EPSILON = 2, 7, 12, 1e-5
TURN = Rotary(100.0, 4)


def _layer(block: Sublayer) -> tuple[Array, Array, Weights]:
    """Input and result of one layer with random weights, and its weights."""
    g = GraphBuilder("layer", opset=23, seed=4)
    ids = g.input("ids", (BATCH, SEQ), ElementType.INT64)
    value = g.input("x", (BATCH, SEQ, HIDDEN))
    kinds = {Rotary(TURN.theta, dim) for dim in (2, 4)}
    shared = Shared(EPSILON, {kind: rotary_tables(g, kind, ids) for kind in kinds})
    g.output(block(g, value, shared))
    model = g.finish()
    check(model)
    x = np.random.default_rng(6).standard_normal((BATCH, SEQ, HIDDEN)).astype(np.float32)
    (result,) = run(with_scans_written_out(model), {"x": x, "ids": np.zeros((BATCH, SEQ), np.int64)})
    return x, result, values(model)


def _linear(w: Weights, name: str, x: Array) -> Array:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def _heads(x: Array, heads: int) -> Array:
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def _turned(x: Array, dim: int) -> Array:
    """The first `dim` elements of each head turned by position."""
    half = dim // 2
    angles = np.arange(x.shape[2])[:, None] * TURN.theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:dim]
    turned = [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)]
    return np.concatenate([*turned, x[..., dim:]], -1)


def _rms(x: Array, scale: Array) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * scale


def _silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def _attended(q: Array, k: Array, v: Array, *, window: int = SEQ, sinks: Array | None = None) -> Array:
    """[b, heads, s, d] each; a query sees the last `window` keys, and a sink takes its share of the softmax."""
    result = np.zeros((*q.shape[:3], v.shape[3]))
    for b, h, s in np.ndindex(*q.shape[:3]):
        seen = range(max(0, s - window + 1), s + 1)
        weight = np.array([np.exp(q[b, h, s] @ k[b, h, t] / np.sqrt(q.shape[3])) for t in seen])
        total = weight.sum() + (np.exp(sinks[h]) if sinks is not None else 0.0)
        result[b, h, s] = sum(share * v[b, h, t] for share, t in zip(weight / total, seen, strict=True))
    return result.transpose(0, 2, 1, 3).reshape(q.shape[0], q.shape[2], -1)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_with_windows_and_sinks(window: int, sinks: bool) -> None:
    x, found, w = _layer(Attention(4, 2, 8, TURN, bias=True, out_bias=True, window=window, sinks=sinks))
    q, k, v = (_heads(_linear(w, f"{name}_proj", x), heads) for name, heads in (("q", 4), ("k", 2), ("v", 2)))
    q, k, v = _turned(q, 4), _turned(k, 4).repeat(2, 1), v.repeat(2, 1)
    attended = _attended(q, k, v, window=window or SEQ, sinks=w["sinks"] if sinks else None)
    np.testing.assert_allclose(found, _linear(w, "o_proj", attended), atol=1e-5)


def test_attention_with_a_gate_and_normalised_heads() -> None:
    x, found, w = _layer(Attention(4, 4, 4, TURN, qk_norm=True, gated=True))
    q, k, v = (_heads(_linear(w, f"{name}_proj", x), 4) for name in "qkv")
    q, k = _turned(_rms(q, w["q_norm.weight"]), 4), _turned(_rms(k, w["k_norm.weight"]), 4)
    gate = 1 / (1 + np.exp(-_linear(w, "gate_proj", x)))
    np.testing.assert_allclose(found, _linear(w, "o_proj", _attended(q, k, v) * gate), atol=1e-5)


@pytest.mark.parametrize("rank", [0, 5])
def test_latent_attention(rank: int) -> None:
    x, found, w = _layer(LatentAttention(heads=3, q_rank=rank, kv_rank=6, plain=4, rotary=Rotary(100.0, 2), value=5))
    row = _rms(_linear(w, "q_a_proj", x), w["q_a_layernorm.weight"]) if rank else x
    q = _heads(_linear(w, "q_b_proj" if rank else "q_proj", row), 3)
    narrow, turned = np.split(_linear(w, "kv_a_proj_with_mqa", x), [6], axis=-1)
    both = _heads(_linear(w, "kv_b_proj", _rms(narrow, w["kv_a_layernorm.weight"])), 3)
    k = np.concatenate([both[..., :4], _turned(turned[:, None], 2).repeat(3, 1)], -1)
    q = np.concatenate([q[..., :4], _turned(q[..., 4:], 2)], -1)
    np.testing.assert_allclose(found, _linear(w, "o_proj", _attended(q, k, both[..., 4:])), atol=1e-5)


def _convolved(w: Weights, name: str, x: Array) -> Array:
    """Each channel over its last tokens, then SiLU."""
    taps = w[f"{name}_conv1d.weight"][:, 0]
    wide = np.pad(x, ((0, 0), (taps.shape[1] - 1, 0), (0, 0)))
    y = sum(wide[:, i : i + x.shape[1]] * taps[:, i] for i in range(taps.shape[1]))
    return _silu(y + w.get(f"{name}_conv1d.bias", 0.0))


def test_mamba_2() -> None:
    heads, width, state, groups = 4, 3, 5, 2
    x, found, w = _layer(partial(mamba2, heads=heads, head_dim=width, state=state, groups=groups, kernel=3))
    value, b, c = (_convolved(w, name, _linear(w, f"{name}_proj", x)) for name in "xbc")
    step = np.log1p(np.exp(_linear(w, "dt_proj", x) + w["dt_bias"]))
    y = np.zeros((BATCH, SEQ, heads, width))
    for sample, head in np.ndindex(BATCH, heads):
        held, group = np.zeros((state, width)), head // (heads // groups)
        of_group, of_head = slice(group * state, (group + 1) * state), slice(head * width, (head + 1) * width)
        for t in range(SEQ):
            size, read = step[sample, t, head], value[sample, t, of_head]
            held = np.exp(-size * np.exp(w["A_log"][head])) * held + np.outer(b[sample, t, of_group], size * read)
            y[sample, t, head] = c[sample, t, of_group] @ held + w["D"][head] * read
    y = y.reshape(BATCH, SEQ, -1) * _silu(_linear(w, "z_proj", x))
    by_group = y.reshape(BATCH, SEQ, groups, -1)
    normed = by_group / np.sqrt((by_group**2).mean(-1, keepdims=True))
    normed = normed.reshape(y.shape) * w["norm.weight"]
    np.testing.assert_allclose(found, _linear(w, "out_proj", normed), atol=1e-4)


def test_gated_delta_net() -> None:
    key_heads, heads, key, width = 2, 4, 3, 5
    x, found, w = _layer(partial(delta_net, key_heads=key_heads, value_heads=heads, key_dim=key, value_dim=width))
    q, k, v = (_convolved(w, name, _linear(w, f"{name}_proj", x)) for name in "qkv")
    q, k = (part.reshape(BATCH, SEQ, key_heads, key) for part in (q, k))
    q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True)) for part in (q, k))
    rate = 1 / (1 + np.exp(-_linear(w, "b_proj", x)))
    decay = np.exp(-np.exp(w["A_log"]) * np.log1p(np.exp(_linear(w, "a_proj", x) + w["dt_bias"])))
    y = np.zeros((BATCH, SEQ, heads, width))
    for sample, head in np.ndindex(BATCH, heads):
        held, of = np.zeros((key, width)), head // (heads // key_heads)
        for t in range(SEQ):
            held = decay[sample, t, head] * held
            new = v[sample, t, head * width : (head + 1) * width] - k[sample, t, of] @ held
            held = held + rate[sample, t, head] * np.outer(k[sample, t, of], new)
            y[sample, t, head] = q[sample, t, of] @ held / np.sqrt(key)
    normed = _rms(y, w["norm.weight"]).reshape(BATCH, SEQ, -1) * _silu(_linear(w, "z_proj", x))
    np.testing.assert_allclose(found, _linear(w, "out_proj", normed), atol=1e-5)
