"""Model files to graphs, one module a format; ONNX passes live in `onnx_graph`."""

from planner.importers.formats import load_graph as load_graph
from planner.importers.onnx import from_torch as from_torch
from planner.importers.onnx import graph_from_proto as graph_from_proto
from planner.importers.onnx import rebatched_file as rebatched_file
