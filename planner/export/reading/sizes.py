"""The sizes that a model tells, and options of a file that say otherwise."""

from __future__ import annotations

import functools
import math
import pkgutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from planner.errors import Problem
from planner.export.reading.options import Settings, Use
from planner.graph import Graph, TensorKind, per_graph
from planner.graph.blocks import Chain, build_chain
from planner.operators import JointCut, OpCall, call_classes, graph_specs, rule_of
from planner.space.jobs import expert_count, experts_of_row
from planner.space.named import chain_items

_HEADS = "grh"
"""Iteration dimensions of attention that count heads: groups, heads of a group, heads."""

PADDED = 128
"""Vocabularies are padded to a multiple of this and of the tensor-parallel ranks by default (Megatron)."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model that its graph tells; sets hold all values that occur, and are empty where nothing is known.

    Attributes:
        layers: numbered layers.
        predictors: predictors of further tokens behind them.
        hidden: width of the tensor between layers.
        heads, groups: attention heads, and heads with keys and values of their own.
        head: width of a head.
        inner: dimensions of matrices in layers.
        vocabulary: rows of the matrices before and behind the layers.
        experts: of the widest mixture; 0 without one.
        chosen: experts of a token.
    """

    layers: int
    predictors: int
    hidden: frozenset[int]
    heads: frozenset[int]
    groups: frozenset[int]
    head: frozenset[int]
    inner: frozenset[int]
    vocabulary: frozenset[int]
    experts: int
    chosen: int


@per_graph
def sizes_of(graph: Graph) -> ModelSizes:
    """The sizes of a model. O(nodes)."""
    chain = build_chain(graph)
    items = chain_items(chain)
    first, last = (items.layers[0], items.loss) if items.layers else (0, 0)
    hidden = _widths_between(chain, items.layers)
    inside, outside = set[int](), set[int]()
    for at, block in enumerate(chain.blocks):
        for node in block.nodes:
            for name in graph.nodes[node].inputs:
                tensor = graph.tensors.get(name)
                if tensor is not None and tensor.kind is TensorKind.PARAMETER and len(tensor.shape) > 1:
                    (inside if first <= at < last else outside).update(tensor.shape)
    heads = {_heads_of(graph, node) for node in call_classes(graph).first} - {(0, 0, 0)}
    return ModelSizes(
        layers=len(items.layers),
        predictors=len(items.predictors),
        hidden=frozenset(hidden),
        heads=frozenset(each[0] for each in heads),
        groups=frozenset(each[1] for each in heads),
        head=frozenset(each[2] for each in heads),
        inner=frozenset(inside),
        vocabulary=frozenset(outside - hidden),
        experts=expert_count(graph),
        chosen=experts_of_row(graph) if expert_count(graph) else 0,
    )


def _widths_between(chain: Chain, heads: Collection[int]) -> set[int]:
    """Widths of the tensors of three dimensions that enter every layer but the first."""
    tensors = chain.graph.tensors
    widths = [
        {tensors[name].shape[-1] for name in chain.crossing[at] if len(tensors[name].shape) > 2}
        for at in tuple(heads)[1:]
    ]
    return set.intersection(*widths) if widths else set()


def _heads_of(graph: Graph, node: int) -> tuple[int, int, int]:
    """Heads, those with keys of their own, and the width of a head, of an attention; zeros for other operators."""
    if rule_of(graph.nodes[node].op).joint is not JointCut.RING:
        return 0, 0, 0
    sizes = {d.name: d.size for nest in graph_specs(graph)[node].nests for d in nest.dims if d.name in _HEADS}
    call = OpCall.of(graph, graph.nodes[node])
    heads = math.prod(sizes.values())
    width = next((t.shape[-1] for t in call.inputs if t is not None and len(t.shape) == 4), 0)
    return heads, sizes.get("g", heads), width


WORDS: Mapping[str, str] = {
    "layers": "layers", "predictors": "predictors of further tokens", "hidden": "a width between layers of",
    "heads": "attention heads:", "groups": "key-value heads:", "head": "heads as wide as",
    "inner": "no matrix with such a dimension", "vocabulary": "no vocabulary of that size", "experts": "experts",
    "chosen": "experts of a token",
}  # fmt: skip
"""Words for the facts of `ModelSizes`."""


def contradictions(settings: Settings, sizes: ModelSizes, moot: Collection[str]) -> list[Problem]:
    """Options of a file that say other sizes than the model has, one problem each; those of `moot` are left out."""
    found = []
    for name in (name for name in settings.values if name not in moot):
        row = settings.table.by_name.get(name)
        if row is None or row.use is not Use.SIZE or name not in settings or row.about not in WORDS:
            continue
        value = settings.number(name)
        if text := _unlike(row.about, value, sizes):
            found.append(
                Problem(f"{name} is {value}, MODEL has {text}", hint="price the model of this file, or mend it")
            )
    if settings.table.framework in _named_models():
        found += _unlike_flavor(settings, sizes)
    return found


def _unlike(fact: str, value: int, sizes: ModelSizes) -> str:
    """What the model has instead of a size; "" where it has that, or does not tell."""
    own: int | frozenset[int] = getattr(sizes, fact)
    if isinstance(own, int):
        return "" if own == value else f"{own} {WORDS[fact]}"
    if not own:
        return ""
    if fact == "inner":  # two products of a gated network may lie in one matrix
        return "" if {value, 2 * value} & own else WORDS[fact]
    if fact == "vocabulary":
        return "" if any(_padded(value, size) or _padded(size, value) for size in own) else WORDS[fact]
    return "" if value in own else f"{WORDS[fact]} {' or '.join(map(str, sorted(own)))}"


def _padded(size: int, padded: int) -> bool:
    """Whether a vocabulary may be another one that is padded to a multiple of 128 and up to 64 ranks."""
    return any(-(-size // step) * step == padded for step in (1, 8, 64, *(PADDED * ranks for ranks in (1, 2, 4, 8))))


@functools.cache
def _named_models() -> Mapping[str, Mapping[tuple[str, str], Mapping[str, int]]]:
    """Sizes of the models that frameworks know by name and flavor, by framework."""
    lines = (pkgutil.get_data(__name__, "flavors.tsv") or b"").decode().splitlines()
    header, *rows = [line.split("\t") for line in lines if not line.startswith("#")]
    models: dict[str, dict[tuple[str, str], Mapping[str, int]]] = {}
    for framework, model, flavor, *numbers in rows:
        facts = {fact: int(text) for fact, text in zip(header[3:], numbers, strict=True) if text != "-"}
        models.setdefault(framework, {})[model, flavor] = facts
    return models


def _unlike_flavor(settings: Settings, sizes: ModelSizes) -> Iterator[Problem]:
    """What the model has otherwise than the one that a file names."""
    known = _named_models()[settings.table.framework]
    if "model.flavor" not in settings:
        return
    key = settings.word("model.name"), settings.word("model.flavor")
    facts = known.get(key, {})
    unlike = [(value, _unlike(fact, value, sizes), fact) for fact, value in facts.items()]
    for value, text, fact in unlike:
        if text:
            noun = WORDS[fact].rstrip(":").removesuffix(" of")
            message = (
                f"{key[0]} {key[1]} has {value} {noun}" if fact != "hidden" else f"{key[0]} {key[1]} is {value} wide"
            )
            yield Problem(f"{message}, MODEL has {text}", hint="price the model of this file, or mend it")
            return


def flavor_notes(settings: Settings) -> tuple[str, ...]:
    """A note on a model of a file whose sizes nobody here knows."""
    if "model.flavor" not in settings or settings.table.framework not in _named_models():
        return ()
    key = settings.word("model.name"), settings.word("model.flavor")
    unknown = key not in _named_models()[settings.table.framework]
    return (f"model {' '.join(key)}: not known here; MODEL is priced",) if unknown else ()
