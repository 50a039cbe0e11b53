"""What training frameworks use an axis of a mesh for, as a choice among the strategies of an operator.

An axis of a mesh may do anything with any operator. Frameworks use it for one thing: for tensor parallelism (weights of
products are cut by their columns or rows, attention by its heads, what lies between layers by the sequence or not at
all; Narayanan et al., SC 2021; Korthikanti et al., 2022), or for expert parallelism (samples are dealt to the ranks,
which have experts of their own and copies of all other weights; Fedus et al., 2021). No weight is gathered from the
ranks of the axis while a micro-batch runs: that is what replicas with a sharded optimizer are for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

from planner.graph import Graph, Tensor, TensorKind
from planner.operators import JointCut, OpCall, OpSpec, graph_specs, rule_of
from planner.sharding.layout import REPLICATED
from planner.sharding.resting import Boundaries, Boundary
from planner.sharding.strategies import Reason, Strategy

SMALL = 0.005
"""A weight with less than this part of its block's elements, a router's say, may be whole on every rank."""

_HEADS = frozenset("grh")
"""Iteration dimensions of attention that count heads: groups, heads of a group, heads."""


class AxisUse(StrEnum):
    """What an axis of a mesh is for."""

    TENSOR = "tensor"
    """Weights are cut, tensors between blocks are whole or cut by the sequence."""
    EXPERT = "expert"
    """The batch and the experts of mixtures are cut, all other weights are whole."""


def uses_of(boundaries: Boundaries) -> tuple[AxisUse, ...]:
    """What axes are for between whose ranks boundary tensors lie like this."""
    return tuple(AxisUse.EXPERT if boundary is Boundary.BATCH else AxisUse.TENSOR for boundary in boundaries)


def attention_heads(graph: Graph) -> tuple[int, int]:
    """Numbers that divide all attentions' heads and all their key-value heads; zeros where there is no attention."""
    heads, groups = 0, 0
    for node, spec in zip(graph.nodes, graph_specs(graph), strict=True):
        if rule_of(node.op).joint is JointCut.RING:
            sizes = {d.name: d.size for nest in spec.nests for d in nest.dims if d.name in _HEADS}
            heads = math.gcd(heads, math.prod(sizes.values()))
            groups = math.gcd(groups, sizes.get("g", math.prod(sizes.values())))
    return heads, groups


def has_experts(graph: Graph) -> bool:
    """Whether an operator multiplies by the weights of several experts."""
    for node, spec in zip(graph.nodes, graph_specs(graph), strict=True):
        tensors = [graph.tensors[name] for name in node.inputs if name] if spec.matrix_flops else []
        if any(t.kind is TensorKind.PARAMETER and _of_experts(t) for t in tensors):
            return True
    return False


def _of_experts(weight: Tensor) -> bool:
    return len(weight.shape) == 3 and weight.shape[0] > 1


def used_so(
    found: Sequence[Strategy], call: OpCall, spec: OpSpec, uses: Sequence[AxisUse], sizes: Sequence[int], elements: int
) -> tuple[Strategy, ...]:
    """The strategies of an operator that fit what the axes are for; all where none does.

    Args:
        found: strategies.
        call: the operator.
        spec: its description.
        uses: by axis; empty for anything.
        sizes: ranks along each axis.
        elements: weights of the block that the operator is part of.
    """
    axes = [(axis, use) for axis, use in enumerate(uses) if sizes[axis] > 1]
    suits = {AxisUse.TENSOR: _as_tensor, AxisUse.EXPERT: _as_expert}
    fitting = tuple(s for s in found if all(suits[use](s, call, spec, axis, sizes, elements) for axis, use in axes))
    return fitting or tuple(found)


def _weights(call: OpCall, spec: OpSpec) -> list[tuple[int, Tensor]]:
    """Weights of two dimensions and more that an operator multiplies by, by input position."""
    inputs = enumerate(call.inputs) if spec.matrix_flops else ()
    return [(p, t) for p, t in inputs if t is not None and t.kind is TensorKind.PARAMETER and len(t.shape) > 1]


def _as_tensor(strategy: Strategy, call: OpCall, spec: OpSpec, axis: int, sizes: Sequence[int], elements: int) -> bool:
    """Whether an axis of tensor parallel ranks runs an operator so."""
    name, reads = strategy.splits[axis], dict(strategy.reads)
    weights = _weights(call, spec)
    if any(len(weight.shape) > 3 for _, weight in weights):  # a convolution's kernel
        return not name
    for p, weight in weights:
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


def _as_expert(strategy: Strategy, call: OpCall, spec: OpSpec, axis: int, sizes: Sequence[int], elements: int) -> bool:
    """Whether an axis of expert parallel ranks runs an operator so."""
    reads = dict(strategy.reads)
    for p, weight in _weights(call, spec):
        experts, part = _of_experts(weight), reads[p][axis]
        if (part.cuts and part.dim == 0) != experts or (part != REPLICATED and not experts):
            return False
    if rule_of(call.op).joint is JointCut.RING and strategy.splits[axis] not in ("b", ""):
        return False
    return not any(e.axis == axis and e.reason in (Reason.STATISTICS, Reason.RING) for e in strategy.exchanges)
