"""Every declared split, executed: pieces computed apart and put together equal the unsplit result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.operators import OpCall, spec
from planner.sharding import PARTIAL, REPLICATED, Part
from tests.operators.calls import Split, call, splits_of

Function = Callable[..., np.ndarray]


def _halves(array: np.ndarray, part: Part, parts: int, rank: int) -> np.ndarray:
    if part.cuts:
        return np.split(array, parts, axis=part.dim)[rank]
    if part == PARTIAL and rank:
        return np.zeros_like(array)
    return array


def _joined(pieces: Sequence[np.ndarray], part: Part) -> np.ndarray:
    if part.cuts:
        return np.concatenate(pieces, axis=part.dim)
    return sum(pieces[1:], pieces[0]) if part == PARTIAL else pieces[0]


def _run(split: Split, arrays: Sequence[np.ndarray], parts: int, function: Function) -> np.ndarray:
    reads, writes = dict(split.reads), dict(split.writes)
    pieces = [
        function(*(_halves(a, reads.get(p, REPLICATED), parts, rank) for p, a in enumerate(arrays)))
        for rank in range(parts)
    ]
    return _joined(pieces, writes[0])


def _check(what: OpCall, arrays: Sequence[np.ndarray], parts: int, function: Function) -> set[str]:
    whole = function(*arrays)
    done = set()
    for split in splits_of(what):
        if split.size % parts == 0:
            np.testing.assert_allclose(_run(split, arrays, parts, function), whole, rtol=1e-9, atol=1e-9)
            done.add(split.dim)
    return done


def _numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).normal(size=shape)


def _named(what: OpCall) -> dict[str, Split]:
    return {s.dim: s for s in splits_of(what)}


@settings(deadline=None, max_examples=25)
@given(b=st.integers(1, 3), m=st.integers(1, 3), k=st.integers(1, 3), n=st.integers(1, 3), parts=st.integers(2, 3))
def test_matrix_product(b: int, m: int, k: int, n: int, parts: int) -> None:
    b, m, k, n = (parts * v for v in (b, m, k, n))
    what = call("MatMul", [f"x {b} {m} {k}", f"w {k} {n}"], [f"x {b} {m} {n}"])
    assert _check(what, [_numbers(b, m, k), _numbers(k, n)], parts, np.matmul) == {"b0", "m", "k", "n"}


def test_bias_of_a_product_is_added_once() -> None:
    what = call("Gemm", ["x 4 6", "w 6 8", "w 8"], ["x 4 8"])
    assert _check(what, [_numbers(4, 6), _numbers(6, 8), _numbers(8)], 2, lambda a, b, c: a @ b + c) == {"m", "k", "n"}
    assert dict(_named(what)["k"].reads)[2] == PARTIAL


def test_einsum() -> None:
    what = call("Einsum", ["x 2 4 6 2", "x 2 8 6 2"], ["x 2 6 4 8"], equation="bshd,bthd->bhst")
    arrays = [_numbers(2, 4, 6, 2), _numbers(2, 8, 6, 2)]
    assert _check(what, arrays, 2, lambda a, b: np.einsum("bshd,bthd->bhst", a, b)) == set("bshdt")


def test_softmax_is_split_everywhere_but_along_its_axis() -> None:
    def softmax(x: np.ndarray) -> np.ndarray:
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    what = call("Softmax", ["x 4 6 8"], ["x 4 6 8"])
    assert _check(what, [_numbers(4, 6, 8)], 2, softmax) == {"d0", "d1"}


def test_broadcast_operands_are_replicated() -> None:
    what = call("Mul", ["x 4 6", "w 6"], ["x 4 6"])
    assert _check(what, [_numbers(4, 6), _numbers(6)], 2, np.multiply) == {"d0", "d1"}
    assert dict(_named(what)["d0"].reads)[1] == REPLICATED


@settings(deadline=None, max_examples=15)
@given(rows=st.integers(1, 4), parts=st.integers(2, 4), steps=st.integers(1, 9))
def test_embedding_split_by_vocabulary_gives_partial_sums(rows: int, parts: int, steps: int) -> None:
    table, ids = _numbers(rows * parts, 6), np.random.default_rng(3).integers(0, rows * parts, size=steps)
    what = call("Gather", [f"w {rows * parts} 6", f"i:int64 {steps}"], [f"x {steps} 6"])
    split = _named(what)["v"]
    assert dict(split.reads) == {0: Part(0), 1: REPLICATED}
    pieces = []
    for rank in range(parts):
        local = ids - rank * rows
        here = (local >= 0) & (local < rows)
        mine = np.split(table, parts)[rank]
        pieces.append(np.where(here[:, None], mine[np.clip(local, 0, rows - 1)], 0.0))
    np.testing.assert_array_equal(_joined(pieces, dict(split.writes)[0]), table[ids])


def _correlate(x: np.ndarray, w: np.ndarray, stride: int, dilation: int) -> np.ndarray:
    """One-dimensional convolution of [n, c, t] with [k, c, r], without padding."""
    reach = dilation * (w.shape[2] - 1)
    starts = range(0, x.shape[2] - reach, stride)
    return np.stack([np.einsum("ncr,kcr->nk", x[:, :, s : s + reach + 1 : dilation], w) for s in starts], axis=2)


@settings(deadline=None, max_examples=40)
@given(
    kernel=st.integers(1, 5), stride=st.integers(1, 3), dilation=st.integers(1, 2), pad=st.integers(0, 3),
    parts=st.integers(2, 3), steps=st.integers(2, 4),
)  # fmt: skip
def test_convolution_split_in_space_needs_its_halo(
    kernel: int, stride: int, dilation: int, pad: int, parts: int, steps: int
) -> None:
    out = parts * steps
    size = out * stride
    after = (out - 1) * stride + dilation * (kernel - 1) + 1 - size - pad
    if after < 0:
        return
    x, w = _numbers(2, 3, size), _numbers(4, 3, kernel)
    whole = _correlate(np.pad(x, ((0, 0), (0, 0), (pad, after))), w, stride, dilation)
    what = call(
        "Conv", [f"x 2 3 {size}", f"w 4 3 {kernel}"], [f"x 2 4 {out}"],
        pads=(pad, after), strides=(stride,), dilations=(dilation,),
    )  # fmt: skip
    assert _named(what)["y0"].reads[0] == Part(2)
    halo = sum(width for nest in spec(what).nests for access in nest.reads for _, width in access.halo)
    # each part owns size / parts elements and gets `halo` from either side, zeros beyond the ends
    wide = np.pad(x, ((0, 0), (0, 0), (halo, halo)))
    own = size // parts
    pieces = []
    for rank in range(parts):
        part = wide[:, :, rank * own : (rank + 1) * own + 2 * halo]
        part = part[:, :, halo - pad : halo + own + after]
        pieces.append(_correlate(part, w, stride, dilation))
    np.testing.assert_allclose(np.concatenate(pieces, axis=2), whole)


def test_convolution_split_in_channels() -> None:
    what = call("Conv", ["x 2 4 8", "w 6 4 3", "w 6"], ["x 2 6 6"])
    found = _check_without_halo(what, [_numbers(2, 4, 8), _numbers(6, 4, 3), _numbers(6)])
    assert found == {"n", "c", "k"}


def _check_without_halo(what: OpCall, arrays: Sequence[np.ndarray]) -> set[str]:
    def conv(x: np.ndarray, w: np.ndarray, bias: np.ndarray) -> np.ndarray:
        return _correlate(x, w, 1, 1) + bias[:, None]

    done = set()
    for split in splits_of(what):
        if not split.windowed:
            np.testing.assert_allclose(_run(split, arrays, 2, conv), conv(*arrays))
            done.add(split.dim)
    return done


def test_grouped_convolution_is_split_by_group() -> None:
    what = call("Conv", ["x 1 4 8", "w 8 2 3"], ["x 1 8 6"], group=2)
    split = _named(what)["g"]
    assert dict(split.reads) == {0: Part(1), 1: Part(0)}
    assert dict(split.writes) == {0: Part(1)}
    assert "k" not in _named(what), "channels inside a group are not contiguous over groups"


def test_attentionsplits_of() -> None:
    what = call("Attention", ["x 2 8 16 4", "x 2 2 16 4", "x 2 2 16 4"], ["x 2 8 16 4"])
    found = _named(what)
    assert dict(found["g"].reads)[1] == Part(1)
    assert dict(found["s"].reads) == {0: Part(2), 1: REPLICATED, 2: REPLICATED}
    assert "t" not in found
    assert "d" not in found


def test_packed_attention_cannot_split_its_steps_input() -> None:
    found = _named(call("com.microsoft.MultiHeadAttention", ["x 2 16 8 3 4"], ["x 2 16 32"], num_heads=8))
    assert dict(found["s"].reads)[0] == REPLICATED
    assert dict(found["g"].reads)[0] == Part(2)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("6 4", "2 3 4", {(0, 0), (1, 2)}),
        ("2 3 4", "6 4", {(0, 0), (2, 1)}),
        ("8 16", "8 4 4", {(0, 0), (1, 1)}),
        ("8 1 16", "8 16", {(0, 0), (2, 1)}),
        ("6 4", "8 3", set()),
        ("4 6", "24", {(0, 0)}),
    ],
)
def test_a_split_passes_through_a_reshape(before: str, after: str, expected: set[tuple[int, int]]) -> None:
    found = splits_of(call("Reshape", [f"x {before}", "c:int64 2"], [f"x {after}"]))
    assert {(dict(s.reads)[0].dim, dict(s.writes)[0].dim) for s in found} == expected
    array = _numbers(*map(int, before.split()))
    target = tuple(map(int, after.split()))
    for split in found:
        layout, result = dict(split.reads)[0], dict(split.writes)[0]
        shape = [*target]
        shape[result.dim] //= split.size
        pieces = [p.reshape(shape) for p in np.split(array, split.size, axis=layout.dim)]
        np.testing.assert_array_equal(np.concatenate(pieces, axis=result.dim), array.reshape(target))


def test_experts_split_into_partial_sums() -> None:
    five = ["x 2 3 8", "x 6 4", "w 4 16 8", None, "w 4 8 16"]
    found = _named(call("com.microsoft.MoE", five, ["x 2 3 8"], k=2))
    assert set(found) == {"m0", "e", "f"}, "the second row dimension is not contiguous in the router's scores"
    assert dict(found["e"].reads)[2] == Part(0)
    assert dict(found["e"].writes)[0] == PARTIAL


def test_a_recurrence_is_split_by_batch_alone() -> None:
    what = call("LSTM", ["x 5 2 8", "w 1 64 8", "w 1 64 16"], ["x 5 1 2 16"], hidden_size=16)
    assert set(_named(what)) == {"b"}


def test_training_batch_norm_couples_the_batch() -> None:
    five = ["x 4 6 8 8", *["w 6"] * 4]
    assert set(_named(call("BatchNormalization", five, ["x 4 6 8 8"], training_mode=1))) == {"c"}
    assert set(_named(call("BatchNormalization", five, ["x 4 6 8 8"]))) == {"n", "c", "s0", "s1"}


def test_rounded_partial_sums_do_not_add() -> None:
    eight = ["x:uint8 2 4", "c", "c:uint8", "w:int8 4 6", "c", "c:int8", "c", "c:uint8"]
    assert set(_named(call("QLinearMatMul", eight, ["x:uint8 2 6"]))) == {"m", "n"}


def test_what_nobody_described_is_not_split() -> None:
    assert splits_of(call("acme.Frobnicate", ["x 4 4"], ["x 4 4"])) == []
