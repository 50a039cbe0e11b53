"""An independent count of contraction work, for checking shapes and repeats of imported graphs."""

from __future__ import annotations

import math

from planner.graph import Graph, Node


def matrix_flops(graph: Graph) -> int:
    """2 per multiply-add of matrix products, convolutions, attention and recurrent layers."""
    return sum(_of(graph, node) * node.repeat for node in graph.nodes)


def _shape(graph: Graph, name: str) -> tuple[int, ...]:
    return graph.tensors[name].shape


def _of(graph: Graph, node: Node) -> int:
    if node.op in ("MatMul", "Gemm", "Conv", "Attention", "LSTM"):
        out = math.prod(_shape(graph, node.outputs[0]))
        first, second = _shape(graph, node.inputs[0]), _shape(graph, node.inputs[1])
    if node.op == "MatMul":
        return 2 * out * first[-1]
    if node.op == "Gemm":
        return 2 * out * first[0 if node.attributes.get("transA") else 1]
    if node.op == "Conv":
        return 2 * out * math.prod(second[1:])
    if node.op == "Attention":
        keys, value_width = second[-2], _shape(graph, node.inputs[2])[-1]
        return 2 * math.prod(first[:-1]) * keys * (first[-1] + value_width)
    if node.op == "LSTM":
        steps, batch, features = first
        directions, four_hidden, _ = second
        return 2 * steps * batch * directions * four_hidden * (features + four_hidden // 4)
    return 0
