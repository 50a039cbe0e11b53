"""Model files to graphs, one module a format; ONNX passes live in `onnx_graph`."""

from planner.importers.formats import load_graph as load_graph
from planner.importers.onnx import from_torch as from_torch
from planner.importers.onnx import graph_from_proto as graph_from_proto
from planner.importers.onnx import rebatched_file as rebatched_file
from planner.importers.operator_graph import OperatorGraph as OperatorGraph
from planner.importers.operator_graph import OperatorNode as OperatorNode
from planner.importers.operator_graph import is_operator_graph as is_operator_graph
from planner.importers.operator_graph import load_operator_graph as load_operator_graph
from planner.importers.operator_graph import operator_graph_from as operator_graph_from
from planner.importers.piper import piper_from_document as piper_from_document
from planner.importers.piper import read_piper as read_piper
from planner.importers.piper import sniff_piper as sniff_piper
