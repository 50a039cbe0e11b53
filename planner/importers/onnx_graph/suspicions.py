"""Say what makes prices doubtful: operators without a rule, and what an exporter has probably lost."""

from __future__ import annotations

import re

from planner.graph import NO_RULE
from planner.importers.onnx_graph.weights import BUFFER_NAMES
from planner.importers.onnx_graph.work import WorkGraph, WorkNode
from planner.operators import rule_of

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
                if origin not in known and not BUFFER_NAMES.search(origin):
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
    return sum(repeat * kind.elements * kind.dtype.bits / 8 for repeat, kind in kinds)


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
    if lost:
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
