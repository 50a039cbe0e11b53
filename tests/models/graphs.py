"""What tests read off a built model: shapes, work of matrix products and convolutions, parameters, a run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

Shapes = dict[str, tuple[int, ...]]


def shapes_of(model: onnx.ModelProto) -> Shapes:
    """Shape of every tensor that the file describes."""
    graph = model.graph
    described = [*graph.value_info, *graph.input, *graph.output]
    shapes = {info.name: tuple(d.dim_value for d in info.type.tensor_type.shape.dim) for info in described}
    return shapes | {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}


def forward_flops(model: onnx.ModelProto) -> int:
    """Two per multiply-add of matrix products, convolutions, attention and LSTMs."""
    shapes = shapes_of(model)
    return sum(_node_flops(node, shapes) for node in model.graph.node)


def _node_flops(node: onnx.NodeProto, shapes: Shapes) -> int:
    if node.op_type not in ("MatMul", "Gemm", "Conv", "Attention", "LSTM"):
        return 0
    first, second = shapes[node.input[0]], shapes[node.input[1]]
    out = math.prod(shapes[node.output[0]])
    if node.op_type in ("MatMul", "Gemm"):
        return 2 * out * first[-1]
    if node.op_type == "Conv":
        return 2 * out * math.prod(second[1:])
    if node.op_type == "Attention":
        batch, heads, queries, width = first
        return 4 * batch * heads * queries * second[2] * width
    steps, batch, _ = first
    return 2 * steps * batch * (math.prod(second) + math.prod(shapes[node.input[2]]))


def weights(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    """Initializers without data, running statistics left out."""
    external = [t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    return [t for t in external if "running_" not in t.name]


def parameter_count(model: onnx.ModelProto) -> int:
    """Number of trained weights."""
    return sum(math.prod(t.dims) for t in weights(model))


def check(model: onnx.ModelProto) -> None:
    """Full check of the file, its own shapes against inferred ones; absent weights become inputs for that."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    kept = []
    for tensor in copy.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            copy.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        else:
            kept.append(tensor)
    del copy.graph.initializer[:]
    copy.graph.initializer.extend(kept)
    onnx.checker.check_model(copy, full_check=True)
    onnx.shape_inference.infer_shapes(copy, check_type=True, strict_mode=True, data_prop=True)


def run(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[np.ndarray]:
    """Results of a model with weights."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def values(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Weights and constants by name."""
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
