"""A schedule by name played out and measured: time of an iteration by its own convention, bubble, memory, staleness.

>>> found = measure_schedule("1f1b", 4, 8, forward_s=1.0, backward_s=2.0)
>>> found.iteration_s, found.held
(33.0, (4, 3, 2, 1))

Of a pipeline that never drains the periodic part is found, not replayed to the end. An order that repeats, on machines
that do not change, ends up in a periodic regime: from some iteration on, all that happens in one happens again `cycle`
iterations later, shifted by a constant (the simulation is linear in the algebra of max and plus). What happens next
depends only on the micro-batches that are under way (and on waves that are waited for later), so one repetition of as
many micro-batches as that proves that it goes on for ever: of the last ones of an iteration where it has more.
Exchanges that travel beside the work may fall behind it; an iteration never takes less than they do.
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
from planner.play.memory import StageBytes, check_capacity, held_units, memory_curve
from planner.play.times import Conditions, Seconds, StageTimes, Trace, Transfers
from planner.schedules import ActivationUnit, Pipeline, Schedule, Work
from planner.schedules.compiling import compile_orders
from planner.schedules.program import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    LAUNCH_SYNC,
    SYNC,
    Program,
    peak_versions,
    staleness,
)

LONGEST_CYCLE = 12
"""Iterations after which a regime may repeat."""

MOST_ACTIONS = 400_000
"""Actions that are played at the most before the pace is taken from the second half of the run."""

_CLOSE = 1e-9


@dataclass(frozen=True, slots=True)
class Steady:
    """What playing orders found.

    Attributes:
        iteration_s: time of one iteration, in the periodic part where the orders never drain.
        cycle: iterations after which the regime repeats, 0 when none was found, or the orders drain.
        played: iterations that were played.
        trace: of these.
    """

    iteration_s: float
    cycle: int
    played: float
    trace: Trace


def play_schedule(schedule: Schedule, pipeline: Pipeline, times: StageTimes, conditions: Conditions) -> Steady:
    """Play an iteration of a schedule that drains, else as many as it takes until they repeat; O(actions played).

    Args:
        schedule: the schedule.
        pipeline: micro-batches of one iteration.
        times: seconds by stage.
        conditions: what transfers occupy, what overlaps.
    """
    if schedule.drains:
        trace = run(_compiled(cast(Hashable, schedule), pipeline), times, conditions)
        return Steady(trace.span_s() if schedule.spans else trace.makespan_s, 0, 1.0, trace)
    rhythm = schedule.rhythm(pipeline)
    few, beats = replace(pipeline, micro_batches=rhythm), pipeline.micro_batches / rhythm
    steady = find_pace(
        lambda iterations: compile_orders(schedule.work(few, iterations)),
        rhythm,
        _reach(schedule, few),
        lambda program: run(program, times, conditions),
    )
    return replace(steady, iteration_s=steady.iteration_s * beats, played=steady.played / beats)


@functools.lru_cache(maxsize=2)
def _compiled(schedule: Hashable, pipeline: Pipeline) -> Program:
    """An iteration of a schedule; a search plays one after the other with other times."""
    return compile_orders(cast(Schedule, schedule).work(pipeline))


def _reach(schedule: Schedule, pipeline: Pipeline) -> int:
    """Micro-batches back to the earliest on which a schedule's next action may depend.

    Those under way, and where copies wait for each other's waves only so many waves later, those of these waves.
    """
    under_way = max(schedule.in_flight(pipeline)) * max(pipeline.replicas)
    distance = schedule.clock_distance
    return under_way if distance is None else under_way + (distance + 2) * schedule.rhythm(pipeline)


def find_pace(
    orders: Callable[[int], Program], micro_batches: int, depth: int, play: Callable[[Program], Trace], least: int = 1
) -> Steady:
    """Play a growing number of iterations of orders that never drain until the regime repeats; O(actions played).

    Args:
        orders: gives the orders of a number of iterations.
        micro_batches: of one iteration.
        depth: micro-batches back to the earliest on which the next action may depend.
        play: simulates a program.
        least: fewest iterations that `orders` can give.
    """
    short = 2 * depth > micro_batches
    window = 1 + -(-depth // micro_batches) if short else 1
    iterations = max(2 * window + 4 if short else 3, least)
    while True:
        program = orders(iterations)
        trace = play(program)
        begins = _begins(trace, micro_batches, iterations - window, micro_batches if short else depth)
        found = _repetition(begins, window)
        if found is not None:
            cycle, period_s = found
            return Steady(max(period_s / cycle, _exchange_s(trace, iterations)), cycle, iterations, trace)
        if len(program.kind) * 2 > MOST_ACTIONS:
            half = (len(begins) - 1) // 2
            pace = float((begins[-1] - begins[half]).mean()) / (len(begins) - 1 - half)
            return Steady(max(pace, _exchange_s(trace, iterations)), 0, iterations, trace)
        iterations *= 2


def _exchange_s(trace: Trace, iterations: int) -> float:
    """Longest time that the exchanges of an iteration take beside the work of a worker, which runs one at a time.

    Where they are slower than the work, they fall behind until the work must wait for them, after as many waves as the
    difference goes into the distance that it may run ahead: too many to be played.
    """
    program = trace.program
    launches = np.flatnonzero(program.kind == LAUNCH_SYNC)
    if not len(launches):
        return 0.0
    each_s = np.zeros(program.stages)
    waits = np.flatnonzero(program.kind == SYNC)
    np.maximum.at(each_s, program.stage[waits], (trace.exchange_end_s - trace.exchange_start_s)[waits])
    return float(np.bincount(program.worker[launches], each_s[program.stage[launches]]).max()) / iterations


def _begins(trace: Trace, micro_batches: int, iterations: int, last: int) -> np.ndarray:
    """[iterations, actions] starts of the forwards and backwards of an iteration's last micro-batches, in one order.

    Raises:
        PlanError: iterations differ in their actions.
    """
    program = trace.program
    chosen = np.flatnonzero(
        program.of(FORWARD, BACKWARD, INPUT_GRAD)
        & (program.micro_batch < iterations * micro_batches)
        & (program.micro_batch % micro_batches >= micro_batches - last)
    )
    if not len(chosen) or len(chosen) % iterations:
        raise PlanError("the orders do not run the same actions in every iteration", hint="plan again")
    order = np.lexsort((program.kind[chosen], program.stage[chosen], program.micro_batch[chosen]))
    return np.asarray(trace.start_s[chosen[order]].reshape(iterations, -1))


def _repetition(begins: np.ndarray, window: int) -> tuple[int, float] | None:
    """Shortest cycle by which the last iterations repeat: (cycle, seconds)."""
    count = len(begins)
    close = _CLOSE * float(begins[-1].max())
    for cycle in range(1, min(LONGEST_CYCLE, count - window - 1) + 1):
        shift = begins[cycle:] - begins[:-cycle]
        period = float(shift[-1, 0])
        same = np.abs(shift - period).max(axis=1) <= close
        run = 0 if same.all() else len(same) - int(np.argmin(same[::-1]))
        if len(same) - run >= window + cycle - 1 and same[-1]:
            return cycle, period
    return None


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
    found = play_schedule(chosen, pipeline, times, under)
    cost = Cost.PERIOD if not chosen.drains else Cost.SPAN if chosen.spans else Cost.MAKESPAN
    _check(found.trace, sizes, capacity_bytes)
    period = micro_batches if chosen.drains else chosen.rhythm(pipeline)
    return _measurement(chosen.name, chosen.activation_unit, found, cost, sizes, period)


def measure_orders(
    work: Work,
    times: StageTimes,
    *,
    cost: Cost = Cost.MAKESPAN,
    conditions: Conditions | None = None,
) -> Measurement:
    """Play orders of one's own, as `read_orders` gives them, and measure them; O(actions).

    Args:
        work: the orders of all lanes.
        times: seconds by stage.
        cost: what the time of an iteration is to mean; MAKESPAN or SPAN.
        conditions: what transfers occupy (by default the link), what overlaps.

    Raises:
        PlanError: the orders deadlock, are incomplete, or read weights that nobody holds.
    """
    trace = run(compile_orders(work), times, conditions or Conditions(transfers=Transfers.OVERLAPPED))
    iteration_s = trace.span_s() if cost is Cost.SPAN else trace.makespan_s
    unit = ActivationUnit.SUB_SEQUENCE if work.parts > 1 else ActivationUnit.MICRO_BATCH
    micro_batches = int(trace.program.micro_batch.max()) + 1
    return _measurement("custom", unit, Steady(iteration_s, 0, 1.0, trace), cost, None, micro_batches)


def _check(trace: Trace, sizes: StageBytes | None, capacity_bytes: float | Sequence[float] | None) -> None:
    if capacity_bytes is None:
        return
    if sizes is None:
        raise PlanError("a capacity is given but not what the stages hold", hint="give `sizes` too")
    check_capacity(trace, sizes, np.broadcast_to(np.asarray(capacity_bytes, float), (trace.program.workers,)))


def _measurement(
    name: str,
    unit: ActivationUnit,
    found: Steady,
    cost: Cost,
    sizes: StageBytes | None,
    micro_batches: int,
) -> Measurement:
    trace, iteration_s, played = found.trace, found.iteration_s, found.played
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
        cycle=found.cycle,
        trace=trace,
    )


def _full_from(held: np.ndarray, program: Program, micro_batches: int) -> int:
    """Micro-batch from which on the pipeline is full: a whole number of iterations past all that is held at first."""
    depth = int(held.max()) * -(-program.workers // program.stages)
    full = -(-depth // micro_batches) * micro_batches
    return full if full < int(program.micro_batch.max()) - micro_batches else 0
