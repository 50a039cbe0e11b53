"""The model as a DAG of operators over named tensors: types, order, cuts and blocks."""

from planner.graph.blocks import Block, Chain, build_chain, layer_of, structural_hash
from planner.graph.memo import hand_on, per_graph, remember
from planner.graph.types import (
    AttributeValue,
    ConstantValue,
    DType,
    Graph,
    ImportReport,
    Node,
    Note,
    NoteLevel,
    Parameter,
    Tensor,
    TensorKind,
)

__all__ = [
    "AttributeValue",
    "Block",
    "Chain",
    "ConstantValue",
    "DType",
    "Graph",
    "ImportReport",
    "Node",
    "Note",
    "NoteLevel",
    "Parameter",
    "Tensor",
    "TensorKind",
    "build_chain",
    "hand_on",
    "layer_of",
    "per_graph",
    "remember",
    "structural_hash",
]
