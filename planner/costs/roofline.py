"""Seconds of each operator on a device: the slowest of matrix units, vector units and memory, with a launch floor.

For each node, forward and backward alike,

    gpu = max(matrix / (matrix_peak * fraction(matrix)), bytes / (bandwidth * fraction(bytes)), vector / vector_peak)

The host launches kernels ahead of the device, so launching costs nothing while the device is busy: a layer takes
`max(sum of gpu, kernels * launch)`, and where launching is the larger, its nodes share that time by their kernels.
Layers are module paths up to their first number; a graph without modules is one layer.

What eager frameworks fuse, and nothing else: the bias sum after a matrix product runs inside it; GELU and SiLU written
out by an exporter are one kernel; so is attention where `fused_attention` is set: no traffic for the score matrix, and
the score product once more in backward. A NaN guard that an exporter puts around softmax costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.costs.precision import Precision
from planner.errors import HardwareError
from planner.graph import DType, Graph, Note, NoteLevel, TensorKind
from planner.graph.blocks import layer_of
from planner.hardware.types import Device
from planner.operators.regions import Attention, ExpertProduct, find_activations, find_attention, find_expert_products
from planner.operators.saved import folded_batchnorms
from planner.operators.specs import needs_gradient
from planner.operators.types import OpSpec

_PEAK_NAMES = {
    DType.FLOAT64: "fp64",
    DType.FLOAT32: "fp32",
    DType.FLOAT16: "fp16",
    DType.BFLOAT16: "bf16",
    DType.FLOAT8: "fp8",
    DType.FLOAT4: "fp4",
    DType.INT8: "int8",
    DType.UINT8: "int8",
}
_STAND_INS = {"bf16": ("fp16",), "fp16": ("bf16",), "tf32": ("fp32",), "fp32": ("tf32",), "fp64": ("fp32",)}
_NORM_PASSES = 3
"""Statistics, then read and write."""
_NORM_BACK_PASSES = 5
"""Both reductions read the input and the gradient; then input and gradient in, gradient out."""
_COLUMNS = (
    "matrix", "vector", "bytes", "kernels",
    "input_grad", "weight_grad", "back_vector", "back_bytes", "back_kernels",
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """Work of each node after fusion; float64 arrays of shape [nodes].

    Attributes:
        matrix: forward matrix flops.
        vector: forward element-wise flops.
        bytes: forward traffic.
        kernels: forward kernels.
        input_grad: backward matrix flops towards activations, recomputation inside fused kernels included.
        weight_grad: backward matrix flops towards weights.
        back_vector: backward element-wise flops.
        back_bytes: backward traffic.
        back_kernels: backward kernels.
        norms: bytes of the tensor that a folded batch normalisation runs over, in kernels of its own.
        types: the type that the matrix units multiply, by node.
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
    norms: np.ndarray
    types: tuple[DType, ...]


@dataclass(frozen=True)
class Times:
    """Seconds of each node, float64 of shape [nodes], and what was assumed."""

    forward_s: np.ndarray
    backward_s: np.ndarray
    weight_grad_s: np.ndarray
    notes: tuple[Note, ...]


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
) -> Work:
    """Work of each node in the training precision, groups that run as one kernel put on their last node.

    Args:
        graph: the graph.
        specs: one description a node.
        sizes: bytes an element takes in training, by file type.
        types: type it is computed in, by file type.
        fused: attention runs as one kernel.
        unfold_batchnorm: convolutions with a folded batch normalisation run it after themselves.
    """
    dtypes = [_float_type_of(graph, i) for i in range(len(graph.nodes))]
    rows = np.zeros((len(graph.nodes), len(_COLUMNS)))
    known: dict[tuple[int, DType], np.ndarray] = {}
    for i, (spec, dtype) in enumerate(zip(specs, dtypes, strict=True)):
        key = (id(spec), dtype)
        if key not in known:
            known[key] = np.array(_row(spec, sizes[dtype]))
        rows[i] = known[key]
    _fuse_bias(graph, specs, rows)
    taken: set[int] = set()
    for region in find_attention(graph):
        taken.update(region.nodes)
        _fuse_attention(graph, specs, rows, region, sizes, fused)
    for activation in find_activations(graph):
        if not taken.intersection(activation.nodes):
            _fuse_activation(graph, rows, activation.nodes, activation.source, sizes)
    for expert in find_expert_products(graph):
        _group_experts(graph, rows, expert, sizes)
    columns = dict(zip(_COLUMNS, rows.T, strict=True))
    norms = np.zeros(len(graph.nodes))
    if unfold_batchnorm:
        for i in folded_batchnorms(graph):
            result = graph.tensors[graph.nodes[i].outputs[0]]
            norms[i] = result.elements * sizes[result.dtype]
    return Work(**columns, norms=norms, types=tuple(types[d] for d in dtypes))


def _row(spec: OpSpec, width: float) -> tuple[float, ...]:
    d = spec.details
    forward = d.get("forward_float_elements", spec.forward_bytes / 4) * width + d.get("forward_fixed_bytes", 0.0)
    backward = d.get("backward_float_elements", spec.backward_bytes / 4) * width + d.get("backward_fixed_bytes", 0.0)
    towards = spec.input_grad_matrix_flops + d.get("recompute_matrix_flops", 0.0)
    return (
        spec.matrix_flops, spec.vector_flops, forward, spec.kernels,
        towards, spec.weight_grad_matrix_flops, spec.backward_vector_flops, backward, spec.backward_kernels,
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


def price(graph: Graph, work: Work, device: Device, precision: Precision) -> Times:
    """Seconds of each node's work.

    Raises:
        HardwareError: the device states no peak for the precision's type, nor for one that can stand in for it.
    """
    peaks, notes = _peaks(work, device, precision)
    input_s = _matrix_s(work.input_grad, peaks, device)
    weight_s = _matrix_s(work.weight_grad, peaks, device)
    forward = _roof(_matrix_s(work.matrix, peaks, device), work.vector, work.bytes, device)
    backward = _roof(input_s + weight_s, work.back_vector, work.back_bytes, device)
    forward = forward + _memory_s(_NORM_PASSES * work.norms, device)
    backward = backward + _memory_s(_NORM_BACK_PASSES * work.norms, device)
    layers = _layers(graph)
    forward = _with_launches(forward, work.kernels, layers, device.launch_s)
    backward = _with_launches(backward, work.back_kernels, layers, device.launch_s)
    share = weight_s / np.maximum(input_s + weight_s, 1e-30)
    share[_only_weights(graph) & (input_s + weight_s == 0)] = 1.0
    return Times(forward, backward, backward * share, notes)


def _matrix_s(flops: np.ndarray, peaks: np.ndarray, device: Device) -> np.ndarray:
    return np.where(flops > 0, flops / (peaks * device.matrix_efficiency.at(flops)), 0.0)


def _roof(matrix_s: np.ndarray, vector: np.ndarray, byte_count: np.ndarray, device: Device) -> np.ndarray:
    return np.asarray(
        np.maximum(np.maximum(matrix_s, vector / device.vector_flop_per_s), _memory_s(byte_count, device))
    )


def _memory_s(byte_count: np.ndarray, device: Device) -> np.ndarray:
    return np.asarray(byte_count / (device.memory_byte_per_s * device.memory_efficiency.at(byte_count)))


def _layers(graph: Graph) -> np.ndarray:
    """Number of each node's layer; nodes without a module belong to their predecessor's."""
    numbers: dict[str, int] = {}
    layers = np.zeros(len(graph.nodes), dtype=np.int64)
    last = ""
    for i, node in enumerate(graph.nodes):
        last = layer_of(node.module) or last
        layers[i] = numbers.setdefault(last, len(numbers))
    return layers


def _with_launches(gpu_s: np.ndarray, kernels: np.ndarray, layers: np.ndarray, launch_s: float) -> np.ndarray:
    """Where a layer's launches take longer than its work, each of its nodes takes its launches' time."""
    if not len(layers):
        return gpu_s
    launches = kernels * launch_s
    bound = np.bincount(layers, launches) > np.bincount(layers, gpu_s)
    return np.where(bound[layers], launches, gpu_s)


def _only_weights(graph: Graph) -> np.ndarray:
    """Nodes whose gradients flow to weights alone (embeddings, the first layer)."""
    needed = needs_gradient(graph)
    return np.array(
        [
            bool(weights)
            and not any(n in needed and graph.tensors[n].kind is TensorKind.ACTIVATION for n in node.inputs)
            for node, weights in zip(graph.nodes, graph.node_parameters, strict=True)
        ],
        dtype=bool,
    )


def _peaks(work: Work, device: Device, precision: Precision) -> tuple[np.ndarray, tuple[Note, ...]]:
    """Matrix peak by node; a type that the device lacks is replaced by its stand-in, with a note."""
    peaks = np.ones(len(work.types))
    notes: dict[str, Note] = {}
    for dtype in dict.fromkeys(work.types):
        chosen = np.array([t is dtype for t in work.types])
        if not ((work.matrix > 0) & chosen).any():
            continue
        wanted = "tf32" if dtype is DType.FLOAT32 and precision.name == "tf32" else _PEAK_NAMES.get(dtype, dtype.value)
        name = next((n for n in (wanted, *_STAND_INS.get(wanted, ())) if n in device.matrix_flop_per_s), "")
        if not name:
            known = ", ".join(sorted(device.matrix_flop_per_s)) or "none"
            raise HardwareError(
                f"{device.name} has no matrix peak for {wanted}",
                hint=f"it has {known}: choose another --precision, or add the figure to the hardware profile",
            )
        if name != wanted:
            message = f"{device.name} has no {wanted} matrix units: priced at its {name} peak"
            notes[wanted] = Note(NoteLevel.WARNING, "peak-stand-in", message)
        peaks[chosen] = device.matrix_flop_per_s[name]
    return peaks, tuple(notes.values())
