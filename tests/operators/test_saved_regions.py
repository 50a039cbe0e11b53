"""Which memory tensors share, and which nodes run as one operator, on graphs written by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from planner.errors import HardwareError
from planner.graph import DType, Graph, Node, Tensor
from planner.importers import load_graph
from planner.operators import (
    SavedOptions,
    Storages,
    dense_strides,
    graph_specs,
    reshaped_strides,
    rewritten,
    saved_for_backward,
    unique_bytes,
)
from tests.operators import calls


def node(op: str, inputs: str, outputs: str, **attributes: int | tuple[int, ...]) -> Node:
    names = tuple(outputs.split())
    return Node(names[0], op, tuple(inputs.split()), names, attributes)


def graph(tensors: dict[str, str], *nodes: Node) -> Graph:
    return calls.graph(tensors, nodes)


def spell(tensor: Tensor) -> str:
    """A tensor as `graph` reads it."""
    letter = {"activation": "x", "parameter": "w", "constant": "c", "input": "i"}[tensor.kind]
    dtype = "" if tensor.dtype is DType.FLOAT32 else f":{tensor.dtype}"
    return " ".join([f"{letter}{dtype}", *map(str, tensor.shape)])


def kept(written: Graph, **options: Any) -> dict[str, int]:
    made = rewritten(written)
    saved = saved_for_backward(made, graph_specs(made), options=SavedOptions(loss=False, **options))
    return {item.storage: item.byte_count for items in saved for item in items}


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.permutations(range(4)),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
)
def test_reshape_views_agree_with_numpy(shape: list[int], order: list[int], factors: list[int]) -> None:
    """numpy says whether a reshape of a permuted array can be a view, and with which strides."""
    array = np.arange(np.prod(shape)).reshape(shape).transpose([d for d in order if d < len(shape)])
    target = []
    left = array.size
    for factor in factors:
        size = np.gcd(left, factor)
        target.append(int(size))
        left //= size
    target.append(int(left))
    reshaped = array.reshape(target)
    strides = [s // array.itemsize for s in array.strides]
    found = reshaped_strides(array.shape, strides, target)
    assert (found is not None) == np.shares_memory(array, reshaped)
    if found is not None:
        expected = [s // array.itemsize for s in reshaped.strides]
        assert [f for f, n in zip(found, target, strict=True) if n > 1] == [
            e for e, n in zip(expected, target, strict=True) if n > 1
        ]


def test_dense_strides_follow_an_order() -> None:
    assert dense_strides((2, 3, 4)) == (12, 4, 1)
    assert dense_strides((2, 3, 5, 4), (0, 2, 1, 3)) == (60, 4, 12, 1)


def test_views_share_and_reshape_after_transpose_copies() -> None:
    made = graph(
        {"x": "x 2 6 8", "h": "x 2 6 2 4", "t": "x 2 2 6 4", "r": "x 2 2 24", "w": "w 8 8", "y": "x 2 6 8"},
        node("MatMul", "x w", "y"),
        node("Reshape", "y", "h"),
        node("Transpose", "h", "t", perm=(0, 2, 1, 3)),
        node("Reshape", "t", "r"),
    )  # fmt: skip
    storages = Storages(made)
    assert [storages.root(n) for n in ("h", "t", "r")] == ["y", "y", "r"]


def test_split_parts_are_one_storage() -> None:
    made = graph(
        {
            "x": "i 4 8",
            "w": "w 8 24",
            "p": "x 4 24",
            "q": "x 4 8",
            "k": "x 4 8",
            "v": "x 4 8",
            "qk": "x 4 8",
            "y": "x 4 8",
        },
        node("MatMul", "x w", "p"),
        node("Split", "p", "q k v", axis=1),
        node("Mul", "q k", "qk"),
        node("Mul", "qk v", "y"),
    )
    assert kept(made) == {"p": 4 * 4 * 24, "qk": 4 * 4 * 8}


def attention(*between: Node, mask: bool = False) -> Graph:
    """Two heads of 8, 16 positions: scores are 2 x 2 x 16 x 16."""
    names = {f"{n}p": "x 2 16 16" for n in "qkv"} | {f"{n}4": "x 2 16 2 8" for n in "qkv"}
    names |= {"q": "x 2 2 16 8", "k": "x 2 2 8 16", "v": "x 2 2 16 8", "x": "i 2 16 16", "one": "c"}
    names |= {f"w{n}": "w 16 16" for n in "qkv"}
    names |= dict.fromkeys(("s", "a", "p", "d", "z"), "x 2 2 16 16") | {"o": "x 2 2 16 8", "m": "c 1 1 16 16"}
    names |= {"n": "x:bool 2 2 16 16", "dm": "x:bool 2 2 16 16", "qs": "x 2 2 16 8"}
    nodes = []
    for n in "qkv":
        nodes += [node("MatMul", f"x w{n}", f"{n}p"), node("Reshape", f"{n}p", f"{n}4")]
        perm = (0, 2, 3, 1) if n == "k" else (0, 2, 1, 3)
        nodes.append(node("Transpose", f"{n}4", n, perm=perm))
    nodes += [node("Mul", "q one", "qs"), node("MatMul", "qs k", "s")]
    scores = "s"
    if mask:
        nodes.append(node("Add", "s m", "a"))
        scores = "a"
    nodes.append(node("Softmax", scores, "p", axis=-1))
    nodes += between
    nodes.append(node("MatMul", f"{between[-1].key if between else 'p'} v", "o"))
    return graph(names, *nodes)


SCORES = 2 * 2 * 16 * 16 * 4
PROJECTED = 2 * 16 * 16 * 4


def test_fused_attention_keeps_its_operands_result_and_row_statistics() -> None:
    (found,) = (n for n in rewritten(attention()).nodes if n.op == "Attention")
    assert (found.inputs[0], found.inputs[2], found.outputs, len(found.inputs)) == ("q", "v", ("o",), 3)
    assert kept(attention()) == {
        "qp": PROJECTED, "kp": PROJECTED, "vp": PROJECTED, "o": PROJECTED, "o#0": 2 * 2 * 16 * 4,
    }  # fmt: skip


def test_a_constant_mask_is_not_kept_and_a_computed_one_once() -> None:
    assert kept(attention(mask=True)) == kept(attention())
    (causal,) = (n for n in rewritten(attention(mask=True)).nodes if n.op == "Attention")
    assert (causal.attributes["is_causal"], len(causal.inputs)) == (1, 3)
    masked = attention(mask=True)
    computed = [replace(n, inputs=("s", "mx")) if n.key == "a" else n for n in masked.nodes]
    made = graph(
        {**{t.name: spell(t) for t in masked.tensors.values()}, "mi": "i 1 1 16 16", "mx": "x 1 1 16 16"},
        node("Neg", "mi", "mx"),
        *computed,
    )
    assert kept(made) == {**kept(attention()), "mx": 16 * 16 * 4}


def test_eager_attention_keeps_the_probabilities() -> None:
    found = kept(attention(mask=True), fused_attention=False)
    assert found == {"qp": PROJECTED, "kp": PROJECTED, "vp": PROJECTED, "o#probabilities": SCORES}


def test_a_nan_guard_adds_nothing() -> None:
    guard = (node("IsNaN", "p", "n"), node("Where", "n one p", "z"))
    assert kept(attention(*guard), fused_attention=False) == kept(attention(), fused_attention=False)
    assert kept(attention(*guard)) == kept(attention())


def test_dropout_on_probabilities_adds_a_mask_and_their_copy() -> None:
    made = attention(node("Dropout", "p one", "d dm"))
    found = kept(made, fused_attention=False)
    assert found["o#dropout"] == SCORES // 4
    assert found["o#dropped"] == SCORES
    assert "o#dropout" not in kept(made, fused_attention=False, dropout=False)
    assert set(kept(made)) == {"qp", "kp", "vp", "o", "o#0"}


def test_softmax_outside_attention_is_left_alone() -> None:
    made = graph(
        {"x": "i 2 4 8", "w": "w 8 8", "s": "x 2 4 8", "p": "x 2 4 8", "v": "w 8 3", "y": "x 2 4 3"},
        node("MatMul", "x w", "s"),
        node("Softmax", "s", "p", axis=-1),
        node("MatMul", "p v", "y"),
    )
    assert rewritten(made) is made
    assert kept(made) == {"p": 4 * 2 * 4 * 8}


ELEMENTWISE = dict.fromkeys("abcdefghy", "x 4 8") | {"x": "i 4 8", "w": "w 8 8", "h": "x 4 8", "k": "c"}


def test_gelu_by_error_function_keeps_its_argument_only() -> None:
    made = graph(
        ELEMENTWISE,
        node("MatMul", "x w", "h"),
        node("Div", "h k", "a"),
        node("Erf", "a", "b"),
        node("Add", "b k", "c"),
        node("Mul", "h c", "d"),
        node("Mul", "d k", "y"),
    )
    assert [(n.op, n.inputs, n.outputs) for n in rewritten(made).nodes[1:]] == [("Gelu", ("h",), ("y",))]
    assert kept(made) == {"h": 4 * 4 * 8}


def test_gelu_by_tanh_with_products_is_one_kernel() -> None:
    made = graph(
        ELEMENTWISE | {"i": "x 4 8"},
        node("MatMul", "x w", "h"),
        node("Mul", "h h", "a"),
        node("Mul", "h a", "b"),
        node("Mul", "b k", "c"),
        node("Add", "h c", "d"),
        node("Mul", "d k", "e"),
        node("Tanh", "e", "f"),
        node("Add", "f k", "g"),
        node("Mul", "h g", "i"),
        node("Mul", "i k", "y"),
    )
    (_, found) = rewritten(made).nodes
    assert (found.op, found.inputs, found.attributes) == ("Gelu", ("h",), {"approximate": "tanh"})
    assert kept(made) == {"h": 4 * 4 * 8}


def test_gelu_by_tanh_with_a_power_keeps_every_step() -> None:
    """Models that write it so compute it so: argument, tanh, and both factors of the product."""
    made = graph(
        ELEMENTWISE,
        node("MatMul", "x w", "h"),
        node("Mul", "h k", "a"),
        node("Pow", "h k", "b"),
        node("Mul", "b k", "c"),
        node("Add", "h c", "d"),
        node("Mul", "d k", "e"),
        node("Tanh", "e", "f"),
        node("Add", "f k", "g"),
        node("Mul", "a g", "y"),
    )
    assert len(rewritten(made).nodes) == 9
    assert set(kept(made)) == {"h", "f", "a", "g"}


def test_silu_keeps_its_argument_only() -> None:
    made = graph(ELEMENTWISE, node("MatMul", "x w", "h"), node("Sigmoid", "h", "a"), node("Mul", "h a", "y"))
    assert kept(made) == {"h": 4 * 4 * 8}


def test_sigmoid_gate_of_another_tensor_is_no_silu() -> None:
    made = graph(
        ELEMENTWISE | {"v": "w 8 8"},
        node("MatMul", "x w", "h"),
        node("MatMul", "x v", "b"),
        node("Sigmoid", "h", "a"),
        node("Mul", "b a", "y"),
    )
    assert set(kept(made)) == {"a", "b"}


@pytest.fixture
def training_export(tmp_path: Path) -> Graph:
    """Conv, batch norm in training mode, ReLU, pool, dropout with a mask, linear: as `training=TRAINING` exports it."""
    value = helper.make_tensor_value_info
    weights = {"cw": (8, 3, 3, 3), "s": (8,), "b": (8,), "m": (8,), "v": (8,), "fw": (10, 8 * 16 * 16), "fb": (10,)}
    initializers = [helper.make_tensor(n, TensorProto.FLOAT, s, [0.5] * int(np.prod(s))) for n, s in weights.items()]
    initializers += [
        helper.make_tensor("ratio", TensorProto.FLOAT, (), [0.5]),
        helper.make_tensor("on", TensorProto.BOOL, (), [True]),
    ]
    nodes = [
        helper.make_node("Conv", ["x", "cw"], ["c"], pads=[1, 1, 1, 1], kernel_shape=[3, 3]),
        helper.make_node("BatchNormalization", ["c", "s", "b", "m", "v"], ["n", "m2", "v2"], training_mode=1),
        helper.make_node("Relu", ["n"], ["r"]),
        helper.make_node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Dropout", ["p", "ratio", "on"], ["d", "mask"]),
        helper.make_node("Flatten", ["d"], ["f"]),
        helper.make_node("Gemm", ["f", "fw", "fb"], ["y"], transB=1),
    ]
    inputs = [value("x", TensorProto.FLOAT, (2, 3, 32, 32))]
    outputs = [value("y", TensorProto.FLOAT, (2, 10))]
    model = helper.make_model(
        helper.make_graph(nodes, "train", inputs, outputs, initializers),
        opset_imports=[helper.make_opsetid("", 17)], ir_version=8,
    )  # fmt: skip
    onnx.save(model, tmp_path / "train.onnx")
    return load_graph(tmp_path / "train.onnx")


def test_a_training_export_by_hand(training_export: Graph) -> None:
    full, half = 2 * 8 * 32 * 32, 2 * 8 * 16 * 16
    expected = (
        4 * full  # convolution's result: batch norm's input
        + 2 * 8 * 4  # mean and inverse deviation
        + 4 * full  # rectified
        + 8 * half  # int64 indices
        + half  # dropout mask, one byte an element
        + 4 * half  # the linear layer's input
        + 4 * 2 * 10  # log-softmax of the loss
    )
    saved = saved_for_backward(training_export, graph_specs(training_export))
    assert unique_bytes(saved) == expected
    pure = saved_for_backward(training_export, graph_specs(training_export), width=2.0)
    assert unique_bytes(pure) == expected - 2 * (2 * full + half)


GATED = {"g": "x 8 64", "u": "x 8 64", "a": "x 8 64", "y": "x 8 64", "d": "w 64 16", "z": "x 8 16"}


def gated(op: str = "Swish", *more: Node, **tensors: str) -> Graph:
    """A feed-forward layer behind its first two matrices."""
    first = {"x": "x 8 16", "v": "w 16 64", "w": "w 16 64"}
    ups = node("MatMul", "x v", "g"), node("MatMul", "x w", "u")
    gate = node(op, "g", "a"), node("Mul", "a u", "y"), node("MatMul", "y d", "z")
    return graph(first | GATED | tensors, *ups, *gate, *more)


@pytest.mark.parametrize("op", ["Swish", "Gelu"])
def test_a_gate_in_one_kernel_is_not_kept_activated(op: str) -> None:
    fused = kept(gated(op), fused=("gated_activation",))
    assert kept(gated(op)).keys() - fused.keys() == {"a"}
    assert {name: fused[name] for name in "guy"} == dict.fromkeys("guy", 8 * 64 * 4)


def test_a_gate_that_others_read_is_made() -> None:
    read = gated("Swish", node("Mul", "a a", "b"), b="x 8 64")
    assert kept(read, fused=("gated_activation",)) == kept(read)


def test_no_gate_is_fused_that_is_none() -> None:
    assert kept(gated("Tanh"), fused=("gated_activation",)) == kept(gated("Tanh"))


def test_kernels_that_nobody_has_are_refused() -> None:
    for name in ("gate", "silu"):
        with pytest.raises(HardwareError, match=f"no fused kernel is called '{name}'.*gated_activation"):
            kept(gated(), fused=(name,))
