"""Find the parameters: which stored tensors are trained, who owns them, and what to call them.

The exporter's signature decides where it is stored. Else a tensor is a parameter when it is of a float type (or
quantised), has at least one dimension, and reaches a slot where operators take weights, directly or through constant
nodes that only rearrange it (transpose, slice, cast, dequantise). An operator without a rule may take weights anywhere.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from planner.graph import Parameter, WeightRead
from planner.importers.onnx_graph.nodes import tensor_value
from planner.importers.onnx_graph.work import Array, TensorType, WorkGraph, WorkNode
from planner.operators import Role, permutation, rule_of

_JOINING = frozenset({
    "Concat", "Add", "Sub", "Mul", "Div", "MatMul", "Gemm", "Sum", "Sqrt", "Pow", "Einsum", "ReduceSum", "ReduceMean",
    "ReduceL2", "Neg", "Reciprocal", "Conv",
})  # fmt: skip
_ANONYMOUS = re.compile(
    r"^(_?val_?\d+|int64_\w+|onnx::|\d+$|const|.*Constant(_\d+)?(_output_\d+)?$|ortshared)", re.IGNORECASE
)
_DOTTED = re.compile(r"^[A-Za-z_]\w*(\.\w+)+$")
BUFFER_NAMES = re.compile(
    r"(inv_freq|freqs_cis|(cos|sin)_cache|(cos|sin)_cached|position_ids|causal_mask|attn_mask|masked_bias|"
    r"num_batches_tracked|relative_position_index|token_type_ids)"
)
CREATED = re.compile(r"^(new_)?(zeros|ones|full|empty|arange|eye|linspace|tril|triu)(_like)?(_\d+)?$")
"""What exporters call a matrix that the model itself creates: an initial state."""
_LITERAL = re.compile(r".*/Constant(_\d+)?_output_\d+$")
"""What torch calls the result of a Constant node; weights of its modules are never one."""
_TRAINED = re.compile(r"(^|[._])(weight|bias|embeddings?|embed|token|gamma|beta|scale|table)$")
"""How paths of trained parameters end, beside those of tables that a model works out for itself."""
_SUFFIX = {
    Role.TABLE: "weight",
    Role.ADDED: "bias",
    Role.SCALE: "weight",
    Role.OTHER: "weight",
    Role.QUANTIZATION: "scale",
}


STATISTICS = frozenset({Role.MEAN, Role.VARIANCE})
"""Roles of weights that no gradient trains."""

Origin = tuple[str, Role, bool, bool]
"""A stored tensor behind a constant one: name, role, whether dequantised or its last two axes swapped on the way."""


class Use(NamedTuple):
    """One stored tensor reaching one input of one node."""

    node: WorkNode
    slot: int
    tensor: str
    stored: str
    role: Role
    quantized: bool = False
    flipped: bool = False


def find_weights(graph: WorkGraph) -> None:
    """Find the weights among the constant tensors that nodes read; unfold operators that compute on trained weights."""
    _collect(graph)
    while _restore_work(graph):  # an operator that comes back may read another weight
        _collect(graph)
    frozen = [w for w in graph.weights.values() if not w.trainable and not graph.types[w.name].dtype.is_float]
    if frozen:
        graph.warn(
            "quantised-weights",
            f"quantised integer weights cannot be trained as they are; {len(frozen)} count as frozen",
            frozen[0].name,
        )
    drawn = {use.stored: None for use in uses(graph) if use.stored in graph.weights and _is_nameless_table(graph, use)}
    tables = [name for name in drawn if sum(size > 1 for size in graph.types[name].shape) > 1]
    if tables:
        elements = sum(graph.types[name].elements for name in tables)
        message = f"nameless tables whose numbers look drawn count as parameters: {len(tables)} ({elements} elements)"
        graph.info("tables-counted", message, tables[0])


def restore_biases(graph: WorkGraph) -> None:
    """Give operators back the biases of zeros that torch's exporter left out and still lists among the parameters."""
    readers: dict[str, list[WorkNode]] = {}
    for use in uses(graph):
        added = next((slot for slot, role in rule_of(use.node.op).weights.items() if role is Role.BIAS), 0)
        if use.role is not Role.MATRIX or not added or any(use.node.inputs[added:]):
            continue
        weight = next(iter(graph.origins.get(use.stored, ())), use.stored)
        bias = "bias".join(weight.rsplit("weight", 1))
        if bias not in graph.stored and weight != bias and graph.signature.get(bias) == "PARAMETER":
            use.node.inputs += [""] * (added + 1 - len(use.node.inputs))
            use.node.inputs[added] = bias
            readers.setdefault(bias, []).append(use.node)
            graph.separated.append(WeightRead(bias, "", use.node.outputs[0], added))
    for bias, nodes in readers.items():
        result = graph.types[nodes[0].outputs[0]]
        graph.types[bias] = TensorType(result.shape[1:2], result.element)
        graph.stored[bias] = None
    if readers:
        elements = sum(graph.types[bias].elements for bias in readers)
        message = f"{len(readers)} biases ({elements} elements) that the exporter left out as zeros are parameters"
        graph.info("biases-restored", message, next(iter(readers)))


def _collect(graph: WorkGraph) -> None:
    by_tensor: dict[str, dict[str, None]] = {}
    for use in uses(graph):
        weight = graph.weights.get(use.stored) or _weight(graph, use)
        if weight is None:
            continue
        graph.weights.setdefault(use.stored, weight)
        by_tensor.setdefault(use.tensor, {})[use.stored] = None
    graph.weight_sources = {tensor: tuple(names) for tensor, names in by_tensor.items()}


def _restore_work(graph: WorkGraph) -> bool:
    """Put folded nodes that compute on trained weights back before their first reader; true if there were any.

    They run again in every forward pass, at a cost that does not follow the batch, and gradients flow through them.
    Nodes that only move weights, or hand them on in another format, stay folded: their results are weights. Linear.
    """
    work = _work_on_weights(graph)
    if not work:
        return False
    nodes: list[WorkNode] = []
    placed: set[str] = set()
    for node in graph.nodes:
        for inner in _makers(graph, [name for name in node.inputs if name in work and name not in placed], work):
            if not placed.intersection(inner.outputs):
                placed.update(name for name in inner.outputs if name)
                graph.fates[inner.fate] -= 1
                if inner.scope.module is None:
                    inner.scope = replace(inner.scope, module=node.scope.module)
                nodes.append(inner)
        nodes.append(node)
    graph.nodes = nodes
    graph.region = {name: node for name, node in graph.region.items() if name not in placed}
    return bool(placed)


def _work_on_weights(graph: WorkGraph) -> dict[str, int]:
    """Folded tensors computed from trained weights, not just moved or cast, with their index in folding order."""
    carrying = {name for name, weight in graph.weights.items() if weight.trainable}
    work: dict[str, int] = {}
    for place, (name, node) in enumerate(graph.region.items()):
        if node.op not in ("Shape", "Size") and any(read in carrying for read in node.inputs):
            carrying.add(name)
            rule = rule_of(node.op)
            moves = rule.rearranges or rule.hands_on or node.op == "Concat"
            if not moves or any(read in work for read in node.inputs):
                work[name] = place
    return work


def _makers(graph: WorkGraph, names: list[str], work: Mapping[str, int]) -> list[WorkNode]:
    """Folded nodes that some tensors are computed by, ancestors included, in folding order; only nodes in `work`."""
    makers: dict[str, WorkNode] = {}
    stack = list(names)
    while stack:
        name = stack.pop()
        if name in work and name not in makers:
            makers[name] = graph.region[name]
            stack += makers[name].inputs
    return [makers[name] for name in sorted(makers, key=work.__getitem__)]


def uses(graph: WorkGraph) -> Iterator[Use]:
    """Every stored tensor that reaches a node, in order of nodes."""
    memo: dict[tuple[str, Role], tuple[Origin, ...]] = {}
    known, computed = graph.stored, graph.region
    for node in graph.nodes:
        for slot, tensor in enumerate(node.inputs):
            if tensor in known or tensor in computed:
                role = rule_of(node.op).weights.get(slot, Role.OTHER)
                for origin in _trace(graph, tensor, role, memo):
                    yield Use(node, slot, tensor, *origin)


def _trace(
    graph: WorkGraph, tensor: str, role: Role, memo: dict[tuple[str, Role], tuple[Origin, ...]]
) -> tuple[Origin, ...]:
    """The stored tensors that a constant tensor is computed from."""
    if tensor not in graph.region:
        return ((tensor, role, False, False),) if tensor in graph.stored else ()
    key = (tensor, role)
    if key in memo:
        return memo[key]
    node = graph.region[tensor]
    if node.op in ("Shape", "Size"):
        return ()
    origins: dict[Origin, None] = {}
    rank = len(graph.types[tensor].shape)
    flips = node.op == "Transpose" and rank >= 2 and permutation(node.attributes, rank)[-1] != rank - 1
    dequantizes = node.op.endswith("DequantizeLinear")
    for slot, name in enumerate(node.inputs):
        if not name:
            continue
        for stored, inner, quantized, flipped in _trace(graph, name, _role_inside(node, slot, role), memo):
            origins[stored, inner, quantized or (dequantizes and slot == 0), flipped != flips] = None
    memo[key] = tuple(origins)
    return memo[key]


def _role_inside(node: WorkNode, slot: int, role: Role) -> Role:
    if node.op.endswith("DequantizeLinear") and slot > 0:
        return Role.QUANTIZATION
    rule = rule_of(node.op)
    if rule.rearranges or rule.hands_on:
        if slot > 0:
            return Role.OTHER
        return Role.TABLE if node.op.startswith("Gather") and role in (Role.ADDED, Role.OTHER) else role
    slot_role = rule.weights.get(slot, Role.OTHER)
    if role is not Role.OTHER and slot_role not in (Role.OTHER, Role.ADDED, Role.SCALE):
        return slot_role
    carries = node.op in _JOINING or (role is Role.MATRIX and rule.differentiable(slot))
    return role if carries else Role.OTHER


def _weight(graph: WorkGraph, use: Use) -> Parameter | None:
    name, kind = use.stored, graph.kinds.get(use.stored, "")
    stored = graph.types[name]
    is_buffer = kind == "BUFFER" or use.role in STATISTICS
    if kind in ("CONSTANT_TENSOR", "TOKEN", "USER_INPUT") or not stored.shape:
        return None
    was_trained = stored.dtype.is_float and bool(lost_parameters(graph, name))
    if was_trained and (_is_product(graph, name) or _may_be_picked(graph, name)):
        return None
    if kind != "PARAMETER" and not was_trained and not _plausible(graph, use, is_buffer):
        return None
    trainable = stored.dtype.is_float and not is_buffer and use.role != Role.QUANTIZATION
    label = _label(graph, use)
    module = label.rpartition(".")[0] if is_path(label) else use.node.scope.module or ""
    shape = _picked_shape(graph, name) if was_trained else stored.shape
    return Parameter(name, label, shape, stored.dtype, module, trainable, _is_transposed(graph, use))


def _is_product(graph: WorkGraph, name: str) -> bool:
    """Whether a tensor is what a linear layer adds its bias to: a product of its weight that the exporter computed."""
    readers = (node for node in (*graph.nodes, *graph.region.values()) if name in node.inputs)
    wide = sum(size > 1 for size in graph.types[name].shape) > 1
    return wide and any(node.op == "Add" and node.scope.torch_op.startswith("aten.linear") for node in readers)


def _may_be_picked(graph: WorkGraph, name: str) -> bool:
    """Whether a tensor of equal numbers was computed with a buffer, as of places in a table of a size that is open."""
    with_buffer = any(graph.signature.get(origin) == "BUFFER" for origin in graph.origins[name])
    numbers = _numbers(graph, name) if with_buffer and name in graph.picked else None
    return numbers is not None and bool((numbers == numbers.flat[0]).all())


def _picked_shape(graph: WorkGraph, name: str) -> tuple[int, ...]:
    """Shape of the weight that an exporter computed a tensor from: a table of which it picked entries repeatedly."""
    shape = graph.types[name].shape
    numbers = _numbers(graph, name) if name in graph.picked else None
    entries = 0 if numbers is None else np.unique(numbers).size
    repeats = numbers is not None and 1 < entries <= numbers.size // 2
    return (*(1 for _ in shape[1:]), entries) if repeats else shape


def _plausible(graph: WorkGraph, use: Use, is_buffer: bool) -> bool:
    """Whether a tensor that the file does not call a parameter is one, by type, shape, slot and name."""
    stored = graph.types[use.stored]
    quantised = use.quantized or use.role == Role.QUANTIZATION or rule_of(use.node.op).quantised
    if not stored.dtype.is_float and not (quantised and stored.dtype.value.startswith(("int", "uint"))):
        return False
    if use.role in STATISTICS:
        return True
    if BUFFER_NAMES.search(use.stored) or (len(stored.shape) > 1 and CREATED.match(use.stored)):
        return False
    copied = any(graph.types[name].elements == stored.elements for name in _held_origins(graph, use.stored))
    told = use.stored in graph.kinds or copied or is_path(use.stored)
    if (graph.signature and not told) or _is_filled_in(graph, use.stored):
        return False
    if rule_of(use.node.op).build is None:
        return not _looks_like_a_mask(graph, use.stored)
    if use.role == Role.OTHER:
        if use.node.op == "Concat" and _is_nameless_table(graph, use):
            return True
        return is_named(graph, use.stored) and (use.node.op == "Concat" or use.stored.endswith((".weight", ".bias")))
    vector = sum(size > 1 for size in stored.shape) == 1
    if use.role in (Role.ADDED, Role.SCALE):
        if is_buffer or _looks_made(graph, use):
            return False
        return vector or is_named(graph, use.stored) or _is_nameless_table(graph, use)
    if use.role == Role.TABLE:
        return len(stored.shape) >= 2 and not is_buffer
    if use.role == Role.MATRIX and use.node.op in ("MatMul", "Einsum") and len(stored.shape) >= 3:
        return sum(size > 1 for size in stored.shape) > 1
    return True


def _is_nameless_table(graph: WorkGraph, use: Use) -> bool:
    """Whether a nameless table was a weight: one that looks drawn and scales, stands beside or is added to activations.

    What is added has the width and places of [batch, sequence, hidden], as positions that were cut to length.
    """
    stored, result = graph.types[use.stored].shape, graph.types[use.node.outputs[0]].shape
    fits = use.node.op in ("Mul", "Concat") or (
        use.node.op == "Add" and len(result) == 3 and stored[-2:] == result[-2:]
    )
    return fits and is_anonymous(use.stored) and _looks_drawn(_numbers(graph, use.stored))


def _looks_drawn(numbers: Array | None) -> bool:
    """Whether numbers look as if they were drawn or trained: they differ, and so do the lengths of the rows.

    Sines and cosines of one angle each have rows of one length; those of places alone begin with a row of one number.
    """
    if numbers is None or 2 * np.unique(numbers).size <= numbers.size:
        return False
    rows = numbers.astype(np.float64).reshape(-1, numbers.shape[-1])
    lengths = np.square(rows).sum(-1)
    uneven = len(rows) == 1 or not np.allclose(lengths, lengths[0], rtol=1e-3)
    return uneven and rows.shape[1] > 1 and bool((rows != rows[:, :1]).any(-1).all())


def _numbers(graph: WorkGraph, name: str) -> Array | None:
    """The numbers of a stored table, where the file holds them."""
    numbers = tensor_value(graph.data[name]) if name in graph.data else None
    return numbers if numbers is not None and numbers.size else None


def lost_parameters(graph: WorkGraph, name: str) -> list[str]:
    """Paths of the parameters that an exporter computed a stored tensor from and that the file no longer holds."""
    origins = (origin for origin in graph.origins.get(name, ()) if origin not in graph.stored)
    return [origin for origin in origins if _was_trained(graph, origin)]


def _held_origins(graph: WorkGraph, name: str) -> list[str]:
    """What an exporter computed a stored tensor from, as far as the file holds it."""
    return [origin for origin in graph.origins.get(name, ()) if origin in graph.stored]


def _was_trained(graph: WorkGraph, origin: str) -> bool:
    if origin in graph.signature:
        return graph.signature[origin] == "PARAMETER"
    return bool(_TRAINED.search(origin)) and not BUFFER_NAMES.search(origin)


def _looks_like_a_mask(graph: WorkGraph, name: str) -> bool:
    value = graph.values.get(name)
    return value is not None and value.dtype.kind == "f" and bool((value <= _MASKED).any())


_MASKED = -1e4


def _looks_made(graph: WorkGraph, use: Use) -> bool:
    """Whether a model works a tensor out and does not train it: a mask, steps of equal width, a nameless divisor."""
    value = graph.values.get(use.stored)
    if _looks_like_a_mask(graph, use.stored) or (is_anonymous(use.stored) and use.node.op in ("Sub", "Div")):
        return True
    if value is None or value.dtype.kind != "f" or value.size < 4:
        return False
    steps = np.diff(value.reshape(-1))
    even = steps[0] != 0 and bool(np.allclose(steps, steps[0], rtol=1e-4, atol=0.0))
    return even or set(np.unique(value)) == {0.0, 1.0}


def is_named(graph: WorkGraph, name: str) -> bool:
    """Whether a name is the module's own: a path, or an attribute of the outermost module in a file of torch's."""
    return is_path(name) or (graph.from_torch and name.isidentifier() and not is_anonymous(name))


def _is_filled_in(graph: WorkGraph, name: str) -> bool:
    """Whether an exporter wrote the tensor for an operand that the module has not: a Constant of a trace, or of equal
    numbers.
    """
    if not _LITERAL.match(name):
        return False
    value = graph.values.get(name)
    return graph.from_torch or (value is not None and bool((value == value.flat[0]).all()))


@functools.lru_cache(maxsize=1024)
def is_anonymous(name: str) -> bool:
    """Whether the name was generated by an exporter (`onnx::MatMul_123`)."""
    return bool(_ANONYMOUS.match(name))


@functools.lru_cache(maxsize=1024)
def is_path(name: str) -> bool:
    """Whether a name is a parameter's path in its model, `h.0.attn.weight`."""
    return bool(_DOTTED.match(name)) and not is_anonymous(name) and not _is_result(name)


def _is_result(name: str) -> bool:
    """Whether a path ends in an operation (`h.0.attn.transpose_3`): an optimiser stored what an operator computed."""
    return re.sub(r"(_\d+)?$", "", name.rpartition(".")[2]).lower() in _operation_names()


@functools.cache
def _operation_names() -> frozenset[str]:
    from onnx import defs

    return frozenset(schema.name.lower() for schema in defs.get_all_schemas())


def _label(graph: WorkGraph, use: Use) -> str:
    origin = graph.origins.get(use.stored, ())
    if len(origin) > 1:
        origin = tuple(lost_parameters(graph, use.stored))
    if origin:
        return origin[0]
    if not is_anonymous(use.stored) or not use.node.scope.module:
        return use.stored
    return module_label(use)


def module_label(use: Use) -> str:
    """Label of a weight that the file does not name: module of the node that reads it, and a suffix for its role."""
    return f"{use.node.scope.module}.{_SUFFIX.get(use.role, use.role.value)}"


def _is_transposed(graph: WorkGraph, use: Use) -> bool:
    """Whether the file stores a weight as (in, out) where the module has it as (out, in)."""
    if not is_anonymous(use.stored) or "Conv1D" in use.node.scope.module_class or use.flipped:
        return False
    if use.node.op == "Gemm":
        return use.slot == 1 and not use.node.attributes.get("transB", 0)
    return use.node.op == "MatMul" and use.slot == 1 and len(graph.types[use.stored].shape) == 2
