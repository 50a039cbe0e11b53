"""The sections of docs/backends.md: what each training framework takes, from its data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from planner.space.configuration import UNRESTRICTED
from planner.systems import BACKENDS
from planner.systems.backends import Backend

START, END = "<!-- generated: abilities -->", "<!-- end -->"

LIMITS = {
    "equal_replicas": "as many replicas for every stage",
    "alike": "all stages share operators and recompute alike",
    "whole_layers": "stages of whole layers",
    "axes": "what ranks of a group are for",
    "powers_of_two": "groups of 2, 4, 8 .. ranks, unless others are asked for",
    "head_groups": "ranks of a group divide",
    "zero_in_pipelines": "ZeRO with several stages",
    "some_layers": "the first layers of a stage recomputed, the others kept",
    "between_layers": "tensors between layers on the ranks of a group",
}
"""Fields of `Structure` in words."""

KINDS = {
    "precisions": "formats",
    "ZeRO stages that go with a precision, where not all do": "zero_of_formats",
    "optimizers": "optimizers",
    "optimizers with ZeRO": "sharded_optimizers",
    "what goes not with a precision": "unable",
    "models of an embedding of tokens, equal layers and a loss alone": "decoders",
    "no predictors of further tokens": "next_token_alone",
}
"""What a framework takes beside, in words, and its field."""


def generated() -> str:
    """A section for each framework: what it takes, each with its source."""
    parts = []
    for name, backend in BACKENDS.items():
        usual = "; plans are made for it unless said otherwise" if backend.usual else ""
        rows = "\n".join(f"| {what} | {value} | {source} |" for what, value, source in _rows(backend))
        notes = "".join(f"\n\n{note}." for note in backend.notes)
        parts.append(
            f"## {backend.title} (`--for {name}`{usual})\n\n| what | takes | source |\n|---|---|---|\n{rows}{notes}"
        )
    return "\n\n".join(parts)


def _rows(backend: Backend) -> Iterator[tuple[str, str, str]]:
    """What, which values, and the source."""
    yield "schedules", ", ".join(f"`{name}`" for name in backend.schedules) or "none", backend.sources["schedules"]
    yield "ZeRO stages", ", ".join(map(str, backend.zero)), backend.sources["zero"]
    for what, field in KINDS.items():
        if value := getattr(backend, field):
            yield what, _words(value), backend.sources[field]
    for what, field in (("modules run again alone", "modules"), ("modules kept in the host's memory", "offloads")):
        if kinds := getattr(backend, field):
            named = ", ".join(f"`{name}`" for name in kinds) if kinds != ("*",) else "any"
            yield what, named, backend.sources[field]
    for field, words in LIMITS.items():
        value = getattr(backend.structure, field)
        if value != getattr(UNRESTRICTED, field) or field in backend.sources:
            yield words, _words(value), backend.sources[field]


def _words(value: object) -> str:
    """A limit's value in words."""
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {_words(own)}" for name, own in value.items())
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "any"
    return "yes" if value is True else str(value or "any")


def with_backends(text: str) -> str:
    """The page with the sections as they are now."""
    before, _, rest = text.partition(START)
    return f"{before}{START}\n{generated()}\n{END}{rest.partition(END)[2]}"
