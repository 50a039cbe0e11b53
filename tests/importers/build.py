"""Small ONNX models for tests, written with `onnx.helper`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

F32, I64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
Shape = Sequence[int | str | None]


def value(name: str, shape: Shape | None, element: int = F32) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, element, shape)


def ints(name: str, values: Sequence[int] | int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, dtype=np.int64), name)


def absent(name: str, shape: Sequence[int], element: int = F32) -> onnx.TensorProto:
    """An initializer whose data lies in a file that does not exist."""
    tensor = TensorProto(name=name, data_type=element, dims=shape, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="nowhere.bin")
    return tensor


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, **attributes)


def scoped(proto: onnx.NodeProto, *scopes: str, classes: Sequence[str] = ()) -> onnx.NodeProto:
    """Add the metadata by which the dynamo exporter says where a node comes from; the last scope is the operation."""
    proto.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=repr(["", *scopes]))
    if classes:
        proto.metadata_props.add(key="pkg.torch.onnx.class_hierarchy", value=repr(["Model", *classes]))
    return proto


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: Sequence[onnx.TensorProto] = (),
    *,
    opset: int = 20,
    ir_version: int = 10,
    domains: Mapping[str, int] | None = None,
    functions: Sequence[onnx.FunctionProto] = (),
    value_info: Sequence[onnx.ValueInfoProto] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "test", inputs, outputs, list(initializers), value_info=list(value_info))
    imports = [helper.make_opsetid("", opset)]
    imports += [helper.make_opsetid(domain, version) for domain, version in (domains or {}).items()]
    return helper.make_model(
        graph, opset_imports=imports, ir_version=ir_version, functions=list(functions), producer_name="test"
    )
