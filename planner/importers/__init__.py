"""Model files to graphs, one module a format; ONNX passes live in `onnx_graph`."""

from planner.importers.formats import FORMATS, Format, ImportOptions, load_graph
from planner.importers.onnx import graph_from_proto
from planner.importers.operator_graph import (
    OperatorGraph,
    OperatorNode,
    is_operator_graph,
    load_operator_graph,
    operator_graph_from,
)
from planner.importers.piper import PiperFile, PiperNode, piper_from_document, read_piper, sniff_piper
from planner.importers.rebatched import RebatchedFile, rebatched_file

__all__ = [
    "FORMATS",
    "Format",
    "ImportOptions",
    "OperatorGraph",
    "OperatorNode",
    "PiperFile",
    "PiperNode",
    "RebatchedFile",
    "graph_from_proto",
    "is_operator_graph",
    "load_graph",
    "load_operator_graph",
    "operator_graph_from",
    "piper_from_document",
    "read_piper",
    "rebatched_file",
    "sniff_piper",
]
