"""Give every node the path of the module it belongs to."""

from __future__ import annotations

from dataclasses import replace

from planner.importers.onnx_graph.work import WorkGraph, WorkNode
from planner.importers.types import ImportOptions


def assign_modules(graph: WorkGraph, options: ImportOptions) -> None:
    """Nodes about which the exporter says nothing join the module of what they read, else of what reads them."""
    said = [node for node in graph.nodes if node.scope.module is not None]
    if len(said) < len(graph.nodes):
        if said:
            _join_producers(graph)
            _join_consumers(graph)
        for node in graph.nodes:
            if node.scope.module is None:
                node.scope = replace(node.scope, module="")
    for node in graph.nodes:
        if node.op == "Conv" and "BatchNorm" in node.scope.module_class:
            _return_to_convolution(node)


def _join_producers(graph: WorkGraph) -> None:
    producer: dict[str, WorkNode] = {}
    for node in graph.nodes:
        if node.scope.module is None:
            found = next(
                (producer[n] for n in node.inputs if n in producer and producer[n].scope.module is not None), None
            )
            if found is not None:
                node.scope = replace(node.scope, module=found.scope.module)
        producer.update((name, node) for name in node.outputs if name)


def _join_consumers(graph: WorkGraph) -> None:
    reader: dict[str, str] = {}
    for node in reversed(graph.nodes):
        if node.scope.module is None:
            module = next((reader[name] for name in node.outputs if name in reader), None)
            node.scope = replace(node.scope, module=module)
        if node.scope.module is not None:
            reader.update((name, node.scope.module) for name in node.inputs if name)


def _return_to_convolution(node: WorkNode) -> None:
    """A convolution with a batch norm folded into it carries the norm's path; its weight knows the convolution's."""
    owner, _, last = node.inputs[1].rpartition(".")
    if last == "weight" and owner:
        node.scope = replace(node.scope, module=owner)
