"""Descriptions of calls and of whole graphs; nodes that make the same call are described once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from planner.graph import Graph, Node, Tensor, TensorKind, per_graph, per_model
from planner.operators.assemble import fallback, traffic
from planner.operators.entry import OpCall, default_needs, rule_of
from planner.operators.types import OpSpec, Traffic

T = TypeVar("T")


def spec(call: OpCall, needs: tuple[bool, ...] | None = None) -> OpSpec:
    """What one operator call is: its work, traffic, kept tensors and loop nests.

    Args:
        call: the operator and its tensors.
        needs: for each input, whether training needs its gradient; by default every floating-point weight and
            activation that the operator is differentiable in.

    Raises:
        ModelError: the tensors contradict the operator (shapes, a missing required input).
    """
    return (rule_of(call.op).build or fallback)(replace(call, needs=default_needs(call) if needs is None else needs))


_PER_RUN = (
    "kernels", "forward", "backward", "backward_kernels", "input_grad_matrix_flops",
    "weight_grad_matrix_flops", "backward_vector_flops",
)  # fmt: skip
"""Figures of a description that add up over its runs."""


def _times(spec: OpSpec, repeat: int) -> OpSpec:
    """The description of a call that runs several times in one forward pass."""
    if repeat == 1:
        return spec
    nests = tuple(
        replace(n, matrix_flops=n.matrix_flops * repeat, vector_flops=n.vector_flops * repeat) for n in spec.nests
    )
    totals = {name: getattr(spec, name) * repeat for name in _PER_RUN}
    return replace(spec, nests=nests, details={k: v * repeat for k, v in spec.details.items()}, **totals)


def _summed(spec: OpSpec, results: Iterable[tuple[Tensor, int]]) -> OpSpec:
    """Add the cost of summing gradients of results with several readers: each sum reads two tensors and writes one."""
    total, kernels, flops = Traffic(), 0, 0.0
    for tensor, readers in results:
        total += traffic(tensor) * (3.0 * (readers - 1))
        kernels += readers - 1
        flops += tensor.elements * (readers - 1)
    return replace(
        spec,
        backward=spec.backward + total,
        backward_kernels=spec.backward_kernels + kernels,
        backward_vector_flops=spec.backward_vector_flops + flops,
    )


@per_graph
def graph_specs(graph: Graph) -> tuple[OpSpec, ...]:
    """What each node of a graph is, aligned with `graph.nodes`.

    Equal calls are described once. Where several operands read a result, summing their gradients is part of the
    backward pass of the node that made it. Work, traffic and kernels of a node that repeats (a loop's body) are those
    of all its runs together; `saved` lists what one run keeps. Remembered as long as the graph lives.

    Raises:
        ModelError: the tensors of a node contradict its operator.
    """
    classes = call_classes(graph)
    described = [_describe(graph, graph.nodes[i]) for i in classes.first]
    return tuple(described[k] for k in classes.index.tolist())


def _describe(graph: Graph, node: Node) -> OpSpec:
    carrying, rule, call = needs_gradient(graph), rule_of(node.op), OpCall.of(graph, node)
    needs = tuple(name in carrying and rule.differentiable(p) for p, name in enumerate(node.inputs))
    one = spec(call, needs)
    readers, results = gradient_readers(graph), zip(call.outputs, node.outputs, strict=True)
    shared = [(tensor, readers[name]) for tensor, name in results if tensor is not None and readers[name] > 1]
    return _times(_summed(one, shared) if shared and any(needs) else one, node.repeat)


@dataclass(frozen=True, slots=True)
class CallClasses:
    """Nodes by the call they make; nodes of a class cost the same.

    Attributes:
        index: [nodes] number of each node's class, in order of first use.
        first: a node of each class.
    """

    index: np.ndarray
    first: tuple[int, ...]


def _trainable(graph: Graph, name: str) -> bool:
    """Whether a tensor of kind PARAMETER comes from a parameter that training changes."""
    index = graph.parameter_index
    sources = graph.sources.get(name) or (name,)
    known = [graph.parameters[index[s]] for s in sources if s in index]
    return any(p.trainable for p in known) or not known


@per_model
def needs_gradient(graph: Graph) -> frozenset[str]:
    """Names of the tensors whose gradient training computes.

    These are the floating-point tensors with a trainable parameter among their ancestors, through ports that a
    gradient can flow through; so neither the network's inputs nor anything computed from them alone. Integer outputs
    of a fake quantisation pass the gradient straight through.
    Complexity: linear in nodes and their operands; remembered as long as the graph lives.
    """
    carrying = {
        name
        for name, tensor in graph.tensors.items()
        if tensor.kind is TensorKind.PARAMETER and tensor.dtype.is_float and _trainable(graph, name)
    }
    for node in graph.nodes:
        rule = rule_of(node.op)
        if not any(name in carrying and rule.differentiable(p) for p, name in enumerate(node.inputs)):
            continue
        straight = rule.straight_through
        carrying.update(name for name in node.outputs if name and (straight or graph.tensors[name].dtype.is_float))
    return frozenset(carrying)


@per_model
def gradient_readers(graph: Graph) -> Counter[str]:
    """For each tensor, how many operands hand a gradient back to it."""
    carrying = needs_gradient(graph)
    count: Counter[str] = Counter()
    for node in graph.nodes:
        rule = rule_of(node.op)
        count.update(name for p, name in enumerate(node.inputs) if name in carrying and rule.differentiable(p))
    return count


@per_graph
def call_classes(graph: Graph) -> CallClasses:
    """Nodes by the call they make at the graph's batch. O(nodes); remembered as long as the graph lives."""
    return group_calls(graph)


def by_class(graph: Graph, figure: Callable[[int], T]) -> list[T]:
    """A figure of each node, computed for one node of each class of equal calls (`call_classes`)."""
    classes = call_classes(graph)
    figures = [figure(i) for i in classes.first]
    return [figures[k] for k in classes.index.tolist()]


def nodes_where(graph: Graph, holds: Callable[[int], object]) -> list[int]:
    """Indices of the nodes that a predicate holds for, ascending; evaluated once for each class of equal calls."""
    classes = call_classes(graph)
    flags = np.array([bool(holds(i)) for i in classes.first], dtype=bool)
    nodes: list[int] = np.flatnonzero(flags[classes.index]).tolist() if len(flags) else []
    return nodes


def group_calls(
    graph: Graph,
    scaling: Mapping[str, Hashable] | None = None,
    edits: Mapping[tuple[int, int], Hashable] | None = None,
) -> CallClasses:
    """Nodes by the call they make.

    Equal are operator, attributes, repetitions, shapes, types and kinds of tensors, values of constants, which operands
    are one tensor, and which gradients are needed and summed.

    Args:
        graph: the graph.
        scaling: what else tells tensors apart: how their shapes follow the batch.
        edits: what else tells operands apart, by (node, position): which values of a constant follow the batch.
    """
    names: dict[str, int] = {}
    kinds: dict[Hashable, int] = {}
    marks, flags, carrying, readers = scaling or {}, edits or {}, needs_gradient(graph), gradient_readers(graph)

    def kind_of(name: str) -> int:
        if name not in names:
            tensor = graph.tensors.get(name)
            seen = (_looks(tensor), graph.constants.get(name), marks.get(name), name in carrying)
            names[name] = kinds.setdefault(seen, len(kinds))
        return names[name]

    numbers: dict[Hashable, int] = {}
    index = np.zeros(len(graph.nodes), dtype=np.int64)
    first: list[int] = []
    for i, node in enumerate(graph.nodes):
        reads, writes = node.inputs, node.outputs
        key = (
            node.op, node.repeat, tuple(sorted(node.attributes.items())) if node.attributes else (),
            tuple(map(reads.index, reads)) if len(set(reads)) < len(reads) else (),
            tuple(map(kind_of, reads)), tuple(map(kind_of, writes)), tuple([readers.get(name, 1) for name in writes]),
            tuple(flags.get((i, p)) for p in range(len(reads))) if flags else (),
        )  # fmt: skip
        index[i] = numbers.setdefault(key, len(first))
        if index[i] == len(first):
            first.append(i)
    index.flags.writeable = False
    return CallClasses(index, tuple(first))


def _looks(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.kind)
