"""Tell real ties from equal values that an exporter merged.

Exporters store equal tensors once. In a freshly initialised model all zero biases and all unit scales are equal, and
taken as tied they would forbid every cut and hide parameters; so a vector read by several modules becomes one parameter
a module. A matrix is equal to another only when it is the same weight: a tie, kept as one parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from planner.importers.onnx_graph.weights import Use, is_path, own_label, uses
from planner.importers.onnx_graph.work import Weight, WorkGraph, WorkNode
from planner.importers.types import ImportOptions
from planner.operators import Role, rule_of

Key = tuple[str, str, str]


def separate_merged(graph: WorkGraph, options: ImportOptions) -> None:
    """Give each module its own copy of a vector that the exporter stored once for several modules."""
    by_weight: dict[str, list[Use]] = {}
    for use in uses(graph):
        if use.stored in graph.weights:
            by_weight.setdefault(use.stored, []).append(use)
    producers = graph.producers()
    partner = _partners(graph)
    matrices_shared = _matrices_shared(graph, by_weight)
    merged = added = 0
    elements = 0
    replaced: dict[tuple[int, int], dict[str, str]] = {}
    for stored, group in by_weight.items():
        if len(group) < 2 or sum(size > 1 for size in graph.types[stored].shape) > 1:
            continue
        keys: dict[Key, list[Use]] = {}
        for use in group:
            keys.setdefault(_key(use, partner, producers, matrices_shared), []).append(use)
        if len(keys) < 2:
            continue
        merged += 1
        for i, (key, members) in enumerate(keys.items()):
            if i == 0:
                continue
            copy = _copy_weight(graph, stored, key, members[0])
            added += 1
            elements += graph.types[stored].elements
            for use in members:
                replaced.setdefault((id(use.node), use.slot), {})[stored] = copy
    _redirect(graph, replaced)
    if merged:
        graph.info(
            "merged-parameters",
            f"{merged} stored vectors serve several modules because their values were equal at export; "
            f"{added} parameters ({elements} elements) were added so that each module has its own",
        )


def _partners(graph: WorkGraph) -> dict[int, str]:
    """The weight matrix that each contraction node uses, by node identity."""
    found = {}
    for node in graph.nodes:
        for slot, role in rule_of(node.op).weights.items():
            if role is not Role.MATRIX or slot >= len(node.inputs) or id(node) in found:
                continue
            sources = graph.weight_sources.get(node.inputs[slot], ())
            wide = [name for name in sources if sum(size > 1 for size in graph.types[name].shape) > 1]
            if wide:
                found[id(node)] = wide[0]
    return found


def _matrices_shared(graph: WorkGraph, by_weight: dict[str, list[Use]]) -> bool:
    """Whether some matrix is used in the same way by several nodes, as where a layer is applied repeatedly."""
    for stored, group in by_weight.items():
        if sum(size > 1 for size in graph.types[stored].shape) > 1:
            nodes = {id(use.node) for use in group if use.role is Role.MATRIX}
            if len(nodes) > 1:
                return True
    return False


def _key(use: Use, partner: dict[int, str], producers: dict[str, WorkNode], matrices_shared: bool) -> Key:
    """Uses with equal keys read the same parameter."""
    mate = partner.get(id(use.node), "")
    if not mate and use.role in (Role.ADDED, Role.SCALE):
        makers = (producers.get(name) for name in use.node.inputs)
        mate = next((partner[id(maker)] for maker in makers if maker is not None and id(maker) in partner), "")
    module = use.node.scope.module or ""
    if use.tensor != use.stored and is_path(use.tensor):
        return use.tensor, "", ""
    if not module and not mate and not matrices_shared:
        return use.node.outputs[0], use.role, ""
    return module, use.role, mate


def _copy_weight(graph: WorkGraph, stored: str, key: Key, use: Use) -> str:
    owner = use.node.scope.module or ""
    if use.tensor == key[0]:
        name, label, owner = use.tensor, use.tensor, use.tensor.rpartition(".")[0]
    else:
        name = f"{stored}@{key[0] or key[2]}"
        while name in graph.types:
            name += "+"
        label = own_label(use) if owner else name
    graph.types[name] = graph.types[stored]
    graph.stored[name] = None
    graph.weights[name] = replace(graph.weights[stored], name=name, label=label, module=owner)
    return name


def _redirect(graph: WorkGraph, replaced: dict[tuple[int, int], dict[str, str]]) -> None:
    """Let each node read tensors that carry its own copies."""
    for node in graph.nodes:
        for slot, tensor in enumerate(node.inputs):
            names = replaced.get((id(node), slot))
            if not names:
                continue
            sources = tuple(names.get(source, source) for source in graph.weight_sources[tensor])
            if tensor in names:
                clone = names[tensor]
            elif tensor in names.values():
                clone = tensor
            else:
                clone = f"{tensor}@{'+'.join(sorted(names.values()))}"
                graph.types[clone] = graph.types[tensor]
                graph.region[clone] = graph.region[tensor]
            graph.weight_sources[clone] = sources
            node.inputs[slot] = clone


def note_ties(graph: WorkGraph, options: ImportOptions) -> None:
    """Say which weights are used in several modules: a plan must keep them together or add up their gradients."""
    owners: dict[str, dict[str, None]] = {}
    carriers: dict[str, set[str]] = {}
    for node in graph.nodes:
        for tensor in node.inputs:
            for name in graph.weight_sources.get(tensor, ()):
                if len(graph.types[name].shape) > 1:
                    owners.setdefault(name, {})[node.scope.module or node.outputs[0]] = None
                    carriers.setdefault(name, set()).add(tensor)
    for name, modules in owners.items():
        if len(modules) < 2:
            continue
        label, shown = graph.weights[name].label, _some(modules)
        if len(carriers[name]) == 1 and name not in carriers[name]:
            graph.info("shared-table", f"a table computed from {label} alone is read by {shown}", name)
        else:
            graph.info("tied-parameter", f"{label} is one weight used by {shown}", name)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


def order_weights(graph: WorkGraph, options: ImportOptions) -> None:
    """Put the parameters in order of first use, and make their labels unique."""
    order: dict[str, Weight] = {}
    taken: set[str] = set()
    for node in graph.nodes:
        for tensor in node.inputs:
            for name in graph.weight_sources.get(tensor, ()):
                if name in order:
                    continue
                weight = graph.weights[name]
                label, number = weight.label, 2
                while label in taken:
                    label, number = f"{weight.label}#{number}", number + 1
                taken.add(label)
                order[name] = weight if label == weight.label else replace(weight, label=label)
    graph.weights = order
