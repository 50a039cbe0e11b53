"""The working graph as an immutable `Graph`, with its fingerprint and its report."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from planner.errors import ModelError
from planner.graph import AttributeValue, ConstantValue, DType, Graph, ImportReport, Node, Parameter, Tensor, TensorKind
from planner.importers.onnx_graph.dims import batch_size
from planner.importers.onnx_graph.weights import lost_parameters
from planner.importers.onnx_graph.work import Array, WorkGraph
from planner.operators import batch_flow, permutation, rule_of

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
    constants = {
        name: _flat(work.values[name])
        for name, tensor in tensors.items()
        if tensor.kind is TensorKind.CONSTANT and name in work.values
    }
    sources = {name: tuple(found) for name, found in work.weight_sources.items() if name in tensors}
    graph = Graph(
        name=work.name,
        fingerprint="",
        nodes=nodes,
        tensors=MappingProxyType(tensors),
        inputs=tuple(work.inputs),
        outputs=tuple(work.outputs),
        parameters=tuple(work.weights.values()),
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
    parameters = _for_one_sample(work, graph)
    fingerprint = _fingerprint(work, nodes, tensors, parameters, constants, sources)
    return replace(graph, parameters=parameters, fingerprint=fingerprint)


def _for_one_sample(work: WorkGraph, graph: Graph) -> tuple[Parameter, ...]:
    """The parameters, those that the exporter repeated for every sample (a class token, queries) as they were before.

    A repeated one has a dimension that follows the batch. Nothing changes where a node stops the batch.
    """
    computed = {
        weight.name
        for weight in graph.parameters
        if len(lost_parameters(work, weight.name)) == 1 and weight.shape == work.types[weight.name].shape
    }
    try:
        marks = batch_flow(graph).marks if computed and graph.batch > 1 else {}
    except ModelError:
        return graph.parameters
    parameters = []
    for weight in graph.parameters:
        following = marks.get(weight.name) if weight.name in computed else None
        if following is not None:
            sizes = zip(weight.shape, following, strict=True)
            weight = replace(weight, shape=tuple(s if mark is None else s // graph.batch for s, mark in sizes))
        parameters.append(weight)
    return tuple(parameters)


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
            order = tuple(permutation(node.attributes, rank)[axis] for axis in order)
        elif not rule_of(node.op).hands_on or work.types[name].shape != work.types[node.inputs[0]].shape:
            return None
        name = node.inputs[0]
    return order if sources == (name,) else None
