"""The working graph as an immutable `Graph`, with its fingerprint and its report."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from planner.graph import AttributeValue, ConstantValue, DType, Graph, ImportReport, Node, Parameter, Tensor, TensorKind
from planner.importers.onnx_graph.dims import batch_size
from planner.importers.onnx_graph.weights import lost_parameters
from planner.importers.onnx_graph.work import Array, WorkGraph
from planner.operators import rule_of

_NO_ATTRIBUTES: Mapping[str, AttributeValue] = MappingProxyType({})


def freeze(work: WorkGraph) -> Graph:
    """The finished graph; deterministic, linear in its size."""
    nodes = tuple(
        Node(
            n.outputs[0], n.op, tuple(n.inputs), tuple(n.outputs),
            MappingProxyType(n.attributes) if n.attributes else _NO_ATTRIBUTES, n.scope.module or "", n.name, n.repeat,
        )
        for n in work.nodes
    )  # fmt: skip
    tensors = _tensors(work, nodes)
    batch = batch_size(work.axis_names, work.types, work.outputs)
    parameters = tuple(_for_one_sample(work, weight, batch) for weight in work.weights.values())
    constants = {
        name: _flat(work.values[name])
        for name, tensor in tensors.items()
        if tensor.kind is TensorKind.CONSTANT and name in work.values
    }
    sources = {name: tuple(found) for name, found in work.weight_sources.items() if name in tensors}
    return Graph(
        name=work.name,
        fingerprint=_fingerprint(work, nodes, tensors, parameters, constants, sources),
        nodes=nodes,
        tensors=MappingProxyType(tensors),
        inputs=tuple(work.inputs),
        outputs=tuple(work.outputs),
        parameters=parameters,
        sources=MappingProxyType(sources),
        permuted=permuted_weights(work, tensors),
        constants=MappingProxyType(constants),
        batch=batch,
        opset=work.opset,
        report=ImportReport(
            "onnx", work.total_nodes, work.fates["plumbing"], work.fates["folded"], work.fates["dead"],
            tuple(work.notes),
        ),
        identities=tuple(work.identities),
        separated=tuple(work.separated),
    )  # fmt: skip


def _tensors(work: WorkGraph, nodes: tuple[Node, ...]) -> dict[str, Tensor]:
    inputs = set(work.inputs)
    names = dict.fromkeys([*work.inputs, *(name for node in nodes for name in (*node.inputs, *node.outputs) if name)])
    names.update(dict.fromkeys(work.outputs))
    tensors = {}
    for name in names:
        kind = TensorKind.ACTIVATION
        if name in inputs:
            kind = TensorKind.INPUT
        elif name in work.weight_sources:
            kind = TensorKind.PARAMETER
        elif work.is_constant(name):
            kind = TensorKind.CONSTANT
        tensors[name] = Tensor(name, work.types[name].shape, work.types[name].dtype, kind)
    return tensors


def _for_one_sample(work: WorkGraph, weight: Parameter, batch: int) -> Parameter:
    """A weight without what was repeated for every sample when the exporter computed it."""
    shape = weight.shape
    repeated = len(shape) > 2 and shape[0] == batch and len(lost_parameters(work, weight.name)) == 1
    return replace(weight, shape=(1, *shape[1:])) if repeated else weight


def _flat(value: Array) -> ConstantValue:
    flat = value.reshape(-1)
    if flat.dtype.kind in "iub":
        return tuple(int(v) for v in flat)
    return tuple(float(v) for v in flat)


def _fingerprint(
    work: WorkGraph,
    nodes: tuple[Node, ...],
    tensors: Mapping[str, Tensor],
    parameters: tuple[Parameter, ...],
    constants: Mapping[str, ConstantValue],
    sources: Mapping[str, tuple[str, ...]],
) -> str:
    """sha256 of structure and shapes: not of weights, names for people, module paths or notes."""
    digest = hashlib.sha256()
    text = {each: each.value for each in (*DType, *TensorKind)}
    digest.update(repr((work.opset, work.inputs, work.outputs)).encode())
    for node in nodes:
        digest.update(repr((node.op, node.inputs, node.outputs, sorted(node.attributes.items()), node.repeat)).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        dtype, kind = text[tensor.dtype], text[tensor.kind]
        structure = (name, tensor.shape, dtype, kind, sources.get(name), constants.get(name))
        digest.update(repr(structure).encode())
    for p in parameters:
        digest.update(repr((p.name, p.shape, text[p.dtype], p.trainable, p.tied_to)).encode())
    return digest.hexdigest()


def permuted_weights(work: WorkGraph, tensors: Mapping[str, object]) -> Mapping[str, tuple[int, ...]]:
    """For weight tensors that are one stored weight transposed: for each dimension, the stored one's.

    Tensors in the stored order and those computed otherwise are not in it. O(folded operators).
    """
    permutations: dict[str, tuple[int, ...]] = {}
    for name, sources in work.weight_sources.items():
        order = _order(work, name, sources) if name in tensors else None
        if order is not None and order != tuple(range(len(order))):
            permutations[name] = order
    return MappingProxyType(permutations)


def _order(work: WorkGraph, tensor: str, sources: tuple[str, ...]) -> tuple[int, ...] | None:
    rank = len(work.types[tensor].shape)
    order, name = tuple(range(rank)), tensor
    while name in work.region:
        node = work.region[name]
        if node.op == "Transpose":
            given = node.attributes.get("perm")
            perm = [int(axis) for axis in given] if isinstance(given, (tuple, list)) else list(range(rank))[::-1]
            order = tuple(perm[axis] for axis in order)
        elif not rule_of(node.op).hands_on or work.types[name].shape != work.types[node.inputs[0]].shape:
            return None
        name = node.inputs[0]
    return order if sources == (name,) else None
