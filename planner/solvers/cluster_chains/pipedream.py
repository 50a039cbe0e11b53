"""PipeDream's problem: cut a layer graph into replicated stages, level by level of a cluster; minimise the slowest.

Level 1 is the innermost (devices of a server), level l has `machines[l]` units of the level below, joined by links of
`bandwidth_byte_per_s[l]`. On each level a run of layers is cut into stages, and a stage is replicated over r units of
the level below, all of which are cut in the same way. With c, w the compute time and weights of a stage, A the time of
one such unit (c at level 1) and O the bytes alive at a cut:

    paper      T = max(A, 2 (r-1) w / B) / r            transfers 2 O / B
    released   T = (A + 4 (r-1) w / (B r) / g) / r      transfers 2 O / (B r), r being the replicas of the charged stage

where g = 1, except for the first stage of a level above the first: there g = units of the level below. A stage that is
not the first of its run is charged the transfers at both its ends (the end of the network is free), the first is
charged none. The objective is the largest time: seconds per minibatch in steady state.

Sources: Narayanan et al., "PipeDream" (SOSP 2019), section 3.1; the optimiser released with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from planner.errors import UsageError
from planner.hardware.tiers import moved_bytes
from planner.hardware.types import Collective
from planner.solvers.cluster_chains.pipedream_terms import NO_LIMIT, CutJudge, LayerDag, Memory, Released
from planner.solvers.cluster_chains.verdict import PartitionVerdict, over_memory
from planner.space.types import Violation


@dataclass(frozen=True, slots=True)
class ReplicatedStage:
    """Layers that are replicated over units of a level; `inner` says how each unit is cut.

    Attributes:
        layers: their numbers, ascending.
        replicas: units of the level below that process the minibatches in turn.
        inner: stages inside one unit; empty on the first level, where a unit is a device.
    """

    layers: tuple[int, ...]
    replicas: int
    inner: tuple[ReplicatedStage, ...] = ()


@dataclass(frozen=True, eq=False)
class ReplicatedPipeline:
    """Stages of a network on a cluster of several levels, the slowest of which counts.

    Attributes:
        layers: the network.
        machines: devices of a lowest unit, then units of each level under one parent.
        bandwidth_byte_per_s: of the links between the units of a level, lowest first.
        released: what is priced and allowed as in the released code.
        transfers: whether cuts take time (the released code's default is no).
        memory: limit of a device.
        replicate: whether stages may have replicas.
        use_all: whether all devices (all units of a level) must be used.
    """

    unit: ClassVar[str] = "s"
    """Seconds a minibatch."""

    layers: LayerDag
    machines: tuple[int, ...]
    bandwidth_byte_per_s: tuple[float, ...]
    released: Released = Released.COST
    transfers: bool = True
    memory: Memory = NO_LIMIT
    replicate: bool = True
    use_all: bool = True

    def __post_init__(self) -> None:
        if not self.machines or len(self.machines) != len(self.bandwidth_byte_per_s):
            raise UsageError("each level needs a number of machines and a bandwidth", where="machines")
        if min(self.machines) < 1 or not min(self.bandwidth_byte_per_s) > 0:
            raise UsageError("machines and bandwidths are positive", where="machines")
        if not self.layers.count:
            raise UsageError("there is no layer to place", where="layers")

    @property
    def devices(self) -> int:
        """Devices of the whole cluster."""
        return math.prod(self.machines)

    @property
    def adds_up(self) -> bool:
        """True if computation and exchange of a stage add up, and its replicas share transfers (`Released.COST`)."""
        return Released.COST in self.released

    def unit_devices(self, level: int) -> int:
        """Devices of one unit of a level; a device is a unit of level 0."""
        return math.prod(self.machines[:level])

    def span_level(self, first: int, last: int) -> int:
        """Level of the slowest links between two devices: 0 when they share a lowest unit."""
        for level in range(len(self.machines)):
            size = self.unit_devices(level + 1)
            if first // size == last // size:
                return level
        raise UsageError(f"device {last} is not in the cluster", where="devices")

    def exchange_s_per_byte(self, devices: Sequence[int]) -> float:
        """Seconds to exchange one byte of weights among replicas on these devices (K of the module)."""
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

    def memory_of(
        self, stages: Sequence[tuple[Sequence[int], int]], cuts: CutJudge
    ) -> tuple[tuple[float, ...], list[Violation]]:
        """Bytes that a device of each stage (layers, replicas) keeps, and a violation for each that exceeds them."""
        kept, faults = list[float](), list[Violation]()
        before, have = frozenset[int](), self.memory.device_bytes
        behind = sum(replicas for _, replicas in stages)
        for number, (layers, replicas) in enumerate(stages):
            behind -= replicas
            needed = self.memory.kept_bytes(self.layers, layers, behind, replicas, cuts.cut_bytes(before))
            kept.append(needed)
            faults += over_memory(number, needed, have, f"a device keeps {needed:.0f} of {have:.0f} bytes")
            before |= set(layers)
        return tuple(kept), faults

    def _traffic(self, count: int) -> float:
        return 2 * moved_bytes(Collective.ALL_REDUCE, 1.0, count) if self.adds_up else 2.0 * (count - 1)


class PipeDreamProblem(ReplicatedPipeline):
    """Hierarchical replicated stages: all units over which a stage is replicated are cut alike."""

    def judge(self, decision: Sequence[ReplicatedStage]) -> PartitionVerdict:
        """Objective and broken limits of a plan; O(cuts * layers * edges)."""
        judge = PlanJudge(self)
        stages, top = tuple(decision), len(self.machines) - 1
        if not judge.shape(top, stages, tuple(range(self.layers.count))):
            return PartitionVerdict(math.inf, tuple(judge.violations))
        times = judge.run(top, stages, frozenset())
        kept, faults = self.memory_of(list(_devices(stages, 1)), judge.cuts)
        return PartitionVerdict(max(times), (*judge.violations, *faults), tuple(times), () if top else kept)

    def trivial(self) -> tuple[tuple[str, tuple[ReplicatedStage, ...]], ...]:
        """One device (without `use_all`), and data parallelism over all devices."""
        layers = tuple(range(self.layers.count))
        one_device: tuple[ReplicatedStage, ...] = ()
        data_parallel: tuple[ReplicatedStage, ...] = ()
        for machines in self.machines:
            one_device = (ReplicatedStage(layers, 1, one_device),)
            data_parallel = (ReplicatedStage(layers, machines, data_parallel),)
        return (("one-device", one_device), ("data-parallel", data_parallel))


class PlanJudge:
    """Prices one plan with plain loops and collects its violations."""

    def __init__(self, problem: PipeDreamProblem) -> None:
        self.problem = problem
        self.violations: list[Violation] = []
        self.cuts = CutJudge(problem.layers, problem.released)

    def shape(self, level: int, stages: tuple[ReplicatedStage, ...], members: tuple[int, ...]) -> bool:
        """True if a run of stages covers its layers, cuts forward edges only and has the depth of the cluster."""
        problem = self.problem
        faults = coverage_faults(problem.layers, [stage.layers for stage in stages], members)
        if faults:
            self.violations += faults
            return False
        for number, stage in enumerate(stages):
            if (level == 0) == bool(stage.inner) or stage.replicas < 1:
                return self._fault("coverage", number, "a stage has not the depth of the cluster")
            if level and not self.shape(level - 1, stage.inner, stage.layers):
                return False
            if stage.replicas > 1 and not problem.replicate:
                self._fault("option", number, "replicas are not allowed")
        used, have = sum(stage.replicas for stage in stages), problem.machines[level]
        if used > have or (used < have and problem.use_all):
            self._fault("devices", -1, f"{used} of {have} units of level {level + 1} are used", used, have)
        return True

    def run(self, level: int, stages: tuple[ReplicatedStage, ...], before: frozenset[int]) -> list[float]:
        """Seconds of each stage of a run; `before` are the layers of all stages before the run."""
        times = []
        for number, stage in enumerate(stages):
            time = self._stage(level, stage, before, first=number == 0)
            after = before | set(stage.layers)
            is_end = len(after) == self.problem.layers.count
            walked = Released.CUTS in self.problem.released and not is_end
            if walked and not self.cuts.from_first_source(after):
                self._fault("option", number, "a cut lies behind a layer that does not depend on the first source")
            if self.problem.transfers and number:
                time = max(time, self._transfer(level, before, stage.replicas))
                if not is_end:
                    time = max(time, self._transfer(level, after, stage.replicas))
            times.append(time)
            before = after
        return times

    def _stage(self, level: int, stage: ReplicatedStage, before: frozenset[int], *, first: bool) -> float:
        problem, members, replicas = self.problem, list(stage.layers), stage.replicas
        inner = math.fsum(problem.layers.compute_s[members])
        if level:
            inner = max(self.run(level - 1, stage.inner, before))
        weights, speed = math.fsum(problem.layers.weight_bytes[members]), problem.bandwidth_byte_per_s[level]
        if not problem.adds_up:
            return max(inner, 2 * (replicas - 1) * weights / speed) / replicas
        exchange = 4 * (replicas - 1) * weights / (speed * replicas)
        if first and level:
            exchange /= problem.machines[level - 1]
        return (inner + exchange) / replicas

    def _transfer(self, level: int, before: frozenset[int], replicas: int) -> float:
        sharing = replicas if self.problem.adds_up else 1
        return 2 * self.cuts.cut_bytes(before) / (self.problem.bandwidth_byte_per_s[level] * sharing)

    def _fault(self, kind: str, stage: int, message: str, needed: float = 0.0, available: float = 0.0) -> bool:
        self.violations.append(Violation(kind, stage, message, needed, available))
        return False


def _devices(stages: tuple[ReplicatedStage, ...], copies: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Stages of the first level in order, with the devices of all their copies."""
    for stage in stages:
        if stage.inner:
            yield from _devices(stage.inner, copies * stage.replicas)
        else:
            yield stage.layers, copies * stage.replicas


def coverage_faults(layers: LayerDag, stages: Sequence[tuple[int, ...]], members: Sequence[int]) -> list[Violation]:
    """Whether stages, given by their layers, hold each member layer once, and no layer reads one of a later stage."""
    if sorted(i for held in stages for i in held) != sorted(members) or not all(stages):
        return [Violation("coverage", -1, "the stages do not hold each of their layers exactly once")]
    place = {i: number for number, held in enumerate(stages) for i in held}
    return [
        Violation("coverage", place[b], f"layer {b} reads layer {a} of a later stage")
        for a, b in layers.edges.tolist()
        if place.get(a, -1) > place.get(b, math.inf)
    ]
