"""The strategies of operators that the tensor parallel layers of training frameworks have.

A tensor axis of a mesh may do anything with any operator. Frameworks cut weights of products by their columns or rows,
attention by its heads, and what lies between layers by the sequence or not at all (Narayanan et al., SC 2021;
Korthikanti et al., 2022). No weight is gathered from the ranks of the axis while a micro-batch runs: that is what
replicas with a sharded optimizer are for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.graph import Graph, Tensor, TensorKind, per_graph
from planner.operators import JointCut, OpCall, OpSpec, graph_specs, rule_of
from planner.sharding.choices import Options
from planner.sharding.mesh import AxisRole
from planner.sharding.strategies import Reason, Strategy

SMALL = 0.005
"""A weight with less than this part of its block's elements, a router's say, may be whole on every rank."""

_HEADS = frozenset("grh")
"""Iteration dimensions of attention that count heads: groups, heads of a group, heads."""


@per_graph
def attention_heads(graph: Graph) -> tuple[int, int]:
    """Numbers that divide all attentions' heads and all their key-value heads; zeros where there is no attention."""
    heads, groups = 0, 0
    for node, spec in zip(graph.nodes, graph_specs(graph), strict=True):
        if rule_of(node.op).joint is JointCut.RING:
            sizes = {d.name: d.size for nest in spec.nests for d in nest.dims if d.name in _HEADS}
            heads = math.gcd(heads, math.prod(sizes.values()))
            groups = math.gcd(groups, sizes.get("g", math.prod(sizes.values())))
    return heads, groups


def layer_strategies(
    found: Sequence[Strategy], call: OpCall, spec: OpSpec, options: Options, sizes: Sequence[int], elements: int
) -> tuple[Strategy, ...]:
    """Of the strategies of an operator those that frameworks have; all where none is, or anything is allowed.

    Args:
        found: strategies.
        call: the operator.
        spec: its description.
        options: which splits count.
        sizes: ranks along each axis.
        elements: weights of the block that the operator is part of.
    """
    if not options.as_layers:
        return tuple(found)
    axes = [axis for axis, size in enumerate(sizes) if size > 1 and options.role(axis) is AxisRole.TENSOR]
    fitting = tuple(s for s in found if all(_in_layers(s, call, spec, axis, sizes, elements) for axis in axes))
    return fitting or tuple(found)


def _weights(call: OpCall, spec: OpSpec) -> list[tuple[int, Tensor]]:
    """Weights of two dimensions and more that an operator multiplies by, by input position."""
    inputs = enumerate(call.inputs) if spec.matrix_flops else ()
    return [(p, t) for p, t in inputs if t is not None and t.kind is TensorKind.PARAMETER and len(t.shape) > 1]


def _tables(call: OpCall) -> list[tuple[int, Tensor]]:
    """Weights of two and three dimensions that an operator reads, embeddings among them, by input position."""
    parameters = ((p, t) for p, t in enumerate(call.inputs) if t is not None and t.kind is TensorKind.PARAMETER)
    return [(p, t) for p, t in parameters if len(t.shape) in (2, 3)]


def _in_layers(strategy: Strategy, call: OpCall, spec: OpSpec, axis: int, sizes: Sequence[int], elements: int) -> bool:
    """Whether tensor parallel layers run an operator so."""
    name, reads = strategy.splits[axis], dict(strategy.reads)
    weights = _weights(call, spec)
    if any(len(weight.shape) > 3 for _, weight in weights):  # a convolution's kernel
        return not name
    for p, weight in _tables(call):
        even = all(size % sizes[axis] == 0 for size in weight.shape[-2:])
        if even and weight.elements >= SMALL * elements and not reads[p][axis].cuts:
            return False
    if rule_of(call.op).joint is JointCut.RING:
        return name in _HEADS
    if spec.matrix_flops and not weights:
        return bool(name) and _by_heads(strategy, call, axis)
    normed = any(t is not None and t.kind is TensorKind.PARAMETER for t in call.inputs) and not weights
    return not (normed and any(e.axis == axis and e.reason is Reason.STATISTICS for e in strategy.exchanges))


def _by_heads(strategy: Strategy, call: OpCall, axis: int) -> bool:
    """Whether a product of two activations is cut along a dimension that both have, but for the samples."""
    pairs = [(call.inputs[p], layout) for p, layout in strategy.reads]
    dims = [(layout[axis].dim, len(t.shape)) for t, layout in pairs if t is not None and layout[axis].cuts]
    return len(dims) == len(pairs) and all(dim < rank - 2 and (dim > 0 or rank < 4) for dim, rank in dims)
