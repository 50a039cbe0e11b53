"""What a step comes to for each worker, all its stages together: seconds by part, and memory by kind.

A worker is what one device does: it holds one stage, or several chunks of an interleaved, V-shaped or bidirectional
pipeline. `step_view` is the one place that adds chunks up to a device; judge, plans, comparisons and reports read it.

Of the seconds of a step a device computes (forward, backward, recomputation, optimizer step), communicates while it
computes nothing (`COMMUNICATION`: exposed), and waits for other stages (`Part.WAITING`). The share of the last, over
all devices, is the bubble; without a pipeline there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from planner.play import Transfers
from planner.schedules import Pipeline, Schedule
from planner.schedules.held import HeldUnits, UnitSizes
from planner.space.configuration import Configuration
from planner.space.workers import pipeline_of
from planner.sums import float_sum

_ROUNDING = 1e-7
"""Part of an iteration that the rounding of a plan's figures explains."""


@dataclass(frozen=True, slots=True)
class MemoryBytes:
    """Memory of one device, by kind."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float
    reserve: float

    @property
    def total(self) -> float:
        """Sum over all kinds."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.workspace + self.reserve


@dataclass(frozen=True, slots=True)
class ExposedSeconds:
    """Seconds of a stage's work in which a device communicates and computes nothing.

    Attributes:
        forward_group_s: in a forward, communication among the ranks of a replica.
        backward_group_s: in a backward without recomputation.
        recompute_group_s: in the forward that a recomputed stage repeats; of single modules it is not known, and 0.
        update_group_s: in an optimizer step.
        forward_exchange_s: in a forward, what work does not hide of exchanges among replicas (ZeRO gathers weights).
        backward_exchange_s: in a backward (weights gathered, gradients reduced).
        forward_host_s: in a forward, what neither work nor these exchanges hide of copies to the host's memory.
        backward_host_s: in a backward, of copies back.
    """

    forward_group_s: float = 0.0
    backward_group_s: float = 0.0
    recompute_group_s: float = 0.0
    update_group_s: float = 0.0
    forward_exchange_s: float = 0.0
    backward_exchange_s: float = 0.0
    forward_host_s: float = 0.0
    backward_host_s: float = 0.0


NOTHING_EXPOSED = ExposedSeconds()
"""Of stages that always compute."""


@dataclass(frozen=True, slots=True)
class StageTerms:
    """Times and memory of one stage of a configuration; times of one micro-batch on one replica unless said otherwise.

    Attributes:
        forward_s: forward computation, with the communication inside a replica.
        backward_s: the same of the backward, recomputation included.
        recompute_s: the part of `backward_s` that repeats the forward.
        receive_s: time to receive the stage's input activations from the stage before (0 for the first).
        sync_s: gradient synchronisation per iteration (with ZeRO-1: reduce-scatter plus all-gather), before overlap.
        exposed_sync_s: the part of `sync_s` that backward work does not hide, plus `tied_sync_s`.
        update_s: optimizer step per iteration.
        in_flight: most micro-batches whose activations one replica keeps at a time.
        memory: bytes of one device, by kind.
        capacity_bytes: memory of the smallest device that the stage uses, reserve included, headroom left out.
        return_s: time to send the gradient of the stage's input back to the stage before (0 for the first).
        tied_sync_s: per iteration, all-reduce of the gradients of weights that later stages hold too. Part of
            `exposed_sync_s`: nothing hides it.
        unit_bytes: activations kept for each micro-batch in flight. `memory.activations` is `in_flight` times this and
            what the micro-batch needs whose forward a recomputed stage is repeating.
        evict_s: time to move the activations of a micro-batch to the worker that stores them, or back; 0 where the
            schedule evicts none.
        host_bytes: activations of each micro-batch in flight that one rank keeps in the host's memory.
        move_s: time to copy these there, or back; the part that no work hides is in `forward_s` and `backward_s`.
        weight_grad_s: the part of `backward_s` that computes gradients of weights; None where it is not known.
        waiting_bytes: where the backward is split, activations of a micro-batch that wait for the second half, with
            gradients; `memory.activations` is then the peak of the order, not a multiple of `unit_bytes`.
        turning_bytes: the most that a micro-batch keeps while the first half runs.
        exposed: the parts of these times in which a device communicates and computes nothing.
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    receive_s: float
    sync_s: float
    exposed_sync_s: float
    update_s: float
    in_flight: int
    memory: MemoryBytes
    capacity_bytes: float
    return_s: float = 0.0
    tied_sync_s: float = 0.0
    unit_bytes: float = 0.0
    evict_s: float = 0.0
    host_bytes: float = 0.0
    move_s: float = 0.0
    weight_grad_s: float | None = None
    waiting_bytes: float = 0.0
    turning_bytes: float = 0.0
    exposed: ExposedSeconds = NOTHING_EXPOSED

    @property
    def total_s(self) -> float:
        """Time a replica of the stage spends on one micro-batch."""
        return self.forward_s + self.backward_s + self.receive_s + self.return_s


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Peak memory of one worker of a configuration, on its smallest device.

    Attributes:
        stages: the stages that it holds.
        memory: bytes by kind, all its stages together.
        capacity_bytes: memory of the smallest of its devices, reserve included, headroom left out.
    """

    stages: tuple[int, ...]
    memory: MemoryBytes
    capacity_bytes: float


def worker_memory(
    schedule: Schedule, pipeline: Pipeline, hosted: Sequence[tuple[int, ...]], stages: Sequence[StageTerms]
) -> tuple[WorkerMemory, ...]:
    """Memory of each worker, all its stages together; one entry for workers that hold the same stages.

    Args:
        schedule: says what is in flight at the same time.
        pipeline: replicas and micro-batches.
        hosted: by worker of one copy, the stages that it holds.
        stages: terms of all stages.
    """
    peaks = schedule.peaks(pipeline)
    memory_by_stages: dict[tuple[int, ...], WorkerMemory] = {}
    for worker, held_stages in enumerate(hosted):
        if held_stages and held_stages not in memory_by_stages:
            memory_by_stages[held_stages] = _memory_of_stages(held_stages, stages, peaks[worker])
    return tuple(memory_by_stages.values())


def fullest_of(workers: Sequence[WorkerMemory]) -> WorkerMemory:
    """The worker nearest to its capacity, or furthest above it."""
    return max(workers, key=lambda worker: worker.memory.total / worker.capacity_bytes)


def _memory_of_stages(held_stages: tuple[int, ...], stages: Sequence[StageTerms], peaks: HeldUnits) -> WorkerMemory:
    """Peak memory of a worker: weights of all its stages, peak activations, the largest workspace."""
    terms = [stages[stage] for stage in held_stages]
    if len(held_stages) == 1 and not peaks.guests:
        return WorkerMemory(held_stages, terms[0].memory, terms[0].capacity_bytes)
    if peaks.splits:
        sizes = UnitSizes(*([getattr(t, f"{k}_bytes") for t in stages] for k in ("unit", "turning", "waiting")))
        activation_bytes = peaks.most_of(sizes)
    else:
        activation_bytes = peaks.most([t.unit_bytes for t in stages])
        activation_bytes += max(t.memory.activations - t.in_flight * t.unit_bytes for t in terms)
    memory = MemoryBytes(
        weights=float_sum(t.memory.weights for t in terms),
        gradients=float_sum(t.memory.gradients for t in terms),
        optimizer=float_sum(t.memory.optimizer for t in terms),
        activations=activation_bytes,
        workspace=max(t.memory.workspace for t in terms),
        reserve=max(t.memory.reserve for t in terms),
    )
    return WorkerMemory(held_stages, memory, min(t.capacity_bytes for t in terms))


class Part(StrEnum):
    """Parts of a step of a device, which add up to it; the value is the label."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recomputation"
    UPDATE = "optimizer step"
    GROUP = "communication inside a group"
    GROUP_SUM = "summing gradients inside a group"
    TRANSFER = "activations and gradients in transfer"
    PASS_EXCHANGE = "exchange of weights and gradients in passes, not hidden"
    HOST = "copies to and from the host, not hidden"
    SYNC = "gradient synchronisation not hidden"
    TIED = "summing gradients of tied weights"
    WAITING = "waiting for other stages (fill, drain, their tails)"


COMMUNICATION = (Part.GROUP, Part.GROUP_SUM, Part.TRANSFER, Part.PASS_EXCHANGE, Part.HOST, Part.SYNC, Part.TIED)
"""Exposed communication: parts in which a device communicates and computes nothing."""
_OF_OPTIMIZER = (Part.UPDATE, Part.GROUP_SUM)
_PER_UPDATE = (*_OF_OPTIMIZER, Part.SYNC, Part.TIED)
"""Parts that an update has, beside those of passes."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A step of one worker, and of all workers that do the same.

    Attributes:
        stages: the stages (chunks) that it holds.
        devices: devices of all such workers, over all copies.
        seconds: of a step of one device, by part; parts of no time are left out. They add up to the step.
        memory: of one device, by kind.
        capacity_bytes: memory of the smallest of the devices, reserve included, headroom left out.
    """

    stages: tuple[int, ...]
    devices: int
    seconds: Mapping[Part, float]
    memory: MemoryBytes
    capacity_bytes: float

    def sum_of(self, *parts: Part) -> float:
        """Seconds of a step that go to some parts."""
        return float_sum(self.seconds.get(part, 0.0) for part in parts)


@dataclass(frozen=True, slots=True)
class StepView:
    """A step of all workers.

    Attributes:
        iteration_s: seconds of the step.
        workers: by the stages they hold and the micro-batches that they run.
    """

    iteration_s: float
    workers: tuple[WorkerView, ...]

    @property
    def devices(self) -> int:
        """Devices at work."""
        return sum(worker.devices for worker in self.workers)

    @property
    def seconds(self) -> Mapping[Part, float]:
        """Seconds of a step by part, the mean over all devices; they add up to the step."""
        totals = {
            part: float_sum(worker.devices * worker.seconds.get(part, 0.0) for worker in self.workers) / self.devices
            for part in Part
        }
        return {part: seconds for part, seconds in totals.items() if seconds > 0}

    def share(self, *parts: Part) -> float:
        """Share of all devices' time in some parts."""
        seconds = self.seconds
        return float_sum(seconds.get(part, 0.0) for part in parts) / self.iteration_s if self.iteration_s > 0 else 0.0

    @property
    def bubble(self) -> float:
        """Share of all devices' time in which they wait for other stages."""
        return self.share(Part.WAITING)

    @property
    def exposed(self) -> float:
        """Share of all devices' time in which they communicate and compute nothing."""
        return self.share(*COMMUNICATION)

    @property
    def fullest(self) -> WorkerView:
        """The worker nearest to its capacity, or furthest above it."""
        return max(self.workers, key=lambda w: w.memory.total / w.capacity_bytes if w.capacity_bytes else 0.0)

    def worker_of(self, stage: int) -> WorkerView:
        """The worker that holds a stage; of several the one that waits least."""
        return min((w for w in self.workers if stage in w.stages), key=lambda worker: worker.sum_of(Part.WAITING))


def step_view(
    configuration: Configuration, schedule: Schedule, stages: Sequence[StageTerms], iteration_s: float
) -> StepView:
    """The step of each worker of a priced configuration, all its stages together. O(workers * stages of a worker).

    Args:
        configuration: the configuration.
        schedule: its schedule.
        stages: terms of its stages.
        iteration_s: seconds of a step.
    """
    pipeline = pipeline_of(configuration)
    memory = {w.stages: w for w in worker_memory(schedule, pipeline, schedule.placement(pipeline), stages)}
    alike: dict[tuple[tuple[int, int], ...], int] = {}
    for counts in schedule.counts(pipeline):
        if counts:
            devices = configuration.copies * configuration.stages[next(iter(counts))].ranks
            alike[tuple(counts.items())] = alike.get(tuple(counts.items()), 0) + devices
    crossings = (
        schedule.crossings(pipeline) if configuration.transfers is Transfers.BLOCKING else (False,) * len(stages)
    )
    passes = [_pass_parts(terms, crosses) for terms, crosses in zip(stages, crossings, strict=True)]
    updates = [_update_parts(terms) for terms in stages]
    exchanges, optimizer_steps = schedule.exchanges(pipeline), schedule.updates(pipeline)
    hidden = not schedule.drains and len(stages) > 1
    views = []
    for held_counts, devices in alike.items():
        held = memory[tuple(stage for stage, _ in held_counts)]
        seconds = dict.fromkeys(Part, 0.0)
        for stage, count in held_counts:
            for part, pass_s in passes[stage].items():
                seconds[part] += count * pass_s
            for part, update_s in updates[stage].items():
                seconds[part] += (optimizer_steps if part in _OF_OPTIMIZER else exchanges)[stage] * update_s
        beside_s = max(exchanges[stage] * stages[stage].sync_s for stage, _ in held_counts) if hidden else 0.0
        completed = _completed(seconds, iteration_s, beside_s)
        views.append(WorkerView(held.stages, devices, completed, held.memory, held.capacity_bytes))
    return StepView(iteration_s, tuple(views))


def _pass_parts(terms: StageTerms, crosses: bool) -> dict[Part, float]:
    """Seconds of a micro-batch's passes through a stage."""
    exposed = terms.exposed
    exchange_s = exposed.forward_exchange_s + exposed.backward_exchange_s
    host_s = exposed.forward_host_s + exposed.backward_host_s
    forward_s = exposed.forward_group_s + exposed.forward_exchange_s + exposed.forward_host_s
    backward_s = exposed.backward_group_s + exposed.backward_exchange_s + exposed.backward_host_s
    return {
        Part.FORWARD: max(0.0, terms.forward_s - forward_s),
        Part.BACKWARD: max(0.0, terms.backward_s - terms.recompute_s - backward_s),
        Part.RECOMPUTE: max(0.0, terms.recompute_s - exposed.recompute_group_s),
        Part.GROUP: exposed.forward_group_s + exposed.backward_group_s + exposed.recompute_group_s,
        Part.TRANSFER: terms.receive_s + terms.return_s if crosses else 0.0,
        Part.PASS_EXCHANGE: exchange_s,
        Part.HOST: host_s,
    }


def _update_parts(terms: StageTerms) -> dict[Part, float]:
    """Seconds of a stage's update and of the exchange before it."""
    group_s = terms.exposed.update_group_s
    parts = (terms.update_s - group_s, group_s, terms.exposed_sync_s - terms.tied_sync_s, terms.tied_sync_s)
    return {part: max(0.0, seconds) for part, seconds in zip(_PER_UPDATE, parts, strict=True)}


def _completed(seconds: dict[Part, float], iteration_s: float, beside_s: float) -> dict[Part, float]:
    """The parts of a step with what is left of it, so that they add up to it.

    An exchange that is launched early hides behind waits, so that less of it is exposed than its seconds. Where the
    exchanges beside the work (`beside_s`, 0 for none) are what the step takes, the worker waits for them and not for
    other stages.
    """
    left_s = iteration_s - float_sum(seconds.values())
    for part in (Part.SYNC, Part.TIED):
        hidden_s = min(max(0.0, -left_s), seconds[part])
        seconds[part], left_s = seconds[part] - hidden_s, left_s + hidden_s
    if left_s > _ROUNDING * iteration_s:
        for_exchange = beside_s >= iteration_s * (1 - _ROUNDING)
        seconds[Part.SYNC if for_exchange else Part.WAITING] += left_s
    return {part: part_s for part, part_s in seconds.items() if part_s > 0}
