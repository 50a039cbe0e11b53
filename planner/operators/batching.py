"""Change the batch size of a graph with fixed shapes: find the batch at the inputs, follow it, scale shapes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.errors import ModelError, UsageError
from planner.graph import ConstantValue, Graph, Node, ScaledTensors, Tensor, hand_on, per_graph, per_model, remember
from planner.operators.entry import rule_of
from planner.operators.flow import BatchFactor, BatchFactors, Flow, along_nests
from planner.operators.specs import CallClasses, call_classes, group_calls

_MOST_TRIES = 40


@dataclass(frozen=True)
class BatchFlow:
    """Which dimensions and constants of a graph follow the batch; found once, applied for any batch size.

    Attributes:
        batch: the size that the graph's shapes are for.
        origin: the size that the graph was imported at.
        values: constants that hold one entry a sample, as they were at `origin`; at other sizes they are unknown.
        marks: for each tensor that follows the batch, where it sits in each dimension.
        edits: constant operands that hold shapes, by (node, position): which of their values follow the batch.
    """

    batch: int
    origin: int
    values: Mapping[str, ConstantValue]
    marks: Mapping[str, BatchFactors]
    edits: Mapping[tuple[int, int], tuple[bool, ...]]


@per_graph
def batch_flow(graph: Graph) -> BatchFlow:
    """Follow the batch through a graph. O(nodes); remembered as long as the graph lives.

    A batch of 1 can be in several dimensions after a reshape. A guess that a later node contradicts is revised, at most
    so many times.

    Raises:
        ModelError: the batch size is unknown, no input has it, or a node stops it; the message names the node and why.
    """
    flow = Flow(graph, graph.batch or _common_first_dimension(graph))
    first_error: ModelError | None = None
    for _ in range(_MOST_TRIES):
        try:
            _follow(flow)
        except ModelError as error:
            first_error = first_error or error
            guesses = flow.other_guesses()
            if guesses is None:
                break
            flow = Flow(graph, flow.batch, guesses=guesses)
            continue
        per_sample = {name: graph.constants[name] for name in flow.marks if name in graph.constants}
        return BatchFlow(flow.batch, flow.batch, per_sample, flow.marks, flow.edits)
    raise first_error or ModelError("the batch size cannot be changed")


def _follow(flow: Flow) -> None:
    """Mark what follows the batch, walking the graph until no reader marks a tensor computed before it."""
    graph, batch = flow.graph, flow.batch
    for name in graph.inputs:
        dim = _batch_dimension(graph.tensors[name], batch) if name in graph.tensors else None
        if dim is not None:
            flow.set(name, [BatchFactor() if d == dim else None for d in range(len(graph.tensors[name].shape))])
    if not flow.marks:
        raise ModelError(f"no input has a dimension of the batch size {batch}", hint="name the batch size at import")
    late = -1
    while flow.late > late:
        late = flow.late
        _walk(flow)
        _require_results(flow)


def _require_results(flow: Flow) -> None:
    """Check that a result follows the batch; otherwise mark the first result and what it is computed from.

    Raises:
        ModelError: no result can follow the batch, or a node picks fixed positions of it and no result follows it.
    """
    graph = flow.graph
    results = [graph.tensors[name] for name in graph.outputs if graph.tensors[name].dtype.is_float]
    if not results or any(tensor.name in flow.marks or not tensor.shape for tensor in results):
        return
    result = results[0]
    at = graph.producer.get(result.name, 0)
    if flow.picked is not None:
        raise flow.picked
    if result.shape[0] != flow.batch:
        raise flow.fail(at, f"makes the result {list(result.shape)}, which does not follow the batch")
    flow.require(at, result.name, 0, BatchFactor())


def _walk(flow: Flow) -> None:
    """Carry marks through all nodes once."""
    for i, node in enumerate(flow.graph.nodes):
        if any(map(flow.marks.get, node.inputs)):
            (rule_of(node.op).travel or along_nests)(flow, i, node)


@per_model
def _lasting_classes(graph: Graph) -> CallClasses:
    """Nodes that make the same call at every batch size."""
    flow = batch_flow(graph)
    return group_calls(graph, flow.marks, flow.edits)


def rebatch(graph: Graph, batch: int) -> Graph:
    """The same model at another batch size: shapes and shape constants scaled, names and fingerprint kept.

    Args:
        graph: the graph.
        batch: samples, at least 1.

    Raises:
        ModelError: a node stops the batch (see `batch_flow`).
        UsageError: `batch` is not positive.
    """
    if batch < 1:
        raise UsageError(f"a batch of {batch} samples", hint="give at least 1")
    if batch == graph.batch:
        return graph
    flow = batch_flow(graph)
    further = dict[str, Tensor]()
    constants, nodes = _apply_edits(graph, flow, batch, further)
    scaled = functools.partial(_scaled, old=flow.batch, new=batch)
    tensors = ScaledTensors(graph.tensors, flow.marks, scaled, further)
    result = replace(graph, nodes=nodes, tensors=tensors, constants=constants, batch=batch)
    remember(result, batch_flow, replace(flow, batch=batch))
    remember(result, call_classes, _lasting_classes(graph))
    hand_on(graph, result)
    return result


@dataclass(frozen=True)
class BatchConstants:
    """What in a model file that was exported at one batch size must be other for another one.

    Attributes:
        operands: values of constant operands, by the first output of the operator that reads them and the position.
        samples: tensors that hold one entry a sample, by name: the dimensions that follow the batch, and their sizes at
            the new one. Where that is more, all entries must be equal; where it is less, the first are taken.
    """

    operands: Mapping[tuple[str, int], tuple[int, ...]]
    samples: Mapping[str, Mapping[int, int]]


def batch_constants(graph: Graph, batch: int) -> BatchConstants:
    """What changes in a model's file for another batch size; empty where nothing holds the batch.

    Args:
        graph: the model as it was imported, its operators as the file has them.
        batch: samples, at least 1.

    Raises:
        ModelError: a node stops the batch.
    """
    if batch == graph.batch or not graph.batch:
        return BatchConstants({}, {})
    flow = batch_flow(graph)
    operands = {}
    for (i, position), flags in flow.edits.items():
        node = graph.nodes[i]
        values = zip(graph.constants[node.inputs[position]], flags, strict=True)
        operands[node.outputs[0], position] = tuple(int(v) // flow.batch * batch if f else int(v) for v, f in values)
    samples = {}
    for name, marks in flow.marks.items():
        if name not in graph.producer and name not in graph.inputs:
            sizes = _scaled(graph.tensors[name].shape, marks, flow.batch, batch)
            samples[name] = {d: size for d, size in enumerate(sizes) if marks[d] is not None}
    return BatchConstants(operands, samples)


def _scaled(shape: tuple[int, ...], marks: BatchFactors, old: int, new: int) -> tuple[int, ...]:
    return tuple(size if mark is None else size // old * new for size, mark in zip(shape, marks, strict=True))


def _apply_edits(
    graph: Graph, flow: BatchFlow, batch: int, further: dict[str, Tensor]
) -> tuple[Mapping[str, ConstantValue], tuple[Node, ...]]:
    """Constants with the values that hold the batch rewritten, and the nodes that read them.

    A constant that serves two purposes becomes two; its copies are put into `further`."""
    constants = dict(graph.constants)
    for name, values in flow.values.items():
        constants.pop(name, None)
        if batch == flow.origin:
            constants[name] = values
        elif len(set(values)) == 1:
            constants[name] = values[:1] * math.prod(
                _scaled(graph.tensors[name].shape, flow.marks[name], flow.batch, batch)
            )
    nodes = list(graph.nodes)
    renamed = False
    wanted: dict[str, dict[tuple[bool, ...], list[tuple[int, int]]]] = {}
    for (i, position), flags in flow.edits.items():
        wanted.setdefault(graph.nodes[i].inputs[position], {}).setdefault(flags, []).append((i, position))
    for name, variants in wanted.items():
        values = graph.constants[name]
        places = {place for users in variants.values() for place in users}
        shared = len(variants) > 1 or any((i, p) not in places for i, p in _reads(graph, name))
        for number, (flags, users) in enumerate(variants.items()):
            edited = tuple(int(v) // flow.batch * batch if f else int(v) for v, f in zip(values, flags, strict=True))
            target = f"{name}@batch{number}" if shared else name
            constants[target] = edited
            if shared:
                further[target] = replace(graph.tensors[name], name=target)
                for i, position in users:
                    inputs = list(nodes[i].inputs)
                    inputs[position], renamed = target, True
                    nodes[i] = replace(nodes[i], inputs=tuple(inputs))
    return constants, tuple(nodes) if renamed else graph.nodes


def _reads(graph: Graph, name: str) -> list[tuple[int, int]]:
    """Every place (node, position) where a tensor is read."""
    users = graph.consumers.get(name, ())
    return [(i, p) for i in users for p, read in enumerate(graph.nodes[i].inputs) if read == name]


def _batch_dimension(tensor: Tensor, batch: int) -> int | None:
    """The dimension of an input that is the batch: the first, else (for a batch above 1) another of that size."""
    if not tensor.shape:
        return None
    if tensor.shape[0] == batch:
        return 0
    return tensor.shape.index(batch) if batch > 1 and batch in tensor.shape else None


def _common_first_dimension(graph: Graph) -> int:
    sizes = {graph.tensors[n].shape[0] for n in graph.inputs if n in graph.tensors and graph.tensors[n].shape}
    if len(sizes) != 1:
        shown = ", ".join(f"{n}{list(graph.tensors[n].shape)}" for n in graph.inputs if n in graph.tensors)
        raise ModelError(f"the batch size is unknown: {shown}", hint="name the batch axis at import, --dim batch=N")
    return sizes.pop()
