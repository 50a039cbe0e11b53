"""Rates of kernels other than plain matrix products: fused attention, unaligned products, small convolutions.

Small convolutions take fewer multiplications: Winograd's minimal filtering over tiles (Lavin and Gray, CVPR 2016).

A 3 x 3 convolution of stride 1 needs 36 multiplications for 4 x 4 results of a channel pair where the plain sum takes
144: F(4x4, 3x3). Tiles of 6 x 6 inputs are transformed, 36 matrix products sum over the channels, and the products are
transformed back; the gradient towards the input is the same on the results' gradient, that towards the weights is
F(3x3, 4x4) on both. The libraries of GPUs run the three steps one after the other through memory ("non-fused"), for
which each product pays (1 + t) of its input and result for the transforms and t of them for the matrix products, with
t = 36 / 16 transformed elements for each of a channel, more where the last tiles stick out. (In profiles of cuDNN these
are the kernels `winograd_nonfused::winogradForwardData4x4`, a plain matrix product, and `winogradForwardOutput4x4`.)

It pays where products cost as much as sums do: on vector units, which is where fp32 without matrix units runs. Matrix
units multiply faster than memory can carry the transformed tiles, and their libraries do without. The scratch memory
for transformed tiles is not charged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from planner.graph import DType, Graph, Node, TensorKind, per_model
from planner.hardware.types import Device, Stack
from planner.operators.entry import JointCut, rule_of
from planner.operators.modules import PRODUCTS, find_expert_products
from planner.operators.types import OpSpec
from planner.sums import float_sum

_ALIGNED_BYTES = 16
"""Rows of matrices that start at multiples of this feed matrix units at full rate (cuBLAS documentation)."""
_COMPARISONS = frozenset({"Trilu", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"})
"""Operators that causal masks are made with."""
_WINDOWS = ("left_window_size", "local_window_size")
"""Attributes of attention operators for the size of a sliding window."""


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
    done = scores_done(graph, specs, stack, fused=fused)
    for i, spec in enumerate(specs):
        if attends(spec) and not spec.scores_in_memory(fused):
            rates[i] = stack.attention_on(device.name) / done[i]
    if device.matrix_unit > 1:
        matrices = stored_matrices(graph)
        rates *= [_filled(spec, matrices.get(i, ()), device.matrix_unit) for i, spec in enumerate(specs)]
    return rates


def scores_done(graph: Graph, specs: Sequence[OpSpec], stack: Stack, *, fused: bool) -> np.ndarray:
    """Scores that fused attention works out, over those of its description, float64 [nodes]; 1 for other nodes.

    Args:
        graph: the graph.
        specs: one description a node.
        stack: the software that has the kernels.
        fused: attention runs as one kernel where one can do it.
    """
    done = np.ones(len(graph.nodes))
    for i, spec in enumerate(specs):
        if attends(spec) and not spec.scores_in_memory(fused):
            done[i] = _scores_done(graph, graph.nodes[i], spec, stack)
    return done


def _scores_done(graph: Graph, node: Node, spec: OpSpec, stack: Stack) -> float:
    """Scores that a fused kernel works out, over those of its description (all of them, or those of a window).

    A kernel works in blocks. Under a causal mask it leaves out the hidden blocks, so that of s keys a query meets
    (s + block) / 2 on average; of a window of w keys it meets the blocks in which any query of its own block sees one.
    """
    keys, window, block = spec.details["keys"], spec.details["window"], stack.attention_block
    causal = min(1.0, stack.causal_part * (1 + (block - 1) / keys))
    if window < keys:
        met = block * (math.ceil((window - 1) / block) + 1)
        return max(1.0, min(float(met), causal * keys) / window)
    return causal if is_causal(graph, node) else 1.0


def _filled(spec: OpSpec, matrices: tuple[int, ...], unit: int) -> float:
    """Part of a matrix unit's rows and columns that a product fills: the stored matrix of a linear layer, or a head's
    elements, are padded to multiples of the unit (MaxText, docs/guides/optimization/custom_model.md)."""
    if attends(spec):
        heads = spec.details["head"], spec.details["value_head"]
        return float_sum(heads) / float_sum(_padded(size, unit) for size in heads)
    return math.prod(size / _padded(size, unit) for size in matrices[1:])


def _padded(size: float, unit: int) -> float:
    return unit * math.ceil(size / unit)


@per_model
def stored_matrices(graph: Graph) -> Mapping[int, tuple[int, ...]]:
    """By product, number, rows and columns of the matrices that are its weight: one, or one for each expert. O(nodes).

    Operators whose weights are not of that form (a convolution's window, sums over several axes) are not among them.
    """
    found = {expert.product: graph.tensors[expert.weight].shape for expert in find_expert_products(graph)}
    for i, node in enumerate(graph.nodes):
        rule = rule_of(node.op)
        stacked = node.op in PRODUCTS or rule.joint is JointCut.EXPERTS
        for p in graph.node_parameters[i] if rule.heavy else ():
            shape = graph.parameters[p].shape
            if len(shape) == 2 or (stacked and len(shape) == 3):
                found[i] = (1, *shape)[-3:]
    return found


def expert_counts(graph: Graph) -> np.ndarray:
    """[nodes] experts with whose matrices a product multiplies; 1 for any other node."""
    counts = np.ones(len(graph.nodes))
    for i, (count, *_) in stored_matrices(graph).items():
        counts[i] = count
    return counts


def attends(spec: OpSpec) -> bool:
    """Whether an operator is an attention, as one kernel or step by step."""
    return "score_elements" in spec.details


def unaligned_products(
    graph: Graph, specs: Sequence[OpSpec], sizes: Mapping[DType, float], *, fused: bool
) -> dict[int, int]:
    """By node, the row length of products of computed matrices whose rows do not start at multiples of 16 bytes.

    Heads of 150 elements make such rows. A fused attention kernel pads them by itself.
    """
    row_lengths: dict[int, int] = {}
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
            row_lengths[i] = odd[0]
    return row_lengths


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


_TILE = 4
"""Results of a tile, each way."""
_TRANSFORMED = (_TILE + 2) ** 2
"""Elements of a transformed tile, and multiplications for it and a pair of channels."""


def fast_convolutions(graph: Graph, sizes: Mapping[DType, float]) -> np.ndarray:
    """What the method multiplies over the plain sum, and the bytes of its transforms and of its matrix products.

    Args:
        graph: the graph.
        sizes: bytes an element takes in training, by file type.

    Returns:
        float64 [3, nodes]; 1, 0 and 0 where the method does not apply. O(nodes).
    """
    rows = np.tile([1.0, 0.0, 0.0], (len(graph.nodes), 1))
    for i, node in enumerate(graph.nodes):
        if _eligible(graph, node):
            rows[i] = _costs(graph, node, sizes)
    return rows.T


def _eligible(graph: Graph, node: Node) -> bool:
    """A 3 x 3 convolution of stride 1, undilated, all input channels to all results."""
    if node.op != "Conv":
        return False
    weight = graph.tensors[node.inputs[1]]
    plain = all(v == 1 for key in ("strides", "dilations") for v in _ints(node, key))
    return weight.shape[2:] == (3, 3) and plain and node.attributes.get("group", 1) == 1


def _ints(node: Node, key: str) -> tuple[int, ...]:
    value = node.attributes.get(key, ())
    return tuple(v for v in value if isinstance(v, int)) if isinstance(value, tuple) else ()


def _costs(graph: Graph, node: Node, sizes: Mapping[DType, float]) -> tuple[float, float, float]:
    data, weight, result = (graph.tensors[n] for n in (node.inputs[0], node.inputs[1], node.outputs[0]))
    rows, columns = result.shape[2:]
    width = sizes[result.dtype]
    tiles = result.shape[0] * -(-rows // _TILE) * -(-columns // _TILE)
    channels = weight.shape[1] + weight.shape[0]
    transformed = _TRANSFORMED * tiles * channels
    multiplied = _TRANSFORMED * tiles / (9 * result.shape[0] * rows * columns)
    product = transformed + _TRANSFORMED * weight.shape[1] * weight.shape[0]
    return multiplied, (data.elements + result.elements + transformed) * width, product * width
