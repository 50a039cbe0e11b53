"""Devices, links and clusters: what the planner knows about the machines, in SI units.

What the runtime takes of a device's memory beside the tensors of a plan:

- *Context*: the driver's context and the kernels that are loaded, `reserve` of a device profile.
- *Communication buffers*: a collective library keeps buffers for each neighbour that a rank has in each of its groups.
- *Fragmentation*: an allocator holds more than is allocated at the peak. It gives what is idle back before it fails, so
  nothing is charged for it; `headroom` is the allowance, and `shown_bytes` says what the driver would show.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import overload

import numpy as np

from planner.errors import JobError
from planner.units import plural

MOST_DEVICES = 1 << 20
"""Largest number of devices of a cluster."""


NARROW_FORMATS = frozenset({"fp8", "mxfp8", "fp4", "mxfp4", "nvfp4", "int8"})
"""Number formats of matrix units that no efficiency curve is stated for."""


class Collective(StrEnum):
    """Collectives by which a group of devices exchanges data."""

    SEND = "send"
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"


@dataclass(frozen=True, slots=True)
class Curve:
    """An achievable fraction of a peak that grows with the size of the work.

    Below the first point the fraction is `fractions[0]`, beyond the last `fractions[-1]`; between two points
    log(fraction) is linear in log(size), so that more work takes longer as long as no fraction grows faster than its
    size. Sizes are FLOPs or bytes, ascending.
    """

    sizes: tuple[float, ...]
    fractions: tuple[float, ...]

    def at(self, size: np.ndarray | float) -> np.ndarray:
        """Fractions (0..1] for an array of sizes of any shape."""
        return np.exp(np.interp(np.log(np.maximum(size, 1.0)), np.log(self.sizes), np.log(self.fractions)))


@dataclass(frozen=True, slots=True)
class Stack:
    """The software that trains: the times that it adds, and the rates that it reaches. The defaults add nothing.

    Attributes:
        name: as in its file, `megatron-2021`; "" for none.
        about: one line on what it is.
        launch_s: host time of one forward operation: the framework's own and the launch of its kernel.
        backward_launch: fraction of `launch_s` that an operation takes in backward.
        kernel_launch_s: host time of a kernel that a library launches by itself within its call.
        waits: whether the host waits for each kernel before it launches the next; launches then add to device time.
        handover_s: host time of passing a micro-batch to another stage, during which the device is idle.
        stretch: factor on the time of all work, for other work beside it and waiting for the slowest of many ranks.
        matrix_rate: factor on the matrix efficiency of devices.
        memory_rate: factor on the memory efficiency of devices.
        link_rate: factor on the bandwidths of links.
        attention_rate: by pattern of device names, the rate of a fused attention kernel over that of a plain product;
            the first match counts.
        causal_part: fraction of the score products that a fused attention kernel does under a causal mask.
        attention_block: queries and keys of a fused attention kernel's blocks; of one that a causal mask or a window
            hides in part, all scores are worked out.
        unaligned_rate: fraction of its rate that a product of two activations reaches where rows are no multiple of 16
            bytes and attention is not fused.
        fused: kernels that run several operators as one, by name (`planner.operators.patterns`); operators inside take
            no launch, traffic or memory.
        loss_passes: number of times that the loss reads or writes its logits in forward and in backward.
        accumulation_bytes: traffic of adding an element of a gradient to the sum over micro-batches.
        overlap: fraction of the work of a pass behind which exchanges of gradients and weights are hidden.
        inner_overlap: by pattern of mesh axis names (`tensor`, `context`, `expert`, ...), the fraction of communication
            along the axis that is hidden behind work; the first match counts, 0 without one.
        product_pieces: products that a product is run as where ranks share it, so that the gather of its operand or the
            scatter of its result runs beside it; no more pieces of a gather than ranks. 1 leaves products whole.
        rows_once: whether a row crosses a link once for all experts behind it and is copied there; else once for each
            expert.
        grouped_experts: whether one kernel does the products of all experts; else that of each is a kernel of its own.
        gather_ports: ports of a node that carry a gather or a scatter among nodes, which then goes around a ring; 0 for
            all ports, by the cheapest algorithm.
        allocator_cache: memory that the allocator holds over that of the tensors at the peak. The default was fitted to
            every second one of 36 peaks that nvidia-smi showed in the BigScience runs of 2021 and 2022, and compared
            with the others (docs/accuracy.md).
        compared: for a calibrated stack, the number of runs compared and the 80 % interval of measured over predicted
            time.
    """

    name: str = ""
    about: str = ""
    launch_s: float = 0.0
    backward_launch: float = 0.5
    kernel_launch_s: float = 5e-6
    waits: bool = False
    handover_s: float = 0.0
    stretch: float = 1.0
    matrix_rate: float = 1.0
    memory_rate: float = 1.0
    link_rate: float = 1.0
    attention_rate: Mapping[str, float] = field(default_factory=lambda: {"*": 0.75})
    causal_part: float = 1.0
    attention_block: int = 1
    unaligned_rate: float = 1.0
    fused: tuple[str, ...] = ()
    loss_passes: tuple[float, float] = (3.0, 6.0)
    accumulation_bytes: float = 0.0
    overlap: float = 0.0
    inner_overlap: Mapping[str, float] = field(default_factory=dict)
    product_pieces: int = 1
    rows_once: bool = False
    grouped_experts: bool = False
    gather_ports: int = 0
    allocator_cache: float = 1.08
    compared: tuple[int, float, float] | None = None

    def attention_on(self, device: str) -> float:
        """Rate of fused attention over that of a plain product, on a device of that name."""
        return next((rate for pattern, rate in self.attention_rate.items() if fnmatchcase(device, pattern)), 1.0)

    def hidden_along(self, axes: Iterable[str]) -> float:
        """Fraction of the communication along mesh axes of these names that is hidden behind work."""
        parts = self.inner_overlap.items()
        return min((next((p for name, p in parts if fnmatchcase(axis, name)), 0.0) for axis in axes), default=0.0)


NO_STACK = Stack()
"""A stack without overheads: kernels run one after the other."""


HOST_BYTE_PER_S = 24e9
"""Assumed rate of copies between a device and its host's memory: three quarters of PCIe of generation 4, 16 lanes."""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, and the software that drives it.

    Attributes:
        name: as in the profile, `a100-sxm-80gb`.
        memory_bytes: all of the device's memory that a program can see.
        reserve_bytes: memory of the runtime's context and loaded kernels; not available to plans.
        matrix_flop_per_s: nominal dense peak of the matrix units by data type (`bf16`, `fp16`, `tf32`, `fp32`, `fp8`,
            `mxfp8`, `nvfp4`).
        matrix_efficiency: achievable fraction of that peak by FLOPs of one operation.
        vector_flop_per_s: nominal peak of element-wise arithmetic (fp32 units).
        memory_byte_per_s: nominal bandwidth of device memory.
        memory_efficiency: achievable fraction of that bandwidth by bytes of one operation.
        launch_s: host time of one forward operation: the framework's own and the launch of its kernel.
        price_per_hour: US dollars a device and hour, 0 when unknown.
        about: one line on what it is.
        handover_s: host time of passing a micro-batch to another stage, during which the device is idle.
        stack: the software; its launch and hand-over times apply where the profile has none.
        neighbour_bytes: buffers that the collective library keeps for each neighbour of a rank in one of its groups
            (`planner.hardware.types`).
        headroom: fraction of the memory that plans leave free.
        format_rates: by number format, the fraction of `matrix_efficiency` that products reach, where below 1.
        host_byte_per_s: what copies between the device and its host's memory reach, one direction.
        matrix_unit: rows and columns of the matrix units' array, to multiples of which products are padded.
    """

    name: str
    memory_bytes: int
    reserve_bytes: int
    matrix_flop_per_s: Mapping[str, float]
    matrix_efficiency: Curve
    vector_flop_per_s: float
    memory_byte_per_s: float
    memory_efficiency: Curve
    launch_s: float
    price_per_hour: float = 0.0
    about: str = ""
    handover_s: float = 0.0
    stack: Stack = NO_STACK
    neighbour_bytes: int = 0
    headroom: float = 0.0
    format_rates: Mapping[str, float] = field(default_factory=dict)
    host_byte_per_s: float = HOST_BYTE_PER_S
    matrix_unit: int = 1

    @property
    def capacity_bytes(self) -> int:
        """Memory that a plan and the runtime may fill: all but the headroom."""
        return math.floor(self.memory_bytes * (1 - self.headroom))

    @property
    def usable_bytes(self) -> int:
        """Memory that a plan may use; at least a byte, so that fractions of it are defined."""
        return max(1, self.capacity_bytes - self.reserve_bytes)


@dataclass(frozen=True, slots=True)
class CollectiveFit:
    """A measured collective on one level: `seconds = latency_s + traffic / byte_per_s`.

    Traffic is `planner.hardware.moved_bytes` of the payload: 2 (n-1)/n of it for an all-reduce, all of it for a
    broadcast, (n-1)/n for the others.
    """

    collective: Collective
    ranks: int
    latency_s: float
    byte_per_s: float


@dataclass(frozen=True, slots=True)
class Level:
    """One tier of links, joining `size` groups of the tier below (devices, for the innermost).

    Attributes:
        name: `nvlink`, `node network`, ...
        size: groups joined; the product over all levels is the number of devices.
        byte_per_s: what one group can send into this tier, one direction.
        device_byte_per_s: what a single device can send into this tier, one direction (at most `byte_per_s`).
        latency_s: start-up time of one message.
        efficiency: achievable fraction of the nominal bandwidths, applied by the pricing functions.
        fits: measured collectives that override the model.
        peer_byte_per_s: what a device can send to a single peer of this tier, one direction, where links are wired
            point to point (a mesh or torus); None behind a switch, where one peer can take all of `device_byte_per_s`.
        torus: dimensions of the torus in which the groups of this tier are wired, with equal sides; 0 for none. The
            bandwidth across its middle limits an all-to-all.
        gather_ports: ports of a group that carry a gather or a scatter, which then goes around a ring; 0 for all of
            them, by the cheapest algorithm.
    """

    name: str
    size: int
    byte_per_s: float
    device_byte_per_s: float
    latency_s: float
    efficiency: float = 1.0
    fits: tuple[CollectiveFit, ...] = ()
    peer_byte_per_s: float | None = None
    torus: int = 0
    gather_ports: int = 0

    def device_rate(self, width: int) -> float:
        """Bytes/s that one device can send into this tier when a communicating group spans `width` of its children."""
        if self.peer_byte_per_s is None or width < 2:
            return self.device_byte_per_s
        return min(self.device_byte_per_s, (width - 1) * self.peer_byte_per_s)


@dataclass(frozen=True)
class Cluster:
    """Devices in a line, numbered so that consecutive ranks share the innermost level.

    Attributes:
        name: as in the profile, with the number of nodes where the user gave one.
        fingerprint: sha256 (hex) of the resolved profile, the identity that plans are bound to.
        devices: the distinct device types.
        device_types: int64 [device_count], index into `devices` for each rank.
        levels: innermost first; empty for a single device. If nodes differ, each figure is that of the slowest.
        node_size: devices in one node, 0 when the profile has none.
        about: one line on what this machine is.
        unlike: by index in `devices`, the levels of nodes of that device type; empty if all nodes have equal links.
        host_memory_bytes: memory of a node's host that training may fill; 0 when unknown, which limits nothing.
        device_order: numbers of a node's devices, as its driver counts them, in the order of the ranks; empty where
            rank i of a node has device i.
        node_step: what numbers of nodes are multiples of, so that they fill the groups of the network.
        most_nodes: largest number of nodes that the profile can have.
    """

    name: str
    fingerprint: str
    devices: tuple[Device, ...]
    device_types: np.ndarray
    levels: tuple[Level, ...]
    node_size: int = 0
    about: str = ""
    unlike: tuple[tuple[Level, ...], ...] = ()
    host_memory_bytes: float = 0.0
    device_order: tuple[int, ...] = ()
    node_step: int = 1
    most_nodes: int = 1

    @property
    def device_count(self) -> int:
        """Number of devices (ranks)."""
        return len(self.device_types)

    @property
    def largest_bytes(self) -> int:
        """What plans may use of the memory of the largest device."""
        return max(device.usable_bytes for device in self.devices)

    @property
    def smallest_bytes(self) -> int:
        """The same of the smallest device."""
        return min(device.usable_bytes for device in self.devices)

    @property
    def stack(self) -> Stack:
        """The software that trains on all devices."""
        return self.devices[0].stack

    def device(self, rank: int) -> Device:
        """The device of a rank."""
        return self.devices[int(self.device_types[rank])]

    def links(self, types: Iterable[int]) -> tuple[Level, ...]:
        """The levels for a group of devices of some types: each figure is that of the slowest type."""
        return slowest_levels([self.unlike[t] for t in types]) if self.unlike else self.levels

    def group_sizes(self) -> tuple[int, ...]:
        """Devices in one group of each level: `(8, 64)` for 8 nodes of 8 devices."""
        return tuple(math.prod(level.size for level in self.levels[: i + 1]) for i in range(len(self.levels)))


def slowest_levels(unlike: Sequence[tuple[Level, ...]]) -> tuple[Level, ...]:
    """The levels for a group that spans several types of nodes: each figure is that of the slowest type."""
    return _slowest(tuple(dict.fromkeys(unlike)))


@functools.lru_cache(maxsize=1 << 10)
def _slowest(unlike: tuple[tuple[Level, ...], ...]) -> tuple[Level, ...]:
    if len(unlike) == 1:
        return unlike[0]
    slowest = []
    for same in zip(*unlike, strict=True):
        peers = [level.peer_byte_per_s for level in same if level.peer_byte_per_s is not None]
        slowest.append(
            replace(
                same[0],
                byte_per_s=min(level.byte_per_s for level in same),
                device_byte_per_s=min(level.device_byte_per_s for level in same),
                latency_s=max(level.latency_s for level in same),
                efficiency=min(level.efficiency for level in same),
                peer_byte_per_s=min(peers) if peers else None,
                gather_ports=min(level.gather_ports for level in same),
                fits=same[0].fits if len({level.fits for level in same}) == 1 else (),
            )
        )
    return tuple(slowest)


NEIGHBOURS = 3
"""Neighbours of a rank in a group: the one before it in a ring, parent and child in a tree (NCCL 2.4 and later)."""

PIPELINE_NEIGHBOURS = 2
"""Neighbours of a pipeline stage: the stage before and the stage after."""

HEADROOM = 0.05
"""Fraction of a device's memory that a search leaves free by default."""

STEP_BYTES = 4
"""Bytes an element of an fp32 copy of 16-bit gradients, which the optimizer step makes for the part that it updates:
20 bytes a parameter in all (Megatron-LM, documentation of the distributed optimizer)."""


@overload
def neighbours(tensor: int, data: int, piped: bool) -> int: ...
@overload
def neighbours(tensor: int, data: np.ndarray, piped: bool | np.ndarray) -> np.ndarray: ...
def neighbours(tensor: int, data: int | np.ndarray, piped: bool | np.ndarray) -> int | np.ndarray:
    """Neighbours of a rank, summed over its groups: tensor and data parallel group, pipeline, and the group of all
    ranks if it is in two groups or more.

    Args:
        tensor: tensor-parallel size.
        data: data-parallel size over all copies of the pipeline.
        piped: whether there are several stages.
    """
    groups = (tensor > 1) + np.greater(data, 1).astype(int) + np.asarray(piped).astype(int)
    inside = min(tensor - 1, NEIGHBOURS) + np.minimum(np.subtract(data, 1), NEIGHBOURS)
    count = inside + PIPELINE_NEIGHBOURS * np.asarray(piped) + NEIGHBOURS * (groups > 1)
    return count if np.ndim(count) else int(count)


def check_devices(cluster: Cluster, wanted: int) -> None:
    """Refuse a number of devices that a cluster does not have.

    Raises:
        JobError: it has fewer.
    """
    there = cluster.device_count
    if wanted > there:
        message = f"{cluster.name} has {plural(there, 'device')}, not {wanted:,}"
        raise JobError(message, hint=with_devices(cluster, wanted))


def with_devices(cluster: Cluster, wanted: int) -> str:
    """What makes a cluster of at least so many devices."""
    nodes = -(-wanted // (cluster.node_size * cluster.node_step or 1)) * cluster.node_step
    if not cluster.node_size or nodes > cluster.most_nodes:
        return f"take a profile with {wanted:,} devices"
    return f"--nodes {nodes} makes {nodes * cluster.node_size:,}"


def with_headroom(cluster: Cluster, headroom: float) -> Cluster:
    """The cluster with a fraction of each device's memory left free by plans."""
    if all(device.headroom == headroom for device in cluster.devices):
        return cluster
    devices = (dataclasses.replace(device, headroom=headroom) for device in cluster.devices)
    return dataclasses.replace(cluster, devices=tuple(devices))


def shown_bytes(
    tensor_bytes: float,
    reserve_bytes: float,
    cache: float,
    stepped_elements: float = 0.0,
    device_bytes: float = math.inf,
) -> float:
    """Estimate of the memory that nvidia-smi shows, in bytes.

    Args:
        tensor_bytes: bytes of tensors at the peak.
        reserve_bytes: bytes of context and communication buffers.
        cache: memory that the allocator holds over that of the tensors (`Stack.allocator_cache`).
        stepped_elements: elements whose 16-bit gradients the optimizer step casts to fp32 on this rank; the allocator
            keeps that memory besides the memory of a pass.
        device_bytes: memory of the device. Caches fill no more than it: an allocator gives idle memory back before it
            fails, so that only what is needed itself can exceed the device.
    """
    cached_bytes = (tensor_bytes + STEP_BYTES * stepped_elements) * cache + reserve_bytes
    return max(tensor_bytes + reserve_bytes, min(cached_bytes, device_bytes))


def reserve_bytes(device: Device, tensor: int, data: int, piped: bool) -> float:
    """Context and communication buffers of one rank on a device; arguments as of `neighbours`."""
    return float(device.reserve_bytes + device.neighbour_bytes * neighbours(tensor, data, piped))
