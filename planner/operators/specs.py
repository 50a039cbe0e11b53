"""Descriptions of calls and of whole graphs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from planner.graph import Graph, Node, Tensor, per_graph
from planner.operators.assemble import Traffic, fallback, traffic
from planner.operators.classes import call_classes, fan_out, needs_gradient
from planner.operators.site import Site, default_needs, rule_of
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
    site = Site(call, default_needs(call) if needs is None else needs)
    return (rule_of(call.op).build or fallback)(site)


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
    shared = [(t, n) for t, n in zip(call.outputs, fan_out(graph, node), strict=True) if t is not None and n > 1]
    return _times(_summed(one, shared) if shared and any(needs) else one, node.repeat)
