"""Walk the file's nodes once in order and give every tensor a shape, a type and, where small and known, a value.

Constants become stored tensors, model-local functions and control flow are replaced by their bodies on the way, so that
all that follows sees one flat list. Shapes come from ONNX's own inference of one node at a time with the values known
so far, then from our rules for operators that ONNX does not know, then from what the file says about the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.errors import ModelError
from planner.graph import AttributeValue
from planner.importers.onnx_graph import dims as axis_binding
from planner.importers.onnx_graph.attributes import (
    constant_value,
    plain_attributes,
    scope_of,
    string_list,
    tensor_value,
)
from planner.importers.onnx_graph.foreign import infer_foreign
from planner.importers.onnx_graph.shapes import HEAVY, SHAPE_INPUTS, Partial, standard_form, upper_bound
from planner.importers.onnx_graph.values import evaluate
from planner.importers.onnx_graph.weights import is_path
from planner.importers.onnx_graph.work import (
    ELEMENT_TYPES,
    MAX_CONSTANT_ELEMENTS,
    NO_SCOPE,
    Array,
    Scope,
    TensorType,
    WorkGraph,
    WorkNode,
)

if TYPE_CHECKING:
    import onnx

STANDARD_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a list of nodes stands: operator set versions, how often it runs, and the module it belongs to."""

    versions: Mapping[str, int]
    repeat: int = 1
    scope: Scope = NO_SCOPE


Handler = Callable[["Resolver", "onnx.NodeProto", Frame], None]


def resolve(model: onnx.ModelProto, name: str, dims: Mapping[str, int], where: str) -> WorkGraph:
    """The working graph of a model, every tensor typed.

    Raises:
        ModelError: an axis without a size, a name nothing defines, shapes that contradict each other, or a shape that
            cannot be found at an operator whose cost depends on it.
    """
    return Resolver(model, name, dims, where).run()


class Resolver:
    """State of one walk; `control_flow` and `sequences` extend it by operator type."""

    def __init__(self, model: onnx.ModelProto, name: str, dims: Mapping[str, int], where: str) -> None:
        from planner.importers.onnx_graph.control_flow import HANDLERS as CONTROL_FLOW
        from planner.importers.onnx_graph.control_flow import loop_names
        from planner.importers.onnx_graph.sequences import HANDLERS as SEQUENCES

        self.model, self.dims, self.where = model, dims, where
        self.functions = {(f.domain, f.name, f.overload): f for f in model.functions}
        self.handlers: dict[str, Handler] = {**CONTROL_FLOW, **SEQUENCES}
        self.versions = {_domain(entry.domain): entry.version for entry in model.opset_import}
        self.hints: dict[str, onnx.TypeProto] = {}
        self.sequences: dict[str, list[str]] = {}
        self.assumed: dict[str, str] = {}
        self.untyped: dict[str, str] = {}
        self.from_shape: set[str] = set()
        self._protos: dict[str, onnx.TypeProto] = {}
        self._data: dict[str, onnx.TensorProto] = {}
        self._schemas: dict[tuple[str, str, int], Any] = {}
        self._unknown_operators: dict[str, int] = {}
        graph = model.graph
        inputs = axis_binding.model_inputs(graph)
        names = axis_binding.axis_names(inputs, where)
        types = axis_binding.bind(inputs, names, dims, loop_names(graph), where)
        self.work = WorkGraph(
            name or graph.name or "model", self.versions.get("", 0), [], {}, {}, {}, {}, {}, list(names),
            [value.name for value in graph.output], names,
        )  # fmt: skip
        for input_name, kind in types.items():
            self.set_type(input_name, kind)

    def run(self) -> WorkGraph:
        """Walk the whole model."""
        graph, work = self.model.graph, self.work
        for value in [*graph.value_info, *graph.output]:
            self.hints[value.name] = value.type
            for entry in value.metadata_props:
                if entry.key.endswith("InputSpec.kind"):
                    work.kinds[value.name] = entry.value
                elif entry.key.endswith("folded_from"):
                    names = string_list(entry.value)
                    work.origins[value.name] = tuple(name for name in names if is_path(name))
        self.store_initializers(graph, {})
        self.walk(self._live(graph), Frame(self.versions))
        for name in work.outputs:
            if name not in work.types:
                hint = "sequences cannot be planned; export tensors" if name in self.sequences else "export it again"
                raise ModelError(f"output {name!r} is computed by no operator", where=self.where, hint=hint)
        for op, count in self._unknown_operators.items():
            work.info(
                "unknown-operator", f"{op} is not a known operator: shapes taken from the file ({count} nodes)", op
            )
        return work

    # -- what handlers use

    def walk(self, nodes: Iterable[onnx.NodeProto], frame: Frame) -> None:
        """Process nodes in dependency order."""
        for node in self._in_order(list(nodes)):
            self.work.total_nodes += 1
            self._process(node, frame)

    def emit(self, node: WorkNode, kinds: Sequence[TensorType | None]) -> None:
        """Add a node whose output types are known."""
        for name, kind in zip(node.outputs, kinds, strict=False):
            if name and kind is not None:
                self.set_type(name, kind)
        self.work.nodes.append(node)

    def alias(self, source: str, target: str, frame: Frame, *, pinned: bool = False) -> None:
        """Let `target` carry `source`; a pinned alias is never taken for a constant."""
        attributes: dict[str, AttributeValue] = {"pinned": 1} if pinned else {}
        node = WorkNode("Identity", [source], [target], attributes, "", frame.scope, frame.repeat)
        self.work.total_nodes += 1
        self.emit(node, [self.type_of(source, node.label)])
        if not pinned and source in self.work.values:
            self.work.values[target] = self.work.values[source]
        if source in self.assumed:
            self.assumed[target] = self.assumed[source]

    def store(self, name: str, kind: TensorType, value: Array | None = None) -> None:
        """Add a tensor that the file holds."""
        self.work.stored[name] = None
        self.set_type(name, kind)
        if value is not None and value.size <= MAX_CONSTANT_ELEMENTS:
            self.work.values[name] = value

    def store_initializers(self, graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
        """Add a graph's initializers, under their new names."""
        for tensor in graph.initializer:
            kind = self._stored_type(tensor.name, tuple(tensor.dims), tensor.data_type)
            self.store(names.get(tensor.name, tensor.name), kind, _small_value(tensor, kind))
        for sparse in graph.sparse_initializer:
            kind = self._stored_type(sparse.values.name, tuple(sparse.dims), sparse.values.data_type)
            self.store(names.get(sparse.values.name, sparse.values.name), kind)

    def set_type(self, name: str, kind: TensorType) -> None:
        """Say what a value is."""
        self.work.types[name] = kind
        self._protos[name] = _type_proto(kind)

    def type_of(self, name: str, reader: str) -> TensorType:
        """What a value is.

        Raises:
            ModelError: nothing defines the name, or it is a sequence.
        """
        kind = self.work.types.get(name)
        if kind is not None:
            return kind
        if name in self.sequences:
            raise ModelError(
                f"{reader} reads the sequence {name!r} in a way that cannot be followed", where=self.where,
                hint="export the model so that it uses tensors only",
            )  # fmt: skip
        if name in self.untyped:
            raise ModelError(
                f"{reader} reads {name!r}, whose shape {self.untyped[name]} leaves open", where=self.where,
                hint="export with value_info for that output",
            )  # fmt: skip
        raise ModelError(
            f"{reader} reads {name!r}, which no operator computes",
            where=self.where,
            hint="the file is incomplete: export it again",
        )

    def value(self, name: str) -> Array | None:
        """The value of a small known tensor."""
        return self.work.values.get(name) if name else None

    def work_node(self, node: onnx.NodeProto, frame: Frame) -> WorkNode:
        """A node of the file as a working node."""
        domain = _domain(node.domain)
        scope = scope_of(node)
        return WorkNode(
            f"{domain}.{node.op_type}" if domain else node.op_type,
            list(node.input), list(node.output), plain_attributes(node), node.name,
            frame.scope if scope.module is None else scope, frame.repeat,
        )  # fmt: skip

    # -- one node

    def _process(self, node: onnx.NodeProto, frame: Frame) -> None:
        key = (node.domain, node.op_type, node.overload)
        if key in self.functions:
            from planner.importers.onnx_graph.control_flow import call_function

            call_function(self, node, self.functions[key], frame)
        elif _domain(node.domain) == "" and node.op_type in self.handlers:
            self.handlers[node.op_type](self, node, frame)
        elif node.op_type == "Constant" and _domain(node.domain) == "":
            self._constant(node)
        elif node.op_type == "ConstantOfShape" and node.input[0] in self.work.stored:
            self._filled(node)
        else:
            self._ordinary(node, frame)

    def _constant(self, node: onnx.NodeProto) -> None:
        found = constant_value(node)
        if found is None:
            raise ModelError(f"Constant {node.output[0]!r} has no value", where=self.where, hint="export it again")
        shape, element, content = found
        kind = self._stored_type(node.output[0], shape, element)
        value = content if content is None or isinstance(content, np.ndarray) else _small_value(content, kind)
        self.store(node.output[0], kind, value)
        self.work.fates["folded"] += 1

    def _filled(self, node: onnx.NodeProto) -> None:
        dims = self.value(node.input[0])
        if dims is None:
            raise self._missing_value(node.input[0], f"ConstantOfShape {node.output[0]!r}")
        content: Array = np.zeros(1, dtype=np.float32)
        element = 1
        for attribute in node.attribute:
            if attribute.name == "value":
                element = attribute.t.data_type
                given = tensor_value(attribute.t)
                content = content if given is None else given
        kind = self._stored_type(node.output[0], tuple(int(d) for d in dims.reshape(-1)), element)
        small = kind.elements <= MAX_CONSTANT_ELEMENTS
        self.store(node.output[0], kind, np.full(kind.shape, content.reshape(-1)[0]) if small else None)
        self.work.fates["folded"] += 1

    def _ordinary(self, proto: onnx.NodeProto, frame: Frame) -> None:
        node = self.work_node(proto, frame)
        inputs = [self.type_of(name, node.label) if name else None for name in node.inputs]
        partial, failure = self._standard(proto, node, frame)
        if any(p is None or p.complete is None for p, out in zip(partial, node.outputs, strict=True) if out):
            partial = self._fill_gaps(proto, node, inputs, partial)
        kinds = [p.complete if p is not None else None for p in partial]
        values = self._evaluate(node, frame, kinds)
        if values is not None:
            kinds = [_type_of_value(v, k) for v, k in zip(values, [*kinds, *[None] * len(values)], strict=False)]
        if not kinds or (kinds[0] is None and node.outputs[0]):
            kinds = self._last_resort(node, inputs, kinds, failure)
        self.untyped.update((o, node.label) for o, k in zip(node.outputs, kinds, strict=False) if o and k is None)
        self._taint(node)
        self.emit(node, kinds)
        for name, value in zip(node.outputs, values or (), strict=False):
            if name and value.size <= MAX_CONSTANT_ELEMENTS:
                self.work.values[name] = value

    def _standard(self, proto: onnx.NodeProto, node: WorkNode, frame: Frame) -> tuple[list[Partial | None], str]:
        """Output types by ONNX's own rules; a message where they contradict each other."""
        from onnx.shape_inference import InferenceError, infer_node_outputs

        nothing: list[Partial | None] = [None] * len(node.outputs)
        proto = standard_form(proto)
        schema = self._schema(proto.op_type, _domain(proto.domain), frame)
        if schema is None:
            return nothing, ""
        known = {name: self._protos[name] for name in proto.input if name}
        try:
            found = infer_node_outputs(
                schema,
                proto,
                known,
                self._inference_data(node),
                None,
                _imports(frame.versions),
                self.model.ir_version or 10,
            )
        except (InferenceError, RuntimeError, ValueError, TypeError) as error:
            return nothing, str(error).strip().splitlines()[0].removeprefix("[ShapeInferenceError] ")
        partial: list[Partial | None] = []
        for name in proto.output:
            kind = found.get(name)
            if kind is not None and kind.WhichOneof("value") == "sequence_type":
                raise ModelError(
                    f"{node.label} makes a sequence; sequences cannot be followed through it", where=self.where,
                    hint="export the model so that it uses tensors only",
                )  # fmt: skip
            partial.append(None if kind is None else Partial.of(kind, {}))
        return partial, ""

    def _fill_gaps(
        self, proto: onnx.NodeProto, node: WorkNode, inputs: Sequence[TensorType | None], partial: list[Partial | None]
    ) -> list[Partial | None]:
        ours = infer_foreign(node, inputs, self.work.values)
        known_operator = ours is not None
        result: list[Partial | None] = []
        for i, name in enumerate(node.outputs):
            merged = partial[i]
            if ours is not None and i < len(ours) and ours[i] is not None:
                merged = ours[i] if merged is None else merged.or_else(ours[i])
            if name in self.hints and (merged is None or merged.complete is None):
                said = Partial.of(self.hints[name], self.dims)
                merged = said if merged is None else merged.or_else(said)
            result.append(merged)
        schema = self._schema(proto.op_type, _domain(proto.domain), Frame(self.versions))
        if schema is None and not known_operator and result[0] is not None and result[0].complete is not None:
            self._unknown_operators[node.op] = self._unknown_operators.get(node.op, 0) + 1
        return result

    def _evaluate(self, node: WorkNode, frame: Frame, kinds: Sequence[TensorType | None]) -> list[Array] | None:
        if node.op in ("Shape", "Size"):
            shape = self.work.types[node.inputs[0]].shape
            self.from_shape.add(node.outputs[0])
            if node.op == "Size":
                return [np.array(self.work.types[node.inputs[0]].elements, dtype=np.int64)]
            start, end = node.attributes.get("start", 0), node.attributes.get("end", len(shape))
            return [np.array(shape[int(start) : int(end)], dtype=np.int64)]  # type: ignore[arg-type]
        values = self.work.values
        if not node.inputs or any(name and name not in values for name in node.inputs):
            return None
        first = kinds[0] if kinds else None
        if first is not None and first.elements > MAX_CONSTANT_ELEMENTS:
            return None
        target = _NUMPY.get(first.element) if first is not None else None
        version = frame.versions.get("", self.work.opset)
        return evaluate(node.op, [self.value(n) for n in node.inputs], node.attributes, version, target)

    def _last_resort(
        self, node: WorkNode, inputs: Sequence[TensorType | None], kinds: Sequence[TensorType | None], failure: str
    ) -> list[TensorType | None]:
        """Types where no rule gave one: an upper bound, an assumption that is said, or an error."""
        bound = upper_bound(node.op, inputs, self.work.values, node)
        if bound is not None:
            self.work.warn(
                "data-dependent-shape",
                f"the size of {node.label}'s result depends on data; its upper bound {list(bound[0].shape)} is used",
                node.outputs[0],
            )
            return list(bound)
        for name in self._shape_operands(node):
            if name in self.work.stored and name not in self.work.values:
                raise self._missing_value(name, node.label)
        if failure:
            raise ModelError(
                f"shapes do not fit at {node.label}: {failure}", where=self.where,
                hint="a size is baked into the export: bind the axes to the sizes it was exported with",
            )  # fmt: skip
        first = next((kind for kind in inputs if kind is not None), None)
        if node.op in HEAVY or first is None:
            raise ModelError(
                f"the output shape of {node.label} cannot be found", where=self.where,
                hint="export with shape information (onnx.shape_inference or value_info for this output)",
            )  # fmt: skip
        self.work.warn(
            "assumed-shape",
            f"{node.label}: output shape unknown, taken to be that of its first input {list(first.shape)}",
            node.outputs[0],
        )
        self.assumed[node.outputs[0]] = node.label
        return [k or replace(first) for k in kinds]

    def _taint(self, node: WorkNode) -> None:
        """A guess must not reach an operator whose cost depends on it."""
        origin = next((self.assumed[name] for name in node.inputs if name in self.assumed), None)
        if origin is None:
            return
        if node.op in HEAVY:
            raise ModelError(
                f"the cost of {node.label} depends on the output shape of {origin}, which is unknown", where=self.where,
                hint="export with value_info for that output, or inline the operator",
            )  # fmt: skip
        for name in node.outputs:
            self.assumed[name] = origin

    # -- small helpers

    def _live(self, graph: onnx.GraphProto) -> list[onnx.NodeProto]:
        """Nodes that an output depends on; the others must not be able to stop an import."""
        wanted = {value.name for value in graph.output}
        live = []
        for node in reversed(self._in_order(list(graph.node))):
            if any(name in wanted for name in node.output):
                live.append(node)
                wanted.update(_reads(node))
        dead = len(graph.node) - len(live)
        self.work.fates["dead"] += dead
        self.work.total_nodes += dead
        return live[::-1]

    def _shape_operands(self, node: WorkNode) -> list[str]:
        slots = SHAPE_INPUTS.get(node.op, ())
        return [node.inputs[i] for i in slots if i < len(node.inputs) and node.inputs[i]]

    def _inference_data(self, node: WorkNode) -> dict[str, onnx.TensorProto]:
        found = {}
        for name in self._shape_operands(node):
            if name in self._data:
                found[name] = self._data[name]
            elif name in self.work.values:
                from onnx import numpy_helper

                kind = self.work.types[name]
                array = np.asarray(self.work.values[name], dtype=_NUMPY.get(kind.element))
                found[name] = self._data[name] = numpy_helper.from_array(array, name)
        return found

    def _schema(self, op: str, domain: str, frame: Frame) -> Any:  # noqa: ANN401
        version = frame.versions.get(domain, self.versions.get(domain, 1))
        key = (op, domain, version)
        if key not in self._schemas:
            from onnx import defs

            try:
                self._schemas[key] = defs.get_schema(op, version, domain)
            except defs.SchemaError:
                self._schemas[key] = None
        return self._schemas[key]

    def _missing_value(self, name: str, reader: str) -> ModelError:
        return ModelError(
            f"{reader} needs the value of {name!r}, which lies in a data file that is absent", where=self.where,
            hint="put the external data file beside the model; only such small integer tensors are read from it",
        )  # fmt: skip

    def _stored_type(self, name: str, shape: tuple[int, ...], element: int) -> TensorType:
        if element not in ELEMENT_TYPES:
            raise ModelError(
                f"tensor {name!r} has the unknown element type {element}", where=self.where, hint="update onnx"
            )
        return TensorType(shape, element)

    def _in_order(self, nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
        """The nodes so that each comes after what it reads; as they are when that already holds."""
        owner = {name: i for i, node in enumerate(nodes) for name in node.output if name}
        needs = [[owner[name] for name in _reads(node) if name in owner] for node in nodes]
        if all(j < i for i, group in enumerate(needs) for j in group):
            return nodes
        order: list[int] = []
        state = [0] * len(nodes)
        for root in range(len(nodes)):
            stack = [(root, iter(needs[root]))] if state[root] == 0 else []
            state[root] = state[root] or 1
            while stack:
                index, pending = stack[-1]
                child = next(pending, None)
                if child is None:
                    state[index] = 2
                    order.append(index)
                    stack.pop()
                elif state[child] == 1:
                    node = nodes[child]
                    raise ModelError(
                        f"the graph has a cycle through {node.op_type} {node.name or node.output[0]!r}",
                        where=self.where, hint="the file is damaged: export it again",
                    )  # fmt: skip
                elif state[child] == 0:
                    state[child] = 1
                    stack.append((child, iter(needs[child])))
        return [nodes[i] for i in order]


_NUMPY: dict[int, Any] = {
    1: np.float32, 2: np.uint8, 3: np.int8, 4: np.uint16, 5: np.int16, 6: np.int32, 7: np.int64, 9: np.bool_,
    10: np.float16, 11: np.float64, 12: np.uint32, 13: np.uint64, 16: np.float32,
}  # fmt: skip


def _domain(domain: str) -> str:
    return "" if domain in STANDARD_DOMAINS else domain


def _reads(node: onnx.NodeProto) -> list[str]:
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        for graph in [attribute.g] if attribute.type == 5 else attribute.graphs if attribute.type == 10 else ():
            for inner in graph.node:
                names.extend(_reads(inner))
            names.extend(value.name for value in graph.output)
    return names


def _imports(versions: Mapping[str, int]) -> list[onnx.OperatorSetIdProto]:
    from onnx import OperatorSetIdProto

    return [OperatorSetIdProto(domain=domain, version=version) for domain, version in versions.items()]


def _type_proto(kind: TensorType) -> onnx.TypeProto:
    from onnx import TypeProto

    proto = TypeProto()
    tensor = proto.tensor_type
    tensor.elem_type = kind.element
    dims = tensor.shape.dim
    for size in kind.shape:
        dims.add().dim_value = size
    if not kind.shape:
        tensor.shape.SetInParent()
    return proto


def _small_value(tensor: onnx.TensorProto, kind: TensorType) -> Array | None:
    return tensor_value(tensor) if kind.elements <= MAX_CONSTANT_ELEMENTS else None


def _type_of_value(value: Array, kind: TensorType | None) -> TensorType | None:
    if kind is not None:
        return TensorType(value.shape, kind.element)
    element = next((number for number, dtype in _NUMPY.items() if value.dtype == dtype), None)
    return None if element is None else TensorType(value.shape, element)
