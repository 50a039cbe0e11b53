"""Leaving tensor data out of a file changes nothing else."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from planner.importers.onnx_graph.read import KEEP_BYTES, WireError, strip_tensor_data
from tests.importers.build import model, node, value

BIG = KEEP_BYTES // 4 + 1


def with_data(sizes: list[int], *, raw: bool) -> onnx.ModelProto:
    tensors = []
    for i, size in enumerate(sizes):
        data = np.arange(size, dtype=np.float32)
        if raw:
            tensors.append(numpy_helper.from_array(data, f"w{i}"))
        else:
            tensors.append(helper.make_tensor(f"w{i}", onnx.TensorProto.FLOAT, [size], data))
    return model([node("Relu", ["x"], ["y"])], [value("x", [2])], [value("y", [2])], tensors)


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.sampled_from([1, 100, BIG, 3 * BIG]), max_size=5), raw=st.booleans())
def test_large_data_goes_and_all_else_stays(sizes: list[int], raw: bool) -> None:
    proto = with_data(sizes, raw=raw)
    stripped = onnx.ModelProto.FromString(strip_tensor_data(proto.SerializeToString()))
    for tensor, size in zip(proto.graph.initializer, sizes, strict=True):
        if size >= BIG:
            tensor.ClearField("raw_data")
            tensor.ClearField("float_data")
    assert stripped == proto


def test_data_in_attributes_and_bodies_goes_too() -> None:
    tensor = numpy_helper.from_array(np.zeros(BIG, np.float32), "t")
    body = helper.make_graph([node("Constant", [], ["c"], value=tensor)], "b", [], [value("c", [BIG])], [tensor])
    proto = model(
        [node("If", ["q"], ["y"], then_branch=body, else_branch=body)], [value("q", [], onnx.TensorProto.BOOL)],
        [value("y", None)],
    )  # fmt: skip
    stripped = strip_tensor_data(proto.SerializeToString())
    assert len(stripped) < 2000
    branch = onnx.ModelProto.FromString(stripped).graph.node[0].attribute[0].g
    assert list(branch.node[0].attribute[0].t.dims) == [BIG]
    assert list(branch.initializer[0].dims) == [BIG]


@settings(max_examples=40, deadline=None)
@given(cut=st.floats(0.01, 0.999))
def test_a_cut_file_is_noticed(cut: float) -> None:
    data = with_data([3 * BIG, 3 * BIG], raw=True).SerializeToString()
    with pytest.raises((WireError, DecodeError)):
        onnx.ModelProto.FromString(strip_tensor_data(data[: int(len(data) * cut)]))
