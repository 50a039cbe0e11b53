"""The walk over a file's nodes with all that extends it: control flow, functions, sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from planner.importers.onnx_graph.control_flow import HANDLERS as CONTROL_FLOW
from planner.importers.onnx_graph.control_flow import call_function, loop_names
from planner.importers.onnx_graph.resolve import Resolver
from planner.importers.onnx_graph.sequences import HANDLERS as SEQUENCES
from planner.importers.onnx_graph.work import WorkGraph

if TYPE_CHECKING:
    import onnx


def resolve(model: onnx.ModelProto, name: str, dims: Mapping[str, int], where: str) -> WorkGraph:
    """The working graph of a model, every tensor typed.

    Raises:
        ModelError: an axis without a size, a name nothing defines, shapes that contradict each other, or a shape that
            cannot be found at an operator whose cost depends on it.
    """
    return Resolver(
        model,
        name,
        dims,
        where,
        loops=loop_names(model.graph),
        handlers={**CONTROL_FLOW, **SEQUENCES},
        call=call_function,
    ).run()
