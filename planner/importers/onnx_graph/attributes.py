"""ONNX attributes and node metadata as plain Python, and the module that each node belongs to."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.graph import AttributeValue
from planner.importers.formats import ImportOptions
from planner.importers.onnx_graph.work import Array, Scope, WorkGraph, WorkNode

if TYPE_CHECKING:
    import onnx

FLOAT, INT, STRING, TENSOR, GRAPH, FLOATS, INTS, STRINGS = 1, 2, 3, 4, 5, 6, 7, 8

_NAME_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_NAMESPACE = "namespace"


def shortest_float(value: float) -> float:
    """The shortest decimal that a 32-bit float stands for: 0.1, not 0.10000000149."""
    return float(str(np.float32(value)))


def plain_attributes(node: onnx.NodeProto) -> dict[str, AttributeValue]:
    """All attributes but tensors and graphs, as plain Python values."""
    values: dict[str, AttributeValue] = {}
    for attribute in node.attribute:
        kind = attribute.type
        if kind == INT:
            values[attribute.name] = attribute.i
        elif kind == INTS:
            values[attribute.name] = tuple(attribute.ints)
        elif kind == FLOAT:
            values[attribute.name] = shortest_float(attribute.f)
        elif kind == STRING:
            values[attribute.name] = attribute.s.decode("utf-8", "replace")
        elif kind == FLOATS:
            values[attribute.name] = tuple(shortest_float(f) for f in attribute.floats)
        elif kind == STRINGS:
            values[attribute.name] = tuple(s.decode("utf-8", "replace") for s in attribute.strings)
    return values


def scope_of(node: onnx.NodeProto) -> Scope:
    """The module a node belongs to: from the exporter's metadata, else from a path in the node's name."""
    data = {entry.key: entry.value for entry in node.metadata_props}
    scopes = string_list(data.get(_NAME_SCOPES, ""))
    classes = string_list(data.get(_CLASSES, ""))
    if not scopes and _NAMESPACE in data:
        steps = [step.partition(": ") for step in data[_NAMESPACE].split("/")]
        scopes, classes = [step[0] for step in steps], [step[2] for step in steps]
    if scopes:
        owner = len(scopes) - 2
        module_class = classes[owner] if 0 <= owner < len(classes) else ""
        return Scope(scopes[owner] if owner >= 0 else "", module_class, classes[-1] if classes else "")
    return Scope(_path_in_name(node.name))


def string_list(text: str) -> list[str]:
    """The strings of a Python list written as text, as exporters put them into metadata; empty for anything else."""
    if not (text.startswith("['") and text.endswith("']")):
        return []
    return text[2:-2].split("', '")


def _path_in_name(name: str) -> str | None:
    """Module path in a node name such as `/layer1/layer1.0/conv1/Conv`, where a container repeats its own name."""
    if "/" not in name:
        return None
    steps: list[str] = []
    for step in name.strip("/").split("/")[:-1]:
        if steps and step.startswith(steps[-1] + "."):
            steps.pop()
        steps.append(step)
    return ".".join(steps)


def tensor_value(tensor: onnx.TensorProto) -> Array | None:
    """A stored tensor as numpy; None when its data is not in the message or of a type numpy cannot hold."""
    from onnx import numpy_helper

    if tensor.data_location == 1:
        return None
    try:
        value = numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError, NotImplementedError):  # how onnx says that numpy has no such type
        return None
    if value.dtype.kind in "biufc":
        return value
    return value.astype(np.float32) if value.dtype.kind == "V" else None


def constant_value(node: onnx.NodeProto) -> tuple[tuple[int, ...], int, Any] | None:
    """Shape, element type and value (a tensor message or numpy array) of a Constant node; None for an unknown form."""
    for attribute in node.attribute:
        name = attribute.name
        if name == "value":
            return tuple(attribute.t.dims), attribute.t.data_type, attribute.t
        if name == "sparse_value":
            sparse = attribute.sparse_tensor
            return tuple(sparse.dims), sparse.values.data_type, None
        if name == "value_int":
            return (), 7, np.array(attribute.i, dtype=np.int64)
        if name == "value_ints":
            return (len(attribute.ints),), 7, np.array(attribute.ints, dtype=np.int64)
        if name == "value_float":
            return (), 1, np.array(attribute.f, dtype=np.float32)
        if name == "value_floats":
            return (len(attribute.floats),), 1, np.array(attribute.floats, dtype=np.float32)
        if name == "value_string":
            return (), 8, None
        if name == "value_strings":
            return (len(attribute.strings),), 8, None
    return None


def assign_modules(graph: WorkGraph, options: ImportOptions) -> None:
    """Put every node without a module into the module of a node it reads, else of a node that reads it."""
    placed = [node for node in graph.nodes if node.scope.module is not None]
    if len(placed) < len(graph.nodes):
        if placed:
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
            maker = next(
                (producer[n] for n in node.inputs if n in producer and producer[n].scope.module is not None), None
            )
            if maker is not None:
                node.scope = replace(node.scope, module=maker.scope.module)
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
    """Name a convolution with a folded batch norm after its weight: the exporter put the norm's path on the node."""
    owner, _, last = node.inputs[1].rpartition(".")
    if last == "weight" and owner:
        node.scope = replace(node.scope, module=owner)
