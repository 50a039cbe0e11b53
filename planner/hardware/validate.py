"""Validation of a profile file: all errors at once, each with its position, source line and a hint.

Implausible figures (a wrong unit, bits for bytes) are warnings, which do not keep a profile from use. Their bounds are
wide: an order of magnitude beyond existing hardware.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from planner.errors import Problem
from planner.hardware.document import Document, Location, citations, device_names
from planner.hardware.schema import ClusterFile, DeviceFile, StackFile
from planner.hardware.types import MOST_DEVICES
from planner.registry import did_you_mean
from planner.units import Dimension, render

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from planner.hardware.schema import DeviceBody, LevelEntry


ProfileFile = ClusterFile | DeviceFile | StackFile
_KINDS: Mapping[str, type[ProfileFile]] = {"cluster": ClusterFile, "device": DeviceFile, "stack": StackFile}
"""By the key that names a profile, the model of its file."""


def validate(document: Document) -> tuple[ProfileFile | None, list[Problem]]:
    """The profile in a file (None if it has errors), and all errors in the order of the file."""
    problems = list(document.problems)
    data = document.data
    spec: ProfileFile | None = None
    if isinstance(data, dict):
        spec, errors = _validate_mapping(document, data)
        problems += errors
    elif not problems:
        problems.append(document.problem((), "a profile is a mapping of keys to values"))
    problems.sort(key=_place)
    return (None if problems else spec), problems


def _place(problem: Problem) -> tuple[int, int]:
    line, column = problem.where.rsplit(":", 2)[-2:]
    return int(line), int(column)


def kind_of(data: Mapping[str, Any]) -> type[ProfileFile]:
    """The model of a profile, by the key that names it; that of a cluster if there is none."""
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
    own_types = _mapping(data, "device_types")
    context = {
        "sources": {**citations(), **_mapping(data, "sources")},
        "devices": {*device_names(), *own_types},
    }
    problems: list[Problem] = []
    if model is ClusterFile:
        problems = _size_problems(document, data) + _same_levels(document, data) + _unknown_nodes(document, data)
    try:
        return model.model_validate(data, context=context), problems
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=True)
        return None, problems + [_problem(document, model, detail) for detail in details]


def _mapping(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key)
    return value if isinstance(value, dict) else {}


def _problem(document: Document, model: type[BaseModel], detail: ErrorDetails) -> Problem:
    """A validation error of the schema as a problem for the user."""
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
    field = owner.model_fields.get(str(location[-1])) if owner and location else None
    return (field.description or "") if field else ""


def _model_at(model: type[BaseModel], location: Location) -> type[BaseModel] | None:
    """The model of the mapping at a path of the file; None if there is no mapping."""
    kind: Any = model
    for part in location:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            field = kind.model_fields.get(str(part))
            kind = field.annotation if field else None
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
    """Sizes of levels that do not multiply; values that are not numbers are left to the schema."""
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
    max_nodes = _int(data, "max_nodes")
    if max_nodes is not None and nodes > max_nodes:
        findings.append(
            (("nodes",), f"{nodes} nodes are more than max_nodes: {max_nodes}", "lower nodes or raise max_nodes")
        )
    return problems + [document.problem(place, message, hint) for place, message, hint in findings]


def _same_levels(document: Document, data: dict[str, Any]) -> list[Problem]:
    """Levels with the same name."""
    problems: list[Problem] = []
    seen: set[str] = set()
    for place, entry in _levels_of(data):
        name = entry.get("level")
        if not isinstance(name, str):
            continue
        if name in seen:
            problems.append(document.problem((*place, "level"), f"two levels are called {name!r}", "rename one"))
        seen.add(name)
    return problems


def _unknown_nodes(document: Document, data: dict[str, Any]) -> list[Problem]:
    """Link figures (`nodes_of`) for device types that the cluster does not have."""
    listed = data.get("devices")
    types = [listed] if isinstance(listed, str) else [entry.get("type") for entry in _list(data, "devices")]
    problems = []
    for place, entry in _levels_of(data):
        for name in _mapping(entry, "nodes_of"):
            if name not in types:
                message, hint = f"no node has devices of type {name!r}", did_you_mean(name, map(str, types))
                problems.append(document.problem((*place, "nodes_of", name), message, hint, at_key=True))
    return problems


def _levels_of(data: Mapping[str, Any]) -> Iterator[tuple[Location, dict[str, Any]]]:
    """The entries of all levels, with their paths."""
    yield from (((key, i), entry) for key in ("node", "network") for i, entry in enumerate(_list(data, key)))


def _list(data: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    value = data.get(key)
    return [entry if isinstance(entry, dict) else {} for entry in value] if isinstance(value, list) else []


def _int(data: Any, key: str) -> int | None:  # noqa: ANN401
    value = data.get(key) if isinstance(data, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _devices_fit(inner: int, nodes: int, listed: int) -> list[tuple[Location, str, str]]:
    """Errors of a device list that fills neither a node nor whole nodes, or more nodes than there are."""
    if inner % listed and listed % inner:
        hint = f"let the counts add up to {inner} or a multiple of it"
        return [(("devices",), f"{listed} devices listed, which neither fill a node of {inner} nor whole nodes", hint)]
    if listed > inner * nodes:
        hint = f"set nodes: {listed // inner}, or list fewer"
        return [(("devices",), f"{listed} devices listed, but nodes: {nodes} of {inner} hold {inner * nodes}", hint)]
    return []


def too_many(inner: int, nodes: int) -> list[tuple[Location, str, str]]:
    """The error of a cluster with more than `MOST_DEVICES` devices."""
    if inner * nodes <= MOST_DEVICES:
        return []
    message = f"{nodes:,} nodes of {inner:,} are {inner * nodes:,} devices"
    return [(("nodes",), message, f"a cluster has at most {MOST_DEVICES:,}")]


def arrange(between: list[int], grows: bool, nodes: int) -> list[tuple[Location, str, str]]:
    """Errors of a number of nodes (path, message, hint); empty when the sizes of levels multiply.

    Args:
        between: sizes of the levels that join nodes, without the outermost, which grows.
        grows: whether there is an outermost level that joins nodes.
        nodes: number of nodes.
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


LATENCY_S = (100e-9, 5e-3)
"""Plausible start-up times of a message: from a wire on a board to the far end of a wide network."""
PORT_BYTE_PER_S = (10e6, 10e12)
"""Plausible bandwidth of all ports of one child, one direction."""
PCIE_BYTE_PER_S = 256e9
"""Sixteen lanes of PCIe of generation 7 in one direction."""
MEMORY_BYTES = (64 * 2**20, 4 * 2**40)
MEMORY_BYTE_PER_S = (1e9, 100e12)
PEAK_FLOP_PER_S = (1e9, 1e18)
FLOP_PER_BYTE = (1.0, 20_000.0)
"""Plausible ratio of the fastest matrix rate to memory bandwidth."""
EFFICIENCY = 0.02
OUTER_FASTER = 1.5
"""Factor by which a device may plausibly send faster into an outer tier than into the tier inside it."""

Finding = tuple[Location, str, str]
"""Path, message, hint."""


def doubts(document: Document, spec: ProfileFile) -> list[Problem]:
    """Warnings of implausible figures in a valid profile, in the order of the file."""
    warnings: list[Finding] = []
    if isinstance(spec, DeviceFile):
        warnings += _device((), spec)
    elif isinstance(spec, ClusterFile):
        for name, body in spec.device_types.items():
            warnings += _device(("device_types", name), body)
        for place, levels in (("node", spec.node), ("network", spec.network)):
            for number, level in enumerate(levels):
                warnings += _level((place, number), level)
        warnings += _faster_outside(spec)
    return [document.problem(location, message, hint) for location, message, hint in warnings]


def _beyond(
    location: Location, what: str, value: float, bounds: tuple[float, float], dimension: Dimension
) -> Iterator[Finding]:
    """A warning if a value is outside its bounds."""
    if not bounds[0] <= value <= bounds[1]:
        low, high = (render(bound, dimension, 3) for bound in bounds)
        hint = f"such figures lie from {low} to {high}: check the unit"
        yield location, f"{what} of {render(value, dimension, 4)} is not plausible", hint


def _device(head: Location, body: DeviceBody) -> Iterator[Finding]:
    yield from _beyond((*head, "memory"), "memory", body.memory.value, MEMORY_BYTES, Dimension.BYTES)
    rate = body.memory_bandwidth.value
    yield from _beyond((*head, "memory_bandwidth"), "a bandwidth", rate, MEMORY_BYTE_PER_S, Dimension.BYTE_RATE)
    peaks = {name: figure.value for name, figure in body.matrix.items()}
    for name, peak in peaks.items():
        yield from _beyond((*head, "matrix", name), f"{name} work", peak, PEAK_FLOP_PER_S, Dimension.FLOP_RATE)
    fastest = max(peaks.values())
    if not FLOP_PER_BYTE[0] <= fastest / rate <= FLOP_PER_BYTE[1]:
        message = f"{fastest / rate:,.0f} FLOP for each byte of memory bandwidth are not plausible"
        yield (*head, "memory_bandwidth"), message, "check the units of `matrix` and `memory_bandwidth`"
    halves = max(peaks.get("bf16", 0.0), peaks.get("fp16", 0.0))
    if halves and peaks.get("fp32", 0.0) > 2 * halves:
        yield (*head, "matrix", "fp32"), "fp32 is faster than 16-bit formats", "check which figure is which"
    if body.reserve is not None and body.reserve.value > body.memory.value / 4:
        yield (*head, "reserve"), "the reserve is more than a quarter of the memory", "600 MiB to 2 GiB are usual"


def _level(head: Location, level: LevelEntry) -> Iterator[Finding]:
    yield from _beyond((*head, "latency"), "a latency", level.latency.value, LATENCY_S, Dimension.SECONDS)
    rate = level.port.byte_per_s * level.port.count
    yield from _beyond((*head, "port"), "a bandwidth", rate, PORT_BYTE_PER_S, Dimension.BYTE_RATE)
    if "pcie" in level.level.lower() and level.port.byte_per_s > PCIE_BYTE_PER_S:
        message = f"PCIe of {render(level.port.byte_per_s, Dimension.BYTE_RATE, 4)} is not plausible"
        yield (*head, "port"), message, "16 lanes of generation 5 have 64 GB/s in one direction"
    if level.efficiency.value < EFFICIENCY:
        yield (*head, "efficiency"), f"{level.efficiency.value:.1%} of the bandwidth is not plausible", "70% to 95%"


def _faster_outside(spec: ClusterFile) -> Iterator[Finding]:
    """Warnings of tiers into which a device sends much faster than into the tier inside them."""
    levels = [("node", i, level) for i, level in enumerate(spec.node)]
    levels += [("network", i, level) for i, level in enumerate(spec.network)]
    devices, inner, inner_name = 1, 0.0, ""
    for place, number, level in levels:
        rate = level.port.byte_per_s * level.port.count * level.efficiency.value / devices
        if inner and rate > OUTER_FASTER * inner:
            message = f"a device sends {rate / inner:.3g} times as fast into {level.level!r} as into {inner_name!r}"
            hint = f"{level.level!r} lies outside: check units, `count` and whether the figures are per device"
            yield (place, number, "port"), message, hint
        inner, inner_name = rate, level.level
        devices *= level.size or 1
