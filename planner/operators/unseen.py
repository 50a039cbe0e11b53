"""What training does that the file does not show: the loss, dropout, or that it cannot."""

from __future__ import annotations

from planner.errors import ModelError
from planner.graph import Graph, TensorKind, per_graph

_LOSSES = frozenset({"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"})
_LINEAR = frozenset({"MatMul", "Gemm", "com.microsoft.FusedMatMul", "com.microsoft.MatMulNBits"})
_HEAD_WRAPPERS = frozenset(
    {"Add", "Reshape", "Softmax", "LogSoftmax", "Cast", "Identity", "Squeeze", "Flatten", "Transpose"}
)
_EMBEDDING_SUM = "Add of embeddings"


def require_trained(graph: Graph) -> None:
    """Refuse a graph that has weights, none of which training changes: a quantised or frozen model.

    Raises:
        ModelError: says how many weights there are.
    """
    if graph.parameters and not any(parameter.trainable for parameter in graph.parameters):
        integers = sum(not parameter.dtype.is_float for parameter in graph.parameters)
        raise ModelError(
            f"none of its {len(graph.parameters)} weights can be trained ({integers} are quantised to integers, the "
            "others are scales or statistics): this is an inference graph, not a training job",
            where=graph.name,
            hint="export the model before quantising it, in floating point",
        )


@per_graph
def logits_of(graph: Graph) -> str:
    """The result that a loss would be computed from: the output of the last linear layer; "" without one."""
    if any(node.op in _LOSSES for node in graph.nodes):
        return ""
    for output in graph.outputs:
        name = output
        while name in graph.producer:
            node = graph.nodes[graph.producer[name]]
            if node.op in _LINEAR and graph.node_parameters[graph.producer[name]]:
                return output if graph.tensors[output].shape else ""
            if node.op not in _HEAD_WRAPPERS:
                break
            computed = [n for n in node.inputs if n and graph.tensors[n].kind is TensorKind.ACTIVATION]
            if len(computed) != 1:
                break
            name = computed[0]
    return ""


def residual_branches(graph: Graph) -> list[tuple[int, str]]:
    """Where transformers drop out: the linear layer's result before each residual sum, and the sum of embeddings."""
    places = []
    embedding = -1
    for i, node in enumerate(graph.nodes):
        if node.op != "Add":
            continue
        computed = [n for n in node.inputs if graph.tensors[n].kind is TensorKind.ACTIVATION]
        sources = [_source_op(graph, n) for n in computed]
        if computed and all(op in ("Gather", _EMBEDDING_SUM) for op in sources):
            embedding = i
        elif len(computed) == 2:
            places += [(i, n) for n, op in zip(computed, sources, strict=True) if op in _LINEAR][:1]
    if embedding >= 0:
        places.insert(0, (embedding, graph.nodes[embedding].outputs[0]))
    return places


def _source_op(graph: Graph, name: str) -> str:
    """Operator that a tensor comes from, through views and bias sums that nothing else reads.

    Sums of embeddings have a name of their own; "" for a tensor that has other readers on the way.
    """
    while name in graph.producer and len(graph.consumers.get(name, ())) == 1:
        node = graph.nodes[graph.producer[name]]
        if node.op in ("Reshape", "Identity", "Squeeze", "Unsqueeze"):
            name = node.inputs[0]
            continue
        if node.op != "Add":
            weighted = node.op not in _LINEAR or graph.node_parameters[graph.producer[name]]
            return node.op if weighted else ""
        computed = [n for n in node.inputs if graph.tensors[n].kind is TensorKind.ACTIVATION]
        inner = {graph.nodes[graph.producer[n]].op if n in graph.producer else "" for n in computed}
        if inner == {"Gather"}:
            return _EMBEDDING_SUM
        if len(computed) != 1:
            return node.op
        name = computed[0]
    return ""
