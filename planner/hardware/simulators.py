"""Clusters described for simulators: Calculon's systems and ASTRA-sim's networks, read against their types."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from annotated_types import Ge, Gt, Le, MinLen

from planner.documents import adapter
from planner.errors import HardwareError
from planner.files import LARGEST_FIGURE
from planner.hardware.document import parse_document
from planner.hardware.write import ClusterSketch, LinkSketch
from planner.units import Dimension, render

_T = TypeVar("_T")
_STRICT: Any = {"strict": True, "allow_inf_nan": False}
"""Configuration of the types of these files; keys that they do not have are let pass."""
_Figure = Annotated[float, Gt(0), Le(LARGEST_FIGURE)]
_Share = Annotated[float, Gt(0), Le(1)]
_Size = Annotated[float, Ge(0), Le(LARGEST_FIGURE)]
_Latency = Annotated[float, Ge(0), Le(1e12)]
_Count = Annotated[int, Ge(1), Le(1 << 31)]
_Curve = Annotated[dict[_Size, _Share], MinLen(1)] | Annotated[list[tuple[_Size, _Share]], MinLen(1)]
_FORMATS = {"float8": "fp8", "float16": "bf16", "bfloat16": "bf16", "float32": "fp32", "tf32": "tf32"}
_BYTES_OR_GIB = 1e6
"""Calculon's memories above this many GiB are given in bytes."""


@dataclass(frozen=True, slots=True)
class _Rate:
    __pydantic_config__: ClassVar[Any] = _STRICT

    tflops: _Figure
    gflops_efficiency: _Curve | None = None


@dataclass(frozen=True, slots=True)
class _Memory:
    __pydantic_config__: ClassVar[Any] = _STRICT

    GiB: _Figure
    GBps: _Figure
    MB_efficiency: _Curve | None = None


@dataclass(frozen=True, slots=True)
class _Network:
    __pydantic_config__: ClassVar[Any] = _STRICT

    bandwidth: _Figure
    efficiency: _Share
    size: _Count
    latency: _Latency


@dataclass(frozen=True, slots=True)
class _System:
    __pydantic_config__: ClassVar[Any] = _STRICT

    matrix: Annotated[dict[str, _Rate], MinLen(1)]
    vector: Annotated[dict[str, _Rate], MinLen(1)]
    mem1: _Memory
    networks: Annotated[list[_Network], MinLen(1)]


def from_calculon(text: str, *, name: str, where: str = "Calculon system") -> ClusterSketch:
    """A cluster from a system file of Calculon (Isaev et al. 2023), with its device written out.

    Networks are innermost first; their bandwidth is that of one processor in one direction, in GB/s; the last one joins
    nodes.

    Args:
        text: the file's.
        name: of the cluster.
        where: name of the text in errors (a file name).

    Raises:
        HardwareError: the text is no such file, or a figure is missing, of another kind or out of range; all of them.
    """
    system = _decoded(text, _System, where, "give a file of Calculon's `systems`")
    memory, source = system.mem1, "Calculon system"
    held = memory.GiB if memory.GiB > _BYTES_OR_GIB else memory.GiB * 2**30
    body: dict[str, Any] = {
        "about": f"processor of the Calculon system {name}",
        "memory": render(held, Dimension.BYTES),
        "memory_bandwidth": f"{memory.GBps:g} GB/s",
        "matrix": {_FORMATS.get(key, key): f"{rate.tflops:g} TFLOP/s" for key, rate in system.matrix.items()},
        "vector": f"{next(iter(system.vector.values())).tflops:g} TFLOP/s",
    }
    for key, curve, unit in (
        ("matrix_efficiency", next(iter(system.matrix.values())).gflops_efficiency, "GFLOP"),
        ("memory_efficiency", memory.MB_efficiency, "MB"),
    ):
        if curve:
            body[key] = {"points": _curve(curve, unit), "source": source}
    links, below = [], 1
    for i, network in enumerate(system.networks):
        size, rate = max(1, network.size // below), network.bandwidth * 1e9
        links.append(LinkSketch(f"network{i}", rate, 1, size, network.latency, network.efficiency, source=source))
        below *= size
    return _tiers(name, f"{name}-device", links, source, nodes=1, device_types={f"{name}-device": body})


def _curve(points: Mapping[float, float] | Sequence[tuple[float, float]], unit: str) -> dict[str, str]:
    """An efficiency curve; a value at size 0 is moved to a thousandth of the next size."""
    pairs = sorted(points.items() if isinstance(points, Mapping) else points)
    if pairs[0][0] == 0:
        after = pairs[1][0] if len(pairs) > 1 else 1.0
        pairs[0] = (after / 1000, pairs[0][1])
    return {f"{size:g} {unit}": f"{share * 100:g}%" for size, share in pairs}


@dataclass(frozen=True, slots=True)
class _Topology:
    """A network of ASTRA-sim: one entry a dimension in each list, innermost first."""

    __pydantic_config__: ClassVar[Any] = _STRICT

    topology: Annotated[list[Literal["Ring", "FullyConnected", "Switch"]], MinLen(1)]
    npus_count: list[_Count]
    bandwidth: list[_Figure]
    latency: list[_Latency]
    links_count: list[_Count] = field(default_factory=list)


_OLD_NAMES: Mapping[str, str] = {
    "topologies-per-dim": "topology", "units-count": "npus_count", "link-bandwidth": "bandwidth",
    "link-latency": "latency", "links-count": "links_count",
}  # fmt: skip
"""Names of older versions of ASTRA-sim, with those of newer ones."""


def from_astra(text: str, *, name: str, device: str, where: str = "ASTRA-sim network") -> ClusterSketch:
    """A cluster from a network of ASTRA-sim's analytical backend: YAML, or JSON of older versions.

    Dimensions are innermost first. The bandwidth is of one link and direction in GB/s: a ring has two links a device, a
    full mesh one to each other device, a switch one; latencies are in nanoseconds.

    Args:
        text: the file's.
        name: of the cluster.
        device: name of the device.
        where: name of the text in errors (a file name).

    Raises:
        HardwareError: the text is no such file, a figure is missing, of another kind or out of range (all of them), or
            its lists differ in length.
    """
    hint = "give topology, npus_count, bandwidth and latency, each for every dimension"
    read = _decoded(text, _Topology, where, hint, _OLD_NAMES)
    lists = (read.topology, read.npus_count, read.bandwidth, read.latency)
    lengths = sorted({len(read.topology), len(read.npus_count), len(read.bandwidth), len(read.latency)})
    if len(lengths) > 1 or (read.links_count and [len(read.links_count)] != lengths):
        raise HardwareError("the lists differ in length", where=where, hint=hint)
    numbers = read.links_count or [0] * len(read.topology)
    source = "ASTRA-sim network"
    links = [_dimension(i, *each, source) for i, each in enumerate(zip(*lists, numbers, strict=True))]
    return _tiers(name, device, links, source, nodes=links[-1].size or 1)


def _dimension(
    index: int, shape: str, count: int, gb_per_s: float, latency_ns: float, links: int, source: str
) -> LinkSketch:
    """One dimension of a topology; `links` of a device, 0 for as many as the shape has."""
    links_of = {"Ring": 2 if count > 2 else 1, "FullyConnected": max(1, count - 1), "Switch": 1}
    wired = shape != "Switch"
    rate = gb_per_s * 1e9
    peer = rate * ((links or links_of[shape]) / links_of[shape]) if wired else None
    return LinkSketch(f"dim{index + 1}", rate, links or links_of[shape], count, latency_ns * 1e-9, 1.0, peer, source)


def _tiers(
    name: str,
    device: str,
    links: Sequence[LinkSketch],
    source: str,
    *,
    nodes: int,
    device_types: Mapping[str, Any] | None = None,
) -> ClusterSketch:
    """A cluster whose last tier joins nodes, if there are several tiers; figures are those of one device."""
    *inside, last = links
    about = f"from a file of the kind {source}"
    if not inside:
        return ClusterSketch(name, device, (last,), device_types=device_types or {}, about=about)
    ports = last.ports * math.prod(link.size or 1 for link in inside)
    outer = dataclasses.replace(last, ports=ports, size=None, peer_byte_per_s=None)
    return ClusterSketch(name, device, tuple(inside), (outer,), nodes, device_types or {}, about)


def _decoded(text: str, kind: type[_T], where: str, hint: str, names: Mapping[str, str] | None = None) -> _T:
    """A text, YAML or JSON, as an object of a type; keys that the type does not have are let pass.

    Args:
        text: the text.
        kind: the dataclass.
        where: name of the text in errors.
        hint: how to come to a file that can be read.
        names: other names of fields.

    Raises:
        HardwareError: `problems` has all that is wrong, each with file:line:column.
    """
    from pydantic import ValidationError

    document = parse_document(text, where)
    if document.problems or not isinstance(document.data, dict):
        first = document.problems[0] if document.problems else document.problem((), "not a mapping of keys to values")
        raise HardwareError(first.message, where=first.where, hint=first.hint or hint, problems=document.problems[:8])
    written = {(names or {}).get(key, key): key for key in document.data}
    fields = {each.name for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
    data = {name: document.data[key] for name, key in written.items() if name in fields}
    target: Any = kind
    try:
        read: _T = adapter(target).validate_json(json.dumps(data))
    except ValidationError as error:
        problems = []
        for each in error.errors(include_url=False):
            location = tuple(written.get(str(part), part) if i == 0 else part for i, part in enumerate(each["loc"]))
            path = ".".join(map(str, location))
            message = f"{path} is missing" if each["type"] == "missing" else f"{path}: {each['msg']}"
            problems.append(document.problem(location, message, hint))
        first = problems[0]
        raise HardwareError(first.message, where=first.where, hint=first.hint, problems=problems) from error
    return read
