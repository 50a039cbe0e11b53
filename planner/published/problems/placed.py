"""PipeDream's stages placed on the devices of a tree, each priced over the links that it spans.

Devices 0..P-1 are the leaves of a tree: `machines[0]` devices share the fastest links, `machines[1]` such units the
next, and so on. Stages take the devices from the left, without holes; devices left over on the right stay idle. A stage
takes any run of neighbouring devices, within a server or across several. Or a run of stages takes `copies` whole units
of one level side by side and is placed equally in each (stage i on the same devices of every unit), so that activations
stay on the fast links and only weights cross the slow ones. With c, w, R the compute time, weights and replicas of a
stage and O the bytes at a cut:

    released   T = (c + K w) / R        K = traffic / bandwidth with traffic(n) = 4 (n-1) / n
    paper      T = max(c, K w) / R      traffic(n) = 2 (n-1)
    K flat          = traffic(R) / slowest bandwidth that the replicas span
    K by levels     = sum over levels l of traffic(n_l) / bandwidth_l, n_l = most units of level l under one parent
    cut             = 2 O / (B R), B the slowest bandwidth that the two stages span, R the replicas charged (paper: 1)

Any plan costs at most as much as on a flat cluster with the slowest links, and exactly as much within one level. Links
are each device's own, as in PipeDream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.solvers.cluster_chains.pipedream import ReplicatedPipeline, coverage_faults
from planner.solvers.cluster_chains.pipedream_terms import CutJudge
from planner.solvers.cluster_chains.verdict import PartitionVerdict
from planner.space.types import Violation


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """Layers on devices `first` to `first + width - 1` and, with copies, on the same devices of the units beside.

    Attributes:
        layers: their numbers, ascending.
        first: leftmost device.
        width: neighbouring devices in one copy.
        copies: units that run the same stages; copy k starts at device `first + k * stride`.
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


class PlacedPipelineProblem(ReplicatedPipeline):
    """Stages on a tree of devices; all cuts are allowed."""

    def judge(self, decision: Sequence[PlacedStage]) -> PartitionVerdict:
        """Recompute objective and violations of a plan; O(cuts * layers * edges)."""
        stages = tuple(decision)
        faults = coverage_faults(self.layers, [stage.layers for stage in stages], range(self.layers.count)) or _places(
            self, stages
        )
        if faults:
            return PartitionVerdict(math.inf, tuple(faults))
        used = sum(stage.replicas for stage in stages)
        if self.use_all and used < self.devices:
            faults.append(Violation("devices", -1, f"{used} of {self.devices} devices are used", used, self.devices))
        times, cuts, before = [], CutJudge(self.layers, self.released), frozenset[int]()
        for number, stage in enumerate(stages):
            if stage.replicas > 1 and not self.replicate:
                faults.append(Violation("option", number, "replicas are not allowed"))
            times.append(self._stage_s(stage))
            if number and self.transfers:
                times[-1] = max(times[-1], self._transfer_s(cuts.cut_bytes(before), stages, number))
            before |= set(stage.layers)
        kept, over = self.memory_of([(stage.layers, stage.replicas) for stage in stages], cuts)
        return PartitionVerdict(max(times), (*faults, *over), tuple(times), kept)

    def _stage_s(self, stage: PlacedStage) -> float:
        compute = math.fsum(self.layers.compute_s[list(stage.layers)])
        exchange = math.fsum(self.layers.weight_bytes[list(stage.layers)]) * self.exchange_s_per_byte(stage.devices)
        total = compute + exchange if self.adds_up else max(compute, exchange)
        return total / stage.replicas

    def _transfer_s(self, cut_bytes: float, stages: tuple[PlacedStage, ...], number: int) -> float:
        """The transfer before stage `number`."""
        last, stage = stages[number - 1], stages[number]
        inside = stage.copies > 1 and (last.copies, last.stride) == (stage.copies, stage.stride)
        inside = inside and stage.first % stage.stride > 0
        end = stage.first + stage.width - 1 if inside else stage.devices[-1]
        seconds = 2 * cut_bytes / self.bandwidth_byte_per_s[self.span_level(last.first, end)]
        return seconds / min(stage.replicas, last.replicas) if self.adds_up else seconds

    def trivial(self) -> tuple[tuple[str, tuple[PlacedStage, ...]], ...]:
        """One device, and data parallelism over all devices."""
        layers = tuple(range(self.layers.count))
        return (
            ("one-device", (PlacedStage(layers, 0, 1),)),
            ("data-parallel", (PlacedStage(layers, 0, self.devices),)),
        )


def _places(problem: PlacedPipelineProblem, stages: tuple[PlacedStage, ...]) -> list[Violation]:
    """Whether the stages take the devices from the left, without holes, and copies take whole units."""
    strides = {problem.unit_devices(level) for level in range(1, len(problem.machines))}
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
