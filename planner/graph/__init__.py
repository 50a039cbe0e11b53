"""The model as a DAG of operators over named tensors: types, order, cuts and blocks."""

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
]
