"""Every operator of the runtime against the cases that the ONNX project keeps for it."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest

from planner.operators import RULES as PRICED

torch = pytest.importorskip("torch", reason="torch is not installed")

from planner import ModelError, runtime  # noqa: E402
from planner.runtime import run_graph  # noqa: E402

NOT_IN_TORCH = {"float8", "uint4", "int4", "float4", "string", "FLOAT8", "UINT4", "INT4", "FLOAT4", "UINT2", "INT2"}
OTHER_ROUNDING = {
    "test_attention_4d_causal_bf16", "test_attention_4d_attn_mask_causal_bf16", "test_attention_3d_causal_bf16",
}  # fmt: skip
"""Computed in the type of the pass, not in bfloat16."""
OUT_OF_SCOPE = {
    "test_bitwise_not_3d": "unsigned integers are computed as larger signed ones",
    "test_identity_sequence": "no sequence crosses an Identity",
    "test_identity_opt": "no sequence crosses an Identity",
    "test_maxpool_2d_uint8": "pooling is of floats",
    "test_reduce_max_empty_set": "no reduction of nothing",
    "test_reduce_max_empty_set_bool": "no reduction of nothing",
    "test_reduce_min_empty_set": "no reduction of nothing",
}


@functools.cache
def _cases() -> dict[str, list[Any]]:
    """The cases of one operator each, by operator."""
    node = pytest.importorskip("onnx.backend.test.case.node")
    found: dict[str, list[Any]] = {}
    for case in node.collect_testcases(None):
        if len(case.model.graph.node) != 1:
            continue
        proto = case.model.graph.node[0]
        name = f"{proto.domain}.{proto.op_type}" if proto.domain not in ("", "ai.onnx") else proto.op_type
        skipped = any(word in case.name for word in NOT_IN_TORCH) or "training_dropout" in case.name
        if not skipped and case.name not in OUT_OF_SCOPE | dict.fromkeys(OTHER_ROUNDING):
            found.setdefault(name, []).append(case)
    return found


def _given(value: Any) -> Any:
    if isinstance(value, list):
        return [_given(v) for v in value]
    array = np.array(value)
    wider = {"float16": "float32", "bfloat16": "float32", "uint16": "int32", "uint32": "int64", "uint64": "int64"}
    return torch.from_numpy(array.astype(wider.get(str(array.dtype), array.dtype)).copy())


def _same(found: Any, expected: Any) -> None:
    if isinstance(expected, list):
        for a, b in zip(found, expected, strict=True):
            _same(a, b)
        return
    wanted = np.array(expected)
    assert tuple(found.shape) == wanted.shape
    np.testing.assert_allclose(found.double().numpy(), wanted.astype(np.float64), rtol=2e-3, atol=1e-4)


def _usable(case: Any) -> bool:
    kinds = {str(np.array(v).dtype) for v in case.data_sets[0][0] if not isinstance(v, list)}
    return "object" not in kinds and not any(
        "float8" in k or "float4" in k or "int4" in k or "int2" in k for k in kinds
    )


@pytest.mark.parametrize("op", sorted(runtime.RULES))
def test_operators_compute_what_the_standard_says(op: str) -> None:
    cases = [case for case in _cases().get(op, []) if _usable(case)]
    refused = 0
    for case in cases:
        given, expected = case.data_sets[0]
        graph = case.model.graph
        feeds = {value.name: _given(x) for value, x in zip(graph.input, given, strict=True)}
        wide = any(str(np.array(x).dtype) == "float64" for x in given if not isinstance(x, list))
        try:
            found = run_graph(case.model, feeds, torch.float64 if wide else torch.float32)
        except ModelError as error:
            if "has no torch rule" not in str(error):
                raise
            refused += 1
            continue
        for value, wanted in zip(graph.output, expected, strict=True):
            _same(found[value.name], wanted)
    assert refused < max(1, len(cases)), f"all cases of {op} are refused"


def test_names_are_those_of_the_priced_operators() -> None:
    assert not set(runtime.RULES) - set(PRICED.names())


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize("by_dimension", [False, True])
def test_linear_attention_by_chunks_is_the_standards_token_by_token(rule: str, by_dimension: bool) -> None:
    onnx, drawn = pytest.importorskip("onnx"), np.random.default_rng(3)
    shapes = {"q": (2, 8, 8), "k": (2, 8, 4), "v": (2, 8, 6), "state": (2, 2, 2, 3)}
    shapes |= {"decay": (2, 8, 4 if by_dimension else 2)} if "gated" in rule else {}
    shapes |= {"rate": (2, 8, 2)} if "delta" in rule else {}
    feeds: dict[str, Any] = {n: drawn.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
    feeds |= {
        name: np.float32(sign) * np.abs(feeds[name]) for name, sign in (("decay", -1), ("rate", 0.25)) if name in feeds
    }
    sizes = {"q_num_heads": 4, "kv_num_heads": 2, "chunk_size": 3}
    operands = [name if name in shapes else "" for name in ("q", "k", "v", "state", "decay", "rate")]
    node = onnx.helper.make_node("LinearAttention", operands, ["y", "last"], update_rule=rule, **sizes)
    described = [onnx.helper.make_tensor_value_info(name, 1, shape) for name, shape in shapes.items()]
    results = [onnx.helper.make_tensor_value_info(name, 1, None) for name in ("y", "last")]
    graph = onnx.helper.make_graph([node], "g", described, results)
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 27)])
    expected = pytest.importorskip("onnx.reference").ReferenceEvaluator(proto).run(None, feeds)
    found = run_graph(proto, {name: torch.from_numpy(x) for name, x in feeds.items()}, torch.float32)
    for name, wanted in zip(("y", "last"), expected, strict=True):
        np.testing.assert_allclose(found[name].numpy(), wanted, rtol=1e-4, atol=1e-5)


def test_a_state_space_scan_by_chunks_is_one_token_by_token() -> None:
    onnx, drawn = pytest.importorskip("onnx"), np.random.default_rng(3)
    shapes = {"x": (2, 8, 8), "b": (2, 8, 6), "c": (2, 8, 6), "step": (2, 8, 4), "a": (4,), "d": (4,), "bias": (4,)}
    feeds = {name: drawn.standard_normal(shape) for name, shape in shapes.items()}
    found = []
    for chunk in (1, 3, 8):
        sizes = {"num_heads": 4, "num_groups": 2, "chunk_size": chunk}
        node = onnx.helper.make_node("StateSpaceScan", list(shapes), ["y"], domain="shardplan", **sizes)
        described = [onnx.helper.make_tensor_value_info(name, 11, shape) for name, shape in shapes.items()]
        result = onnx.helper.make_tensor_value_info("y", 11, shapes["x"])
        graph = onnx.helper.make_graph([node], "g", described, [result])
        opsets = [onnx.helper.make_opsetid(*each) for each in (("", 23), ("shardplan", 1))]
        leaves = {name: torch.from_numpy(x).requires_grad_() for name, x in feeds.items()}
        y = run_graph(onnx.helper.make_model(graph, opset_imports=opsets), leaves, torch.float64)["y"]
        found.append([y, *torch.autograd.grad(y.square().sum(), list(leaves.values()))])
    for values in found[1:]:
        for value, wanted in zip(values, found[0], strict=True):
            torch.testing.assert_close(value, wanted)


def test_a_gradient_goes_through_a_fully_masked_attention() -> None:
    q, k, v = (torch.randn(1, 1, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    onnx = pytest.importorskip("onnx")
    node = onnx.helper.make_node("Attention", ["q", "k", "v", "mask"], ["y"])
    values = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, (1, 1, 3, 4)) for n in "qkv"]
    mask = onnx.helper.make_tensor_value_info("mask", onnx.TensorProto.BOOL, (3, 3))
    out = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, (1, 1, 3, 4))
    graph = onnx.helper.make_graph([node], "g", [*values, mask], [out])
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)])
    seen = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])
    y = run_graph(proto, {"q": q, "k": k, "v": v, "mask": seen}, torch.float64)["y"]
    y.sum().backward()
    assert torch.isfinite(q.grad).all()
    assert torch.equal(y[0, 0, 1], torch.zeros(4, dtype=torch.float64))
    assert math.isclose(float(v.grad[0, 0, 2, 0]), float(torch.softmax(q[0, 0, 2] @ k[0, 0].T / 2, -1)[2].detach()))
