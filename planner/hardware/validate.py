"""Validation of a profile file: all errors at once, each with its position, source line and a hint.

Implausible figures (a wrong unit, bits for bytes) are warnings, which do not keep a profile from use. Their bounds are
wide: an order of magnitude beyond existing hardware.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from planner.documents import schema_at
from planner.errors import Problem
from planner.hardware.document import BEGINNING, KINDS, Document, Location, citations, device_names
from planner.hardware.loader import profile_json_schema
from planner.hardware.schema import ClusterFile, DeviceFile, StackFile
from planner.hardware.types import MOST_DEVICES
from planner.registry import did_you_mean
from planner.units import Dimension, render

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from planner.hardware.schema import DeviceBody, LevelEntry


ProfileFile = ClusterFile | DeviceFile | StackFile
_KINDS: Mapping[str, type[ProfileFile]] = dict(zip(KINDS, (ClusterFile, DeviceFile, StackFile), strict=True))
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
        return None, [document.problem((), several if kinds else "missing field 'cluster'", BEGINNING)]
    model = _KINDS[kinds[0]]
    context = {
        "sources": {**citations(), **_mapping(data, "sources")},
        "devices": {*device_names(), *_mapping(data, "device_types")},
    }
    try:
        spec = model.model_validate(data, context=context)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=True)
        return None, [_problem(document, model, detail) for detail in details]
    findings = contradictions(spec) if isinstance(spec, ClusterFile) else ()
    return spec, [document.problem(*finding) for finding in findings]


def _mapping(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key)
    return value if isinstance(value, dict) else {}


def _problem(document: Document, model: type[ProfileFile], detail: ErrorDetails) -> Problem:
    """A validation error of the schema as a problem for the user."""
    location: Location = tuple(part for part in detail["loc"] if part != "[key]")
    name = str(location[-1]) if location else ""
    context, schema = detail.get("ctx", {}), _schema(model)
    hint = schema_at(location, schema).get("description", "")
    match detail["type"]:
        case "finding":
            at_key = detail["loc"][-1] == "[key]"
            return document.problem(location, context["message"], context["hint"], at_key=at_key)
        case "extra_forbidden":
            hint = did_you_mean(name, schema_at(location[:-1], schema).get("properties", ()))
            return document.problem(location, f"unknown key {name!r}", hint, at_key=True)
        case "missing":
            return document.problem(location[:-1], f"missing field {name!r}", hint, at_key=True)
        case "literal_error":
            expected = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
            at_key = detail["loc"][-1] == "[key]"
            message = f"{detail['input']!r} is not one of {', '.join(expected)}"
            return document.problem(location, message, _close(str(detail["input"]), expected), at_key=at_key)
        case "greater_than_equal":
            return document.problem(location, f"{name!r} must be at least {context['ge']}, not {detail['input']}")
        case "too_short":
            return document.problem(location, f"{name!r} is empty", hint)
        case "model_type" | "model_attributes_type" | "dict_type":
            return document.problem(location, f"{name!r} should be a mapping of keys", hint)
        case _:
            message = (
                detail["msg"]
                .replace("Input should be", f"{name!r} should be")
                .replace("valid ", "")
                .replace("a integer", "an integer")
            )
            return document.problem(location, message, hint)


def _close(name: str, known: list[str]) -> str:
    hint = did_you_mean(name, known)
    return hint if hint.startswith("did") else ""


@functools.cache
def _schema(model: type[ProfileFile]) -> Mapping[str, Any]:
    """The JSON Schema of a kind of profile, with the definitions that it refers to."""
    whole = profile_json_schema()
    return {**whole["definitions"][model.__name__], "definitions": whole["definitions"]}


Finding = tuple[Location, str, str]
"""Path, message, hint."""


def contradictions(spec: ClusterFile) -> Iterator[Finding]:
    """Parts of a cluster's file, each right by itself, that do not go together."""
    names: set[str] = set()
    types = [name for part in spec.devices for name in (part.type, part.links) if name]
    for place, level in spec.levels():
        outermost = place == ("network", len(spec.network) - 1)
        if level.size is None and not outermost:
            yield place, f"missing field 'size' in {place[0]!r}", "say how many children it joins"
        elif level.size is not None and outermost:
            hint = "remove it: the outermost level grows with the number of nodes"
            yield (*place, "size"), "the outermost level has a size", hint
        if level.level in names:
            yield (*place, "level"), f"two levels are called {level.level!r}", "rename one"
        names.add(level.level)
        for name in level.nodes_of:
            if name not in types:
                hint = did_you_mean(name, types)
                yield (*place, "nodes_of", name), f"no node has devices of type {name!r}, or links of that name", hint
    for at, part in enumerate(spec.devices):
        if part.links and not any(part.links in level.nodes_of for _, level in spec.levels()):
            hint = f"say under `nodes_of: {{{part.links}: ..}}` of a level how they differ"
            yield ("devices", at, "links"), f"no level has figures of the links {part.links!r}", hint
    inner, listed = spec.node_size, sum(part.count for part in spec.devices)
    if inner % listed and listed % inner:
        message = f"{listed} devices listed, which neither fill a node of {inner} nor whole nodes"
        yield ("devices",), message, f"let the counts add up to {inner} or a multiple of it"
    elif listed > inner * spec.nodes:
        message = f"{listed} devices listed, but nodes: {spec.nodes} of {inner} hold {inner * spec.nodes}"
        yield ("devices",), message, f"set nodes: {listed // inner}, or list fewer"
    if spec.order and (len(spec.order) != inner or len(set(spec.order)) != inner):
        message = f"{len(set(spec.order))} different devices in the order of a node of {inner}"
        yield ("order",), message, f"name each device of a node once, such as {list(range(inner))[:8]}"
    yield from unfit_nodes(spec, spec.nodes)


def most_nodes(spec: ClusterFile) -> int:
    """The largest number of nodes that a cluster can have."""
    joined = MOST_DEVICES // spec.node_size if spec.network else 1
    return min(joined, spec.max_nodes or joined)


def unfit_nodes(spec: ClusterFile, nodes: int) -> Iterator[Finding]:
    """Why a cluster cannot have a number of nodes: nothing joins them, they fill no groups, or they are too many."""
    if nodes > 1 and not spec.network:
        yield ("nodes",), f"{nodes} nodes, but no level joins nodes", "add a level under `network` that joins them"
    filled = 1
    for i, entry in enumerate(spec.network[:-1]):
        filled *= entry.size or 1
        if nodes > filled and nodes % filled:
            below = nodes // filled * filled
            hint = f"take {below} or {below + filled} nodes, or change the size"
            yield ("network", i, "size"), f"{nodes} nodes do not fill groups of {filled}", hint
    if spec.max_nodes is not None and nodes > spec.max_nodes:
        yield ("nodes",), f"{nodes} nodes are more than max_nodes: {spec.max_nodes}", "lower nodes or raise max_nodes"
    if spec.node_size * nodes > MOST_DEVICES:
        message = f"{nodes:,} nodes of {spec.node_size:,} are {spec.node_size * nodes:,} devices"
        yield ("nodes",), message, f"a cluster has at most {MOST_DEVICES:,}"


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
OVERSUBSCRIPTION = 32.0
"""Largest plausible ratio of what children can send at once to what a tier carries."""
OUTER_FASTER = 1.5
"""Factor by which a device may plausibly send faster into an outer tier than into the tier inside it."""


def doubts(document: Document, spec: ProfileFile) -> list[Problem]:
    """Warnings of implausible figures in a valid profile, in the order of the file."""
    warnings: list[Finding] = []
    if isinstance(spec, DeviceFile):
        warnings += _device((), spec)
    elif isinstance(spec, ClusterFile):
        for name, body in spec.device_types.items():
            warnings += _device(("device_types", name), body)
        for place, level in spec.levels():
            warnings += _level(place, level)
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
    ratio = level.oversubscription.value if level.oversubscription else 1.0
    if ratio > OVERSUBSCRIPTION:
        message = f"an oversubscription of {ratio:.6g}:1 is not plausible"
        yield (*head, "oversubscription"), message, "fat trees have 1:1 to 8:1"
    if ratio > 1 and level.measured is not None:
        message = "measured collectives stand as they were measured, without the oversubscription"
        yield (*head, "oversubscription"), message, "remove it or `measured`, if they were measured without that load"


def _faster_outside(spec: ClusterFile) -> Iterator[Finding]:
    """Warnings of tiers into which a device sends much faster than into the tier inside them."""
    devices, inner, inner_name = 1, 0.0, ""
    for place, level in spec.levels():
        carried = 1 / level.oversubscription.value if level.oversubscription else 1.0
        rate = carried * level.port.byte_per_s * level.port.count * level.efficiency.value / devices
        if inner and rate > OUTER_FASTER * inner:
            message = f"a device sends {rate / inner:.3g} times as fast into {level.level!r} as into {inner_name!r}"
            hint = f"{level.level!r} lies outside: check units, `count` and whether the figures are per device"
            yield (*place, "port"), message, hint
        inner, inner_name = rate, level.level
        devices *= level.size or 1
