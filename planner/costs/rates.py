"""What the kernels of a stack reach of a plain matrix product's rate: fused attention, products of odd rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from planner.graph import DType, Graph, TensorKind
from planner.hardware.types import Device
from planner.operators.regions import Attention

_ALIGNED_BYTES = 16
"""Rows of matrices that start at multiples of this feed matrix units at full rate (cuBLAS documentation)."""
_COMPARISONS = frozenset({"Trilu", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"})
"""Operators by one of which every causal mask is made."""


def kernel_rates(graph: Graph, fused: Sequence[Attention], sizes: Mapping[DType, float], device: Device) -> np.ndarray:
    """Part of a plain product's rate, float64 [nodes]: above 1 for attention that leaves out what its mask hides.

    Args:
        graph: the graph.
        fused: attention that runs as one kernel, put on its last node.
        sizes: bytes an element takes in training, by file type.
        device: with the stack that has the kernels.
    """
    stack, rates = device.stack, np.ones(len(graph.nodes))
    if stack.unaligned_rate != 1.0:
        rates[list(unaligned_products(graph, fused, sizes))] = stack.unaligned_rate
    for region in fused:
        part = stack.causal_part if is_causal(graph, region) else 1.0
        rates[region.nodes[-1]] = stack.attention_on(device.name) / part
    return rates


def unaligned_products(graph: Graph, fused: Sequence[Attention], sizes: Mapping[DType, float]) -> dict[int, int]:
    """By node, the row length of products of two computed matrices whose rows do not start at multiples of 16 bytes.

    Heads of 150 elements make such rows. A fused attention kernel pads them by itself.
    """
    padded = {i for region in fused for i in region.nodes}
    found: dict[int, int] = {}
    for i, node in enumerate(graph.nodes):
        if node.op != "MatMul" or graph.node_parameters[i] or i in padded:
            continue
        operands = [graph.tensors[name] for name in node.inputs]
        width = sizes[operands[0].dtype]
        lengths = [t.shape[-1] for t in operands if len(t.shape) > 1]
        odd = [length for length in lengths if length > 1 and length * width % _ALIGNED_BYTES]
        if odd:
            found[i] = odd[0]
    return found


def is_causal(graph: Graph, region: Attention) -> bool:
    """Whether a query sees the keys up to its own alone: the operator says so, or its mask is made by a comparison of
    positions or cut to a triangle. A constant square mask counts too; one of a kind for each sample does not."""
    if graph.nodes[region.nodes[-1]].attributes.get("is_causal"):
        return True
    mask = graph.tensors.get(region.mask)
    if mask is None or mask.shape[-2:] != region.scores[-2:] or math.prod(mask.shape[:-2]) != 1:
        return False
    names, seen = [region.mask], set[str]()
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
