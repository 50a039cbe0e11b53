"""Restore ties that an export broke: an embedding and a head of transposed shape stored as two tensors.

Nothing in such a file says whether the two were one weight. Known model families have conventions, told by the names of
the two modules; the table below is all that is assumed, and every decision is said in a note.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from planner.errors import UsageError
from planner.importers.onnx_graph.weights import Use, is_path, uses
from planner.importers.onnx_graph.work import WorkGraph
from planner.importers.types import ImportOptions
from planner.operators import Role, rule_of
from planner.registry import did_you_mean

SMALLEST_VOCABULARY = 256


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
        "BERT, ELECTRA, RoBERTa", r"(^|\.)word_embeddings\b", r"(^|\.)(predictions\.decoder|lm_head\.decoder)\b", True
    ),
    Convention("DistilBERT", r"embeddings\.word_embeddings\b", r"(^|\.)vocab_projector\b", True),
    Convention("BLOOM", r"(^|\.)word_embeddings\b", r"(^|\.)lm_head\b", True),
    Convention("T5 1.1 and later", r"(^|\.)shared\b", r"(^|\.)lm_head\b", False, r"\bwi_0\b"),
    Convention("T5 1.0, BART", r"(^|\.)shared\b", r"(^|\.)lm_head\b", True),
    Convention("OPT, XGLM", r"(^|\.)decoder\.embed_tokens\b", r"(^|\.)lm_head\b", True),
    Convention("Pythia, GPT-NeoX", r"(^|\.)embed_in\b", r"(^|\.)embed_out\b", False),
    Convention("LLaMA, Mistral, Mixtral", r"(^|\.)embed_tokens\b", r"(^|\.)lm_head\b", False),
)
"""Tried in order; the first that matches both names decides."""


def restore_ties(graph: WorkGraph, options: ImportOptions) -> None:
    """Set `tied_to` where the options or a convention say that two stored tensors are copies of one weight.

    Raises:
        UsageError: a pair in the options names no parameter, or two of different size.
    """
    if not isinstance(options.ties, str):
        for copy, original in options.ties:
            _tie_as_told(graph, copy, original)
        return
    if options.ties not in ("auto", "none"):
        raise UsageError(f"ties cannot be {options.ties!r}", hint="give auto, none, or pairs of parameter names")
    if options.ties == "none":
        return
    _tie_by_origin(graph)
    for table, head in _candidates(graph):
        if not graph.weights[head].tied_to:
            _decide(graph, table, head)


def _tie_by_origin(graph: WorkGraph) -> None:
    """A stored tensor that the exporter computed from another stored weight is a copy of it."""
    for name, weight in graph.weights.items():
        origin = graph.origins.get(name, ())
        if len(origin) != 1 or origin[0] == name or origin[0] not in graph.weights:
            continue
        if graph.types[name].elements == graph.types[origin[0]].elements:
            graph.weights[name] = replace(weight, tied_to=origin[0])
            graph.info("tie-restored", f"{name} is a copy of {origin[0]}, as the exporter's metadata says", name)


def _candidates(graph: WorkGraph) -> list[tuple[str, str]]:
    """Pairs of an embedding table (V, d) and another stored matrix that multiplies (d) to (V)."""
    tables: dict[tuple[int, int], str] = {}
    heads: dict[str, tuple[int, int]] = {}
    found = list(uses(graph))
    gathered = {use.stored for use in found if use.role is Role.TABLE}
    last = _last_contractions(graph)
    for use in found:
        shape = graph.types[use.stored].shape
        if use.stored not in graph.weights or len(shape) != 2:
            continue
        if use.role is Role.TABLE and shape[0] >= SMALLEST_VOCABULARY:
            tables.setdefault((shape[0], shape[1]), use.stored)
        elif use.role is Role.MATRIX and use.stored not in gathered and id(use.node) in last:
            heads[use.stored] = _out_in(use, shape)
    return [(tables[shape], name) for name, shape in heads.items() if shape in tables]


def _last_contractions(graph: WorkGraph) -> set[int]:
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
    return last


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
                f"{names} are stored apart but taken as one weight, as in {rule.family} (ties=none keeps them apart)",
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
        f"{names} have matching shapes; they are taken as two weights (say so with ties if they are one)",
        head,
    )


def _has(graph: WorkGraph, pattern: str) -> bool:
    return not pattern or any(re.search(pattern, weight.label) for weight in graph.weights.values())


def _tie_as_told(graph: WorkGraph, copy: str, original: str) -> None:
    first, second = _named(graph, copy), _named(graph, original)
    if graph.types[first].elements != graph.types[second].elements:
        raise UsageError(
            f"{copy!r} and {original!r} cannot be tied: {list(graph.types[first].shape)} against "
            f"{list(graph.types[second].shape)}",
            hint="name two weights of the same size",
        )
    target = graph.weights[second].tied_to or second
    if first != target:
        graph.weights[first] = replace(graph.weights[first], tied_to=target)
        graph.info("tie-given", f"{copy} is taken as a copy of {original}, as given", first)


def _named(graph: WorkGraph, name: str) -> str:
    if name in graph.weights:
        return name
    labels = {weight.label: stored for stored, weight in graph.weights.items()}
    if name not in labels:
        raise UsageError(f"no parameter is called {name!r}", hint=did_you_mean(name, labels))
    return labels[name]
