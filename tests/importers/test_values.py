"""Known values: every operator that folds does so with operands, attributes and types as a model gives them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from onnx.reference import ReferenceEvaluator

from planner.importers.onnx_graph.nodes import plain_attributes
from planner.operators import evaluate
from tests.importers.build import model, node, value

V = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int64)
M = V.reshape(2, 4)
F = M.astype(np.float32) / 2


def i(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int64)


CASES: list[tuple[str, list[np.ndarray[Any, Any]], dict[str, Any]]] = [
    ("Gather", [M, i(1, 0)], {"axis": 1}),
    ("Gather", [V, np.array(-1)], {}),
    ("GatherElements", [M, i(0, -1, 2, 3).reshape(2, 2)], {"axis": 1}),
    ("Concat", [V, V], {"axis": 0}),
    ("Slice", [V, i(1), i(6), i(0), i(2)], {}),
    ("Slice", [M, i(-1), i(-100), i(1), i(-1)], {}),
    ("Slice", [M, i(0, 1), i(1, 99)], {}),
    ("Split", [V, i(3, 5)], {"axis": 0}),
    ("Split", [V], {"axis": 0, "num_outputs": 3}),
    ("Unsqueeze", [V, i(0, -1)], {}),
    ("Squeeze", [V.reshape(1, 8, 1), i(0)], {}),
    ("Squeeze", [V.reshape(1, 8, 1)], {}),
    ("Reshape", [V, i(0, 1, -1)], {}),
    ("Flatten", [V.reshape(2, 2, 2)], {"axis": 2}),
    ("Transpose", [M], {"perm": [1, 0]}),
    ("Transpose", [V.reshape(1, 2, 4)], {}),
    ("Expand", [V.reshape(8, 1), i(3, 1, 2)], {}),
    ("Tile", [M, i(2, 1)], {}),
    ("Range", [np.array(2), np.array(11), np.array(3)], {}),
    ("Where", [M > 2, M, -M], {}),
    ("Add", [M, i(1)], {}),
    ("Sub", [M, V[:4]], {}),
    ("Mul", [M, M], {}),
    ("Div", [i(7, -7, 8), i(2)], {}),
    ("Div", [F, F + 1], {}),
    ("Mod", [i(7, -7, 8), i(3)], {}),
    ("Mod", [i(7, -7, 8), i(3)], {"fmod": 1}),
    ("Pow", [F, np.array(2, np.float32)], {}),
    ("Max", [M, M[:, ::-1]], {}),
    ("Min", [M, M[:, ::-1]], {}),
    ("Neg", [M], {}),
    ("Abs", [-M], {}),
    ("Floor", [F], {}),
    ("Ceil", [F], {}),
    ("Sqrt", [F], {}),
    ("Reciprocal", [F], {}),
    ("Not", [M > 2], {}),
    ("Equal", [M, i(1)], {}),
    ("Less", [M, i(3)], {}),
    ("GreaterOrEqual", [M, i(3)], {}),
    ("And", [M > 2, M < 6], {}),
    ("Or", [M > 2, M < 6], {}),
    ("ReduceProd", [M, i(0)], {"keepdims": 0}),
    ("ReduceSum", [M], {}),
    ("ReduceSum", [M], {"noop_with_empty_axes": 1}),
    ("ReduceMax", [M, i(-1)], {}),
    ("ReduceMin", [M, i(1)], {"keepdims": 0}),
    ("NonZero", [np.array([[1, 0], [2, 3]])], {}),
    ("ScatterND", [V, i(1, 3).reshape(2, 1), i(70, 80)], {}),
    ("CumSum", [M, np.array(1)], {}),
    ("Trilu", [M, np.array(1)], {"upper": 1}),
    ("Trilu", [M], {"upper": 0}),
]


def check(op: str, arrays: list[np.ndarray[Any, Any]], attributes: dict[str, Any]) -> None:
    names = [f"i{k}" for k in range(len(arrays))]
    count = attributes.get("num_outputs", 2 if op == "Split" else 1)
    outputs = [f"o{k}" for k in range(count)]
    call = node(op, names, outputs, **attributes)
    kinds = [helper.np_dtype_to_tensor_dtype(a.dtype) for a in arrays]
    inputs = [value(n, a.shape, k) for n, a, k in zip(names, arrays, kinds, strict=True)]
    proto = model([call], inputs, [value(o, None) for o in outputs], opset=18)
    expected = ReferenceEvaluator(proto).run(None, dict(zip(names, arrays, strict=True)))
    found = evaluate(op, arrays, plain_attributes(call), 18, None)
    assert found is not None
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
        assert mine.shape == theirs.shape
        assert mine.dtype == theirs.dtype


@pytest.mark.parametrize(("op", "arrays", "attributes"), CASES, ids=[f"{c[0]}-{k}" for k, c in enumerate(CASES)])
def test_agrees_with_the_reference(op: str, arrays: list[np.ndarray[Any, Any]], attributes: dict[str, Any]) -> None:
    check(op, arrays, attributes)


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 9), start=st.integers(-12, 12), end=st.integers(-12, 12),
    step=st.sampled_from([-3, -2, -1, 1, 2, 3]),
)  # fmt: skip
def test_slices_of_every_kind(size: int, start: int, end: int, step: int) -> None:
    check("Slice", [np.arange(size), i(start), i(end), i(0), i(step)], {})


def test_what_is_not_computed_here_says_so() -> None:
    assert evaluate("Conv", [F, F], {}, 18, None) is None
    assert evaluate("Reshape", [V, i(3, 3)], {}, 18, None) is None
    assert evaluate("Cast", [V], {}, 18, None) is None
    found = evaluate("Cast", [F], {"to": 7}, 18, None)
    assert found is not None
    assert found[0].dtype == np.int64


@pytest.mark.parametrize(
    ("op", "arrays", "attributes", "expected"),
    [
        ("Gather", [i(10, 20, 30), i(2, 0)], {}, [30, 10]),
        ("Slice", [i(1, 2, 3, 4), i(-1), i(-9), i(0), i(-2)], {}, [4, 2]),
        ("Range", [np.array(2), np.array(11), np.array(3)], {}, [2, 5, 8]),
        ("Div", [i(7, -7), i(2)], {}, [3, -3]),
        ("ReduceProd", [i(2, 3, 4), i(0)], {"keepdims": 0}, 24),
        ("Unsqueeze", [i(5), i(0)], {}, [[5]]),
    ],
)
def test_results_by_hand(
    op: str, arrays: list[np.ndarray[Any, Any]], attributes: dict[str, Any], expected: Any
) -> None:
    found = evaluate(op, arrays, attributes, 20, None)
    assert found is not None
    assert found[0].tolist() == expected
