"""Nodes that make the same call: a model repeats its layers, so a few hundred calls describe thousands of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np

from planner.graph import Graph, Node, Tensor, TensorKind, per_graph
from planner.operators.site import rule_of


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


@per_graph
def needs_gradient(graph: Graph) -> frozenset[str]:
    """Names of the tensors whose gradient training computes.

    These are the floating-point tensors with a trainable parameter among their ancestors, through ports that a
    gradient can flow through; so neither the network's inputs nor anything computed from them alone. Integer outputs
    of a fake quantisation pass the gradient straight through.
    Complexity: linear in nodes and their operands; remembered as long as the graph lives.
    """
    found = {
        name
        for name, tensor in graph.tensors.items()
        if tensor.kind is TensorKind.PARAMETER and tensor.dtype.is_float and _trainable(graph, name)
    }
    for node in graph.nodes:
        rule = rule_of(node.op)
        if not any(name in found and rule.differentiable(p) for p, name in enumerate(node.inputs)):
            continue
        straight = rule.straight_through
        found.update(name for name in node.outputs if name and (straight or graph.tensors[name].dtype.is_float))
    return frozenset(found)


@per_graph
def gradient_readers(graph: Graph) -> Counter[str]:
    """For each tensor, how many operands hand a gradient back to it."""
    carrying = needs_gradient(graph)
    count: Counter[str] = Counter()
    for node in graph.nodes:
        rule = rule_of(node.op)
        count.update(name for p, name in enumerate(node.inputs) if name in carrying and rule.differentiable(p))
    return count


def fan_out(graph: Graph, node: Node) -> tuple[int, ...]:
    """For each result of a node, how many gradients are summed to its own; at least 1."""
    readers = gradient_readers(graph)
    return tuple(max(1, readers[name]) for name in node.outputs)


@per_graph
def call_classes(graph: Graph) -> CallClasses:
    """Nodes by the call they make at the graph's batch. O(nodes); remembered as long as the graph lives."""
    return group_calls(graph)


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
    marks, flags, carrying = scaling or {}, edits or {}, needs_gradient(graph)

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
        places = tuple(node.inputs.index(name) for name in node.inputs)
        key = (
            node.op, node.repeat, tuple(sorted(node.attributes.items())), places,
            tuple(map(kind_of, node.inputs)), tuple(map(kind_of, node.outputs)), fan_out(graph, node),
            tuple(flags.get((i, p)) for p in range(len(places))) if flags else (),
        )  # fmt: skip
        index[i] = numbers.setdefault(key, len(first))
        if index[i] == len(first):
            first.append(i)
    index.flags.writeable = False
    return CallClasses(index, tuple(first))


def _looks(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.kind)
