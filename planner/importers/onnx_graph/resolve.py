"""Walk the file's nodes once in order and give every tensor a shape, a type and, where small and known, a value.

Constants become stored tensors, model-local functions and control flow are replaced by their bodies on the way, so that
all that follows sees one flat list. Shapes come from ONNX's own inference of one node at a time with the values known
so far, then from our rules for operators that ONNX does not know, then from what the file says about the value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.errors import ModelError
from planner.graph import AttributeValue
from planner.importers.formats import damaged
from planner.importers.onnx_graph import dims as axis_binding
from planner.importers.onnx_graph import nodes as onnx_nodes
from planner.importers.onnx_graph.control_flow import HANDLERS as CONTROL_FLOW
from planner.importers.onnx_graph.control_flow import call_function, loop_names
from planner.importers.onnx_graph.inference import Inference, plain_domain
from planner.importers.onnx_graph.sequences import HANDLERS as SEQUENCES
from planner.importers.onnx_graph.weights import CREATED, is_anonymous, is_path
from planner.importers.onnx_graph.work import (
    INT64,
    MAX_CONSTANT_ELEMENTS,
    NO_SCOPE,
    Array,
    Scope,
    TensorType,
    WorkGraph,
    WorkNode,
)
from planner.operators import rule_of

if TYPE_CHECKING:
    import onnx


MOST_ELEMENTS = 1 << 56
"""Largest number of elements of a tensor, so that byte counts of a model fit in 64 bits."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Context of a list of nodes: operator set versions, how often they run, and the module they belong to."""

    versions: Mapping[str, int]
    repeat: int = 1
    scope: Scope = NO_SCOPE

    def scope_of(self, node: onnx.NodeProto) -> Scope:
        """The module of a node: from its metadata, else the frame's."""
        scope = onnx_nodes.scope_of(node)
        return self.scope if scope.module is None else scope

    def inside(self, node: onnx.NodeProto, trips: int = 1) -> Frame:
        """The context of what stands in a node, which may run several times."""
        return replace(self, repeat=self.repeat * trips, scope=self.scope_of(node))


class Resolver:
    """Walks a model's nodes once and builds the working graph.

    Args:
        model: the file's content.
        name: a name for the graph, "" for the file's own.
        dims: sizes of symbolic axes and trip counts of loops.
    """

    def __init__(self, model: onnx.ModelProto, name: str, dims: Mapping[str, int]) -> None:
        self.model = model
        self.functions = {(f.domain, f.name, f.overload): f for f in model.functions}
        self.versions = {plain_domain(entry.domain): entry.version for entry in model.opset_import}
        self.hints: dict[str, onnx.TypeProto] = {}
        self.declared: set[str] = set()
        self.sequences: dict[str, list[str]] = {}
        self.assumed: dict[str, str] = {}
        self.dealt: dict[str, int] = {}
        self.untyped: dict[str, str] = {}
        graph = model.graph
        inputs = axis_binding.model_inputs(graph)
        names = axis_binding.axis_names(inputs)
        assumed = axis_binding.assumed_batch(names, dims)
        self.dims = dims = {**assumed, **dims}
        types = axis_binding.bind(inputs, names, dims, loop_names(graph))
        self.work = WorkGraph(
            name or graph.name or "model", self.versions.get("", 0), [], {}, {}, {}, {}, {}, list(names),
            [value.name for value in graph.output], names,
        )  # fmt: skip
        self.work.from_torch = model.producer_name == "pytorch"
        self.work.types.update(types)
        for axis in assumed:
            message = f"{axis!r} is taken for the batch and as 1: plans search the size that they run (--dim {axis}=N)"
            self.work.info("batch-assumed", message)
        self.inference = Inference(self.work, self.hints, dims, self.versions, model.ir_version or 10)

    def run(self) -> WorkGraph:
        """Walk the whole model.

        Raises:
            ModelError: a name that nothing defines, shapes that contradict each other, or a shape that cannot be found
                at an operator whose cost depends on it.
        """
        graph, work = self.model.graph, self.work
        self._read_statements(graph)
        self.store_initializers(graph, {})
        for node in graph.node:
            for name in node.output:
                if name in self.work.types:
                    raise damaged(
                        f"{onnx_nodes.node_label(node)} computes {name!r}, which {self._origin(name)} already"
                    )
        nodes = onnx_nodes.in_order(list(graph.node))
        live = onnx_nodes.live_nodes(nodes, work.outputs)
        work.fates["dead"] += len(nodes) - len(live)
        work.total_nodes += len(nodes) - len(live)
        self._walk_in_order(live, Frame(self.versions))
        for name in work.outputs:
            if name not in work.types:
                hint = "sequences cannot be planned; export tensors" if name in self.sequences else "export it again"
                raise ModelError(f"output {name!r} is computed by no operator", hint=hint)
        for op, count in self.inference.unknown_operators.items():
            message = f"{op} is not a known operator: shapes taken from the file ({count} nodes)"
            work.info("unknown-operator", message, op)
        if self.dealt:
            label, rows = next(iter(self.dealt.items()))
            message = (
                f"{len(self.dealt)} experts find their rows by data; with each of a layer picked equally often, "
                f"they are {rows} in {label}"
            )
            work.info("experts-even", message, label)
        return work

    def _read_statements(self, graph: onnx.GraphProto) -> None:
        """Read declared types of values, whether they are parameters, and which tensors were folded into them."""
        for entry in graph.metadata_props:
            if entry.key.endswith("graph_signature"):
                self.work.signature.update((name, kind) for kind, name in _SIGNATURE.findall(entry.value))
        self.work.kinds.update(self.work.signature)
        for value in [*graph.value_info, *graph.output]:
            self.hints[value.name] = value.type
            if value.type.HasField("tensor_type"):
                self.declared.add(value.name)
            for entry in value.metadata_props:
                if entry.key.endswith("InputSpec.kind"):
                    self.work.kinds[value.name] = entry.value
                elif entry.key.endswith("folded_from"):
                    names = onnx_nodes.string_list(entry.value)
                    if any(map(_PICKED.match, (*names, value.name))):
                        self.work.picked.add(value.name)
                    origins = [name for name in names if is_path(name) or name in self.work.signature]
                    self.work.origins[value.name] = tuple(origins)
                    buffers = all(self.work.signature.get(name, "PARAMETER") != "PARAMETER" for name in origins)
                    given = all(is_anonymous(name) or name in self.work.inputs for name in names)
                    product = any(map(_PRODUCT.match, (*names, value.name)))
                    made = buffers or (product and any(map(self._is_made, names)))
                    if given or (self.work.signature and made):
                        self.work.kinds.setdefault(value.name, "CONSTANT_TENSOR")

    def _is_made(self, name: str) -> bool:
        """Whether the module makes a tensor and does not train it: a buffer, or what it fills in."""
        return self.work.signature.get(name, "PARAMETER") != "PARAMETER" or bool(CREATED.match(name))

    # -- what handlers use

    def walk(self, nodes: Iterable[onnx.NodeProto], frame: Frame) -> None:
        """Process nodes in dependency order."""
        self._walk_in_order(onnx_nodes.in_order(list(nodes)), frame)

    def _walk_in_order(self, nodes: Sequence[onnx.NodeProto], frame: Frame) -> None:
        for node in nodes:
            self.work.total_nodes += 1
            self._process(node, frame)

    def emit(self, node: WorkNode, kinds: Sequence[TensorType | None]) -> None:
        """Add a node whose output types are known."""
        for name, kind in zip(node.outputs, kinds, strict=False):
            if name and kind is not None:
                self._define(name, kind, node)
        self.work.nodes.append(node)

    def alias(self, source: str, target: str, frame: Frame, *, pinned: bool = False) -> None:
        """Let `target` carry `source`; a pinned alias is never taken for a constant."""
        if source in self.sequences and not pinned:
            self.sequences[target] = self.sequences[source]
            return
        kind = self.type_of(source, f"Identity {target!r}")
        mark: dict[str, Any] = {"pinned": 1} if pinned else {}
        self.add("Identity", [source], target, kind, frame, **mark)
        if not pinned and source in self.work.values:
            self.work.values[target] = self.work.values[source]
        if source in self.assumed:
            self.assumed[target] = self.assumed[source]

    def add(
        self, op: str, inputs: list[str], target: str, kind: TensorType, frame: Frame, name: str = "",
        **attributes: AttributeValue,
    ) -> str:  # fmt: skip
        """Add an operator that stands for a part of one in the file; the name of its result."""
        self.work.total_nodes += 1
        self.emit(WorkNode(op, inputs, [target], attributes, name, frame.scope, frame.repeat), [kind])
        return target

    def store_integers(self, name: str, values: Sequence[int]) -> str:
        """Add a vector of known integers, which an added operator reads; its name."""
        self.store(name, TensorType((len(values),), INT64), np.array(values, dtype=np.int64))
        return name

    def store(self, name: str, kind: TensorType, value: Array | None = None) -> None:
        """Add a tensor that the file holds."""
        self.work.stored[name] = None
        self._define(name, kind, None)
        if value is not None and value.size <= MAX_CONSTANT_ELEMENTS:
            self.work.values[name] = value

    def _define(self, name: str, kind: TensorType, maker: WorkNode | None) -> None:
        """Register a new tensor's type; `maker` is None for a tensor that the file stores.

        Raises:
            ModelError: the name is registered already, a size is negative, or the tensor has more than `MOST_ELEMENTS`.
        """
        if name in self.work.types:
            origin = "the file stores" if maker is None else f"{maker.label} computes"
            raise damaged(f"{origin} {name!r}, which {self._origin(name)} already")
        if min(kind.shape, default=0) < 0 or kind.elements > MOST_ELEMENTS:
            raise damaged(f"{name!r} has the shape {list(kind.shape)}")
        self.work.types[name] = kind

    def _origin(self, name: str) -> str:
        return "is stored" if name in self.work.stored else "is an input or computed"

    def store_initializers(self, graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
        """Add a graph's initializers, under their new names."""
        for tensor in graph.initializer:
            kind = onnx_nodes.stored_type(tensor.name, tuple(tensor.dims), tensor.data_type)
            if names.get(tensor.name, tensor.name) in self.work.stored:
                raise damaged(f"two initializers are called {tensor.name!r}")
            self.store(names.get(tensor.name, tensor.name), kind, onnx_nodes.small_value(tensor, tensor.name, kind))
            if tensor.raw_data and kind.dtype.is_float and len(kind.shape) > 1:
                self.work.data[tensor.name] = tensor
        for sparse in graph.sparse_initializer:
            kind = onnx_nodes.stored_type(sparse.values.name, tuple(sparse.dims), sparse.values.data_type)
            self.store(names.get(sparse.values.name, sparse.values.name), kind)

    def type_of(self, name: str, reader: str) -> TensorType:
        """The type of a tensor.

        Raises:
            ModelError: nothing defines the name, or it is a sequence.
        """
        kind = self.work.types.get(name)
        if kind is not None:
            return kind
        if name in self.sequences:
            message = f"{reader} reads the sequence {name!r} in a way that cannot be followed"
            raise ModelError(message, hint="export the model so that it uses tensors only")
        if name in self.untyped:
            message = f"{reader} reads {name!r}, whose shape {self.untyped[name]} leaves open"
            raise ModelError(message, hint="export with value_info for that output")
        raise ModelError(
            f"{reader} reads {name!r}, which no operator computes", hint="the file is incomplete: export it again"
        )

    def value(self, name: str) -> Array | None:
        """The value of a small known tensor."""
        return self.work.values.get(name) if name else None

    def number(self, name: str, reader: str) -> int | None:
        """The first entry of a small known tensor; None where it is not known.

        Raises:
            ModelError: it has no entry, or one that is no number.
        """
        value = self.value(name)
        if value is None:
            return None
        if not value.size or not np.isfinite(value.reshape(-1)[0]):
            raise damaged(f"{reader} takes a number from {name!r}, which has none")
        return int(value.reshape(-1)[0])

    def axis(self, axis: object, rank: int, reader: str) -> int:
        """An axis of a tensor, not negative.

        Raises:
            ModelError: the tensor has no such axis.
        """
        if not isinstance(axis, int) or not -rank <= axis < rank:
            raise damaged(f"{reader} works along axis {axis} of a tensor of {rank} dimensions")
        return axis % rank

    def work_node(self, node: onnx.NodeProto, frame: Frame) -> WorkNode:
        """A node of the file as a working node."""
        domain = plain_domain(node.domain)
        return WorkNode(
            f"{domain}.{node.op_type}" if domain else node.op_type,
            list(node.input), list(node.output), onnx_nodes.plain_attributes(node), node.name,
            frame.scope_of(node), frame.repeat,
        )  # fmt: skip

    # -- one node

    def _process(self, node: onnx.NodeProto, frame: Frame) -> None:
        key = (node.domain, node.op_type, node.overload)
        if key in self.functions:
            call_function(self, node, self.functions[key], frame)
            return
        handler = _HANDLERS.get(node.op_type) if plain_domain(node.domain) == "" else None
        if handler is None:
            self._ordinary(node, frame)
        else:
            self.inference.check(node, frame.versions)
            handler(self, node, frame)

    def constant(self, node: onnx.NodeProto, frame: Frame) -> None:
        """Store the tensor of a Constant node."""
        constant = onnx_nodes.constant_value(node)
        if constant is None:
            raise ModelError(f"Constant {node.output[0]!r} has no value", hint="export it again")
        shape, element, content = constant
        kind = onnx_nodes.stored_type(node.output[0], shape, element)
        stored = content is None or isinstance(content, np.ndarray)
        value = content if stored else onnx_nodes.small_value(content, node.output[0], kind)
        self.store(node.output[0], kind, value)
        self.work.fates["folded"] += 1

    def filled(self, node: onnx.NodeProto, frame: Frame) -> None:
        """Store the tensor that a ConstantOfShape node makes of a stored shape; of a computed one, know its value."""
        stored = node.input[0] in self.work.stored
        if not stored:
            self._ordinary(node, frame)
        dims = self.value(node.input[0])
        if dims is None:
            if stored:
                raise self._missing_value(node.input[0], f"ConstantOfShape {node.output[0]!r}")
            return
        content: Array = np.zeros(1, dtype=np.float32)
        element = 1
        for attribute in node.attribute:
            if attribute.name == "value":
                element = attribute.t.data_type
                given = onnx_nodes.tensor_value(attribute.t)
                content = content if given is None else given
        kind = onnx_nodes.stored_type(node.output[0], tuple(int(d) for d in dims.reshape(-1)), element)
        small = kind.elements <= MAX_CONSTANT_ELEMENTS
        value = np.full(kind.shape, content.reshape(-1)[0]) if small else None
        if stored:
            self.store(node.output[0], kind, value)
            self.work.fates["folded"] += 1
        elif value is not None:
            self.work.values[node.output[0]] = value

    def _ordinary(self, proto: onnx.NodeProto, frame: Frame) -> None:
        node = self.work_node(proto, frame)
        for name in node.inputs:
            if name and name not in self.work.types:
                self.inference.check(proto, frame.versions)
                self.type_of(name, node.label)
        kinds, values, failure = self.inference.outputs(proto, node, frame.versions)
        if not kinds or (kinds[0] is None and node.outputs[0]):
            kinds = self._last_resort(node, kinds, failure)
        self._require_declared(node, kinds)
        onnx_nodes.require_window(node, kinds)
        if None in kinds:
            self.untyped.update((o, node.label) for o, k in zip(node.outputs, kinds, strict=False) if o and k is None)
        if self.assumed:
            self._taint(node)
        self.emit(node, kinds)
        self.inference.follow_choice(node)
        for name, value in zip(node.outputs, values, strict=False):
            if name and value.size <= MAX_CONSTANT_ELEMENTS:
                self.work.values[name] = value

    def _last_resort(self, node: WorkNode, kinds: Sequence[TensorType | None], failure: str) -> list[TensorType | None]:
        """Types where no rule gave one: an upper bound, an assumption that is said, or an error."""
        onnx_nodes.require_fitting_window(node, [self.work.types.get(name) for name in node.inputs])
        said = [] if failure else self.inference.by_rule(node, rule_of(node.op).most) or []
        bound = [kind.complete if kind is not None else None for kind in said]
        if bound and bound[0] is not None:
            rows = self.inference.rows_of_expert(node)
            if rows is not None:
                self.dealt[node.label] = rows
                return [bound[0]._replace(shape=(bound[0].shape[0], rows))]
            self.work.warn(
                "data-dependent-shape",
                f"the size of {node.label}'s result depends on data; its upper bound {list(bound[0].shape)} is used",
                node.outputs[0],
            )
            return bound
        for name in self.inference.shape_operands(node):
            if name in self.work.stored and name not in self.work.values:
                raise self._missing_value(name, node.label)
        guessed = next((self.assumed[name] for name in node.inputs if name in self.assumed), None)
        if failure and guessed:
            raise self._rests_on_guess(node, guessed)
        if failure:
            message = f"shapes do not fit at {node.label}: {failure}"
            raise ModelError(
                message, hint="where a size is baked into the export, bind the axes to the sizes it was exported with"
            )
        first = next((self.work.types[name] for name in node.inputs if name), None)
        if rule_of(node.op).heavy or first is None:
            message = f"the output shape of {node.label} cannot be found"
            raise ModelError(
                message, hint="export with shape information (onnx.shape_inference or value_info for this output)"
            )
        self.work.warn(
            "assumed-shape",
            f"{node.label}: output shape unknown, taken to be that of its first input {list(first.shape)}",
            node.outputs[0],
        )
        self.assumed[node.outputs[0]] = node.label
        return [k or first for k in kinds]

    def _require_declared(self, node: WorkNode, kinds: Sequence[TensorType | None]) -> None:
        """Refuse a result of another shape than the model's graph declares.

        Sizes are not held against each other where the model has symbolic axes: files say some of them for the example
        that they were exported with.

        Raises:
            ModelError: the shapes differ.
        """
        for name, kind in zip(node.outputs, kinds, strict=False):
            if kind is None or name not in self.declared:
                continue
            declared = self.inference.stated(name).shape
            if declared is None or declared == kind.shape:
                continue
            fixed = not any(any(names) for names in self.work.axis_names.values())
            if len(declared) != len(kind.shape) or (
                fixed and any(a not in (None, b) for a, b in zip(declared, kind.shape, strict=True))
            ):
                shown = ["?" if size is None else size for size in declared]
                raise damaged(f"{node.label} makes {name!r} of shape {list(kind.shape)}, declared as {shown}")

    def _taint(self, node: WorkNode) -> None:
        """Propagate guessed shapes to a node's results; refuse them at an operator whose cost depends on them."""
        origin = next((self.assumed[name] for name in node.inputs if name in self.assumed), None)
        if origin is None:
            return
        if rule_of(node.op).heavy:
            raise self._rests_on_guess(node, origin)
        for name in node.outputs:
            self.assumed[name] = origin

    # -- small helpers

    def _rests_on_guess(self, node: WorkNode, origin: str) -> ModelError:
        message = f"the cost of {node.label} depends on the output shape of {origin}, which is unknown"
        return ModelError(message, hint="export with value_info for that output, or inline the operator")

    def _missing_value(self, name: str, reader: str) -> ModelError:
        message = f"{reader} needs the value of {name!r}, which lies in a data file that is absent"
        return ModelError(
            message,
            hint="put the external data file beside the model; only such small integer tensors are read from it",
        )


_PRODUCT = re.compile(r"^(linear|matmul|mm|bmm|addmm|einsum|conv(olution)?(\dd)?)(_\d+)?$")
"""What torch calls the results of products."""

_PICKED = re.compile(r"^(index(_select)?|embedding|gather|take|repeat|expand|tile)(_\d+)?$")
"""What torch calls results that hold entries of a tensor several times."""

_SIGNATURE = re.compile(r"^\w+: ([A-Z_]+) target='([^']+)'", re.MULTILINE)
"""A line of torch's export signature: what kind of tensor an input of the exported program is, and its name."""

Handler = Callable[[Resolver, "onnx.NodeProto", Frame], None]

_HANDLERS: dict[str, Handler] = {
    **CONTROL_FLOW,
    **SEQUENCES,
    "Constant": Resolver.constant,
    "ConstantOfShape": Resolver.filled,
}
"""Handlers of operators that are not kept as one node of the graph, by operator type."""
