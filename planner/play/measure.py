"""Simulate a schedule and measure it: iteration time by the schedule's own convention, bubble, memory, staleness.

>>> measurement = measure_schedule("1f1b", 4, 8, forward_s=1.0, backward_s=2.0)
>>> measurement.iteration_s, measurement.held
(33.0, (4, 3, 2, 1))

A pipeline that never drains is simulated until it is periodic. A repeated order with constant durations always becomes
so: from some iteration on, everything repeats `cycle` iterations later, shifted by a constant (the simulation is linear
in max-plus algebra). The next action depends only on the micro-batches in flight (and on waves that are awaited later).
So if that many micro-batches (the last ones of an iteration, if it has more) repeat once, the run repeats forever.
Exchanges that overlap with work may fall behind it; an iteration never takes less time than they do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import cast

import numpy as np

from planner import schedules
from planner.errors import PlanError
from planner.play.engine import run
from planner.play.memory import StageBytes, held_units, memory_curve
from planner.play.times import Conditions, Seconds, StageTimes, Trace, Transfers
from planner.schedules import ActivationUnit, Pipeline, Schedule, Work
from planner.schedules.compiling import compile_orders
from planner.schedules.program import Code, Program, peak_versions, staleness
from planner.schedules.schedule import require

MAX_CYCLE = 12
"""Longest cycle, in iterations, that is looked for."""

MAX_ACTIONS = 400_000
"""Most actions that are simulated before the iteration time is taken as the mean of the second half of the run."""

_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class PlayedSchedule:
    """Iteration time of simulated orders.

    Attributes:
        iteration_s: time of one iteration; of the periodic part if the orders never drain.
        cycle: iterations after which the run repeats; 0 if no cycle was found, or the orders drain.
        played: number of iterations that were simulated.
        trace: the trace of these.
    """

    iteration_s: float
    cycle: int
    played: float
    trace: Trace

    @property
    def idle(self) -> float:
        """Fraction of the workers' time in which they compute nothing: waits, transfers and exchanges."""
        busy_s = float(self.trace.compute_s().mean()) / self.played
        return max(0.0, 1.0 - busy_s / self.iteration_s) if self.iteration_s > 0 else 0.0


def play_schedule(schedule: Schedule, pipeline: Pipeline, times: StageTimes, conditions: Conditions) -> PlayedSchedule:
    """Simulate one iteration of a schedule that drains, else iterations until they repeat; O(simulated actions).

    Args:
        schedule: the schedule.
        pipeline: micro-batches of one iteration.
        times: seconds by stage.
        conditions: what transfers occupy, and what overlaps.
    """
    if schedule.drains:
        trace = run(_compiled(cast(Hashable, schedule), pipeline), times, conditions)
        return PlayedSchedule(trace.span_s() if schedule.spans else trace.makespan_s, 0, 1.0, trace)
    rhythm = schedule.rhythm(pipeline)
    one_rhythm, rhythms = replace(pipeline, micro_batches=rhythm), pipeline.micro_batches / rhythm
    steady = find_period(
        lambda iterations: compile_orders(schedule.work(one_rhythm, iterations)),
        rhythm,
        _dependency_depth(schedule, one_rhythm),
        lambda program: run(program, times, conditions),
    )
    return replace(steady, iteration_s=steady.iteration_s * rhythms, played=steady.played / rhythms)


@functools.lru_cache(maxsize=2)
def _compiled(schedule: Hashable, pipeline: Pipeline) -> Program:
    """The program of one iteration; cached, since a search simulates it several times with other durations."""
    return compile_orders(cast(Schedule, schedule).work(pipeline))


def _dependency_depth(schedule: Schedule, pipeline: Pipeline) -> int:
    """Number of last micro-batches that a schedule's next action may depend on.

    These are the micro-batches in flight and, if copies wait for each other's waves, those of the awaited waves.
    """
    under_way = max(schedule.in_flight(pipeline)) * max(pipeline.replicas)
    distance = schedule.clock_distance
    return under_way if distance is None else under_way + (distance + 2) * schedule.rhythm(pipeline)


def find_period(
    orders: Callable[[int], Program], micro_batches: int, depth: int, play: Callable[[Program], Trace], least: int = 1
) -> PlayedSchedule:
    """Simulate more and more iterations of orders that never drain, until they repeat; O(simulated actions).

    Args:
        orders: the program of a given number of iterations.
        micro_batches: micro-batches of one iteration.
        depth: number of last micro-batches that the next action may depend on.
        play: simulates a program.
        least: fewest iterations that `orders` accepts.
    """
    is_short = 2 * depth > micro_batches
    window = 1 + -(-depth // micro_batches) if is_short else 1
    iterations = max(2 * window + 4 if is_short else 3, least)
    while True:
        program = orders(iterations)
        trace = play(program)
        starts = _pass_starts(trace, micro_batches, iterations - window, micro_batches if is_short else depth)
        repetition = _repetition(starts, window)
        if repetition is not None:
            cycle, period_s = repetition
            return PlayedSchedule(max(period_s / cycle, _exchange_s(trace, iterations)), cycle, iterations, trace)
        if len(program.kind) * 2 > MAX_ACTIONS:
            half = (len(starts) - 1) // 2
            mean_s = float((starts[-1] - starts[half]).mean()) / (len(starts) - 1 - half)
            return PlayedSchedule(max(mean_s, _exchange_s(trace, iterations)), 0, iterations, trace)
        iterations *= 2


def _exchange_s(trace: Trace, iterations: int) -> float:
    """Seconds of one iteration's launched exchanges on the worker where they take longest, one at a time.

    If they are slower than the work, they fall behind until the work must wait for them. That may take more waves than
    can be simulated, so this bound is applied instead.
    """
    program = trace.program
    launches = np.flatnonzero(program.kind == Code.LAUNCH_SYNC)
    if not len(launches):
        return 0.0
    exchange_s = np.zeros(program.stages)
    syncs = np.flatnonzero(program.kind == Code.SYNC)
    np.maximum.at(exchange_s, program.stage[syncs], (trace.exchange_end_s - trace.exchange_start_s)[syncs])
    return float(np.bincount(program.worker[launches], exchange_s[program.stage[launches]]).max()) / iterations


def _pass_starts(trace: Trace, micro_batches: int, iterations: int, last: int) -> np.ndarray:
    """float64 [iterations, actions], starts of the passes of each iteration's `last` micro-batches, in one order.

    Raises:
        PlanError: iterations differ in their actions.
    """
    program = trace.program
    chosen = np.flatnonzero(
        program.of(Code.FORWARD, Code.BACKWARD, Code.INPUT_GRAD)
        & (program.micro_batch < iterations * micro_batches)
        & (program.micro_batch % micro_batches >= micro_batches - last)
    )
    if not len(chosen) or len(chosen) % iterations:
        raise PlanError("the orders do not run the same actions in every iteration", hint="plan again")
    order = np.lexsort((program.kind[chosen], program.stage[chosen], program.micro_batch[chosen]))
    return np.asarray(trace.start_s[chosen[order]].reshape(iterations, -1))


def _repetition(starts: np.ndarray, window: int) -> tuple[int, float] | None:
    """(cycle in iterations, seconds of a cycle) of the shortest repetition of the last iterations; None if none."""
    count = len(starts)
    tolerance_s = _TOLERANCE * float(starts[-1].max())
    for cycle in range(1, min(MAX_CYCLE, count - window - 1) + 1):
        shift = starts[cycle:] - starts[:-cycle]
        period = float(shift[-1, 0])
        shifted_equally = np.abs(shift - period).max(axis=1) <= tolerance_s
        run = 0 if shifted_equally.all() else len(shifted_equally) - int(np.argmin(shifted_equally[::-1]))
        if len(shifted_equally) - run >= window + cycle - 1 and shifted_equally[-1]:
            return cycle, period
    return None


class Cost(StrEnum):
    """Definition of the iteration time."""

    MAKESPAN = "from the first start to the last end of all workers"
    SPAN = "from the first start to the last end of the worker for which that is longest"
    PERIOD = "time between iterations in the periodic part"


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """Figures of a simulated iteration, or of the periodic part of a continuous run.

    Attributes:
        schedule: name with options.
        workers: number of workers.
        iteration_s: time of one iteration.
        cost: definition of `iteration_s`.
        makespan_s: time of the whole simulation.
        bubble: 1 - computation of all workers / (workers * iteration time).
        bubble_over_ideal: (iteration time - mean computation of a worker) / mean computation of a worker.
        worker_idle_s: by worker, time of an iteration in which it neither computes nor communicates.
        unit: unit of `held`.
        held: by worker, most units kept at the same time.
        held_micro_batches: `held` in micro-batches of all stages of the worker.
        weight_versions: by stage, most versions held.
        staleness: by stage, most updates between reading the forward's weights and applying the gradient.
        mean_staleness: its mean over micro-batches of the full pipeline.
        backward_staleness: the mean for the backward's weights.
        peak_bytes: by worker; empty if no sizes were given.
        cycle: iterations after which the periodic part repeats; 0 if it drains, or no cycle was found.
        trace: the simulated trace.
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
) -> Measurement:
    """Simulate a schedule and measure it; O(actions).

    Args:
        schedule: name with options (`chimera:pairs=2`), or the schedule itself.
        stages: number of stages; two per worker of a V, v for interleaved, 2W for a wave.
        micro_batches: micro-batches of one iteration.
        forward_s, backward_s, ...: seconds by stage, or one number for all (see `StageTimes`).
        replicas: replicas by stage, or one number for all.
        conditions: what transfers occupy (by default the link), and what overlaps; see `Conditions`.
        sizes: memory by stage, for `peak_bytes`.

    Raises:
        UsageError: no schedule has that name.
        PlanError: the schedule does not support the pipeline.
    """
    resolved = schedules.get(schedule) if isinstance(schedule, str) else schedule
    counts = (replicas,) * stages if isinstance(replicas, int) else tuple(replicas)
    pipeline = Pipeline(counts, micro_batches)
    require(resolved, pipeline)
    forwards = (forward_s,) * stages if isinstance(forward_s, (int, float)) else forward_s
    times = StageTimes.of(
        forwards, backward_s, receive_s, sync_s, update_s, weight_grad_s, recompute_s=recompute_s, evict_s=evict_s
    )
    assumed = conditions or Conditions(transfers=Transfers.OVERLAPPED)
    steady = play_schedule(resolved, pipeline, times, assumed)
    cost = Cost.PERIOD if not resolved.drains else Cost.SPAN if resolved.spans else Cost.MAKESPAN
    period = micro_batches if resolved.drains else resolved.rhythm(pipeline)
    return _measurement(resolved.name, resolved.activation_unit, steady, cost, sizes, period)


def measure_orders(
    work: Work,
    times: StageTimes,
    *,
    cost: Cost = Cost.MAKESPAN,
    conditions: Conditions | None = None,
) -> Measurement:
    """Simulate user-written orders, as `read_orders` gives them, and measure them; O(actions).

    Args:
        work: the orders of all lanes.
        times: seconds by stage.
        cost: definition of the iteration time; MAKESPAN or SPAN.
        conditions: what transfers occupy (by default the link), and what overlaps.

    Raises:
        PlanError: the orders deadlock, are incomplete, or read weights that nobody holds.
    """
    trace = run(compile_orders(work), times, conditions or Conditions(transfers=Transfers.OVERLAPPED))
    iteration_s = trace.span_s() if cost is Cost.SPAN else trace.makespan_s
    unit = ActivationUnit.SUB_SEQUENCE if work.parts > 1 else ActivationUnit.MICRO_BATCH
    micro_batches = int(trace.program.micro_batch.max()) + 1
    return _measurement("custom", unit, PlayedSchedule(iteration_s, 0, 1.0, trace), cost, None, micro_batches)


def _measurement(
    name: str,
    unit: ActivationUnit,
    steady: PlayedSchedule,
    cost: Cost,
    sizes: StageBytes | None,
    micro_batches: int,
) -> Measurement:
    trace, iteration_s, played = steady.trace, steady.iteration_s, steady.played
    program = trace.program
    held = held_units(trace)
    chunks = np.bincount(np.unique(np.stack([program.worker, program.stage]), axis=1)[0], minlength=program.workers)
    units_per_micro_batch = (
        np.maximum(chunks, 1) if unit is ActivationUnit.CHUNK else np.full(program.workers, program.work.parts)
    )
    ages = staleness(program, warm_up=_full_from(held, program, micro_batches), period=micro_batches)
    work_s, communication_s = trace.compute_s() / played, trace.communication_s() / played
    mean_work_s = float(work_s.mean())
    return Measurement(
        schedule=name,
        workers=program.workers,
        iteration_s=iteration_s,
        cost=cost,
        makespan_s=trace.makespan_s,
        bubble=1.0 - mean_work_s / iteration_s if iteration_s > 0 else 0.0,
        bubble_over_ideal=(iteration_s - mean_work_s) / mean_work_s if mean_work_s > 0 else 0.0,
        worker_idle_s=tuple(np.maximum(iteration_s - work_s - communication_s, 0.0).tolist()),
        unit=unit,
        held=tuple(held.tolist()),
        held_micro_batches=tuple((held / units_per_micro_batch).tolist()),
        weight_versions=tuple(peak_versions(program).tolist()),
        staleness=tuple(int(most) for most in ages.forward_most),
        mean_staleness=tuple(ages.forward_mean.tolist()),
        backward_staleness=tuple(ages.backward_mean.tolist()),
        peak_bytes=tuple(memory_curve(trace, w, sizes).peak_bytes for w in range(program.workers)) if sizes else (),
        cycle=steady.cycle,
        trace=trace,
    )


def _full_from(held: np.ndarray, program: Program, micro_batches: int) -> int:
    """Number of the first micro-batch of a full pipeline, rounded up to whole iterations; 0 if the run is too short."""
    depth = int(held.max()) * -(-program.workers // program.stages)
    full = -(-depth // micro_batches) * micro_batches
    return full if full < int(program.micro_batch.max()) - micro_batches else 0
