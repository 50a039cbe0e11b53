"""Model files to graphs, one module a format; ONNX passes live in `onnx_graph`."""

from planner.importers.formats import FORMATS, Format, ImportOptions, load_graph
from planner.importers.onnx import graph_from_proto

__all__ = ["FORMATS", "Format", "ImportOptions", "graph_from_proto", "load_graph"]
