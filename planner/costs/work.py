"""The work of each node as frameworks run it: views are free, and some groups of nodes are one kernel.

What eager frameworks fuse, and nothing else: the bias sum after a matrix product runs inside it; GELU and SiLU written
out by an exporter are one kernel; so is attention where `fused` is set: no traffic for the score matrix, and the score
product once more in backward. A NaN guard that an exporter puts around softmax costs nothing. Products with expert
weights that were gathered for each token are grouped products over the stored weights. Transposing and slicing make
views; a copy is made where a reshape or a batched product cannot read one.

Work that the file does not show, but training does, stands beside the node's own: an unfolded batch normalisation, and,
where the graph ends at logits, the cross-entropy loss over them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.costs.precision import Precision
from planner.costs.rates import kernel_rates
from planner.costs.winograd import FastConvolutions, fast_convolutions
from planner.graph import DType, Graph, Node, Tensor, TensorKind
from planner.hardware.types import Device
from planner.operators.regions import Attention, ExpertProduct, find_activations, find_attention, find_expert_products
from planner.operators.site import rule_of
from planner.operators.specs import call_classes
from planner.operators.storage import Storages
from planner.operators.types import OpSpec
from planner.operators.unseen import folded_batchnorms, logits_of

_COLUMNS = (
    "matrix", "vector", "bytes", "kernels",
    "input_grad", "weight_grad", "back_vector", "back_bytes", "back_kernels",
)  # fmt: skip
_NORM_PASSES = 3
"""Statistics, then read and write."""
_NORM_BACK_PASSES = 5
"""Both reductions read the input and the gradient; then input and gradient in, gradient out."""


@dataclass(frozen=True)
class Work:
    """Work of each node after fusion; float64 arrays of shape [nodes].

    Attributes:
        matrix: forward matrix flops.
        vector: forward element-wise flops.
        bytes: forward traffic.
        kernels: forward kernels, those that a library launches by itself at their share of a launch's time.
        input_grad: backward matrix flops towards activations, recomputation inside fused kernels included.
        weight_grad: backward matrix flops towards weights.
        back_vector: backward element-wise flops.
        back_bytes: backward traffic.
        back_kernels: backward kernels, likewise.
        beside: forward traffic of memory-bound kernels that run beside the node's own (batch normalisation, loss).
        back_beside: their backward traffic.
        types: the type that the matrix units multiply, by node.
        matrix_share: what the node's kernel reaches of a plain matrix product's rate.
        fast: the convolutions that fewer multiplications can do.
    """

    matrix: np.ndarray
    vector: np.ndarray
    bytes: np.ndarray
    kernels: np.ndarray
    input_grad: np.ndarray
    weight_grad: np.ndarray
    back_vector: np.ndarray
    back_bytes: np.ndarray
    back_kernels: np.ndarray
    beside: np.ndarray
    back_beside: np.ndarray
    types: tuple[DType, ...]
    matrix_share: np.ndarray
    fast: FastConvolutions


def training_types(own: DType, precision: Precision) -> Mapping[DType, DType]:
    """The type in which a tensor of each file type is computed: the model's own type follows the precision."""
    return {dtype: precision.compute if dtype is own else dtype for dtype in DType}


def node_work(
    graph: Graph,
    specs: Sequence[OpSpec],
    sizes: Mapping[DType, float],
    types: Mapping[DType, DType],
    *,
    fused: bool,
    unfold_batchnorm: bool,
    storages: Storages,
    device: Device,
    loss_bytes: float = 0.0,
) -> Work:
    """Work of each node in the training precision, groups that run as one kernel put on their last node.

    Args:
        graph: the graph.
        specs: one description a node.
        sizes: bytes an element takes in training, by file type.
        types: type it is computed in, by file type.
        fused: attention runs as one kernel.
        unfold_batchnorm: convolutions with a folded batch normalisation run it after themselves.
        storages: which tensors share memory.
        device: whose software's launches, attention kernel and loss are counted.
        loss_bytes: bytes an element takes in the loss that follows a graph that ends at logits; 0 for no loss.
    """
    classes = call_classes(graph)
    own = [_float_type_of(graph, i) for i in classes.first]
    library = min(1.0, device.stack.library_launch_s / (device.launch_s or math.inf))
    rows = np.array([_row(specs[i], sizes[dtype], library) for i, dtype in zip(classes.first, own, strict=True)])
    rows = rows.reshape(-1, len(_COLUMNS))[classes.index]
    dtypes = [own[k] for k in classes.index.tolist()]
    _fuse_bias(graph, specs, rows)
    taken: set[int] = set()
    regions = find_attention(graph)
    _free_views(graph, specs, rows, sizes, regions if fused else (), storages)
    for region in regions:
        taken.update(region.nodes)
        _fuse_attention(graph, specs, rows, region, sizes, fused)
    for activation in find_activations(graph):
        if not taken.intersection(activation.nodes):
            _fuse_activation(graph, rows, activation.nodes, activation.source, sizes)
    for expert in find_expert_products(graph):
        _group_experts(graph, rows, expert, sizes)
    columns = dict(zip(_COLUMNS, rows.T, strict=True))
    beside = np.zeros((2, len(graph.nodes)))
    if unfold_batchnorm:
        for i in folded_batchnorms(graph):
            result = graph.tensors[graph.nodes[i].outputs[0]]
            passes = np.array([_NORM_PASSES, _NORM_BACK_PASSES])
            beside[:, i] = passes * result.elements * sizes[result.dtype]
    if device.stack.accumulation_bytes:
        elements = [sum(graph.parameters[p].elements for p in weights) for weights in graph.node_parameters]
        beside[1] += device.stack.accumulation_bytes * np.array(elements, dtype=float)
    if loss_bytes:
        _add_loss(graph, columns, beside, sizes, loss_bytes, device.stack.loss_passes)
    return Work(
        **columns,
        beside=beside[0],
        back_beside=beside[1],
        types=tuple(types[d] for d in dtypes),
        matrix_share=kernel_rates(graph, regions if fused else (), sizes, device),
        fast=fast_convolutions(graph, sizes),
    )


def _row(spec: OpSpec, width: float, library: float) -> tuple[float, ...]:
    d = spec.details
    forward = d.get("forward_float_elements", spec.forward_bytes / 4) * width + d.get("forward_fixed_bytes", 0.0)
    backward = d.get("backward_float_elements", spec.backward_bytes / 4) * width + d.get("backward_fixed_bytes", 0.0)
    towards = spec.input_grad_matrix_flops + d.get("recompute_matrix_flops", 0.0)
    kernels, back_kernels = (
        count - (1 - library) * d.get(name, 0.0)
        for name, count in (("library_kernels", spec.kernels), ("library_back_kernels", spec.backward_kernels))
    )
    return (
        spec.matrix_flops, spec.vector_flops, forward, kernels,
        towards, spec.weight_grad_matrix_flops, spec.backward_vector_flops, backward, back_kernels,
    )  # fmt: skip


def _float_type_of(graph: Graph, i: int) -> DType:
    """File type of a node's floating-point operands (of its results where it has none)."""
    node = graph.nodes[i]
    for name in (*node.inputs, *node.outputs):
        tensor = graph.tensors.get(name) if name else None
        if tensor is not None and tensor.dtype.is_float and tensor.shape:
            return tensor.dtype
    return DType.FLOAT32


def _fuse_bias(graph: Graph, specs: Sequence[OpSpec], rows: np.ndarray) -> None:
    """A weight vector added right after a matrix product costs nothing of its own."""
    for i, node in enumerate(graph.nodes):
        if node.op != "Add" or len(node.inputs) != 2:
            continue
        kinds = [graph.tensors[n].kind for n in node.inputs]
        if sorted(kinds) != [TensorKind.ACTIVATION, TensorKind.PARAMETER]:
            continue
        product, bias = node.inputs if kinds[1] is TensorKind.PARAMETER else reversed(node.inputs)
        at = graph.producer.get(product, -1)
        alone = graph.consumers.get(product, ()) == (i,)
        if at >= 0 and alone and specs[at].weight_grad_matrix_flops and len(graph.tensors[bias].shape) == 1:
            rows[i] = 0.0


def _fuse_attention(
    graph: Graph,
    specs: Sequence[OpSpec],
    rows: np.ndarray,
    region: Attention,
    sizes: Mapping[DType, float],
    fused: bool,
) -> None:
    """One kernel forward, two backward: query, key, value, result and mask pass through memory once."""
    if region.softmax < 0:
        if not fused:
            _add_score_traffic(rows, region, sizes[graph.tensors[region.query].dtype])
        return
    nodes = list(region.nodes)
    if not fused:
        for i in nodes:
            if graph.nodes[i].op == "IsNaN" or (graph.nodes[i].op == "Where" and i > region.softmax):
                rows[i] = 0.0
        return
    first = next(i for i in nodes if specs[i].matrix_flops)
    operands = [graph.tensors[n] for n in (region.query, region.key, region.value)]
    result = graph.tensors[region.output]
    carried = sum(t.elements * sizes[t.dtype] for t in operands)
    made = result.elements * sizes[result.dtype]
    mask = graph.tensors[region.mask].elements * sizes[graph.tensors[region.mask].dtype] if region.mask else 0.0
    total = rows[nodes].sum(axis=0)
    trains = total[4] > 0
    forward = (total[0], rows[region.softmax, 1], carried + made + mask, 1.0)
    backward = (total[4] + specs[first].matrix_flops, 0.0, rows[region.softmax, 6], 2 * (carried + made) + mask, 2.0)
    rows[nodes] = 0.0
    rows[nodes[-1]] = (*forward, *(backward if trains else (0.0,) * 5))


def _add_score_traffic(rows: np.ndarray, region: Attention, width: float) -> None:
    """An attention operator that is not fused writes and reads scores and probabilities."""
    scores = math.prod(region.scores) * width
    last = region.nodes[-1]
    rows[last, 2] += 4 * scores
    rows[last, 3] += 3
    if rows[last, 8]:
        rows[last, 7] += 6 * scores
        rows[last, 8] += 3


def _fuse_activation(
    graph: Graph, rows: np.ndarray, members: Sequence[int], source: str, sizes: Mapping[DType, float]
) -> None:
    """One pass over argument and result; backward reads the argument and the result's gradient and writes one."""
    nodes = list(members)
    tensor = graph.tensors[source]
    size = tensor.elements * sizes[tensor.dtype]
    total = rows[nodes].sum(axis=0)
    trains = total[8] > 0
    rows[nodes] = 0.0
    rows[nodes[-1]] = (0.0, total[1], 2 * size, 1.0, 0.0, 0.0, total[6], 3 * size * trains, 1.0 * trains)


def _group_experts(graph: Graph, rows: np.ndarray, expert: ExpertProduct, sizes: Mapping[DType, float]) -> None:
    """A grouped product reads the stored weights once; half of its backward work makes their gradient."""
    node = graph.nodes[expert.product]
    gathered = graph.nodes[expert.gather].outputs[0]
    names = [*(n for n in node.inputs if n != gathered), *node.outputs]
    carried = sum(graph.tensors[n].elements * sizes[graph.tensors[n].dtype] for n in names)
    weight = graph.tensors[expert.weight]
    stored = min(weight.elements, graph.tensors[gathered].elements) * sizes[weight.dtype]
    back = rows[expert.product, 4] + rows[expert.product, 5]
    rows[expert.gather] = 0.0
    rows[expert.product, 2] = carried + stored
    rows[expert.product, 4:6] = back / 2
    rows[expert.product, 7] = 2 * (carried + stored) if back else 0.0


def _add_loss(
    graph: Graph,
    columns: Mapping[str, np.ndarray],
    beside: np.ndarray,
    sizes: Mapping[DType, float],
    loss_bytes: float,
    passes: tuple[float, float],
) -> None:
    """A cross-entropy over the logits where the graph ends at them: cast to the loss's type, log-softmax, and back."""
    name = logits_of(graph)
    if not name:
        return
    logits, at = graph.tensors[name], graph.producer[name]
    width = sizes[logits.dtype]
    cast = width + loss_bytes if loss_bytes != width else 0.0
    beside[:, at] += logits.elements * (np.array(passes) * loss_bytes + cast)
    columns["kernels"][at] += 2 + (cast > 0)
    columns["back_kernels"][at] += 2 + (cast > 0)


def _free_views(
    graph: Graph,
    specs: Sequence[OpSpec],
    rows: np.ndarray,
    sizes: Mapping[DType, float],
    regions: Sequence[Attention],
    storages: Storages,
) -> None:
    """Views cost nothing; reshapes that must copy cost the copy.

    A strided view is copied by a batched product that is not part of a fused region. What cuts a tensor in parts or
    repeats it (Split, Slice, Expand) still has to put the gradients together.
    """
    fused = {i for region in regions for i in region.nodes}
    for i, (node, spec) in enumerate(zip(graph.nodes, specs, strict=True)):
        if i in fused or not node.outputs:
            continue
        if spec.details.get("alias"):
            readers = (r for name in node.outputs for r in graph.consumers.get(name, ()))
            if not any(graph.nodes[r].op == "MatMul" and r not in fused for r in readers):
                rows[i, :4] = 0.0
                if node.op == "Transpose":
                    rows[i] = 0.0
        elif spec.view and rule_of(node.op).strides and storages.root(node.outputs[0]) == node.outputs[0]:
            tensor = graph.tensors[node.outputs[0]]
            if tensor.kind is TensorKind.ACTIVATION:
                rows[i, 2] += 2 * tensor.elements * sizes[tensor.dtype]
                rows[i, 3] += 1


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
