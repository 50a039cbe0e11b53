"""Replicated stages laid on the devices of a hierarchical cluster, each priced over the links that it really spans.

Devices 0..P-1 are the leaves of a tree: `fanout[0]` devices share the fastest links, `fanout[1]` such units the next,
and so on. Stages take the devices from the left, without holes; devices left over on the right stay idle. A stage takes
any run of neighbouring devices, within a server or across several; or a run of stages takes `copies` whole units of one
level side by side, each of which runs all of them alike (stage i on the same devices of every unit), so that
activations keep to the fast links and only weights cross the slow ones. With c, w, R the compute time, weights and
replicas of a stage and O the bytes at a cut:

    released   T = (c + K w) / R        K = traffic / bandwidth with traffic(n) = 4 (n-1) / n
    paper      T = max(c, K w) / R      traffic(n) = 2 (n-1)
    K flat          = traffic(R) / slowest bandwidth that the replicas span
    K by levels     = sum over levels l of traffic(n_l) / bandwidth_l, n_l = most units of level l under one parent
    cut             = 2 O / (B R), B the slowest bandwidth that the two stages span, R the replicas charged (paper: 1)

A plan that does not care for the levels costs here at the most what it costs on a flat cluster with the slowest links,
and inside one level exactly that. Links are taken as each device's own, as PipeDream does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from planner.errors import UsageError
from planner.hardware.tiers import moved_bytes
from planner.hardware.types import Collective
from planner.space.partition.pipedream_terms import (
    NO_LIMIT,
    BoundaryBytes,
    CutJudge,
    Layers,
    Memory,
    StageCost,
)
from planner.space.partition.verdict import Verdict, over_memory
from planner.space.types import Violation


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """Layers on devices `first` to `first + width - 1` and, if there are copies, on the same of the units beside.

    Attributes:
        layers: their numbers, ascending.
        first: leftmost device.
        width: neighbouring devices in one copy.
        copies: units that run the same stages; copy k takes the devices `first + k * stride` onwards.
        stride: devices of such a unit; 0 without copies.
    """

    layers: tuple[int, ...]
    first: int
    width: int
    copies: int = 1
    stride: int = 0

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices of the stage, ascending."""
        return tuple(self.first + k * self.stride + i for k in range(self.copies) for i in range(self.width))

    @property
    def replicas(self) -> int:
        """Number of devices."""
        return self.width * self.copies


@dataclass(frozen=True, eq=False)
class PlacedPipelineProblem:
    """Stages on a tree of devices.

    Attributes:
        layers: the network.
        fanout: devices of a lowest unit, then units of each level under one parent.
        bandwidth_byte_per_s: of the links between the units of a level, lowest first.
        cost: how computation and weight exchange add up.
        transfers: whether cuts cost anything.
        boundary: what crosses a cut.
        memory: limit of a device.
        use_all: whether every device must be used.
    """

    unit: ClassVar[str] = "s"
    """Seconds a minibatch."""

    layers: Layers
    fanout: tuple[int, ...]
    bandwidth_byte_per_s: tuple[float, ...]
    cost: StageCost = StageCost.RELEASED
    transfers: bool = True
    boundary: BoundaryBytes = BoundaryBytes.LIVE
    memory: Memory = NO_LIMIT
    use_all: bool = False

    def __post_init__(self) -> None:
        if not self.fanout or len(self.fanout) != len(self.bandwidth_byte_per_s):
            raise UsageError("each level needs a fanout and a bandwidth", where="fanout")
        if min(self.fanout) < 1 or not min(self.bandwidth_byte_per_s) > 0:
            raise UsageError("fanouts and bandwidths are positive", where="fanout")
        if not self.layers.count:
            raise UsageError("there is no layer to place", where="layers")

    @property
    def devices(self) -> int:
        """Devices of the whole cluster."""
        return math.prod(self.fanout)

    def unit_devices(self, level: int) -> int:
        """Devices of one unit of a level; a device is a unit of level 0."""
        return math.prod(self.fanout[:level])

    def span_level(self, first: int, last: int) -> int:
        """Level of the slowest links between two devices: 0 when they share a lowest unit."""
        for level in range(len(self.fanout)):
            size = self.unit_devices(level + 1)
            if first // size == last // size:
                return level
        raise UsageError(f"device {last} is not in the cluster", where="devices")

    def exchange_s_per_byte(self, devices: Sequence[int]) -> float:
        """Seconds to exchange one byte of weights among replicas on these devices (K above)."""
        if len(devices) < 2:
            return 0.0
        level = self.span_level(min(devices), max(devices))
        flat = self._traffic(len(devices)) / self.bandwidth_byte_per_s[level]
        if level == 0:
            return flat
        by_level = 0.0
        for level, speed in enumerate(self.bandwidth_byte_per_s):
            inner, outer = self.unit_devices(level), self.unit_devices(level + 1)
            units: dict[int, set[int]] = {}
            for device in devices:
                units.setdefault(device // outer, set()).add(device // inner)
            by_level += self._traffic(max(map(len, units.values()))) / speed
        return min(flat, by_level)

    def _traffic(self, count: int) -> float:
        return 2.0 * (count - 1) if self.cost is StageCost.PAPER else 2 * moved_bytes(Collective.ALL_REDUCE, 1.0, count)

    def judge(self, decision: Sequence[PlacedStage]) -> Verdict:
        """Recompute objective and violations of a plan; O(cuts * layers * edges)."""
        stages = tuple(decision)
        faults = _cover(self, stages) or _places(self, stages)
        if faults:
            return Verdict(math.inf, tuple(faults))
        used = sum(stage.replicas for stage in stages)
        if self.use_all and used < self.devices:
            faults.append(Violation("devices", -1, f"{used} of {self.devices} devices are used", used, self.devices))
        times, cuts, before = [], CutJudge(self.layers, self.boundary), frozenset[int]()
        behind = used
        for number, stage in enumerate(stages):
            time, behind = self._stage_s(stage), behind - stage.replicas
            received = cuts.cut_bytes(before) if number else 0.0
            if number and self.transfers:
                time = max(time, self._transfer_s(received, stages, number))
            times.append(time)
            needed = self.memory.kept_bytes(self.layers, stage.layers, behind, stage.replicas, received)
            message = f"a device of the stage keeps {needed:.0f} of {self.memory.device_bytes:.0f} bytes"
            faults += over_memory(number, needed, self.memory.device_bytes, message)
            before = before | set(stage.layers)
        return Verdict(max(times), tuple(faults), tuple(times))

    def _stage_s(self, stage: PlacedStage) -> float:
        compute = math.fsum(self.layers.compute_s[list(stage.layers)])
        exchange = math.fsum(self.layers.weight_bytes[list(stage.layers)]) * self.exchange_s_per_byte(stage.devices)
        total = max(compute, exchange) if self.cost is StageCost.PAPER else compute + exchange
        return total / stage.replicas

    def _transfer_s(self, cut_bytes: float, stages: tuple[PlacedStage, ...], number: int) -> float:
        """The transfer before stage `number`."""
        last, stage = stages[number - 1], stages[number]
        inside = stage.copies > 1 and (last.copies, last.stride) == (stage.copies, stage.stride)
        inside = inside and stage.first % stage.stride > 0
        end = stage.first + stage.width - 1 if inside else stage.devices[-1]
        seconds = 2 * cut_bytes / self.bandwidth_byte_per_s[self.span_level(last.first, end)]
        if self.cost is StageCost.PAPER:
            return seconds
        return seconds / min(stage.replicas, last.replicas)

    def trivial(self) -> tuple[tuple[str, tuple[PlacedStage, ...]], ...]:
        """One device, and data parallelism over all devices."""
        whole = tuple(range(self.layers.count))
        return (
            ("one-device", (PlacedStage(whole, 0, 1),)),
            ("data-parallel", (PlacedStage(whole, 0, self.devices),)),
        )


def _cover(problem: PlacedPipelineProblem, stages: tuple[PlacedStage, ...]) -> list[Violation]:
    layers = problem.layers
    if sorted(i for s in stages for i in s.layers) != list(range(layers.count)) or any(not s.layers for s in stages):
        return [Violation("coverage", -1, "the stages do not hold each layer exactly once")]
    place = {i: number for number, stage in enumerate(stages) for i in stage.layers}
    return [
        Violation("coverage", place[b], f"layer {b} reads layer {a} of a later stage")
        for a, b in layers.edges.tolist()
        if place[a] > place[b]
    ]


def _places(problem: PlacedPipelineProblem, stages: tuple[PlacedStage, ...]) -> list[Violation]:
    """Whether the stages take the devices from the left, without holes, and copies take whole units."""
    strides = {problem.unit_devices(level) for level in range(1, len(problem.fanout))}
    free, offset, section = 0, 0, (1, 0)
    for number, stage in enumerate(stages):
        copies = (stage.copies, stage.stride)
        known = stage.stride in strides if stage.copies > 1 else (stage.copies, stage.stride) == (1, 0)
        aligned = stage.copies == 1 or offset > 0 or free % stage.stride == 0
        same = offset == 0 or copies == section
        if stage.width < 1 or not (known and aligned and same) or stage.first != free + offset:
            return [Violation("devices", number, "the stage does not take the next devices in line")]
        section, offset = copies, offset + stage.width
        if stage.copies == 1:
            free, offset = free + stage.width, 0
        elif offset > stage.stride:
            return [Violation("devices", number, "the stage leaves its unit")]
        elif offset == stage.stride:
            free, offset = free + stage.copies * stage.stride, 0
    if offset:
        return [Violation("devices", len(stages) - 1, "the last units are not filled")]
    if free > problem.devices:
        return [Violation("devices", -1, f"{free} of {problem.devices} devices are used", free, problem.devices)]
    return []
