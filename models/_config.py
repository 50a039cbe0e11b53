"""Read configurations in the keys of Hugging Face's `config.json`, and check them against the keys of a model type."""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ._graph import GraphBuilder
from ._graph import ModelBuildError as ModelBuildError

Config = Mapping[str, Any]
"""A configuration with a value for every key of its type."""

Build = Callable[[Config, GraphBuilder, int, int], None]
"""Adds the model of a configuration to a graph, for a batch and a sequence length (0 where it reads no sequence)."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A bundled model by name.

    Attributes:
        name: name on the command line, `llama3-70b`.
        family: family that it is listed under, `llama`.
        description: one line for people.
        layers: number of repeated blocks (encoder plus decoder, or weighted layers of a convolutional net).
        parameters: published number of trained weights, tied ones counted once; rounded where the source rounds.
        active: parameters that one token uses, embedding and head included; None if all.
        seq: default sequence length; None for models that read no sequence.
        max_seq: longest sequence that its position table allows; None if there is no such limit.
        source: where the sizes come from.
    """

    name: str
    family: str
    description: str
    layers: int
    parameters: int
    active: int | None
    seq: int | None
    max_seq: int | None
    source: str


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a configuration.

    Attributes:
        kind: type of its value; for float an int is accepted.
        default: value if the configuration has none.
        required: the configuration must have it.
        items: type of the items of a list.
        count: how many items a list has, each a number of layers; 0 for any.
    """

    kind: type
    default: Any = None
    required: bool = False
    items: type = int
    count: int = 0


def named(c: Config, key: str, known: Collection[str]) -> str:
    """The value of a key, one of some names.

    Raises:
        ModelBuildError: it is none of them.
    """
    name: str = c[key]
    if name not in known:
        raise ModelBuildError(f"{key} {name!r} is not known", f"known: {', '.join(known)}")
    return name


@dataclass(frozen=True, slots=True)
class ModelType:
    """The type of model that a configuration's `model_type` names.

    Attributes:
        family: family that its models are listed under.
        keys: keys that its configurations may have, by name.
        build: adds the model of a configuration with a value for every key to a graph.
        opset: version of the operator set that its graphs need at least.
        positions: key of the size of its position table; "" if it has none.
        reads_sequence: True if the model reads a sequence of any length.
    """

    family: str
    keys: Mapping[str, Key]
    build: Build
    opset: int
    positions: str = ""
    reads_sequence: bool = True


_KINDS: Mapping[str, type] = {"int": int, "str": str, "list": list, "names": list, "dict": dict}


@functools.cache
def _facts_of(name: str) -> tuple[Mapping[str, Key], Mapping[str, Any]]:
    """The keys of a table of `types.toml`, and what it says of its models."""
    own = _tables()[name]
    keys: dict[str, Key] = {}
    facts: dict[str, Any] = {}
    named: dict[str, Iterable[str]] = {}
    for base in own.get("like", ()):
        keys, facts = {**keys, **_facts_of(base)[0]}, {**facts, **_facts_of(base)[1]}
        named |= facts["named"]
    without = own.get("without", ())
    keys = {key: entry for key, entry in keys.items() if key not in without}
    named = {key: ours for key, ours in named.items() if key not in without} | own.get("named", {})
    for place in ("required", "open"):
        for kind, listed in own.get(place, {}).items():
            items, counts = str if kind == "names" else int, own.get("count", {})
            for key in listed:
                keys[key] = Key(_KINDS[kind], None, place == "required", items, counts.get(key, 0))
    keys |= {key: Key(type(value), value) for key, value in own.get("default", {}).items()}
    facts |= {fact: own[fact] for fact in ("family", "positions", "reads_sequence") if fact in own}
    return keys, facts | {"named": named}


@functools.cache
def _tables() -> Mapping[str, Any]:
    return tomllib.loads((Path(__file__).parent / "types.toml").read_text(encoding="utf-8"))


def typed(builders: Mapping[str, Build], opset: int) -> dict[str, ModelType]:
    """Model types with the keys that `types.toml` gives them.

    Args:
        builders: by model type, what builds it.
        opset: version of the operator set that their graphs need at least.
    """
    types = {}
    for name, build in builders.items():
        of_table, facts = _facts_of(name)
        keys, named = dict(of_table), facts["named"]
        for key, ours in named.items():
            if key not in keys:
                keys[key] = keys[ours[0]]
            keys = {other: entry for other, entry in keys.items() if other == key or other not in ours}
        about = {fact: value for fact, value in facts.items() if fact != "named"}
        types[name] = ModelType(keys=keys, build=partial(_renamed, build, named), opset=opset, **about)
    return types


def _renamed(
    build: Build, named: Mapping[str, Iterable[str]], c: Config, g: GraphBuilder, batch: int, seq: int
) -> None:
    """Build a configuration that has its own names for some keys."""
    ours = {our: c[key] for key, names in named.items() for our in names}
    build({key: value for key, value in c.items() if key not in named} | ours, g, batch, seq)


MOST_LAYERS = 10_000
"""Maximum number of layers of a configuration; more are taken for a typing error."""
LARGEST_SIZE = 1 << 24
"""Largest width, length or vocabulary of a configuration: the longest contexts are 10 million tokens."""
MOST_ITEMS = 4096
"""Maximum number of items of a list of numbers, such as the tables of a recommendation model."""
LARGEST = 1 << 40
"""Largest other number of a configuration, such as the rows of a table."""

SHORT_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv-heads": ("num_key_value_heads",),
    "head-dim": ("head_dim", "d_kv"),
    "ffn": ("intermediate_size", "n_inner", "d_ff"),
    "vocab": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "top-k": ("num_experts_per_tok",),
    "expert-ffn": ("moe_intermediate_size",),
    "window": ("sliding_window",),
}
"""By option of the command line: the keys it may set, of which a type's first one counts."""


@dataclass(frozen=True, slots=True)
class ModelConfiguration:
    """A configuration that was checked and completed.

    Attributes:
        model_type: its type of model.
        values: a value for every key of the type.
        notes: keys and parts that were left out or not understood, for people.
    """

    model_type: ModelType
    values: Mapping[str, Any]
    notes: tuple[str, ...]


def understand(
    document: Mapping[str, Any], types: Mapping[str, ModelType], irrelevant: Iterable[str]
) -> ModelConfiguration:
    """Check a configuration and fill in defaults.

    Args:
        document: keys and values, `model_type` among them.
        types: known types by name.
        irrelevant: keys on which no shape depends.

    Raises:
        ModelBuildError: no or an unknown `model_type`.
        ModelBuildError: required keys are missing, or a value has the wrong type or makes no sense.
    """
    outer, notes = document, []
    parts = sorted(key for key in outer if key.endswith("_config") and key not in ("text_config", *irrelevant))
    if isinstance(document.get("text_config"), Mapping):
        shared = {key: outer.get(key) for key in ("model_type", "tie_word_embeddings")}
        document = {**shared, **document["text_config"]}
    if parts:
        notes.append(f"only the language model is built; left out: {', '.join(parts)}")
    kind = type_named(document.get("model_type"), types)
    if isinstance(document.get("rope_parameters"), Mapping):
        rope = document["rope_parameters"]
        document = {**{key: value for key, value in rope.items() if key in kind.keys}, **document}
    values = _values(document, kind)
    unknown = sorted(set(document) - set(kind.keys) - {*irrelevant, *parts, "model_type", "text_config"})
    unknown = [key for key in unknown if not key.startswith("_") and document[key] not in (None, False)]
    if unknown:
        notes.append(f"keys that are not understood and have no effect: {', '.join(unknown)}")
    return ModelConfiguration(kind, values, tuple(notes))


def type_named(name: object, types: Mapping[str, ModelType]) -> ModelType:
    """The type of model of that name; of the language model within a larger one (`qwen2_5_vl_text`), the larger one's.

    Raises:
        ModelBuildError: there is none; the hint names close ones, or lists all.
    """
    listed = f"known: {', '.join(types)}"
    if not isinstance(name, str):
        raise ModelBuildError("the configuration lacks the key 'model_type'", f"name one; {listed}")
    for known in (name, name.removesuffix("_text")):
        if known in types:
            return types[known]
    close = close_names(name, types)
    hint = f"{close}if its layers are the same, write that name there" if close else listed
    raise ModelBuildError(f"no builder for model_type {name!r}", f"{hint}; else export the model: docs/models.md")


def close_names(name: str, known: Iterable[str]) -> str:
    """ "did you mean 'a' or 'b'? ", empty where no known name is close."""
    close = difflib.get_close_matches(name.lower(), list(known), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(repr(c) for c in close)}? " if close else ""


def _values(document: Mapping[str, Any], kind: ModelType) -> dict[str, Any]:
    """A value for every key of a type."""
    given = {key: document[key] for key in kind.keys if document.get(key) is not None}
    missing = [key for key, entry in kind.keys.items() if entry.required and key not in given]
    if missing:
        shown = dict(zip(kind.keys, option_names(kind), strict=True))
        options = " ".join(f"--{shown[key]}" for key in missing)
        raise ModelBuildError(
            f"the configuration lacks {', '.join(map(repr, missing))}",
            f"add the keys; they are {options} of `models build`",
        )
    for key, value in given.items():
        _check(key, kind.keys[key], value)
    for key in filter(_counts_layers, given):
        if isinstance(given[key], int) and given[key] > MOST_LAYERS:
            raise ModelBuildError(f"{key} is {given[key]}", f"give {MOST_LAYERS} or less")
    return {key: given.get(key, entry.default) for key, entry in kind.keys.items()}


def _counts_layers(key: str) -> bool:
    """True for keys whose value is a number of layers: `num_nextn_predict_layers`, `n_layer`."""
    return key.endswith(("layer", "layers"))


def _check(key: str, entry: Key, value: Any) -> None:  # noqa: ANN401
    """Refuse a value of the wrong type, a negative size, and 0 for a key that is required or has a default."""
    accepted = (int, float) if entry.kind is float else (entry.kind,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and entry.kind is not bool):
        raise ModelBuildError(f"{key} is {value!r}", f"give a value of type {entry.kind.__name__}")
    if entry.kind is list:
        _check_items(key, entry, value)
    number: Any = value
    if entry.kind is int and number < (1 if entry.required or entry.default else 0):
        raise ModelBuildError(f"{key} is {value}", "give a positive number")
    most = {int: LARGEST_SIZE, float: LARGEST}.get(entry.kind)
    if most is not None and not abs(number) <= most:
        raise ModelBuildError(f"{key} is {value}", f"give {most} or less")


def _check_items(key: str, entry: Key, value: Any) -> None:  # noqa: ANN401
    """Refuse a list with items of the wrong type, out of range, or in the wrong number."""
    of_type = all(type(item) is entry.items for item in value)
    if not of_type or (entry.items is int and not all(0 <= item <= LARGEST for item in value)):
        what = "names" if entry.items is str else "whole numbers"
        raise ModelBuildError(f"{key} is {value!r}", f"give a list of {what}")
    if entry.items is int and len(value) > MOST_ITEMS:
        raise ModelBuildError(f"{key} has {len(value)} items", f"give {MOST_ITEMS} or less")
    if entry.count and (len(value) != entry.count or min(value) < 1 or sum(map(int, value)) > MOST_LAYERS):
        raise ModelBuildError(f"{key} is {value!r}", f"give {entry.count} numbers from 1, {MOST_LAYERS} together")


def with_options(
    document: Mapping[str, Any], options: Mapping[str, str], types: Mapping[str, ModelType]
) -> dict[str, Any]:
    """A configuration with values replaced by options, which are short names (`{"layers": "40"}`) or keys.

    Raises:
        ModelBuildError: an unknown `model_type`.
        ModelBuildError: the type does not have an option, or a value cannot be read.
    """
    kind = type_named(document.get("model_type"), types)
    names = option_names(kind)
    accepted = {key: key for key in kind.keys} | {name.replace("-", "_"): key for name, key in names.items()}
    changed = dict(document)
    for option, text in options.items():
        key = accepted.get(option.replace("-", "_"))
        if key is None:
            hint = close_names(option, (*names, "batch", "seq", "output", "family"))
            hint += f"options of {document['model_type']}: {' '.join(f'--{name}' for name in names)}"
            raise ModelBuildError(f"{document['model_type']} has no option --{option}", hint)
        changed[key] = _read(key, kind.keys[key].kind, text)
    return changed


def option_names(kind: ModelType) -> dict[str, str]:
    """Keys by name of their option (a short name, or the key itself), in the order of the type's keys."""
    short = {next((key for key in keys if key in kind.keys), ""): name for name, keys in SHORT_NAMES.items()}
    return {short.get(key, key).replace("_", "-"): key for key in kind.keys}


def _read(key: str, kind: type, text: str) -> Any:  # noqa: ANN401
    """Read a value of a type from text; items of a list are separated by commas."""
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        if kind is list:
            return [int(item) if item.lstrip("-").isdigit() else item for item in text.split(",")]
        return kind(text)
    except (KeyError, ValueError):
        wanted = {bool: "true or false", list: "items separated by commas"}.get(
            kind, f"a value of type {kind.__name__}"
        )
        raise ModelBuildError(f"{key} cannot be {text!r}", f"give {wanted}") from None
