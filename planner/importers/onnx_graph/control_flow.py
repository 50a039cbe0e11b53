"""Replace model-local functions, If, Loop and Scan by their bodies.

A body's own names get the call's first output in front, names from outside stay, so edges to them are kept. The nodes
of a loop's body appear once, with the trip count as `repeat`; a value carried from one turn to the next enters through
a pinned Identity, so that the first turn's constant is not taken for all turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from planner.errors import ModelError
from planner.importers.formats import damaged
from planner.importers.onnx_graph.nodes import node_label, plain_attributes, subgraphs
from planner.importers.onnx_graph.sequences import price_as_bags
from planner.importers.onnx_graph.work import INT64, TensorType, WorkNode

if TYPE_CHECKING:
    import onnx

    from planner.importers.onnx_graph.resolve import Frame, Handler, Resolver

_NUMBER = TensorType((), INT64)
_GRAPH = 5
_NO_LIMIT = (1 << 63) - 1
"""Trip count that means no limit: exporters write the largest integer."""
MOST_TRIPS = 1 << 20
"""Largest trip count that can be priced: collected results are written out one by one."""


def loop_names(graph: onnx.GraphProto) -> list[str]:
    """Names by which the trip counts of a graph's loops can be given, nested ones included."""
    names = []
    for node in graph.node:
        if node.op_type == "Loop":
            names.append(_loop_name(node))
        for inner in subgraphs(node):
            names.extend(loop_names(inner))
    return names


def call_function(resolver: Resolver, node: onnx.NodeProto, function: onnx.FunctionProto, frame: Frame) -> None:
    """Put a model-local function's body in place of a call."""
    prefix = _prefix(node)
    produced = {name for inner in function.node for name in inner.output}
    names = {name: f"{prefix}{name}" for name in produced if name}
    actual = [*node.input, *[""] * (len(function.input) - len(node.input))]
    names.update(zip(function.input, actual, strict=False))
    passed = []
    for formal, target in zip(function.output, node.output, strict=False):
        if target and formal in produced and formal not in function.input:
            names[formal] = target
        elif target:
            passed.append((names.get(formal, formal), target))
    given = {attribute.name: attribute for attribute in function.attribute_proto}
    given.update((attribute.name, attribute) for attribute in node.attribute)
    for value in function.value_info:
        resolver.hints.setdefault(names.get(value.name, value.name), value.type)
    versions = {**frame.versions, **{entry.domain: entry.version for entry in function.opset_import}}
    versions = {("" if domain == "ai.onnx" else domain): version for domain, version in versions.items()}
    inner_frame = replace(frame.inside(node), versions=versions)
    resolver.work.fates["plumbing"] += 1
    resolver.walk((_renamed(inner, names, given) for inner in function.node), inner_frame)
    for source, target in passed:
        resolver.alias(source, target, inner_frame)


def _if(resolver: Resolver, node: onnx.NodeProto, frame: Frame) -> None:
    branches = {a.name: a.g for a in node.attribute if a.type == _GRAPH}
    label = node.name or node.output[0]
    resolver.type_of(node.input[0], f"If {label!r}")
    condition = resolver.number(node.input[0], f"If {label!r}")
    resolver.work.fates["plumbing"] += 1
    if condition is None:
        outputs = _costlier_branch(resolver, node, branches, frame)
    else:
        branch = "then_branch" if condition else "else_branch"
        outputs = _body(resolver, node, branches[branch], {}, frame)
        resolver.work.info("if-branch", f"If {label!r}: its condition is constant, only the {branch} runs", label)
    for source, target in zip(outputs, node.output, strict=False):
        if target:
            resolver.alias(source, target, frame)


def _costlier_branch(
    resolver: Resolver, node: onnx.NodeProto, branches: Mapping[str, onnx.GraphProto], frame: Frame
) -> list[str]:
    """Walk both branches and keep the one with more work; a branch that cannot be walked does not run."""
    work, label = resolver.work, node.name or node.output[0]
    before = work.nodes
    walked: dict[str, tuple[float, list[WorkNode], list[str]]] = {}
    failures = []
    for name in ("then_branch", "else_branch"):
        work.nodes = []
        try:
            outputs = _body(resolver, node, branches[name], {}, frame, tag=name)
        except ModelError as error:
            failures.append(error)
            work.fates["dead"] += len(work.nodes) + 1
            continue
        walked[name] = (_rough_work(work.nodes, work.types), work.nodes, outputs)
    work.nodes = before
    if not walked:
        raise failures[0]
    costlier = max(walked, key=lambda name: (walked[name][0], name == "then_branch"))
    work.fates["dead"] += sum(len(nodes) for name, (_, nodes, _) in walked.items() if name != costlier)
    why = "the other cannot be followed" if failures else "the costlier"
    work.warn("if-branch", f"If {label!r}: the condition depends on data; the {costlier} is priced ({why})", label)
    work.nodes.extend(walked[costlier][1])
    return walked[costlier][2]


def _loop(resolver: Resolver, node: onnx.NodeProto, frame: Frame) -> None:
    body = next(a.g for a in node.attribute if a.name == "body")
    states = len(node.input) - 2
    _require_body(resolver, node, body, inputs=2 + states, outputs=1 + states)
    if price_as_bags(resolver, node, body, frame):
        return
    for initial in [name for name in node.input[2:] if name in resolver.sequences]:  # refused, however often it runs
        resolver.type_of(initial, f"Loop {_loop_name(node)!r}")
    trips = _trip_count(resolver, node)
    inner = frame.inside(node, trips)
    prefix = _prefix(node)
    names = {}
    counter, condition = body.input[0].name, body.input[1].name
    resolver.store(prefix + counter, _NUMBER)
    resolver.store(prefix + condition, TensorType((), 9), np.array(True))
    names[counter], names[condition] = prefix + counter, prefix + condition
    carried = list(node.input[2:])
    for formal, initial in zip(body.input[2:], carried, strict=False):
        names[formal.name] = prefix + formal.name
        resolver.alias(initial, prefix + formal.name, inner, pinned=True)
    resolver.work.fates["plumbing"] += 1
    outputs = _body(resolver, node, body, names, inner)[1:]
    _finish(resolver, node, outputs, [prefix + f.name for f in body.input[2:]], [], trips, frame, inner)


def _scan(resolver: Resolver, node: onnx.NodeProto, frame: Frame) -> None:
    body = next(a.g for a in node.attribute if a.name == "body")
    attributes = plain_attributes(node)
    scanned = _ints(attributes.get("num_scan_inputs", 0))[0]
    label = f"Scan {node.name or node.output[0]!r}"
    if frame.versions.get("", 9) < 9:
        raise ModelError(
            f"{label} is of operator set 8, which batches in another way",
            hint="convert the model to operator set 9 or later",
        )
    states = len(node.input) - scanned
    if not 0 <= states < len(node.input):
        raise damaged(f"{label} scans {scanned} of its {len(node.input)} inputs")
    _require_body(resolver, node, body, inputs=len(node.input), outputs=states)
    formals, actuals = [value.name for value in body.input], list(node.input)
    sources = actuals[states:]
    shapes = [resolver.type_of(name, label).shape for name in sources]
    given_axes = _ints(attributes.get("scan_input_axes", (0,) * scanned))
    if len(given_axes) != scanned:
        raise damaged(f"{label} has {len(given_axes)} axes for {scanned} inputs to scan")
    axes = [resolver.axis(axis, len(shape), label) for axis, shape in zip(given_axes, shapes, strict=True)]
    trips = _limited(resolver, label, shapes[0][axes[0]])
    inner = frame.inside(node, trips)
    prefix = _prefix(node)
    names = {formal: prefix + formal for formal in formals}
    for formal, initial in zip(formals[:states], actuals[:states], strict=True):
        resolver.alias(initial, names[formal], inner, pinned=True)
    index = prefix + "index"
    resolver.store(index, _NUMBER)
    for formal, source, axis, shape in zip(formals[states:], sources, axes, shapes, strict=True):
        taken = TensorType((*shape[:axis], *shape[axis + 1 :]), resolver.type_of(source, label).element)
        resolver.add("Gather", [source, index], names[formal], taken, inner, axis=axis)
    resolver.work.fates["plumbing"] += 1
    outputs = _body(resolver, node, body, names, inner)
    out_axes = _ints(attributes.get("scan_output_axes", (0,) * (len(outputs) - states)))
    _finish(resolver, node, outputs, [names[f] for f in formals[:states]], out_axes, trips, frame, inner)
    resolver.work.info(
        "loop-trips", f"{label}: its body is priced {trips} times, the length of its input", node.output[0]
    )


def _trip_count(resolver: Resolver, node: onnx.NodeProto) -> int:
    name = _loop_name(node)
    label = f"Loop {name!r}"
    trips, work = resolver.number(node.input[0], label), resolver.work
    if name in resolver.dims:
        work.info("loop-trips", f"{label}: its body is priced {resolver.dims[name]} times, as given", name)
        return _limited(resolver, label, resolver.dims[name])
    if trips is None or trips == _NO_LIMIT:
        raise ModelError(f"how often {label} runs is not in the file", hint=f"say it, for example --dim {name}=10")
    if trips < 1:
        work.warn("loop-trips", f"{label} runs {trips} times in the file; it is priced as if it ran once", name)
        return 1
    work.info("loop-trips", f"{label}: its body is priced {trips} times, its limit in the file", name)
    return _limited(resolver, label, trips, f"say how often it really runs, for example --dim {name}=10")


def _limited(resolver: Resolver, label: str, trips: int, hint: str = "export the model for a shorter input") -> int:
    """The trip count, if it is at most `MOST_TRIPS`.

    Raises:
        ModelError: it is larger.
    """
    if trips > MOST_TRIPS:
        text = f"{label} runs {trips:,} times, at most {MOST_TRIPS:,} can be priced"
        raise ModelError(text, hint=hint)
    return trips


def _require_body(
    resolver: Resolver, node: onnx.NodeProto, body: onnx.GraphProto, *, inputs: int, outputs: int
) -> None:
    """Refuse a loop whose body has another number of inputs than the loop passes, or too few outputs for its state."""
    if len(body.input) != inputs or len(body.output) < outputs:
        raise damaged(
            f"{node_label(node)} has a body of {len(body.input)} inputs and "
            f"{len(body.output)} outputs, where {inputs} and at least {outputs} are needed"
        )


def _body(
    resolver: Resolver,
    node: onnx.NodeProto,
    body: onnx.GraphProto,
    names: Mapping[str, str],
    frame: Frame,
    tag: str = "",
) -> list[str]:
    """Walk a subgraph as part of the graph around it, and return the new names of its outputs."""
    prefix = _prefix(node) + (f"{tag}/" if tag else "")
    local = [name for inner in body.node for name in inner.output if name]
    local += [tensor.name for tensor in body.initializer] + [t.values.name for t in body.sparse_initializer]
    all_names = {**{name: prefix + name for name in local}, **names}
    for value in [*body.value_info, *body.output]:
        if value.type.HasField("tensor_type"):
            resolver.hints.setdefault(all_names.get(value.name, value.name), value.type)
    resolver.store_initializers(body, all_names)
    resolver.walk((_renamed(n, all_names, {}) for n in body.node), frame.inside(node))
    return [all_names.get(value.name, value.name) for value in body.output]


def _finish(
    resolver: Resolver, node: onnx.NodeProto, outputs: list[str], states: list[str], axes: list[int], trips: int,
    frame: Frame, inner: Frame,
) -> None:  # fmt: skip
    """Connect a loop's results: last states as they are, collected values stacked along their axis."""
    label = node_label(node)
    for state, source, target in zip(states, outputs, node.output, strict=False):
        before, after = resolver.type_of(state, label).shape, resolver.type_of(source, label).shape
        if before != after:
            resolver.work.warn(
                "loop-shape",
                f"{label}: a carried value goes from shape {list(before)} to {list(after)}; the first turn's is priced",
                target or node.output[0],
            )
        if target:
            resolver.alias(source, target, frame)
    for i, (source, target) in enumerate(zip(outputs[len(states) :], list(node.output)[len(states) :], strict=False)):
        if target:
            _stack(resolver, source, target, axes[i] if i < len(axes) else 0, trips, frame, inner, label)


def _stack(
    resolver: Resolver, source: str, target: str, axis: int, trips: int, frame: Frame, inner: Frame, label: str
) -> None:
    kind = resolver.type_of(source, label)
    axis = resolver.axis(axis, len(kind.shape) + 1, label)
    single = (*kind.shape[:axis], 1, *kind.shape[axis:])
    where = resolver.store_integers(f"{target}/axis", [axis])
    turn = resolver.add("Unsqueeze", [source, where], f"{target}/turn", TensorType(single, kind.element), inner)
    stacked = TensorType((*kind.shape[:axis], trips, *kind.shape[axis:]), kind.element)
    resolver.add("Concat", [turn] * trips, target, stacked, replace(inner, repeat=frame.repeat), axis=axis)


def _renamed(
    node: onnx.NodeProto, names: Mapping[str, str], given: Mapping[str, onnx.AttributeProto]
) -> onnx.NodeProto:
    """A copy of a body's node under its new names, references to the call's attributes filled in."""
    from onnx import NodeProto

    copy = NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = [names.get(name, name) for name in node.input]
    copy.output[:] = [names.get(name, name) for name in node.output]
    attributes = []
    for attribute in copy.attribute:
        if attribute.ref_attr_name:
            value = given.get(attribute.ref_attr_name)
            if value is None:
                continue
            name = attribute.name
            attribute.CopyFrom(value)
            attribute.name = name
        attributes.append(attribute)
    if len(attributes) != len(copy.attribute):
        kept = [type(a).FromString(a.SerializeToString()) for a in attributes]
        del copy.attribute[:]
        copy.attribute.extend(kept)
    for graph in subgraphs(copy):
        _rename_free(graph, names, given)
    return copy


def _rename_free(graph: onnx.GraphProto, names: Mapping[str, str], given: Mapping[str, onnx.AttributeProto]) -> None:
    """Rename the tensors that a nested body reads from the graph around it."""
    defined_inside = {name for node in graph.node for name in node.output} | {value.name for value in graph.input}
    defined_inside |= {tensor.name for tensor in graph.initializer}
    free = {old: new for old, new in names.items() if old not in defined_inside}
    nodes = [_renamed(node, free, given) for node in graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    for value in graph.output:
        value.name = free.get(value.name, value.name)


def _rough_work(nodes: Iterable[WorkNode], types: Mapping[str, TensorType]) -> float:
    """A crude measure of a branch's work: contractions by their multiply-adds, all else by elements written."""
    total = 0.0
    for node in nodes:
        work = sum(types[name].elements for name in node.outputs if name in types)
        kinds = [types.get(name) for name in node.inputs[:2]]
        if len(kinds) == 2 and kinds[0] is not None and kinds[1] is not None and kinds[0].shape:
            if "Conv" in node.op:
                work *= 2 * math.prod(kinds[1].shape[1:])
            elif "MatMul" in node.op or "Gemm" in node.op:
                work *= 2 * kinds[0].shape[-1]
        total += work * node.repeat
    return total


def _ints(value: object) -> list[int]:
    return [int(v) for v in value] if isinstance(value, tuple) else [int(value)]  # type: ignore[call-overload]


def _prefix(node: onnx.NodeProto) -> str:
    return f"{next(name for name in node.output if name)}/"


def _loop_name(node: onnx.NodeProto) -> str:
    return node.name or next(iter(node.output), "")


HANDLERS: dict[str, Handler] = {"If": _if, "Loop": _loop, "Scan": _scan}
