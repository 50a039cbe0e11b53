"""Bytes of a graph's tensors in the training precision, node by node."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from planner.graph import DType, Graph, Node, Tensor, TensorKind
from planner.operators.regions import find_expert_products
from planner.operators.specs import call_classes


def tensor_bytes(graph: Graph, sizes: Mapping[DType, float]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of each node's results, and of the gradients of its results and computed operands.

    Args:
        graph: the graph.
        sizes: bytes an element takes in training, by file type.

    Returns:
        Two float64 arrays of shape [nodes]: results, and what is transient while the node's backward pass runs.
    """
    classes = call_classes(graph)
    own = np.array([_own_bytes(graph, graph.nodes[i], sizes, {}) for i in classes.first]).reshape(-1, 2)
    outputs, workspace = own[classes.index].T.copy()
    absent = {graph.nodes[e.gather].outputs[0]: 0.0 for e in find_expert_products(graph)}
    for i in {i for e in find_expert_products(graph) for i in (e.gather, e.product)}:
        outputs[i], workspace[i] = _own_bytes(graph, graph.nodes[i], sizes, absent)
    return outputs, workspace


def _own_bytes(
    graph: Graph, node: Node, sizes: Mapping[DType, float], known: Mapping[str, float]
) -> tuple[float, float]:
    """Bytes of a node's results, and of the gradients of its results and computed operands."""

    def size(tensor: Tensor) -> float:
        return known.get(tensor.name, tensor.elements * sizes[tensor.dtype])

    results = [graph.tensors[n] for n in node.outputs if n in graph.tensors]
    operands = [graph.tensors[n] for n in dict.fromkeys(node.inputs) if n]
    floats = [t for t in (*results, *(t for t in operands if t.kind is TensorKind.ACTIVATION)) if t.dtype.is_float]
    return sum(map(size, results)), sum(map(size, floats))
