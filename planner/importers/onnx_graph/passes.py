"""Take out of the graph what costs nothing: constant regions, aliases, shape plumbing, dead nodes, a final Softmax; and
say what makes prices doubtful: operators without a rule, and what an exporter has probably lost.
"""

from __future__ import annotations

import re

from planner.graph import NO_RULE
from planner.importers.formats import some
from planner.importers.onnx_graph.weights import BUFFER_NAMES, is_path
from planner.importers.onnx_graph.work import WorkGraph, WorkNode
from planner.operators import rule_of
from planner.sums import float_sum

_FOLDS_OF_ONE = frozenset({"Concat", "Sum", "Max", "Min", "Mean"})
_DROPOUT_WITH_MODE = 12


def fold_constant_regions(graph: WorkGraph) -> None:
    """Mark what depends on stored tensors alone, or on shapes alone, and take its nodes out.

    The tensors it leaves behind stay known through `region`; once the weights are known (`find_weights`), nodes that
    compute something of trained ones come back. Nodes that depend on a shape count as plumbing, all others as folded.
    """
    from_shape: set[str] = set()
    kept = []
    for node in graph.nodes:
        is_shape = node.op in ("Shape", "Size")
        read = node.inputs[:1] if node.op == "CastLike" else node.inputs  # of the second, only the type counts
        if not is_shape and (not _foldable(node, graph) or not all(graph.is_constant(n) for n in read if n)):
            kept.append(node)
            continue
        plumbing = is_shape or any(name in from_shape for name in node.inputs)
        node.fate = "plumbing" if plumbing else "folded"
        graph.fates[node.fate] += 1
        if plumbing and not is_shape and _handed_on(node, graph) == node.inputs[0]:
            graph.identities.append(node.outputs[0])  # such as a state of zeros, expanded to the batch that it has
        for name in node.outputs:
            if name:
                graph.region[name] = node
                if plumbing:
                    from_shape.add(name)
    graph.nodes = kept


def _foldable(node: WorkNode, graph: WorkGraph) -> bool:
    if rule_of(node.op).random or "pinned" in node.attributes:
        return False
    return node.op != "Dropout" or not _drops(node, graph)


def collapse_aliases(graph: WorkGraph) -> None:
    """Take out nodes that hand on one of their inputs unchanged, and let readers read that input.

    Some exporters leave out factors of one, terms of zero and empty pieces of a concatenation, others write them.
    """
    same: dict[str, str] = {}
    kept = []
    for node in graph.nodes:
        node.inputs = [same.get(name, name) for name in node.inputs]
        if node.op == "Concat" and len(pieces := [n for n in node.inputs if graph.types[n].elements]) > 0:
            node.inputs = pieces
        source = _handed_on(node, graph)
        if source:
            same[node.outputs[0]] = source
            if source == node.inputs[0]:
                graph.identities.append(node.outputs[0])
            graph.fates["plumbing"] += 1
        else:
            kept.append(node)
        node.attributes.pop("pinned", None)
    graph.nodes = kept
    graph.outputs = list(dict.fromkeys(same.get(name, name) for name in graph.outputs))


def _handed_on(node: WorkNode, graph: WorkGraph) -> str:
    """The input that is a node's result; "" where it computes something."""
    target = graph.types.get(node.outputs[0])
    for place, source in enumerate(node.inputs[:2]):
        if source and graph.types[source] == target and _is_handed_on(node, place, graph):
            return source
    return ""


def _is_handed_on(node: WorkNode, place: int, graph: WorkGraph) -> bool:
    """Whether a node's result is its input in that place, of the same type."""
    neutral = rule_of(node.op).neutral
    if neutral:
        return 1 - place in neutral and _is_untrained(node.inputs[1 - place], neutral[1 - place], graph)
    if place:
        return False
    if node.op == "Identity":
        return "pinned" not in node.attributes or not graph.is_constant(node.inputs[0])
    if rule_of(node.op).hands_on:
        return True
    if node.op in _FOLDS_OF_ONE:
        return len(node.inputs) == 1
    if node.op == "Slice":
        steps = graph.values.get(node.inputs[4]) if len(node.inputs) > 4 else None
        return bool(steps is None or (steps > 0).all()) and (
            len(node.inputs) < 5 or not node.inputs[4] or steps is not None
        )
    if node.op == "Transpose":
        return node.attributes.get("perm") == tuple(range(len(graph.types[node.inputs[0]].shape)))
    return node.op == "Dropout" and not _drops(node, graph) and not any(node.outputs[1:])


def _is_untrained(name: str, number: float, graph: WorkGraph) -> bool:
    """Whether a tensor is one given number, and none that training could change."""
    value = graph.values.get(name)
    named = is_path(name) or graph.kinds.get(name) in ("PARAMETER", "BUFFER")
    return value is not None and not value.shape and graph.is_constant(name) and not named and value == number


def _drops(node: WorkNode, graph: WorkGraph) -> bool:
    """Whether a Dropout is there for training: it has a ratio, and its file does not say that it is off."""
    ratio = node.attributes.get("ratio", 0.5)
    if len(node.inputs) > 1 and node.inputs[1]:
        value = graph.values.get(node.inputs[1])
        ratio = float(value.reshape(-1)[0]) if value is not None else 0.5
    if ratio == 0:
        return False
    if graph.opset >= _DROPOUT_WITH_MODE:
        if len(node.inputs) < 3 or not node.inputs[2]:
            return False
        mode = graph.values.get(node.inputs[2])
        return mode is None or bool(mode.reshape(-1)[0])
    return True


def drop_final_softmax(graph: WorkGraph) -> None:
    """Let the graph end at its logits: training applies the loss to them, not to probabilities."""
    producers = graph.producers()
    for i, name in enumerate(graph.outputs):
        node = producers.get(name)
        if node is None or node.op not in ("Softmax", "LogSoftmax") or node.inputs[0] not in producers:
            continue
        if any(name in other.inputs for other in graph.nodes) or not _over_classes(node, graph):
            continue
        graph.outputs[i] = node.inputs[0]
        graph.info(
            "final-softmax",
            f"the final {node.label} is left out: training works on the logits before it",
            name,
        )


def _over_classes(node: WorkNode, graph: WorkGraph) -> bool:
    rank = len(graph.types[node.inputs[0]].shape)
    axis = node.attributes.get("axis", -1 if graph.opset >= 13 else 1)
    return isinstance(axis, int) and (axis % rank in (1, rank - 1)) and rank >= 2


def remove_dead(graph: WorkGraph) -> None:
    """Take out what no output needs; what is needed only to say a shape counts as plumbing."""
    live = _live(graph)
    graph.fates["dead"] += len(graph.nodes) - len(live)
    graph.nodes = live
    for node in live:
        if node.op == "Range":
            continue
        for slot in rule_of(node.op).values:
            if slot < len(node.inputs) and node.inputs[slot] and not graph.is_constant(node.inputs[slot]):
                node.inputs[slot] = ""
    needed = _live(graph)
    graph.fates["plumbing"] += len(live) - len(needed)
    graph.nodes = needed
    read = {name for node in needed for name in node.inputs} | set(graph.outputs)
    for node in needed:
        node.outputs = [name if i == 0 or name in read else "" for i, name in enumerate(node.outputs)]


def _live(graph: WorkGraph) -> list[WorkNode]:
    wanted = set(graph.outputs)
    live = []
    for node in reversed(graph.nodes):
        if any(name in wanted for name in node.outputs):
            live.append(node)
            wanted.update(node.inputs)
    return live[::-1]


SMALL_SHARE = 0.01
"""Share of a model's weights, or of the bytes its operators move, that operators without a rule may hold unsaid."""


def note_folded_batch_norms(graph: WorkGraph) -> None:
    """A convolution whose bias the exporter made up had a batch norm after it."""
    folded = [node for node in graph.nodes if node.op == "Conv" and _made_up_bias(node, graph)]
    if not folded:
        return
    channels = sum(graph.types[node.inputs[2]].elements for node in folded)
    graph.warn(
        "batch-norm-folded",
        f"{len(folded)} convolutions carry a bias that the exporter made: their batch norms were folded, so {channels} "
        "parameters and the norms' saved activations are missing; export in training mode without constant folding",
        folded[0].outputs[0],
    )


def _made_up_bias(node: WorkNode, graph: WorkGraph) -> bool:
    if len(node.inputs) < 3 or not node.inputs[2]:
        return False
    if "BatchNorm" in node.scope.module_class:
        return True
    sources = graph.weight_sources.get(node.inputs[2], ())
    return any(name.startswith("onnx::Conv") for name in sources)


def note_lost_weights(graph: WorkGraph) -> None:
    """A weight that the exporter computed into a constant, so that the file no longer holds it as it was."""
    known = {weight.label for weight in graph.weights.values()}
    read = {name for node in graph.nodes for name in node.inputs}
    lost: dict[str, str] = {}
    for name in read & set(graph.origins):
        if name in graph.stored and name not in graph.weights and graph.types[name].dtype.is_float:
            for origin in graph.origins[name]:
                buffer = graph.signature.get(origin, "PARAMETER") != "PARAMETER" or BUFFER_NAMES.search(origin)
                if origin not in known and not buffer:
                    lost[origin] = name
    for name, weight in graph.weights.items():
        if len(graph.origins.get(name, ())) > 1:
            shape = list(graph.types[name].shape)
            graph.info(
                "weight-became-constant",
                f"{weight.label} was computed into the constant {name!r} {shape} at export; that is counted as trained",
                name,
            )
    for origin in sorted(lost):
        shape = list(graph.types[lost[origin]].shape)
        graph.warn(
            "weight-became-constant",
            f"{origin} was computed into the constant {lost[origin]!r} {shape} at export and is not counted as trained",
            lost[origin],
        )


def note_missing_parameters(graph: WorkGraph) -> None:
    """Parameters that the exporter's signature lists and that the file no longer holds: folded, or dropped as zeros."""
    held = {*graph.stored, *(weight.label for weight in graph.weights.values())}
    held.update(origin for name in graph.weights for origin in graph.origins.get(name, ()))
    missing = [name for name, kind in graph.signature.items() if kind == "PARAMETER" and name not in held]
    if missing:
        graph.warn(
            "parameters-missing",
            f"{len(missing)} parameters of the module are not in the file and not counted: {some(missing, 3)}; the "
            "exporter folded them or dropped them as zeros: export with optimize=False",
            missing[0],
        )


def note_possible_tables(graph: WorkGraph) -> None:
    """A nameless table added to [batch, sequence, hidden]: perhaps learned positions, cut to length by an optimiser."""
    for node in graph.nodes:
        if node.op != "Add" or len(graph.types[node.outputs[0]].shape) != 3:
            continue
        for name in node.inputs:
            kind = graph.types[name]
            if name not in graph.stored or name in graph.weights or graph.kinds.get(name) or graph.origins.get(name):
                continue
            if kind.dtype.is_float and kind.shape[-2:] == graph.types[node.outputs[0]].shape[-2:]:
                graph.warn(
                    "possible-weight",
                    f"the constant {name!r} {list(kind.shape)} added by {node.label} may be a learned table that an "
                    "optimiser cut to length; it is not counted as a parameter",
                    name,
                )


def note_missing_rules(graph: WorkGraph) -> None:
    """Operators that no rule describes and that hold more than `SMALL_SHARE` of the weights or of the bytes moved."""
    unknown = [node for node in graph.nodes if rule_of(node.op).build is None]
    if not unknown:
        return
    of_weights = _weight_elements(graph, unknown) / max(1, _weight_elements(graph, graph.nodes))
    of_bytes = _moved_bytes(graph, unknown) / max(1, _moved_bytes(graph, graph.nodes))
    if max(of_weights, of_bytes) > SMALL_SHARE:
        ops = ", ".join(sorted({node.op for node in unknown}))
        graph.warn(
            NO_RULE,
            f"no rule describes {ops}, with {of_weights:.1%} of the weights and {of_bytes:.1%} of the bytes that "
            "operators move: priced as one pass over their operands and results, which may be far off",
            unknown[0].name or unknown[0].outputs[0],
        )


def _weight_elements(graph: WorkGraph, nodes: list[WorkNode]) -> int:
    read = {source for node in nodes for name in node.inputs for source in graph.weight_sources.get(name, ())}
    return sum(graph.types[name].elements for name in read if not graph.weights[name].tied_to)


def _moved_bytes(graph: WorkGraph, nodes: list[WorkNode]) -> float:
    kinds = ((node.repeat, graph.types[name]) for node in nodes for name in (*node.inputs, *node.outputs) if name)
    return float_sum(repeat * kind.elements * kind.dtype.bits / 8 for repeat, kind in kinds)


def note_missing_biases(graph: WorkGraph) -> None:
    """A linear layer without a bias whose like in other layers, or whose original operation, has one."""
    groups: dict[str, list[tuple[WorkNode, bool]]] = {}
    lost: dict[str, None] = {}
    readers: dict[str, list[WorkNode]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)
    for node in graph.nodes:
        sources = [name for n in node.inputs[:2] for name in graph.weight_sources.get(n, ())]
        if node.op not in ("Gemm", "MatMul") or not sources:
            continue
        biased = _has_bias(node, graph, readers)
        module = graph.weights[sources[0]].module
        if module:
            groups.setdefault(re.sub(r"\d+", "*", module), []).append((node, biased))
        if not biased and node.scope.torch_op.startswith("aten.addmm"):
            lost[node.outputs[0]] = None
    for members in groups.values():
        if any(biased for _, biased in members):
            lost.update((node.outputs[0], None) for node, biased in members if not biased)
    if lost and not graph.signature:
        graph.warn(
            "bias-dropped",
            f"{len(lost)} linear layers have no bias although others of their kind do: exporters drop biases that are "
            "all zero; those parameters are missing from the counts",
            next(iter(lost)),
        )


def _has_bias(node: WorkNode, graph: WorkGraph, readers: dict[str, list[WorkNode]]) -> bool:
    if node.op == "Gemm":
        return len(node.inputs) > 2 and bool(node.inputs[2])
    following = readers.get(node.outputs[0], [])
    return any(f.op == "Add" and any(n in graph.weight_sources for n in f.inputs) for f in following)
