"""From a model's graph and the times of its nodes to what one step exchanges."""

from __future__ import annotations

import numpy as np

from planner.errors import ModelError
from planner.exchange.types import Step, Variable
from planner.graph import Graph, TensorKind


def step_of(
    graph: Graph,
    forward_s: np.ndarray,
    backward_s: np.ndarray,
    *,
    gradient_bytes: float = 2,
    weight_bytes: float | None = None,
    micro_batches: int = 1,
    lookups: int = 1,
) -> Step:
    """The trained parameters as variables, each ready when the backward has passed the first node that reads it.

    A parameter that only look-ups (`Gather` along its rows) read is sparse; the part of its rows that is touched is at
    most indices over rows, which is taken. Tied copies are one variable, as large as one and ready with the last.

    Args:
        graph: the model, at the micro-batch that the times are for.
        forward_s: seconds of each node, float64 [nodes].
        backward_s: seconds of each node's backward, float64 [nodes].
        gradient_bytes: bytes an element of a gradient takes when it travels.
        weight_bytes: bytes an element of a weight takes; None for as many.
        micro_batches: micro-batches whose gradients accumulate.
        lookups: micro-batches whose touched rows come together before they are sent: those of a step times the ranks
            of a machine.

    Raises:
        ModelError: times that are not one a node.

    O(nodes + parameters).
    """
    nodes = len(graph.nodes)
    if len(forward_s) != nodes or len(backward_s) != nodes:
        raise ModelError(
            f"{len(forward_s)} forward and {len(backward_s)} backward times for {nodes} nodes",
            where=graph.name,
            hint="give one time a node",
        )
    done_s = np.cumsum(np.asarray(backward_s, dtype=np.float64)[::-1])[::-1]  # when node i's backward is complete
    total_s = float(done_s[0]) if nodes else 0.0
    first, rows = _readers(graph)
    variables = []
    for p in graph.parameters:
        if p.name not in first or not p.trainable or p.tied_to:
            continue
        sparse = p.name in rows and len(p.shape) == 2
        touched = min(1.0, rows[p.name] * lookups / p.shape[0]) if sparse else 1.0
        weight = None if weight_bytes is None else p.elements * weight_bytes
        ready_s = min(float(done_s[first[p.name]]), total_s)
        variables.append(Variable(p.name, p.elements * gradient_bytes, ready_s, sparse, touched, weight))
    return Step(tuple(variables), total_s, float(np.sum(forward_s)), micro_batches)


def _readers(graph: Graph) -> tuple[dict[str, int], dict[str, float]]:
    """The first node that reads each parameter (or a tied copy), and the rows read of those that are only looked up."""
    owner = {p.name: p.tied_to or p.name for p in graph.parameters}
    first: dict[str, int] = {}
    rows: dict[str, float] = {}
    dense: set[str] = set()
    for i, node in enumerate(graph.nodes):
        for position, tensor in enumerate(node.inputs):
            if not tensor or graph.tensors[tensor].kind is not TensorKind.PARAMETER:
                continue
            read = _rows_read(graph, i, position)
            for source in graph.sources.get(tensor) or (tensor,):
                name = owner.get(source, source)
                first.setdefault(name, i)
                if read is None:
                    dense.add(name)
                else:
                    rows[name] = rows.get(name, 0.0) + read
    return first, {name: count for name, count in rows.items() if name not in dense}


def _rows_read(graph: Graph, index: int, position: int) -> float | None:
    """How many rows a look-up reads of a parameter; None when the node is no look-up along its rows."""
    node = graph.nodes[index]
    if node.op != "Gather" or position != 0 or node.attributes.get("axis", 0) != 0:
        return None
    return float(graph.tensors[node.inputs[1]].elements * node.repeat)
