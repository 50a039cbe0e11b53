"""The work of each node as frameworks run it: views are free, and some groups of nodes are one kernel.

What eager frameworks fuse: the bias sum after a matrix product runs inside it; so does all of
attention where `fused` is set: no traffic for the score matrix, and the score product once more in backward. What a
stack fuses beyond that (`Stack.fused`) reads its operands and writes its result, once. Products
with expert weights that were gathered for each token are grouped products over the stored weights. Transposing and
slicing make views; a copy is made where a reshape or a batched product cannot read one.

Work that the file does not show, but training does, stands beside the node's own: where the graph ends at logits, the
cross-entropy loss over them. A loss in the graph costs the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.costs.precision import NarrowProducts, Precision, product_formats
from planner.costs.rates import expert_counts, fast_convolutions, kernel_rates, scores_done
from planner.graph import DType, Graph, Node, Tensor, TensorKind
from planner.hardware.types import Device
from planner.operators.entry import rule_of
from planner.operators.modules import ExpertProduct, find_expert_products
from planner.operators.rewriting import fused_kernels
from planner.operators.saved import float_type, logits_of
from planner.operators.specs import by_class, call_classes, needs_gradient, nodes_where
from planner.operators.storage import Storages
from planner.operators.types import OpSpec
from planner.sums import float_sum

_COLUMNS = (
    "matrix", "vector", "bytes", "kernels",
    "input_grad", "weight_grad", "back_vector", "back_bytes", "back_kernels",
)  # fmt: skip


@dataclass(frozen=True)
class OperatorWork:
    """Work of each node after fusion; arrays of shape [nodes], float64 but for names.

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
        beside: forward traffic of memory-bound kernels that run beside the node's own (the loss).
        back_beside: their backward traffic.
        formats: the format that the matrix units multiply in, by node, as devices name it.
        matrix_share: what the node's kernel reaches of a plain matrix product's rate.
        multiplied: multiplications of a fast convolution over those of the plain sum; 1 where there is none.
        transform_bytes: traffic of its transforms for one product (forward, or one of both gradients).
        product_bytes: traffic of its matrix products; 0 where there is none.
        scores: elements of attention scores that the node has in memory.
        experts: products that the node is run as, one for each expert; 1 where it is one, or one grouped kernel.
        executed: part of the node's matrix work that its kernel does: below 1 for fused attention under a causal mask.
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
    formats: np.ndarray
    matrix_share: np.ndarray
    multiplied: np.ndarray
    transform_bytes: np.ndarray
    product_bytes: np.ndarray
    scores: np.ndarray
    experts: np.ndarray
    executed: np.ndarray

    def of(self, nodes: np.ndarray) -> OperatorWork:
        """The work of some nodes, in arrays of their own."""
        return OperatorWork(**{name: column[nodes] for name, column in vars(self).items()})

    def kinds(self, graph: Graph) -> tuple[np.ndarray, np.ndarray]:
        """Nodes with equal work, found among those that make the same call.

        Returns:
            A node of each kind, ascending, and for each node the number of its kind. O(nodes log nodes).
        """
        classes = call_classes(graph)
        kind = np.asarray(classes.first, dtype=np.int64)[classes.index]
        own = np.logical_or.reduce([column != column[kind] for column in vars(self).values()])
        first, index = np.unique(np.where(own, np.arange(len(kind)), kind), return_inverse=True)
        return first, index


def node_work(
    graph: Graph,
    specs: Sequence[OpSpec],
    sizes: Mapping[DType, float],
    precision: Precision,
    *,
    narrow: NarrowProducts | None,
    fused: bool,
    storages: Storages,
    device: Device,
    loss_bytes: float = 0.0,
) -> OperatorWork:
    """Work of each node in the training precision, groups that run as one kernel put on their last node.

    Args:
        graph: the graph.
        specs: one description a node.
        sizes: bytes an element takes in training, by file type.
        precision: what the model's own floating-point type is computed in.
        narrow: the products in its narrow format; None where it has none.
        fused: attention runs as one kernel.
        storages: which tensors share memory.
        device: whose software's launches, attention kernel and loss are counted.
        loss_bytes: bytes an element takes in the loss that follows a graph that ends at logits; 0 for no loss.
    """
    classes = call_classes(graph)
    firsts = [_float_type_of(graph, i) for i in classes.first]
    launch_share = min(1.0, device.stack.kernel_launch_s / (device.launch_s or math.inf))
    rows = np.array(
        [_row(specs[i], sizes[dtype], launch_share) for i, dtype in zip(classes.first, firsts, strict=True)]
    )
    rows = rows.reshape(-1, len(_COLUMNS))[classes.index]
    dtypes = [firsts[k] for k in classes.index.tolist()]
    _fuse_bias(graph, specs, rows)
    _free_views(graph, specs, rows, sizes, storages)
    scores = np.array(by_class(graph, lambda i: specs[i].scores_in_memory(fused)))
    _write_scores(rows, specs, scores, np.array([sizes[d] for d in dtypes]))
    for kernel in fused_kernels(graph, device.stack.fused):
        _fuse(graph, rows, kernel, sizes)
    for expert in find_expert_products(graph):
        _group_experts(graph, rows, expert, sizes)
    beside = np.zeros((2, len(graph.nodes)))
    if device.stack.accumulation_bytes:
        elements = [sum(graph.parameters[p].elements for p in weights) for weights in graph.node_parameters]
        beside[1] += device.stack.accumulation_bytes * np.array(elements, dtype=float)
    if loss_bytes:
        _add_loss(graph, specs, rows, beside, sizes, loss_bytes, device.stack.loss_passes)
    if narrow:
        narrow.change(graph, rows, beside, sizes, launch_share)
    model_type = float_type(graph)
    formats = product_formats([precision.compute if d is model_type else d for d in dtypes], precision, narrow)
    multiplied, transform_bytes, product_bytes = fast_convolutions(graph, sizes)
    return OperatorWork(
        **dict(zip(_COLUMNS, rows.T, strict=True)),
        beside=beside[0],
        back_beside=beside[1],
        formats=np.array(formats, dtype=str),
        matrix_share=kernel_rates(graph, specs, sizes, device, fused=fused),
        multiplied=multiplied,
        transform_bytes=transform_bytes,
        product_bytes=product_bytes,
        scores=scores,
        experts=np.ones(len(graph.nodes)) if device.stack.grouped_experts else expert_counts(graph),
        executed=np.minimum(1.0, scores_done(graph, specs, device.stack, fused=fused)),
    )


def _row(spec: OpSpec, width: float, launch_share: float) -> tuple[float, ...]:
    d = spec.details
    forward, backward = (each.float_elements * width + each.fixed_bytes for each in (spec.forward, spec.backward))
    towards = spec.input_grad_matrix_flops + d.get("recompute_matrix_flops", 0.0)
    kernels, back_kernels = (
        count - (1 - launch_share) * d.get(name, 0.0)
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


def _fuse(graph: Graph, rows: np.ndarray, kernel: Sequence[int], sizes: Mapping[DType, float]) -> None:
    """Merge some nodes' work into one kernel that reads operands, writes the result, and recomputes in backward."""

    def size(names: Iterable[str]) -> float:
        return float_sum(graph.tensors[name].elements * sizes[graph.tensors[name].dtype] for name in names)

    *inner, last = kernel
    made = {name for i in inner for name in graph.nodes[i].outputs}
    read = dict.fromkeys(name for i in kernel for name in graph.nodes[i].inputs if name and name not in made)
    operands, result = size(read), size(graph.nodes[last].outputs[:1])
    carrying = needs_gradient(graph)
    gradients = size(name for name in read if name in carrying)
    recomputed = rows[inner, 1].sum()
    rows[last, [1, 2, 3]] = rows[kernel, 1].sum(), operands + result, 1.0
    if gradients:
        rows[last, [6, 7, 8]] = rows[kernel, 6].sum() + recomputed, result + operands + gradients, 1.0
    rows[inner] = 0.0


def _write_scores(rows: np.ndarray, specs: Sequence[OpSpec], scores: np.ndarray, widths: np.ndarray) -> None:
    """Attention that is not one kernel writes and reads its scores step by step, and computes none of them twice.

    Args:
        rows: the work of each node, changed in place.
        specs: one description a node.
        scores: elements of the score matrices that each node has in memory.
        widths: bytes an element takes.
    """
    for i in np.flatnonzero(scores).tolist():
        steps = specs[i].details
        rows[i, 2] += steps["eager_elements"] * widths[i]
        rows[i, 3] += steps["eager_kernels"]
        if rows[i, 8]:
            rows[i, 4] -= steps["recompute_matrix_flops"]
            rows[i, 7] += steps["eager_back_elements"] * widths[i]
            rows[i, 8] += steps["eager_back_kernels"]


def _group_experts(graph: Graph, rows: np.ndarray, expert: ExpertProduct, sizes: Mapping[DType, float]) -> None:
    """A grouped product reads the stored weights once; half of its backward work makes their gradient."""
    node = graph.nodes[expert.product]
    gathered = graph.nodes[expert.gather].outputs[0]
    names = [*(n for n in node.inputs if n != gathered), *node.outputs]
    carried = float_sum(graph.tensors[n].elements * sizes[graph.tensors[n].dtype] for n in names)
    weight = graph.tensors[expert.weight]
    stored = min(weight.elements, graph.tensors[gathered].elements) * sizes[weight.dtype]
    back = rows[expert.product, 4] + rows[expert.product, 5]
    rows[expert.gather] = 0.0
    rows[expert.product, 2] = carried + stored
    rows[expert.product, 4:6] = back / 2
    rows[expert.product, 7] = 2 * (carried + stored) if back else 0.0


def _add_loss(
    graph: Graph,
    specs: Sequence[OpSpec],
    rows: np.ndarray,
    beside: np.ndarray,
    sizes: Mapping[DType, float],
    loss_bytes: float,
    passes: tuple[float, float],
) -> None:
    """A cross-entropy over the logits: cast to the loss's type, log-softmax, and back.

    It stands in the graph, or is assumed where the graph ends at logits, and costs the same.
    """
    name = logits_of(graph)
    places = [(graph.producer[name], name)] if name else []
    for i in nodes_where(graph, lambda i: "loss_elements" in specs[i].details):
        rows[i, [2, 3, 7, 8]] = 0.0
        places.append((i, graph.nodes[i].inputs[0]))
    for at, name in places:
        logits = graph.tensors[name]
        width = sizes[logits.dtype]
        cast = width + loss_bytes if loss_bytes != width else 0.0
        beside[:, at] += logits.elements * (np.array(passes) * loss_bytes + cast)
        rows[at, [3, 8]] += 2 + (cast > 0)


def _free_views(
    graph: Graph,
    specs: Sequence[OpSpec],
    rows: np.ndarray,
    sizes: Mapping[DType, float],
    storages: Storages,
) -> None:
    """Views cost nothing; reshapes that must copy cost the copy.

    A strided view is copied by a batched product. What cuts a tensor in parts or
    repeats it (Split, Slice, Expand) still has to put the gradients together.
    """
    for i in nodes_where(graph, lambda i: specs[i].view or specs[i].details.get("alias")):
        node, spec = graph.nodes[i], specs[i]
        if not node.outputs:
            continue
        if spec.details.get("alias"):
            readers = (r for name in node.outputs for r in graph.consumers.get(name, ()))
            if not any(graph.nodes[r].op == "MatMul" for r in readers):
                rows[i, :4] = 0.0
                if node.op == "Transpose":
                    rows[i] = 0.0
        elif spec.view and rule_of(node.op).strides and storages.root(node.outputs[0]) == node.outputs[0]:
            tensor = graph.tensors[node.outputs[0]]
            if tensor.kind is TensorKind.ACTIVATION:
                rows[i, 2] += 2 * tensor.elements * sizes[tensor.dtype]
                rows[i, 3] += 1


def tensor_bytes(
    graph: Graph, sizes: Mapping[DType, float], scores: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of each node's results, and of what is transient while its backward pass runs.

    Transient are the gradients of its results and operands, as far as they are computed, and scores and their gradient
    where an attention has them in memory.

    Args:
        graph: the graph.
        sizes: bytes an element takes in training, by file type.
        scores: [nodes] elements of score matrices in memory; None for none.

    Returns:
        Two float64 arrays of shape [nodes].
    """
    classes = call_classes(graph)
    own = np.array([_own_bytes(graph, graph.nodes[i], sizes, {}) for i in classes.first]).reshape(-1, 2)
    outputs, workspace = own[classes.index].T.copy()
    absent = {graph.nodes[e.gather].outputs[0]: 0.0 for e in find_expert_products(graph)}
    for i in {i for e in find_expert_products(graph) for i in (e.gather, e.product)}:
        outputs[i], workspace[i] = _own_bytes(graph, graph.nodes[i], sizes, absent)
    for i, elements in enumerate(() if scores is None else scores.tolist()):
        if elements:
            workspace[i] += 2 * elements / graph.nodes[i].repeat * sizes[_float_type_of(graph, i)]
    return outputs, workspace


def _own_bytes(
    graph: Graph, node: Node, sizes: Mapping[DType, float], known: Mapping[str, float]
) -> tuple[float, float]:
    """Bytes of a node's results, and of the gradients of its results and computed operands."""
    carrying = needs_gradient(graph)

    def size(tensor: Tensor) -> float:
        return known.get(tensor.name, tensor.elements * sizes[tensor.dtype])

    results = [graph.tensors[n] for n in node.outputs if n in graph.tensors]
    operands = [graph.tensors[n] for n in dict.fromkeys(node.inputs) if n]
    grown = [t for t in (*results, *operands) if t.kind is TensorKind.ACTIVATION and t.name in carrying]
    return float_sum(map(size, results)), float_sum(map(size, grown))
