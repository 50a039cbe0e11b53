"""Builds clusters, devices and stacks in SI units from validated profile files, with defaults filled in."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from planner.errors import HardwareError
from planner.hardware.schema import (
    Bytes,
    Cited,
    ClusterFile,
    DeviceBody,
    DeviceCount,
    Figure,
    Flops,
    LevelEntry,
    LinkFigures,
    PeerLink,
    Port,
    Reserve,
    SizeCurve,
    StackFile,
    Stated,
)
from planner.hardware.types import (
    HOST_BYTE_PER_S,
    NARROW_FORMATS,
    NO_STACK,
    Cluster,
    CollectiveFit,
    Curve,
    Device,
    Level,
    Stack,
    slowest_levels,
)
from planner.hardware.validate import most_nodes, unfit_nodes

_A100_BF16, _A100_MEMORY = 312e12, 2039e9
_MATRIX_SHAPE = {0.1e9: 0.09, 1e9: 0.45, 16e9: 0.65, 128e9: 0.75, 10e12: 0.80}
_MEMORY_SHAPE = {0.1e6: 0.20, 1e6: 0.40, 10e6: 0.55, 100e6: 0.62}


def with_defaults(body: DeviceBody) -> DeviceBody:
    """The device with every optional figure filled in, each marked as a default.

    The default curves are those of an A100 with sizes scaled by the ratio of the peaks, because small operations are
    limited by their duration, not by their work.
    """
    fastest = max(figure.value for kind, figure in body.matrix.items() if kind not in NARROW_FORMATS)
    moved = body.memory_bandwidth.value / _A100_MEMORY
    context = "context of a GPU runtime that loads its kernels when they are first used"
    channels = "24 channels of NCCL with buffers of 4, 4.7 and 0.5 MiB"
    matrix, memory = _scaled(_MATRIX_SHAPE, fastest / _A100_BF16), _scaled(_MEMORY_SHAPE, moved)
    host = "three quarters of PCIe of generation 4 with 16 lanes"
    default = {
        "reserve": _assumed(Figure[Reserve], context, value=600 * 2**20),
        "neighbour_buffers": _assumed(Figure[Reserve], channels, value=220 * 2**20),
        "matrix_efficiency": _assumed(SizeCurve[Flops], "shape of an A100", points=matrix),
        "memory_efficiency": _assumed(SizeCurve[Bytes], "shape of an A100", points=memory),
        "host_link": _assumed(PeerLink, host, value=HOST_BYTE_PER_S, direction="per-direction"),
    }
    return body.model_copy(update={key: value for key, value in default.items() if getattr(body, key) is None})


def _scaled(shape: Mapping[float, float], factor: float) -> dict[float, float]:
    """A curve with its sizes times a factor, to two digits."""
    return {float(f"{size * factor:.2g}"): part for size, part in shape.items()}


def _assumed(kind: type[Cited], note: str, **fields: Any) -> Cited:  # noqa: ANN401
    """A figure that is marked as a default."""
    return kind.model_construct(source="default", verified=False, note=note, **fields)


def build_device(name: str, body: DeviceBody, stack: Stack, price: float | None = None) -> Device:
    """A device in SI units, driven by a stack; `price` replaces its own where the price of a node is known."""
    full: Any = with_defaults(body)
    handover_s = 0.0 if full.launch else stack.handover_s
    return Device(
        name=name,
        memory_bytes=round(full.memory.value),
        reserve_bytes=round(full.reserve.value),
        neighbour_bytes=round(full.neighbour_buffers.value),
        matrix_flop_per_s={str(kind): figure.value for kind, figure in full.matrix.items()},
        matrix_efficiency=_curve(full.matrix_efficiency.points, stack.matrix_rate),
        format_rates={str(kind): figure.value for kind, figure in full.format_rates.items()},
        vector_flop_per_s=full.vector.value,
        memory_byte_per_s=full.memory_bandwidth.value,
        memory_efficiency=_curve(full.memory_efficiency.points, stack.memory_rate),
        launch_s=full.launch.value if full.launch else stack.launch_s,
        handover_s=full.handover.value if full.handover else handover_s,
        price_per_hour=price if price is not None else full.price.value if full.price else 0.0,
        about=full.about,
        stack=stack,
        host_byte_per_s=full.host_link.byte_per_s,
        matrix_unit=full.matrix_unit.value if full.matrix_unit else 1,
    )


def _curve(points: Mapping[float, float], factor: float) -> Curve:
    """A curve with its fractions times a factor, capped at 1."""
    return Curve(tuple(points), tuple(min(1.0, factor * part) for part in points.values()))


_STACK_FIELDS = {
    "launch": "launch_s",
    "library_launch": "kernel_launch_s",
    "handover": "handover_s",
    "attention": "attention_rate",
    "loss": "loss_passes",
}
"""By name in the file, fields of `Stack` with another name."""


def build_stack(spec: StackFile, base: Stack) -> Stack:
    """A stack in SI units; figures that its file leaves out are those of the base."""
    stated = {key: item for key in type(spec).model_fields if isinstance(item := getattr(spec, key), Stated)}
    figures: dict[str, Any] = {_STACK_FIELDS.get(key, key): item.value for key, item in stated.items()}
    return replace(base, name=spec.stack, about=spec.about, **figures)


def nodes_of(spec: ClusterFile, nodes: int | str | None, devices: int | None = None) -> tuple[int, int]:
    """Number of nodes, and of devices of each that are used; arguments as of `load_cluster`.

    Raises:
        HardwareError: neither a number of nodes nor `4x64`, or a number of devices that no nodes can give equally.
    """
    full = spec.node_size
    if devices is not None:
        splits = ((n, devices // n) for n in range(max(1, -(-devices // full)), devices + 1) if devices % n == 0)
        fewest = next((split for split in splits if nodes is None and _sizes_within(spec, split[1])), None)
        if fewest is None:
            hint = "give a number of nodes or of devices, 1 or more"
            raise HardwareError(f"no {devices} devices of {spec.cluster}", hint=hint)
        return fewest
    texts = str(spec.nodes if nodes is None else nodes).split("x")
    numbers = [int(text) if text.isdigit() else 0 for text in texts]
    if len(numbers) not in (1, 2) or min(numbers) < 1:
        raise HardwareError(
            f"{nodes} nodes make no cluster", hint="take 1 or more, or 4x64 for 64 devices of each of 4"
        )
    return numbers[0], (*numbers, full)[1]


def _sizes_within(spec: ClusterFile, used: int) -> list[int] | None:
    """Sizes of the levels of a node with only the first `used` devices; None if they do not fill a level."""
    sizes, left = [], used
    for entry in spec.node:
        sizes.append(min(entry.size or 1, left))
        if left % sizes[-1]:
            return None
        left //= sizes[-1]
    return sizes if left == 1 else None


def part_of_nodes(spec: ClusterFile, used: int) -> ClusterFile:
    """The profile with only the first devices of each node; ports of idle devices are removed.

    Raises:
        HardwareError: a node has fewer devices, or they do not fill its levels.
    """
    full = spec.node_size
    if used == full:
        return spec
    sizes = _sizes_within(spec, used)
    if sizes is None:
        hint = f"take a number up to {full} that fills the levels {' x '.join(str(e.size or 1) for e in spec.node)}"
        raise HardwareError(f"no {used} devices of a node", where=spec.cluster, hint=hint)
    node = [entry.model_copy(update={"size": size}) for entry, size in zip(spec.node, sizes, strict=True)]
    network = [_fewer_ports(entry, used, full) for entry in spec.network[:1]] + spec.network[1:]
    pattern = _device_pattern(spec)
    listed = [pattern[i % len(pattern)] for i in range(math.lcm(full, len(pattern)))]
    kept = [part for i, part in enumerate(listed) if i % full < used]
    runs = [(part, len(list(run))) for part, run in itertools.groupby(kept)]
    devices = [part.model_copy(update={"count": 1 if len(runs) == 1 else count}) for part, count in runs]
    left = {"node": node, "network": network, "devices": devices, "order": spec.order[:used]}
    return spec.model_copy(update=left)


def _device_pattern(spec: ClusterFile) -> list[DeviceCount]:
    """Each device of the list in the profile, one an entry."""
    single = {"count": 1}
    return [part.model_copy(update=single) for part in spec.devices for _ in range(part.count)]


def _fewer_ports(entry: LevelEntry, used: int, full: int) -> LevelEntry:
    """A tier between nodes with `used` of `full` devices: if each device has its own ports, those of idle ones go."""

    def of(figures: LevelEntry | LinkFigures) -> dict[str, Any]:
        port = figures.port
        if port is None or port.count < full:
            return {}
        return {"port": port.model_copy(update={"count": port.count * used // full})}

    unlike = {device: figures.model_copy(update=of(figures)) for device, figures in entry.nodes_of.items()}
    return entry.model_copy(update={**of(entry), "nodes_of": unlike})


def build_cluster(
    spec: ClusterFile,
    types: Mapping[str, DeviceBody],
    wanted: tuple[int, int],
    stack: Stack,
) -> Cluster:
    """The cluster of a profile with some number of nodes.

    Args:
        spec: the profile.
        types: by name, each device type of the profile.
        wanted: number of nodes, and of devices of each that are used.
        stack: the software that trains.

    Raises:
        HardwareError: the number of nodes, or of their devices, does not fit the sizes of the levels.
    """
    nodes, node_size = wanted
    full = spec.node_size
    spec = part_of_nodes(spec, node_size)
    for _, message, hint in unfit_nodes(spec, nodes):
        raise HardwareError(message, where=spec.cluster, hint=hint)
    price = spec.node_price.value / node_size if spec.node_price else None
    pattern = _device_pattern(spec)
    ranks = [pattern[i % len(pattern)] for i in range(node_size * nodes)]
    kinds = {(part.type, part.links): part for part in ranks}
    devices = tuple(build_device(_named(kind), types[kind.type], stack, price) for kind in kinds.values())
    numbers = {key: number for number, key in enumerate(kinds)}
    device_types = np.asarray([numbers[part.type, part.links] for part in ranks], dtype=np.int64)
    unlike = tuple(_levels(spec, nodes, stack, kind) for kind in kinds.values()) if _links_differ(spec) else ()
    levels = slowest_levels(unlike) if unlike else _levels(spec, nodes, stack, pattern[0])
    count = f"{nodes} node{'s' if nodes > 1 else ''}{f' of {node_size}' if node_size < full else ''}"
    name = spec.cluster if (nodes, node_size) == (spec.nodes, full) else f"{spec.cluster} ({count})"
    return Cluster(
        name=name,
        fingerprint=_fingerprint(devices, device_types, levels, unlike),
        devices=devices,
        device_types=device_types,
        levels=levels,
        node_size=node_size,
        about=spec.about,
        unlike=unlike,
        host_memory_bytes=spec.host_memory.value if spec.host_memory else 0.0,
        device_order=() if spec.order == list(range(node_size)) else tuple(spec.order),
        node_step=math.prod(level.size or 1 for level in spec.network[:-1]),
        most_nodes=most_nodes(spec),
    )


def _named(kind: DeviceCount) -> str:
    """Name of devices of a type, with that of their links where they have links of their own."""
    return f"{kind.type} ({kind.links})" if kind.links else kind.type


def _links_differ(spec: ClusterFile) -> bool:
    return any(entry.nodes_of for _, entry in spec.levels())


def _levels(spec: ClusterFile, nodes: int, stack: Stack, device: DeviceCount) -> tuple[Level, ...]:
    """The levels that join more than one child, innermost first, for nodes of a device type."""
    levels: list[Level] = []
    child, left = 1, nodes
    for (section, _), entry in spec.levels():
        size, across = entry.size or left, section == "network"
        if across:
            size = min(size, left)
            left //= size
        if size > 1:
            levels.append(_level(entry.of(device), size, child, stack, across=across))
        child *= size
    return tuple(levels)


def _level(entry: LevelEntry, size: int, child: int, stack: Stack, *, across: bool) -> Level:
    """A level; between nodes the stack may limit gathers to some ports.

    What crosses an oversubscribed level gets the bandwidth of its ports over the oversubscription. Measured collectives
    are what they were measured to be.
    """
    port: Port = entry.port
    carried = 1 / entry.oversubscription.value if entry.oversubscription else 1.0
    peer: PeerLink | None = entry.peer
    fits = entry.measured.rows() if entry.measured else []
    driven = entry.device_ports or max(1.0, port.count / child)
    return Level(
        name=entry.level,
        size=size,
        byte_per_s=carried * port.byte_per_s * port.count,
        device_byte_per_s=carried * port.byte_per_s * min(driven, port.count),
        latency_s=entry.latency.value,
        efficiency=min(1.0, stack.link_rate * entry.efficiency.value),
        fits=tuple(CollectiveFit(kind, row.ranks, row.latency, row.bandwidth) for kind, row in fits),
        peer_byte_per_s=carried * peer.byte_per_s if peer else None,
        torus=entry.torus or 0,
        gather_ports=min(stack.gather_ports, port.count) if across else 0,
    )


def single_device(name: str, device: Device) -> Cluster:
    """A cluster of one device and no links."""
    types = np.zeros(1, dtype=np.int64)
    return Cluster(name, _fingerprint((device,), types, ()), (device,), types, (), 1, device.about)


_ADDED = ("inner_overlap", "product_pieces", "rows_once", "fused", "attention_block", "grouped_experts")
"""Figures of a stack that stacks did not always have: they count in a fingerprint only where they are no defaults."""


def _fingerprint(
    devices: Sequence[Device],
    device_types: np.ndarray,
    levels: Sequence[Level],
    unlike: Sequence[Sequence[Level]] = (),
) -> str:
    """sha256 of all that a plan depends on: figures, sizes and device names, but not names of levels or sources.

    The host's figures are left out: only plans that move activations there depend on them, and checks price those anew.
    """
    stack = _figures(devices[0].stack, "name", "compared", "about", **{key: getattr(NO_STACK, key) for key in _ADDED})
    changes = np.flatnonzero(np.diff(device_types, prepend=-1))
    runs = [
        (int(device_types[i]), int(n)) for i, n in zip(changes, np.diff([*changes, len(device_types)]), strict=True)
    ]
    content = {
        "devices": [
            _figures(each, "stack", "about", "host_byte_per_s", format_rates={}, matrix_unit=1) for each in devices
        ],
        "ranks": runs,
        "levels": [_figures(each, "name", torus=0, gather_ports=0) for each in levels],
        "stack": stack,
    }
    if unlike:
        content["unlike"] = [[_figures(each, "name") for each in own] for own in unlike]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _figures(entry: Device | Level | Stack, *words: str, **absent: object) -> dict[str, Any]:
    """Fields by name, without those in `words` and those with the value in `absent`."""
    return {k: v for k, v in asdict(entry).items() if k not in words and (k not in absent or v != absent[k])}
