"""Which tensors carry a gradient back."""

from __future__ import annotations

from planner.graph import Graph, Node
from planner.operators import needs_gradient, rule_of
from planner.space.blocks import loss_outputs


def differentiable(graph: Graph) -> frozenset[str]:
    """Names of the tensors through which a gradient flows in training.

    These depend on a trained weight, and the loss depends on them, both through inputs that an operator can
    differentiate. Without a loss in the graph every output counts as one. O(nodes).
    """
    reaches = set(loss_outputs(graph) or graph.outputs)
    for node in reversed(graph.nodes):
        if any(name in reaches for name in node.outputs):
            reaches.update(_smooth_inputs(node))
    return needs_gradient(graph) & reaches


def _smooth_inputs(node: Node) -> tuple[str, ...]:
    rule = rule_of(node.op)
    return tuple(name for i, name in enumerate(node.inputs) if name and rule.differentiable(i))
