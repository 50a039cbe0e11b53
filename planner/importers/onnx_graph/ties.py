"""Find which stored tensors are one weight: keep real ties, restore broken ones, separate weights merged at export.

Exporters store equal tensors once. In a freshly initialised model all zero biases and all unit scales are equal, and
taken as tied they would forbid every cut and hide parameters; so a vector read by several modules becomes one parameter
a module. So does a matrix where the file shows that its exporter merged equal ones; otherwise it is the same weight: a
tie, kept as one parameter.

The other way round, an embedding and a head of transposed shape may be stored as two tensors. Nothing in such a file
says whether the two were one weight. Known model families have conventions, told by the names of the two modules; the
table below is all that is assumed, and every decision is said in a note.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from planner.graph import Parameter, WeightRead
from planner.importers.formats import some
from planner.importers.onnx_graph.weights import STATISTICS, Use, is_named, is_path, module_label, uses
from planner.importers.onnx_graph.work import TensorType, WorkGraph, WorkNode
from planner.operators import Role, rule_of

SMALLEST_VOCABULARY = 256
_SHOWN = 4
"""Most modules that a note lists."""


@dataclass(frozen=True, slots=True)
class Convention:
    """How a family of models treats embedding and head.

    Attributes:
        family: for the note.
        embedding: pattern of the embedding's label or module path.
        head: pattern of the head's.
        tied: whether they are one weight.
        given: pattern of a label that some weight of the model must have for the convention to apply.
    """

    family: str
    embedding: str
    head: str
    tied: bool
    given: str = ""


CONVENTIONS: tuple[Convention, ...] = (
    Convention("GPT-2, GPT-Neo, CodeGen", r"(^|\.)wte\b", r"(^|\.)lm_head\b", True),
    Convention(
        "BERT, ELECTRA, RoBERTa",
        r"(^|\.)word_embeddings\b",
        r"(^|\.)(predictions\.decoder|lm_head\.decoder|generator_lm_head)\b",
        True,
    ),
    Convention("ModernBERT", r"(^|\.)embeddings\.tok_embeddings\b", r"(^|\.)decoder\b", True),
    Convention("XLNet", r"(^|\.)word_embedding\b", r"(^|\.)lm_loss\b", True),
    Convention("DistilBERT", r"embeddings\.word_embeddings\b", r"(^|\.)vocab_projector\b", True),
    Convention("BLOOM", r"(^|\.)word_embeddings\b", r"(^|\.)lm_head\b", True),
    Convention("T5 1.1 and later", r"(^|\.)shared\b", r"(^|\.)lm_head\b", False, r"\bwi_0\b"),
    Convention("T5 1.0, BART", r"(^|\.)shared\b", r"(^|\.)lm_head\b", True),
    Convention("OPT, XGLM", r"(^|\.)decoder\.embed_tokens\b", r"(^|\.)lm_head\b", True),
    Convention("Pythia, GPT-NeoX", r"(^|\.)embed_in\b", r"(^|\.)embed_out\b", False),
    Convention("LLaMA, Mistral, Mixtral", r"(^|\.)embed_tokens\b", r"(^|\.)lm_head\b", False),
)
"""Tried in order; the first that matches both names decides."""


def restore_ties(graph: WorkGraph) -> None:
    """Set `tied_to` where a convention says that two stored tensors are copies of one weight."""
    for table, head in _candidates(graph):
        if not graph.weights[head].tied_to:
            _decide(graph, table, head)


def tie_copies(graph: WorkGraph) -> None:
    """Set `tied_to` where metadata say that the exporter computed a stored tensor from another stored weight."""
    for name in graph.weights:
        origin = graph.origins.get(name, ())
        if len(origin) != 1 or origin[0] == name or origin[0] not in graph.weights:
            continue
        if graph.types[name].elements == graph.types[origin[0]].elements:
            _tie(graph, name, origin[0], origin[0])
    _tie_repeated(graph)


def _tie(graph: WorkGraph, copy: str, original: str, origin: str) -> None:
    graph.weights[copy] = replace(graph.weights[copy], tied_to=original)
    graph.info("tie-restored", f"{copy} is a copy of {origin}, as the exporter's metadata says", copy)


def _tie_repeated(graph: WorkGraph) -> None:
    """A module that is applied again, for which an optimiser stored its weight again: one weight.

    Parts of one weight also come from one stored tensor; they are read beside each other, not one after the other.
    """
    first: dict[tuple[str, TensorType], Use] = {}
    for use in uses(graph):
        origin = graph.origins.get(use.stored, ())
        weight = graph.weights.get(use.stored)
        if weight is None or weight.tied_to or use.role is not Role.MATRIX or len(origin) != 1:
            continue
        if origin[0] in graph.stored or origin[0].rpartition(".")[0] != use.node.scope.module:
            continue
        original = first.setdefault((origin[0], graph.types[use.stored]), use)
        if original.stored != use.stored and _is_after(graph, use.node, original.node):
            _tie(graph, use.stored, original.stored, origin[0])


def _is_after(graph: WorkGraph, node: WorkNode, earlier: WorkNode) -> bool:
    """Whether a node depends on an earlier one. O(nodes)."""
    made = set(earlier.outputs)
    for each in graph.nodes:
        if not made.isdisjoint(each.inputs):
            if each is node:
                return True
            made.update(filter(None, each.outputs))
    return False


def _candidates(graph: WorkGraph) -> list[tuple[str, str]]:
    """Pairs of an embedding table (V, d) and another stored matrix that multiplies (d) to (V)."""
    tables: dict[tuple[int, ...], str] = {}
    matrix_uses = [
        use for use in uses(graph) if use.stored in graph.weights and len(graph.types[use.stored].shape) == 2
    ]
    gathered = {use.stored for use in matrix_uses if use.role is Role.TABLE}
    for use in matrix_uses:
        shape = graph.types[use.stored].shape
        if use.role is Role.TABLE and shape[0] >= SMALLEST_VOCABULARY:
            tables.setdefault(shape, use.stored)
    matrices = [use for use in matrix_uses if use.role is Role.MATRIX and use.stored not in gathered]
    shapes = [_out_in(use, graph.types[use.stored].shape) for use in matrices]
    last = frozenset() if tables.keys().isdisjoint(shapes) else _last_contractions(graph)
    heads = {use.stored: shape for use, shape in zip(matrices, shapes, strict=True) if id(use.node) in last}
    return [(tables[shape], name) for name, shape in heads.items() if shape in tables]


def _last_contractions(graph: WorkGraph) -> frozenset[int]:
    """Identities of the nodes after which no weight matrix is applied any more: where a head can be."""
    before: set[str] = set()
    last = set()
    for node in reversed(graph.nodes):
        inside = any(name in before for name in node.outputs)
        if not inside:
            last.add(id(node))
        contracts = rule_of(node.op).weights.get(1) is Role.MATRIX and len(node.inputs) > 1
        wide = contracts and any(len(graph.types[n].shape) > 1 for n in graph.weight_sources.get(node.inputs[1], ()))
        if inside or wide:
            before.update(node.inputs)
    return frozenset(last)


def _out_in(use: Use, shape: tuple[int, ...]) -> tuple[int, int]:
    """A weight's (outputs, inputs)."""
    transposed = use.node.op in ("Gemm", "com.microsoft.FusedMatMul") and bool(use.node.attributes.get("transB", 0))
    transposed |= use.node.op == "com.microsoft.MatMulNBits"
    return (shape[0], shape[1]) if transposed != use.flipped else (shape[1], shape[0])


def _decide(graph: WorkGraph, table: str, head: str) -> None:
    embedding, output = graph.weights[table], graph.weights[head]
    names = f"{embedding.label} and {output.label}"
    if is_path(table) and is_path(head):
        graph.info(
            "tie-not-assumed",
            f"{names} have matching shapes, but the file names both, so they are two weights",
            head,
        )
        return
    for rule in CONVENTIONS:
        matches = re.search(rule.embedding, embedding.label) and re.search(rule.head, output.label)
        if not matches or not _has(graph, rule.given):
            continue
        if rule.tied:
            graph.weights[head] = replace(output, tied_to=table)
            graph.warn(
                "tie-restored",
                f"{names} are stored apart but taken as one weight, as in {rule.family}",
                head,
            )
        else:
            graph.info(
                "tie-not-assumed",
                f"{names} have matching shapes and are taken as two weights, as {rule.family} have it",
                head,
            )
        return
    graph.info(
        "tie-not-assumed",
        f"{names} have matching shapes; they are taken as two weights",
        head,
    )


def _has(graph: WorkGraph, pattern: str) -> bool:
    return not pattern or any(re.search(pattern, weight.label) for weight in graph.weights.values())


Key = tuple[str, str, str]


def separate_merged(graph: WorkGraph) -> None:
    """Give each module its own copy of a weight that the exporter stored once for several modules.

    Torch's first exporter names each tensor that it merged because the values were equal; tensors that the modules
    share keep one name. Where no name tells, vectors are the modules' own; so are matrices that modules of different
    paths multiply by, as those of layers that were copied, or begin at zero.
    """
    by_weight: dict[str, list[Use]] = {}
    for use in uses(graph):
        if use.stored in graph.weights:
            by_weight.setdefault(use.stored, []).append(use)
    key_of = _Keys(graph, by_weight)
    merged = added = elements = matrices = 0
    replaced: dict[tuple[int, int], dict[str, str]] = {}
    for stored, group in by_weight.items():
        keys: dict[Key, list[Use]] = {}
        for use in group if len(group) > 1 else ():
            keys.setdefault(key_of(use), []).append(use)
        if len(keys) < 2:
            continue
        owner = stored.rpartition(".")[0]
        keys = {key: keys[key] for key in sorted(keys, key=lambda key: any(key) and key[0] != owner)}
        merged += 1
        matrices += _is_wide(graph, stored)
        for key, members in list(keys.items())[1:]:
            copy = _copy_weight(graph, stored, key, members[0])
            added += 1
            elements += graph.types[stored].elements
            for use in members:
                replaced.setdefault((id(use.node), use.slot), {})[stored] = copy
                graph.separated.append(WeightRead(copy, stored, use.node.outputs[0], use.slot))
    _redirect(graph, replaced)
    if merged:
        graph.info(
            "merged-parameters",
            f"{merged} stored {f'tensors ({matrices} matrices)' if matrices else 'vectors'} serve several modules "
            f"because their values were equal at export; {added} parameters ({elements} elements) were added so that "
            "each module has its own",
        )


def _is_wide(graph: WorkGraph, name: str) -> bool:
    """Whether a tensor is no vector: more than one of its dimensions has several entries."""
    return sum(size > 1 for size in graph.types[name].shape) > 1


def _partners(graph: WorkGraph) -> dict[int, str]:
    """The weight matrix that each contraction node uses, by node identity: of two, what the other is multiplied by."""
    partners = {}
    for node in graph.nodes:
        for slot, role in sorted(rule_of(node.op).weights.items(), reverse=True):
            if role is not Role.MATRIX or slot >= len(node.inputs) or id(node) in partners:
                continue
            sources = graph.weight_sources.get(node.inputs[slot], ())
            wide = [name for name in sources if _is_wide(graph, name)]
            if wide:
                partners[id(node)] = graph.weights[wide[0]].tied_to or wide[0]
    return partners


_MOST_MERGED = 1024
"""Largest number of elements of tensors that torch's second exporter merges where they are equal."""


class _Keys:
    """Tells which parameter a use reads: uses of one stored tensor with equal keys read the same.

    Args:
        graph: the model.
        by_weight: uses by stored tensor.
    """

    def __init__(self, graph: WorkGraph, by_weight: Mapping[str, Sequence[Use]]) -> None:
        self._graph = graph
        self._wide = {name for name in by_weight if _is_wide(graph, name)}
        self._multiplied = {name for name in self._wide if all(map(self._multiplies, by_weight[name]))}
        self._modules = {name: {use.node.scope.module for use in group} for name, group in by_weight.items()}
        self._producers = graph.producers()
        self._partner = _partners(graph)
        self._matrices_shared = any(len({id(use.node) for use in by_weight[name]}) > 1 for name in self._multiplied)

    def __call__(self, use: Use) -> Key:
        """Key of the parameter that a use reads: the module, the role, and the matrix it belongs to."""
        alias = self._alias(use)
        if alias != use.stored and is_named(self._graph, alias):
            return alias, "", ""
        owner = use.stored.rpartition(".")[0]
        if use.stored in self._wide and (listed := self._listed(use)):
            return listed, "", ""
        if use.stored in self._wide:
            return (self._module(use), use.role, "") if self._may_be_merged(use.stored, owner) else ("", "", "")
        if not owner and not self._graph.signature and is_named(self._graph, use.stored):
            return "", "", ""
        mate = self._partner.get(id(use.node), "")
        if not mate and use.role in (Role.ADDED, Role.SCALE):
            makers = (self._producers.get(name) for name in use.node.inputs)
            mate = next((self._partner[id(m)] for m in makers if m is not None and id(m) in self._partner), "")
        module = self._module(use)
        if not module and not mate and not self._matrices_shared:
            return use.node.outputs[0], use.role, ""
        return module, use.role, mate

    def _multiplies(self, use: Use) -> bool:
        """Whether a use multiplies by a matrix; a table that is multiplied by another weight is no module's own."""
        contracts = rule_of(use.node.op).weights.get(1) is Role.MATRIX and len(use.node.inputs) > 1
        multiplied = use.slot == 0 and contracts and use.node.inputs[1] in self._graph.weight_sources
        return use.role is Role.MATRIX and not multiplied

    def _alias(self, use: Use) -> str:
        """The name under which a use reads the stored tensor: of the Identity next to it, else its own."""
        stack, seen = [use.tensor], set[str]()
        while stack:
            name = stack.pop()
            node = self._graph.region.get(name)
            if node is None or name in seen:
                continue
            seen.add(name)
            if node.op == "Identity" and node.inputs[0] == use.stored:
                return name
            stack += node.inputs
        return use.stored

    def _listed(self, use: Use) -> str:
        """Path of a module's parameter that the signature lists and the file has as another's, or ""."""
        label = self._graph.weights[use.stored].label
        path = f"{use.node.scope.module}.{label.rpartition('.')[2]}"
        listed = self._graph.signature.get(path) == "PARAMETER" and path != label and path not in self._graph.stored
        return path if listed and use.role in (Role.ADDED, Role.SCALE) else ""

    def _may_be_merged(self, stored: str, owner: str) -> bool:
        """Whether modules of several paths may have had matrices of their own, of equal values, under one name."""
        if stored not in self._multiplied or not self._graph.from_torch:
            return False
        if not is_named(self._graph, stored):
            return True
        small = self._graph.types[stored].elements <= _MOST_MERGED
        within = any(f"{owner}.".startswith(f"{module}.") for module in self._modules[stored] if module)
        return bool(self._graph.signature) and small and within

    def _module(self, use: Use) -> str:
        """The module of a use; `m` for `m_1`, as torch's first exporter calls `m` when it is applied again."""
        module = use.node.scope.module or ""
        first = re.sub(r"_\d+$", "", module)
        known = first == use.stored.rpartition(".")[0] or first in self._modules[use.stored]
        return first if known and not self._graph.signature else module


def _copy_weight(graph: WorkGraph, stored: str, key: Key, use: Use) -> str:
    owner = use.node.scope.module or ""
    if not any(key[1:]):
        name, label, owner = key[0], key[0], key[0].rpartition(".")[0]
    else:
        name = f"{stored}@{key[0] or key[2]}"
        while name in graph.types:
            name += "+"
        label = module_label(use) if owner else name
    graph.types[name] = graph.types[stored]
    graph.stored[name] = None
    weight = graph.weights[stored]
    trainable = weight.trainable and use.role not in STATISTICS and _has_parameters(graph, owner)
    graph.weights[name] = replace(weight, name=name, label=label, module=owner, trainable=trainable)
    return name


def _has_parameters(graph: WorkGraph, module: str) -> bool:
    """False where the exporter's signature lists none of a module, as of a norm whose scale the exporter filled in."""
    listed = (name for name, kind in graph.signature.items() if kind == "PARAMETER")
    return not module or not graph.signature or any(name.startswith(f"{module}.") for name in listed)


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


def note_ties(graph: WorkGraph) -> None:
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
        label, shown = graph.weights[name].label, some(modules, _SHOWN)
        if len(carriers[name]) == 1 and name not in carriers[name]:
            graph.info("shared-table", f"a table computed from {label} alone is read by {shown}", name)
        else:
            graph.info("tied-parameter", f"{label} is one weight used by {shown}", name)


def order_weights(graph: WorkGraph) -> None:
    """Put the parameters in order of first use, and make their labels unique."""
    order: dict[str, Parameter] = {}
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
