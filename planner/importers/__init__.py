"""Model files to graphs, one module a format; ONNX passes live in `onnx_graph`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.importers.formats import FORMATS, Format, ImportOptions, load_graph

if TYPE_CHECKING:
    from planner.importers.onnx import graph_from_proto

__all__ = ["FORMATS", "Format", "ImportOptions", "graph_from_proto", "load_graph"]


def __getattr__(name: str) -> object:
    if name == "graph_from_proto":
        from planner.importers.onnx import graph_from_proto

        return graph_from_proto
    raise AttributeError(f"module 'planner.importers' has no attribute {name!r}")
