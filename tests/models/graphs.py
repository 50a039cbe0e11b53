"""What tests read off a built model: shapes, work of matrix products and convolutions, parameters, a run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

import models

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


def gpt(layers: int, hidden: int, heads: int, vocab: int, positions: int, **options: Any) -> Any:
    """The configuration of a GPT of some sizes; options are further keys."""
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": vocab, "n_positions": positions}
    return models.size_of(model_type="gpt2", **sizes, **options)


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


def with_scans_written_out(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with each state-space scan as what it stands for: the standard's linear attention."""
    if all(node.op_type != "StateSpaceScan" for node in model.graph.node):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    shapes, nodes = shapes_of(model), list(copy.graph.node)
    del copy.graph.node[:]
    for node in nodes:
        copy.graph.node.extend(_scan(copy, node, shapes) if node.op_type == "StateSpaceScan" else [node])
    return copy


def _scan(model: onnx.ModelProto, node: onnx.NodeProto, shapes: Shapes) -> list[onnx.NodeProto]:
    """`y = C^T S + D x`, `S = exp(-s exp(A_log)) S + B (s x)^T`, `s = softplus(step + bias)`; B and C are a group's."""
    sizes = {a.name: a.i for a in node.attribute}
    heads, groups, prefix = sizes["num_heads"], sizes["num_groups"], f"{node.name}/"
    x, b, c, step, a_log, skip, bias = node.input
    width, state = shapes[x][2] // heads, shapes[b][2] // groups
    nodes: list[onnx.NodeProto] = []

    def constant(*numbers: int) -> str:
        name = f"{prefix}{len(model.graph.initializer)}"
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(numbers, np.int64), name))
        return name

    def made(op: str, *inputs: str, results: int = 1, **attributes: Any) -> str:
        name = f"{prefix}{op}{len(nodes)}"
        outputs = [name, f"{name}_state"][:results]
        nodes.append(onnx.helper.make_node(op, list(inputs), outputs, name=name, **attributes))
        return name

    def repeated(directions: str) -> str:
        parts = made("Unsqueeze", made("Reshape", directions, constant(0, 0, groups, state)), constant(3))
        parts = made("Expand", parts, constant(1, 1, 1, heads // groups, 1))
        return made("Reshape", parts, constant(0, 0, heads * state))

    def per_head(tensor: str) -> str:
        return made("Reshape", tensor, constant(0, 0, heads, width))

    size = made("Softplus", made("Add", step, bias))
    decay = made("Neg", made("Mul", size, made("Exp", a_log)))
    value = made("Mul", per_head(x), made("Unsqueeze", size, constant(3)))
    flat = made("Reshape", value, constant(0, 0, heads * width))
    y = made(
        "LinearAttention", repeated(c), repeated(b), flat, "", decay, results=2,
        q_num_heads=heads, kv_num_heads=heads, update_rule="gated", scale=1.0,
    )  # fmt: skip
    kept = made("Mul", per_head(x), made("Unsqueeze", skip, constant(1)))
    total = made("Add", per_head(y), kept)
    nodes.append(onnx.helper.make_node("Reshape", [total, constant(0, 0, heads * width)], [node.output[0]]))
    return nodes
