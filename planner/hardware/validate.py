"""Checks a profile file and collects all that is wrong with it, each with its place, its line and a hint."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from planner.errors import Problem
from planner.hardware.catalog import citations, device_names
from planner.hardware.document import Document, Location
from planner.hardware.schema import ClusterFile, DeviceFile, StackFile
from planner.hardware.types import MOST_DEVICES
from planner.registry import did_you_mean

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

ProfileFile = ClusterFile | DeviceFile | StackFile
_KINDS: Mapping[str, type[ProfileFile]] = {"cluster": ClusterFile, "device": DeviceFile, "stack": StackFile}
"""What a profile describes, by the key that names it."""


def validate(document: Document) -> tuple[ProfileFile | None, list[Problem]]:
    """The profile in a file, or None, with all findings in the order of the file."""
    problems = list(document.problems)
    data = document.data
    spec: ProfileFile | None = None
    if isinstance(data, dict):
        spec, found = _validate_mapping(document, data)
        problems += found
    elif not problems:
        problems.append(document.problem((), "a profile is a mapping of keys to values"))
    problems.sort(key=_place)
    return (None if problems else spec), problems


def _place(problem: Problem) -> tuple[int, int]:
    line, column = problem.where.rsplit(":", 2)[-2:]
    return int(line), int(column)


def kind_of(data: Mapping[str, Any]) -> type[ProfileFile]:
    """What the data of a profile describes, by the key that names it; a cluster where no key does."""
    return next((model for key, model in _KINDS.items() if key in data), ClusterFile)


def _validate_mapping(document: Document, data: dict[str, Any]) -> tuple[ProfileFile | None, list[Problem]]:
    kinds = [key for key in _KINDS if key in data]
    if len(kinds) != 1:
        several = f"a profile has either {' or '.join(map(repr, kinds))}"
        message = several if kinds else "missing field 'cluster'"
        hint = (
            "start with `cluster: NAME` for a cluster, `device: NAME` for a single device or `stack: NAME` for software"
        )
        return None, [document.problem((), message, hint)]
    model = _KINDS[kinds[0]]
    own = _mapping(data, "device_types")
    context = {
        "sources": {**citations(), **_mapping(data, "sources")},
        "devices": {*device_names(), *own},
    }
    problems: list[Problem] = []
    if model is ClusterFile:
        problems = _size_problems(document, data) + _same_levels(document, data) + _others(document, data)
    try:
        return model.model_validate(data, context=context), problems
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=True)
        return None, problems + [_problem(document, model, detail) for detail in details]


def _mapping(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key)
    return value if isinstance(value, dict) else {}


def _problem(document: Document, model: type[BaseModel], detail: ErrorDetails) -> Problem:
    """One finding of the schema in the user's terms."""
    location: Location = tuple(part for part in detail["loc"] if part != "[key]")
    name = str(location[-1]) if location else ""
    context = detail.get("ctx", {})
    match detail["type"]:
        case "finding":
            at_key = detail["loc"][-1] == "[key]"
            return document.problem(location, context["message"], context["hint"], at_key=at_key)
        case "extra_forbidden":
            hint = did_you_mean(name, _fields_at(model, location[:-1]))
            return document.problem(location, f"unknown key {name!r}", hint, at_key=True)
        case "missing":
            hint = _description(model, location)
            return document.problem(location[:-1], f"missing field {name!r}", hint, at_key=True)
        case "literal_error":
            expected = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
            at_key = detail["loc"][-1] == "[key]"
            message = f"{detail['input']!r} is not one of {', '.join(expected)}"
            return document.problem(location, message, _close(str(detail["input"]), expected), at_key=at_key)
        case "greater_than_equal":
            return document.problem(location, f"{name!r} must be at least {context['ge']}, not {detail['input']}")
        case "too_short":
            return document.problem(location, f"{name!r} is empty", _description(model, location))
        case "model_type" | "model_attributes_type" | "dict_type":
            return document.problem(location, f"{name!r} should be a mapping of keys", _description(model, location))
        case _:
            message = (
                detail["msg"]
                .replace("Input should be", f"{name!r} should be")
                .replace("valid ", "")
                .replace("a integer", "an integer")
            )
            return document.problem(location, message, _description(model, location))


def _close(name: str, known: list[str]) -> str:
    hint = did_you_mean(name, known)
    return hint if hint.startswith("did") else ""


def _fields_at(model: type[BaseModel], location: Location) -> Iterable[str]:
    owner = _model_at(model, location)
    return owner.model_fields if owner else ()


def _description(model: type[BaseModel], location: Location) -> str:
    owner = _model_at(model, location[:-1])
    found = owner.model_fields.get(str(location[-1])) if owner and location else None
    return (found.description or "") if found else ""


def _model_at(model: type[BaseModel], location: Location) -> type[BaseModel] | None:
    """The model that describes what stands at a path of the file."""
    kind: Any = model
    for part in location:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found = kind.model_fields.get(str(part))
            kind = found.annotation if found else None
        else:
            kind = typing.get_args(kind)[-1] if typing.get_args(kind) else None
        kind = _unwrap(kind)
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _unwrap(kind: Any) -> Any:  # noqa: ANN401
    """`X` of `X | None` and of `Annotated[X, ...]`."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind = next(a for a in typing.get_args(kind) if a is not type(None))
    return typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind


def _size_problems(document: Document, data: dict[str, Any]) -> list[Problem]:
    """Sizes that do not multiply; what is not a number is left to the schema's own findings."""
    inside = [_int(entry, "size") for entry in _list(data, "node")]
    between = [_int(entry, "size") for entry in _list(data, "network")]
    devices = data.get("devices")
    counts = [_int(entry, "count") or 1 for entry in devices] if isinstance(devices, list) else [1]
    nodes = _int(data, "nodes") or 1
    problems = []
    for place, sizes in (("node", inside), ("network", between[:-1])):
        for i, size in enumerate(sizes):
            if size is None and "size" not in _list(data, place)[i]:
                hint = "say how many children it joins"
                problems.append(document.problem((place, i), f"missing field 'size' in {place!r}", hint))
    if between and between[-1] is not None:
        hint = "remove it: the outermost level grows with the number of nodes"
        problems.append(document.problem(("network", len(between) - 1, "size"), "the outermost level has a size", hint))
    if any(size is None for size in (*inside, *between[:-1])):
        return problems
    findings = arrange([size for size in between[:-1] if size], bool(between), nodes)
    inner = math.prod(size for size in inside if size)
    findings += _devices_fit(inner, nodes, sum(counts)) + too_many(inner, nodes)
    most = _int(data, "max_nodes")
    if most is not None and nodes > most:
        findings.append(
            (("nodes",), f"{nodes} nodes are more than max_nodes: {most}", "lower nodes or raise max_nodes")
        )
    return problems + [document.problem(place, message, hint) for place, message, hint in findings]


def _same_levels(document: Document, data: dict[str, Any]) -> list[Problem]:
    """Two levels of one name, which figures and messages could not tell apart."""
    problems: list[Problem] = []
    seen: set[str] = set()
    for place in ("node", "network"):
        for i, entry in enumerate(_list(data, place)):
            name = entry.get("level")
            if not isinstance(name, str):
                continue
            if name in seen:
                problems.append(document.problem((place, i, "level"), f"two levels are called {name!r}", "rename one"))
            seen.add(name)
    return problems


def _others(document: Document, data: dict[str, Any]) -> list[Problem]:
    """Links of nodes whose devices the cluster does not have."""
    listed = data.get("devices")
    types = [listed] if isinstance(listed, str) else [entry.get("type") for entry in _list(data, "devices")]
    problems = []
    for place in ("node", "network"):
        for i, entry in enumerate(_list(data, place)):
            for name in _mapping(entry, "nodes_of"):
                if name not in types:
                    message, hint = f"no node has devices of type {name!r}", did_you_mean(name, map(str, types))
                    problems.append(document.problem((place, i, "nodes_of", name), message, hint, at_key=True))
    return problems


def _list(data: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    value = data.get(key)
    return [entry if isinstance(entry, dict) else {} for entry in value] if isinstance(value, list) else []


def _int(data: Any, key: str) -> int | None:  # noqa: ANN401
    value = data.get(key) if isinstance(data, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _devices_fit(inner: int, nodes: int, listed: int) -> list[tuple[Location, str, str]]:
    """The device list is a pattern that fills a node, or whole nodes, and no more of them than there are."""
    if inner % listed and listed % inner:
        hint = f"let the counts add up to {inner} or a multiple of it"
        return [(("devices",), f"{listed} devices listed, which neither fill a node of {inner} nor whole nodes", hint)]
    if listed > inner * nodes:
        hint = f"set nodes: {listed // inner}, or list fewer"
        return [(("devices",), f"{listed} devices listed, but nodes: {nodes} of {inner} hold {inner * nodes}", hint)]
    return []


def too_many(inner: int, nodes: int) -> list[tuple[Location, str, str]]:
    """More devices than a cluster can have: each has a number of its own."""
    if inner * nodes <= MOST_DEVICES:
        return []
    message = f"{nodes:,} nodes of {inner:,} are {inner * nodes:,} devices"
    return [(("nodes",), message, f"a cluster has at most {MOST_DEVICES:,}")]


def arrange(between: list[int], grows: bool, nodes: int) -> list[tuple[Location, str, str]]:
    """What is wrong with a number of nodes: places, messages and hints; nothing when the sizes multiply.

    Args:
        between: sizes of the levels that join nodes, without the outermost, which takes the rest.
        grows: whether there is an outermost level that joins nodes.
        nodes: how many nodes.
    """
    findings: list[tuple[Location, str, str]] = []
    if nodes > 1 and not grows:
        hint = "add a level under `network` that joins them"
        findings.append((("nodes",), f"{nodes} nodes, but no level joins nodes", hint))
    filled = 1
    for i, size in enumerate(between):
        filled *= size
        if nodes > filled and nodes % filled:
            below = nodes // filled * filled
            hint = f"take {below} or {below + filled} nodes, or change the size"
            findings.append((("network", i, "size"), f"{nodes} nodes do not fill groups of {filled}", hint))
    return findings
