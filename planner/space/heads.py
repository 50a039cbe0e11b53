"""Where a model's loss is computed, and which block makes the logits for it."""

from __future__ import annotations

from planner.graph import Chain, Graph
from planner.operators.unseen import logits_of

LOSS_OPS = frozenset({"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"})


def loss_outputs(graph: Graph) -> tuple[str, ...]:
    """Outputs that are a training loss: made by a loss operator, or floating-point scalars; () when there is none."""
    return tuple(name for name in graph.outputs if _is_loss(graph, name))


def _is_loss(graph: Graph, name: str) -> bool:
    at = graph.producer.get(name)
    tensor = graph.tensors.get(name)
    if at is None or tensor is None or not tensor.dtype.is_float:
        return False
    node = graph.nodes[at]
    return (node.op in LOSS_OPS and node.outputs[0] == name) or tensor.shape == ()


def head_block(chain: Chain) -> int:
    """The last block, when the loss or the logits that it is computed from are made there; -1 otherwise.

    Training frameworks recompute layers, not the head: its activations are used at once, and its forward is long.
    """
    graph = chain.graph
    ends = {graph.producer[name] for name in (*loss_outputs(graph), logits_of(graph)) if name in graph.producer}
    last = len(chain.blocks) - 1
    return last if last >= 0 and ends.intersection(chain.blocks[last].nodes) else -1
