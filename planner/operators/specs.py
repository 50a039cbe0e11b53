"""Descriptions of calls and of whole graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from planner.graph import Graph, Node, Tensor, TensorKind
from planner.operators.assemble import Traffic, fallback, traffic
from planner.operators.site import Rule, Site, default_needs, find_rule
from planner.operators.types import OpCall, OpSpec


def spec(call: OpCall, needs: tuple[bool, ...] | None = None) -> OpSpec:
    """What one operator call is: its work, traffic, kept tensors and loop nests.

    Args:
        call: the operator and its tensors.
        needs: for each input, whether training needs its gradient; by default every floating-point weight and
            activation that the operator is differentiable in.

    Raises:
        ModelError: the tensors contradict the operator (shapes, a missing required input).
    """
    rule = find_rule(call.op)
    site = Site(call, default_needs(call) if needs is None else needs)
    return fallback(site) if rule is None else rule.build(site)


def _differentiable(rule: Rule | None, position: int) -> bool:
    return rule is None or rule.ports is None or position in rule.ports


def _carries_gradient(graph: Graph, node: Node, found: set[str]) -> bool:
    rule = find_rule(node.op)
    return any(name in found and _differentiable(rule, p) for p, name in enumerate(node.inputs))


def _trainable(graph: Graph, name: str) -> bool:
    """Whether a tensor of kind PARAMETER comes from a parameter that training changes."""
    index = graph.parameter_index
    sources = graph.sources.get(name) or (name,)
    known = [graph.parameters[index[s]] for s in sources if s in index]
    return any(p.trainable for p in known) or not known


def needs_gradient(graph: Graph) -> frozenset[str]:
    """Names of the tensors whose gradient training computes.

    These are the floating-point tensors with a trainable parameter among their ancestors, through ports that a
    gradient can flow through; so neither the network's inputs nor anything computed from them alone. Integer outputs
    of a fake quantisation pass the gradient straight through.
    Complexity: linear in nodes and their operands.
    """
    found = {
        name
        for name, tensor in graph.tensors.items()
        if tensor.kind is TensorKind.PARAMETER and tensor.dtype.is_float and _trainable(graph, name)
    }
    for node in graph.nodes:
        if not _carries_gradient(graph, node, found):
            continue
        rule = find_rule(node.op)
        straight = rule is not None and rule.straight_through
        found.update(name for name in node.outputs if name and (straight or graph.tensors[name].dtype.is_float))
    return frozenset(found)


def _times(one: OpSpec, repeat: int) -> OpSpec:
    """The description of a call that runs several times in one forward pass."""
    if repeat == 1:
        return one
    nests = tuple(
        replace(n, matrix_flops=n.matrix_flops * repeat, vector_flops=n.vector_flops * repeat) for n in one.nests
    )
    return replace(
        one,
        nests=nests,
        kernels=one.kernels * repeat,
        forward_bytes=one.forward_bytes * repeat,
        backward_bytes=one.backward_bytes * repeat,
        backward_kernels=one.backward_kernels * repeat,
        input_grad_matrix_flops=one.input_grad_matrix_flops * repeat,
        weight_grad_matrix_flops=one.weight_grad_matrix_flops * repeat,
        backward_vector_flops=one.backward_vector_flops * repeat,
        details={name: value * repeat for name, value in one.details.items()},
    )


def _readers(graph: Graph, carrying: frozenset[str]) -> Counter[str]:
    """For each tensor, how many operands hand a gradient back to it."""
    count: Counter[str] = Counter()
    for node in graph.nodes:
        rule = find_rule(node.op)
        count.update(name for p, name in enumerate(node.inputs) if name in carrying and _differentiable(rule, p))
    return count


def _summed(one: OpSpec, results: Iterable[tuple[Tensor, int]]) -> OpSpec:
    """Add what it costs to sum the gradients of results that several operands read: two in, one out, each time."""
    total, kernels, flops = Traffic(), 0, 0.0
    for tensor, readers in results:
        total += traffic(tensor) * (3.0 * (readers - 1))
        kernels += readers - 1
        flops += tensor.elements * (readers - 1)
    figures = dict(one.details)
    figures["backward_float_elements"] += total.float_elements
    figures["backward_fixed_bytes"] += total.fixed_bytes
    return replace(
        one,
        backward_bytes=one.backward_bytes + total.byte_count,
        backward_kernels=one.backward_kernels + kernels,
        backward_vector_flops=one.backward_vector_flops + flops,
        details=figures,
    )


def graph_specs(graph: Graph) -> tuple[OpSpec, ...]:
    """What each node of a graph is, aligned with `graph.nodes`.

    Equal calls are described once. Where several operands read a result, summing their gradients is part of the
    backward pass of the node that made it. Work, traffic and kernels of a node that repeats (a loop's body) are those
    of all its runs together; `saved` lists what one run keeps.

    Raises:
        ModelError: the tensors of a node contradict its operator.
    """
    carrying = needs_gradient(graph)
    readers = _readers(graph, carrying)
    cache: dict[object, OpSpec] = {}
    result = []
    for node in graph.nodes:
        call = OpCall.of(graph, node)
        rule = find_rule(node.op)
        needs = tuple(name in carrying and _differentiable(rule, p) for p, name in enumerate(node.inputs))
        fan_out = tuple(max(1, readers[name]) for name in node.outputs)
        key = (call.signature(), needs, node.repeat, fan_out)
        if key not in cache:
            one = spec(call, needs)
            shared = [(t, n) for t, n in zip(call.outputs, fan_out, strict=True) if t is not None and n > 1]
            cache[key] = _times(_summed(one, shared) if shared and any(needs) else one, node.repeat)
        result.append(cache[key])
    return tuple(result)
