"""ONNX attributes and node metadata as plain Python, and the module that each node belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.graph import AttributeValue
from planner.importers.onnx_graph.work import Array, Scope, WorkGraph, WorkNode

if TYPE_CHECKING:
    import onnx

_NAME_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_NAMESPACE = "namespace"


def shortest_float(value: float) -> float:
    """The shortest decimal that a 32-bit float stands for: 0.1, not 0.10000000149."""
    return float(str(np.float32(value)))


_PLAIN: Mapping[int, Callable[[onnx.AttributeProto], AttributeValue]] = {
    1: lambda attribute: shortest_float(attribute.f),
    2: lambda attribute: attribute.i,
    3: lambda attribute: attribute.s.decode("utf-8", "replace"),
    6: lambda attribute: tuple(map(shortest_float, attribute.floats)),
    7: lambda attribute: tuple(attribute.ints),
    8: lambda attribute: tuple(text.decode("utf-8", "replace") for text in attribute.strings),
}
"""By the number of an attribute's type, its value as plain Python."""


def plain_attributes(node: onnx.NodeProto) -> dict[str, AttributeValue]:
    """All attributes but tensors and graphs, as plain Python values."""
    return {each.name: _PLAIN[each.type](each) for each in node.attribute if each.type in _PLAIN}


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


_CONSTANTS: Mapping[str, tuple[str, int, Any]] = {
    "value_int": ("i", 7, np.int64), "value_ints": ("ints", 7, np.int64), "value_float": ("f", 1, np.float32),
    "value_floats": ("floats", 1, np.float32), "value_string": ("s", 8, None), "value_strings": ("strings", 8, None),
}  # fmt: skip
"""By attribute of a Constant node: the field that holds its value, the number of its element type, numpy's type."""


def constant_value(node: onnx.NodeProto) -> tuple[tuple[int, ...], int, Any] | None:
    """Shape, element type and value (a tensor message or numpy array) of a Constant node; None for an unknown form."""
    for attribute in node.attribute:
        if attribute.name == "value":
            return tuple(attribute.t.dims), attribute.t.data_type, attribute.t
        if attribute.name == "sparse_value":
            sparse = attribute.sparse_tensor
            return tuple(sparse.dims), sparse.values.data_type, None
        field, element, kind = _CONSTANTS.get(attribute.name, ("", 0, None))
        if field:
            content = getattr(attribute, field)
            shape = (len(content),) if field.endswith("s") and len(field) > 1 else ()
            return shape, element, None if kind is None else np.array(content, dtype=kind)
    return None


def assign_modules(graph: WorkGraph) -> None:
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
