"""A schedule by name played out and measured: time of an iteration by its own convention, bubble, memory, staleness.

>>> found = measure_schedule("1f1b", 4, 8, forward_s=1.0, backward_s=2.0)
>>> found.iteration_s, found.held
(33.0, (4, 3, 2, 1))
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from planner import schedules
from planner.errors import PlanError
from planner.play.engine import run
from planner.play.memory import StageBytes, check_capacity, held_units, memory_curve
from planner.play.steady import find_steady
from planner.play.times import Conditions, Seconds, StageTimes, Trace, Transfers
from planner.schedules import ActivationUnit, Pipeline, Schedule, Work
from planner.schedules.compiling import compile_orders
from planner.schedules.program import Program, peak_versions, staleness


class Cost(StrEnum):
    """What the time of an iteration is."""

    MAKESPAN = "from the first start to the last end of all workers"
    SPAN = "from the first start to the last end of the worker for which that is longest"
    PERIOD = "time between iterations in the periodic part"


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """What a simulation of one iteration, or of the periodic part, finds.

    Attributes:
        schedule: its name with options.
        workers: how many.
        iteration_s: time of one iteration.
        cost: what that is.
        makespan_s: of what was played.
        bubble: 1 - computation of all workers / (workers * iteration time).
        bubble_over_ideal: (iteration time - mean computation of a worker) / mean computation of a worker.
        worker_idle_s: by worker, time of an iteration in which it neither computes nor communicates.
        unit: what `held` counts.
        held: by worker, most units kept at the same time.
        held_micro_batches: the same in micro-batches of a whole worker's share of the model.
        weight_versions: by stage, most versions held.
        staleness: by stage, updates between the forward's weights and the update, at the most.
        mean_staleness: the same on average when the pipeline is full.
        backward_staleness: the same for the backward's weights.
        peak_bytes: by worker, empty when no memory was given.
        cycle: iterations after which the periodic part repeats; 0 when it drains, or none was found.
        trace: what was played.
    """

    schedule: str
    workers: int
    iteration_s: float
    cost: Cost
    makespan_s: float
    bubble: float
    bubble_over_ideal: float
    worker_idle_s: tuple[float, ...]
    unit: ActivationUnit
    held: tuple[int, ...]
    held_micro_batches: tuple[float, ...]
    weight_versions: tuple[int, ...]
    staleness: tuple[int, ...]
    mean_staleness: tuple[float, ...]
    backward_staleness: tuple[float, ...]
    peak_bytes: tuple[float, ...]
    cycle: int
    trace: Trace


def measure_schedule(
    schedule: str | Schedule,
    stages: int,
    micro_batches: int,
    *,
    forward_s: Seconds,
    backward_s: Seconds,
    weight_grad_s: Seconds | None = None,
    receive_s: Seconds = 0.0,
    sync_s: Seconds = 0.0,
    update_s: Seconds = 0.0,
    recompute_s: Seconds | None = None,
    evict_s: Seconds = 0.0,
    replicas: int | Sequence[int] = 1,
    conditions: Conditions | None = None,
    sizes: StageBytes | None = None,
    capacity_bytes: float | Sequence[float] | None = None,
) -> Measurement:
    """Play a schedule and measure it; O(actions).

    Args:
        schedule: its name, with options (`chimera:pairs=2`), or the schedule itself.
        stages: pieces of the model; two for each worker of a V, v for interleaved, 2W for a wave.
        micro_batches: of one iteration.
        forward_s, backward_s, ...: seconds by stage, or one number for all (see `StageTimes`).
        replicas: of each stage, or one number for all.
        conditions: what transfers occupy (by default the link), what overlaps; see `Conditions`.
        sizes: memory by stage, for `peak_bytes`.
        capacity_bytes: memory of a device, by worker or one number for all.

    Raises:
        UsageError: no schedule has that name.
        PlanError: the schedule cannot serve such a pipeline, or a worker's memory is exceeded (the message says when).
    """
    chosen = schedules.get(schedule) if isinstance(schedule, str) else schedule
    counts = (replicas,) * stages if isinstance(replicas, int) else tuple(replicas)
    pipeline = Pipeline(counts, micro_batches)
    reason = chosen.supports(pipeline)
    if reason:
        raise PlanError(reason, hint="change the stages, the micro-batches, or the schedule")
    forwards = (forward_s,) * stages if isinstance(forward_s, (int, float)) else forward_s
    times = StageTimes.of(
        forwards, backward_s, receive_s, sync_s, update_s, weight_grad_s, recompute_s=recompute_s, evict_s=evict_s
    )
    under = conditions or Conditions(transfers=Transfers.OVERLAPPED)
    if chosen.weight_policy.synchronous:
        trace = run(compile_orders(chosen.work(pipeline)), times, under)
        cost, iteration_s, cycle = Cost.SPAN if chosen.spans else Cost.MAKESPAN, 0.0, 0
        iteration_s = trace.span_s() if cost is Cost.SPAN else trace.makespan_s
        played = 1.0
    else:
        rhythm = chosen.rhythm(pipeline)
        beats = micro_batches // rhythm
        steady = find_steady(chosen, replace(pipeline, micro_batches=rhythm), lambda p: run(p, times, under))
        trace, cost, iteration_s, cycle = steady.trace, Cost.PERIOD, steady.iteration_s * beats, steady.cycle
        played, micro_batches = steady.played / beats, rhythm
    _check(trace, sizes, capacity_bytes)
    unit = chosen.activation_unit
    return _measurement(chosen.name, unit, trace, cost, iteration_s, played, cycle, sizes, micro_batches)


def measure_orders(
    work: Work,
    times: StageTimes,
    *,
    cost: Cost = Cost.MAKESPAN,
    conditions: Conditions | None = None,
    sizes: StageBytes | None = None,
    capacity_bytes: float | Sequence[float] | None = None,
    name: str = "custom",
) -> Measurement:
    """Play orders of one's own, as `read_orders` gives them, and measure them; O(actions).

    Args:
        work: the orders of all lanes.
        times: seconds by stage.
        cost: what the time of an iteration is to mean; MAKESPAN or SPAN.
        conditions: what transfers occupy (by default the link), what overlaps.
        sizes: memory by stage.
        capacity_bytes: memory of a device, by worker or one number for all.
        name: what to call them.

    Raises:
        PlanError: the orders deadlock, are incomplete, read weights that nobody holds, or exceed the memory.
    """
    trace = run(compile_orders(work), times, conditions or Conditions(transfers=Transfers.OVERLAPPED))
    iteration_s = trace.span_s() if cost is Cost.SPAN else trace.makespan_s
    _check(trace, sizes, capacity_bytes)
    unit = ActivationUnit.SUB_SEQUENCE if work.parts > 1 else ActivationUnit.MICRO_BATCH
    micro_batches = int(trace.program.micro_batch.max()) + 1
    return _measurement(name, unit, trace, cost, iteration_s, 1, 0, sizes, micro_batches)


def _check(trace: Trace, sizes: StageBytes | None, capacity_bytes: float | Sequence[float] | None) -> None:
    if capacity_bytes is None:
        return
    if sizes is None:
        raise PlanError("a capacity is given but not what the stages hold", hint="give `sizes` too")
    check_capacity(trace, sizes, np.broadcast_to(np.asarray(capacity_bytes, float), (trace.program.workers,)))


def _measurement(
    name: str,
    unit: ActivationUnit,
    trace: Trace,
    cost: Cost,
    iteration_s: float,
    played: float,
    cycle: int,
    sizes: StageBytes | None,
    micro_batches: int,
) -> Measurement:
    program = trace.program
    held = held_units(trace)
    chunks = np.bincount(np.unique(np.stack([program.worker, program.stage]), axis=1)[0], minlength=program.workers)
    share = np.maximum(chunks, 1) if unit is ActivationUnit.CHUNK else np.full(program.workers, program.work.parts)
    old = staleness(program, warm_up=_full_from(held, program, micro_batches), period=micro_batches)
    work_s, talk_s = trace.compute_s() / played, trace.communication_s() / played
    mean = float(work_s.mean())
    return Measurement(
        schedule=name,
        workers=program.workers,
        iteration_s=iteration_s,
        cost=cost,
        makespan_s=trace.makespan_s,
        bubble=1.0 - mean / iteration_s if iteration_s > 0 else 0.0,
        bubble_over_ideal=(iteration_s - mean) / mean if mean > 0 else 0.0,
        worker_idle_s=tuple(np.maximum(iteration_s - work_s - talk_s, 0.0).tolist()),
        unit=unit,
        held=tuple(held.tolist()),
        held_micro_batches=tuple((held / share).tolist()),
        weight_versions=tuple(peak_versions(program).tolist()),
        staleness=tuple(int(most) for most in old.forward_most),
        mean_staleness=tuple(old.forward_mean.tolist()),
        backward_staleness=tuple(old.backward_mean.tolist()),
        peak_bytes=tuple(memory_curve(trace, w, sizes).peak_bytes for w in range(program.workers)) if sizes else (),
        cycle=cycle,
        trace=trace,
    )


def _full_from(held: np.ndarray, program: Program, micro_batches: int) -> int:
    """Micro-batch from which on the pipeline is full: a whole number of iterations past all that is held at first."""
    depth = int(held.max()) * -(-program.workers // program.stages)
    full = -(-depth // micro_batches) * micro_batches
    return full if full < int(program.micro_batch.max()) - micro_batches else 0


def play(
    schedule: str,
    replicas: Sequence[int],
    micro_batches: int,
    times: StageTimes,
    *,
    transfers: Transfers = Transfers.BLOCKING,
) -> Trace:
    """Play one iteration of one copy of a pipeline.

    Args:
        schedule: name of the schedule.
        replicas: of each stage, in one copy.
        micro_batches: of one copy.
        times: seconds by stage; `sync_s` is what is not hidden behind backward work.
        transfers: what a transfer between stages occupies.

    Raises:
        UsageError: no schedule has that name.
        PlanError: replicas do not divide the micro-batches, or times are for fewer stages.

    O(actions): about 2 us an action, 1 us when the same pipeline was played before.
    """
    return run(_program(schedule, tuple(replicas), micro_batches), times, Conditions(transfers))


@functools.lru_cache(maxsize=8)
def _program(schedule: str, replicas: tuple[int, ...], micro_batches: int) -> Program:
    return compile_orders(schedules.get(schedule).order(Pipeline(replicas, micro_batches)))
