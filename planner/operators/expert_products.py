"""Products with expert weights that the graph copies for each token."""

from __future__ import annotations

from dataclasses import dataclass

from planner.graph import Graph, TensorKind, per_model


@dataclass(frozen=True, slots=True)
class ExpertProduct:
    """A product with weights gathered for each token: a mixture of experts written with a copy of its weights.

    Training runs it as one grouped product per expert; the copies are never made.

    Attributes:
        gather: index of the node that copies.
        product: index of the matrix product.
        weight: the stored weights of all experts.
    """

    gather: int
    product: int
    weight: str


@per_model
def find_expert_products(graph: Graph) -> tuple[ExpertProduct, ...]:
    """All products with weights gathered by computed indices, in graph order. O(nodes)."""
    found = []
    for i, node in enumerate(graph.nodes):
        if node.op not in ("Gather", "GatherND") or graph.tensors[node.inputs[0]].kind is not TensorKind.PARAMETER:
            continue
        weight, readers = graph.tensors[node.inputs[0]], graph.consumers.get(node.outputs[0], ())
        picked = graph.tensors[node.inputs[1]].kind is TensorKind.ACTIVATION
        if len(weight.shape) == 3 and picked and len(readers) == 1 and graph.nodes[readers[0]].op == "MatMul":
            found.append(ExpertProduct(i, readers[0], weight.name))
    return tuple(found)
