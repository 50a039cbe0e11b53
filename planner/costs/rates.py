"""What the kernels of a stack reach of a plain matrix product's rate: fused attention, products of odd rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from planner.graph import DType, Graph, Node, TensorKind
from planner.hardware.types import Device
from planner.operators.types import OpSpec

_ALIGNED_BYTES = 16
"""Rows of matrices that start at multiples of this feed matrix units at full rate (cuBLAS documentation)."""
_COMPARISONS = frozenset({"Trilu", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"})
"""Operators by one of which every causal mask is made."""
_WINDOWS = ("left_window_size", "local_window_size")
"""Attributes by which an attention says how far back a query sees."""


def kernel_rates(
    graph: Graph, specs: Sequence[OpSpec], sizes: Mapping[DType, float], device: Device, *, fused: bool
) -> np.ndarray:
    """Part of a plain product's rate, float64 [nodes]: above 1 for attention that leaves out what its mask hides.

    Args:
        graph: the graph.
        specs: one description a node.
        sizes: bytes an element takes in training, by file type.
        device: with the stack that has the kernels.
        fused: attention runs as one kernel where one can do it.
    """
    stack, rates = device.stack, np.ones(len(graph.nodes))
    if stack.unaligned_rate != 1.0:
        rates[list(unaligned_products(graph, specs, sizes, fused=fused))] = stack.unaligned_rate
    for i, spec in enumerate(specs):
        if attends(spec) and not spec.scores_in_memory(fused):
            part = stack.causal_part if is_causal(graph, graph.nodes[i]) else 1.0
            rates[i] = stack.attention_on(device.name) / part
    return rates


def attends(spec: OpSpec) -> bool:
    """Whether an operator is an attention, as one kernel or step by step."""
    return "score_elements" in spec.details


def unaligned_products(
    graph: Graph, specs: Sequence[OpSpec], sizes: Mapping[DType, float], *, fused: bool
) -> dict[int, int]:
    """By node, the row length of products of computed matrices whose rows do not start at multiples of 16 bytes.

    Heads of 150 elements make such rows. A fused attention kernel pads them by itself.
    """
    found: dict[int, int] = {}
    for i, (node, spec) in enumerate(zip(graph.nodes, specs, strict=True)):
        if attends(spec) and spec.scores_in_memory(fused):
            operands = node.inputs[:1]
        elif node.op == "MatMul" and not graph.node_parameters[i]:
            operands = node.inputs
        else:
            continue
        shapes = [_rows(graph, node, name) for name in operands]
        width = sizes[graph.tensors[operands[0]].dtype]
        odd = [length for length in shapes if length > 1 and length * width % _ALIGNED_BYTES]
        if odd:
            found[i] = odd[0]
    return found


def _rows(graph: Graph, node: Node, name: str) -> int:
    """Elements of a row of an operand; of heads that lie side by side, of one head."""
    shape, heads = graph.tensors[name].shape, node.attributes.get("q_num_heads", 1)
    if len(shape) < 2:
        return 1
    return shape[-1] // heads if len(shape) == 3 and isinstance(heads, int) and heads > 1 else shape[-1]


def is_causal(graph: Graph, node: Node) -> bool:
    """Whether a query of an attention sees the keys up to its own alone: the operator says so, or its mask is made by a
    comparison of positions or cut to a triangle. A mask of a kind for each sample does not count, nor does a window:
    what it hides is left out of the work already."""
    if any(isinstance(size := node.attributes.get(name), int) and size >= 0 for name in _WINDOWS):
        return False
    if node.attributes.get("is_causal") or node.attributes.get("unidirectional"):
        return True
    mask = graph.tensors.get(node.inputs[3]) if len(node.inputs) > 3 else None
    if mask is None or len(mask.shape) < 2 or mask.shape[-2] < 2 or math.prod(mask.shape[:-2]) != 1:
        return False
    names, seen = [mask.name], set[str]()
    while names:
        name = names.pop()
        at = graph.producer.get(name)
        if at is None or name in seen:
            continue
        seen.add(name)
        if graph.nodes[at].op in _COMPARISONS:
            return True
        names += [each for each in graph.nodes[at].inputs if each]
    return mask.kind is TensorKind.CONSTANT
