"""Bytes of a graph's tensors in the training precision, node by node."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from planner.graph import DType, Graph, TensorKind
from planner.operators.regions import find_expert_products


def tensor_bytes(graph: Graph, sizes: Mapping[DType, float]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of each node's results, and of the gradients of its results and computed operands.

    Args:
        graph: the graph.
        sizes: bytes an element takes in training, by file type.

    Returns:
        Two float64 arrays of shape [nodes]: results, and what is transient while the node's backward pass runs.
    """
    lookup = {name: t.elements * sizes[t.dtype] for name, t in graph.tensors.items()}
    lookup.update((graph.nodes[e.gather].outputs[0], 0.0) for e in find_expert_products(graph))
    outputs = np.zeros(len(graph.nodes))
    workspace = np.zeros(len(graph.nodes))
    for i, node in enumerate(graph.nodes):
        results = [n for n in node.outputs if n in lookup]
        operands = [n for n in dict.fromkeys(node.inputs) if n and graph.tensors[n].kind is TensorKind.ACTIVATION]
        outputs[i] = sum(lookup[n] for n in results)
        workspace[i] = sum(lookup[n] for n in (*results, *operands) if graph.tensors[n].dtype.is_float)
    return outputs, workspace
