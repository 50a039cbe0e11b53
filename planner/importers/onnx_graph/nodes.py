"""The nodes of an ONNX file: their order and bodies, attributes, stored tensors and metadata as plain Python, the
module that each belongs to, and what is wrong with a call that ONNX's own checks and inference leave out.

Models that grow beyond bounds once their functions are written out are refused before anything is written out.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.errors import ModelError
from planner.graph import AttributeValue, DType
from planner.importers.formats import damaged
from planner.importers.onnx_graph.work import (
    ELEMENT_TYPES,
    MAX_CONSTANT_ELEMENTS,
    Array,
    Scope,
    TensorType,
    WorkGraph,
    WorkNode,
)
from planner.operators import rule_of

if TYPE_CHECKING:
    import onnx


_TENSOR, _GRAPH, _GRAPHS, _SPARSE = 4, 5, 10, 11
"""Types of attributes, by the numbers of the file."""


def subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Bodies that a node carries as attributes."""
    graphs: list[onnx.GraphProto] = []
    for attribute in node.attribute:
        if attribute.type == _GRAPH:
            graphs.append(attribute.g)
        elif attribute.type == _GRAPHS:
            graphs.extend(attribute.graphs)
    return graphs


def reads(node: onnx.NodeProto) -> list[str]:
    """Names that a node reads, in its bodies too; names that a body defines itself may be among them."""
    names = [name for name in node.input if name]
    for graph in subgraphs(node) if node.attribute else ():
        for inner in graph.node:
            names.extend(reads(inner))
        names.extend(value.name for value in graph.output)
    return names


def in_order(nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Sort nodes topologically, keeping the given order where it is one already. Linear.

    Raises:
        ModelError: they depend on each other in a circle, or two write one result.
    """
    owner: dict[str, int] = {}
    for i, node in enumerate(nodes):
        for name in node.output:
            if name and name in owner:
                first, second = node_label(nodes[owner[name]]), node_label(node)
                raise damaged(f"{second} writes {name!r}, which {first} writes too")
            owner[name] = i
    owner.pop("", None)
    needs = [[owner[name] for name in reads(node) if name in owner] for node in nodes]
    if all(j < i for i, group in enumerate(needs) for j in group):
        return nodes
    import networkx

    graph = networkx.DiGraph()
    graph.add_nodes_from(range(len(nodes)))
    graph.add_edges_from((i, j) for i, group in enumerate(needs) for j in group)
    if not networkx.is_directed_acyclic_graph(graph):
        through = node_label(nodes[networkx.find_cycle(graph)[-1][1]])
        raise damaged(f"the graph has a cycle through {through}")
    return [nodes[i] for i in networkx.dfs_postorder_nodes(graph)]


def live_nodes(nodes: Sequence[onnx.NodeProto], outputs: Sequence[str]) -> list[onnx.NodeProto]:
    """The nodes that an output depends on; `nodes` must be in topological order."""
    wanted = set(outputs)
    live = []
    for node in reversed(nodes):
        if any(name in wanted for name in node.output):
            live.append(node)
            wanted.update(reads(node))
    return live[::-1]


def node_label(node: onnx.NodeProto) -> str:
    """What errors call a node: its operator, and its name or that of its first result."""
    return f"{node.op_type} {node.name or next(iter(node.output), '')!r}"


MOST_NODES = 1 << 20
"""Largest number of operators of a model, all functions inlined."""
MOST_NESTED = 64
"""Largest depth of nested function calls."""

_Key = tuple[str, str, str]


def require_formals(node: onnx.NodeProto, function: onnx.FunctionProto) -> None:
    """Refuse a call with more operands or results than the function has.

    Raises:
        ModelError: names the call.
    """
    for what, actual, formal in (
        ("operands", node.input, function.input), ("results", node.output, function.output),
    ):  # fmt: skip
        if len(actual) > len(formal):
            raise damaged(f"{node_label(node)} calls a function of {len(formal)} {what} with {len(actual)}")


def require_bounded(model: onnx.ModelProto) -> None:
    """Refuse a model whose functions call themselves, are called with more operands than they have, or grow beyond
    `MOST_NODES` operators. Linear in the file.

    Raises:
        ModelError: names the function, used or not, and the node that calls it.
    """
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    known: dict[_Key, int] = {}
    calling: list[_Key] = []

    def written_out(nodes: Iterable[onnx.NodeProto]) -> int:
        count = 0
        for node in nodes:
            key = (node.domain, node.op_type, node.overload)
            if key in functions:
                require_formals(node, functions[key])
            count += body_of(key, node_label(node)) if key in functions else 1
            count += sum(written_out(graph.node) for graph in subgraphs(node))
        return count

    def body_of(key: _Key, caller: str) -> int:
        if key in calling or len(calling) >= MOST_NESTED:
            why = "calls itself" if key in calling else f"is called more than {MOST_NESTED} calls deep"
            raise damaged(f"the function {key[1]!r} {why}, at {caller}")
        if key not in known:
            calling.append(key)
            known[key] = written_out(functions[key].node)
            calling.pop()
        return known[key]

    for key in functions:
        body_of(key, "its definition")
    count = written_out(model.graph.node)
    if count > MOST_NODES:
        raise damaged(f"with its functions written out the model has {count:,} operators, over {MOST_NODES:,}")


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


def stored_type(name: str, shape: tuple[int, ...], element: int) -> TensorType:
    """The type of a tensor that the file holds.

    Raises:
        ModelError: the number of the element type is unknown, or a size is negative.
    """
    if element not in ELEMENT_TYPES:
        raise ModelError(f"tensor {name!r} has the unknown element type {element}", hint="update onnx")
    if min(shape, default=0) < 0:
        raise damaged(f"{name!r} has the shape {list(shape)}")
    return TensorType(shape, element)


_DATA = ("float_data", "double_data", "int32_data", "int64_data", "uint64_data")
"""Where a tensor message holds its numbers if not as bytes."""

_ONE_ENTRY = frozenset({DType.FLOAT32, DType.FLOAT64, DType.INT32, DType.INT64, DType.UINT64, DType.BOOL})
"""Types of which each number is one entry there."""


def small_value(tensor: onnx.TensorProto, name: str, kind: TensorType) -> Array | None:
    """A stored tensor's value where it is small and in the file.

    Raises:
        ModelError: the file holds more or less data than the tensor's shape needs.
    """
    held, needed = len(tensor.raw_data), (kind.elements * kind.dtype.bits + 7) // 8
    if held and held != needed and kind.dtype is not DType.STRING:
        raise damaged(f"{name!r} holds {held:,} bytes of data, its shape {list(kind.shape)} needs {needed:,}")
    entries = sum(len(getattr(tensor, field)) for field in _DATA)
    if entries and kind.dtype in _ONE_ENTRY and entries != kind.elements:
        raise damaged(f"{name!r} holds {entries:,} numbers, its shape {list(kind.shape)} needs {kind.elements:,}")
    return tensor_value(tensor) if kind.elements <= MAX_CONSTANT_ELEMENTS else None


_CONSTANTS: Mapping[str, tuple[int, Any]] = {
    "value_int": (7, np.int64), "value_ints": (7, np.int64), "value_float": (1, np.float32),
    "value_floats": (1, np.float32), "value_string": (8, None), "value_strings": (8, None),
}  # fmt: skip
"""By attribute of a Constant node that is no tensor: the number of its element type, numpy's type."""


def constant_value(node: onnx.NodeProto) -> tuple[tuple[int, ...], int, Any] | None:
    """Shape, element type and value (a tensor message or numpy array) of a Constant node; None for an unknown form."""
    from onnx.helper import get_attribute_value

    for attribute in node.attribute:
        if attribute.name == "value":
            return tuple(attribute.t.dims), attribute.t.data_type, attribute.t
        if attribute.name == "sparse_value":
            sparse = attribute.sparse_tensor
            return tuple(sparse.dims), sparse.values.data_type, None
        if attribute.name in _CONSTANTS:
            content, (element, kind) = get_attribute_value(attribute), _CONSTANTS[attribute.name]
            return np.shape(content), element, None if kind is None else np.array(content, dtype=kind)
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


MOST_VERSION = (1 << 31) - 1
"""Largest operator set version that a schema can be asked for."""

_EQUATION = re.compile(r"[A-Za-z., ]*(->[A-Za-z. ]*)?")
"""Form of an Einsum's equation: onnx's inference of another one never ends."""


@functools.lru_cache(maxsize=4096)
def schema_of(op: str, domain: str, version: int) -> Any | None:  # noqa: ANN401
    """ONNX's description of an operator in an operator set; None for one that the standard does not know."""
    from onnx import defs

    try:
        return defs.get_schema(op, version, domain)
    except defs.SchemaError:
        return None


@functools.cache
def newest_version(domain: str) -> int:
    """The newest version of an operator set that the onnx package knows; 0 for one that is not of the standard."""
    from onnx import helper

    name = domain or "ai.onnx"
    return max((version for known, version in helper.OP_SET_ID_VERSION_MAP if known == name), default=0)


def check_call(node: onnx.NodeProto, domain: str, version: int, ir_version: int) -> None:
    """Refuse a node that its operator cannot be called as; of unknown operators only that they compute something.

    Raises:
        ModelError: too few or too many inputs or outputs, one that is needed left out, an attribute that is absent,
            unknown or of another kind.
    """
    from onnx import checker

    if schema_of(node.op_type, domain, version) is None:
        if not (node.output and node.output[0]):
            raise damaged(f"{node.op_type} {node.name!r} has no first output")
        return
    context = checker.C.CheckerContext()
    context.ir_version, context.opset_imports = ir_version, {domain: version}
    try:
        checker.check_node(_without_content(node, domain), context)
    except checker.ValidationError as error:
        label = node.name or next((name for name in node.output if name), "")
        raise damaged(f"{node.op_type} {label!r}: {str(error).strip().splitlines()[0]}") from None


def _without_content(node: onnx.NodeProto, domain: str) -> onnx.NodeProto:
    """The node in a domain without bodies, which are checked when they are walked, and without data."""
    from onnx import GraphProto, NodeProto, TensorProto

    if node.domain == domain and not any(a.type in (_TENSOR, _GRAPH, _SPARSE) for a in node.attribute):
        return node
    bare = NodeProto(op_type=node.op_type, domain=domain, input=node.input, output=node.output)
    empty = {_TENSOR: {"t": TensorProto(data_type=1, dims=[0])}, _GRAPH: {"g": GraphProto(name="body")}}
    for attribute in node.attribute:
        if attribute.type in empty:
            bare.attribute.add(name=attribute.name, type=attribute.type, **empty[attribute.type])
        elif attribute.type != _SPARSE:
            bare.attribute.append(attribute)
    return bare


def _equation_fault(equation: str) -> str:
    """Why an Einsum equation is invalid: its form, or a letter of the result that no operand has or that it has twice;
    "" if valid."""
    if not _EQUATION.fullmatch(equation):
        return f"has the malformed equation {equation!r}"
    operands, _, result = equation.replace(" ", "").replace(".", "").partition("->")
    for letter in result:
        if letter not in operands:
            return f"has the equation {equation!r}, whose result has the letter {letter!r}, which no operand has"
        if result.count(letter) > 1:
            return f"has the equation {equation!r}, whose result has the letter {letter!r} twice"
    return ""


_UNKNOWN = np.ones(1)
_WINDOW = {"kernel_shape": 1, "strides": 1, "dilations": 1, "pads": 2}
"""Entries of a window's attributes for each spatial dimension."""
_COUNTS = ("num_heads", "kv_num_heads", "q_num_heads", "group", "block_size")


def contradiction(node: WorkNode, inputs: Sequence[TensorType | None], values: Mapping[str, Array]) -> str:
    """First contradiction between an operator's input types, known values and attributes, "" if there is none. O(1)."""
    return next(_contradictions(node, inputs, values), "")


def _contradictions(node: WorkNode, inputs: Sequence[TensorType | None], values: Mapping[str, Array]) -> Iterator[str]:
    if node.op == "Einsum" and (fault := _equation_fault(str(node.attributes["equation"]))):
        yield fault
    if node.op == "Range" and not values.get(node.inputs[2], _UNKNOWN).all():
        yield f"counts in steps of 0 ({node.inputs[2]!r})"
    for position, ranks in rule_of(node.op).ranks.items():
        kind = inputs[position] if position < len(inputs) else None
        if kind is not None and len(kind.shape) not in ranks:
            expected = " or ".join(map(str, ranks))
            yield f"reads {node.inputs[position]!r} of {len(kind.shape)} dimensions, where it takes {expected}"
    for name in _COUNTS:
        count = node.attributes.get(name, 1)
        if isinstance(count, int | float) and count < 1 and node.op.startswith(("com.microsoft.", "Conv")):
            yield f"has the attribute {name!r} = {count}"
    parts = node.attributes.get("num_outputs", len(node.outputs)) if node.op == "Split" else len(node.outputs)
    if parts != len(node.outputs):  # onnx's inference would end the whole process
        yield f"splits into {parts} parts and has {len(node.outputs)} outputs"
    slot = rule_of(node.op).window
    if slot is not None and inputs and inputs[0] is not None:
        spatial = len(inputs[0].shape) - 2
        weight = inputs[slot] if 0 <= slot < len(inputs) else None
        if weight is not None and len(weight.shape) != spatial + 2:
            yield f"reads {len(weight.shape)}-dimensional weights, its input has {spatial + 2} dimensions"
        for name, per_dim in _WINDOW.items():
            window = node.attributes.get(name)
            if isinstance(window, tuple) and len(window) != per_dim * spatial:
                yield f"has {len(window)} {name} for {spatial} spatial dimensions"


_SIZES = "give the sizes that the model is run at (--dim for axes by name)"


def require_window(node: WorkNode, kinds: Sequence[TensorType | None]) -> None:
    """Refuse a convolution or pooling whose input is smaller than its window, so that the result has no place.

    Raises:
        ModelError: names the operator and the shape of its result.
    """
    if rule_of(node.op).window is None or not kinds or kinds[0] is None:
        return
    if not all(size > 0 for size in kinds[0].shape[2:]):
        message = f"{node.label} makes a result of shape {list(kinds[0].shape)}: its input is smaller than its window"
        raise ModelError(message, hint=_SIZES)


def require_fitting_window(node: WorkNode, inputs: Sequence[TensorType | None]) -> None:
    """Refuse a window that is larger than the input with its padding, of which no shape inference makes a result.

    Raises:
        ModelError: names the operator, the window and the input.
    """
    slot = rule_of(node.op).window
    if slot is None or not inputs or inputs[0] is None:
        return
    image = inputs[0].shape[2:]
    weight = inputs[slot] if 0 < slot < len(inputs) else None
    window: Any = node.attributes.get("kernel_shape", weight.shape[2:] if weight is not None else ())
    padding: Any = node.attributes.get("pads", (0,) * 2 * len(image))
    if isinstance(window, tuple) and isinstance(padding, tuple) and 2 * len(window) == len(padding) == 2 * len(image):
        padded = [size + padding[i] + padding[i + len(image)] for i, size in enumerate(image)]
        if any(extent > size for extent, size in zip(window, padded, strict=True)):
            message = f"{node.label} has a window of {list(window)} over an input of {list(image)}"
            raise ModelError(message, hint=_SIZES)
