"""The pace of a pipeline that never drains: the periodic part is found, not replayed to the end.

An order that repeats, on machines that do not change, ends up in a periodic regime: from some iteration on, all that
happens in one happens again `cycle` iterations later, shifted by a constant (the simulation is linear in the algebra of
max and plus). What happens next depends only on the micro-batches that are under way (and on waves that are waited for
later), so one repetition of as many micro-batches as that proves that it goes on for ever: of the last ones of an
iteration where it has more. Exchanges that travel beside the work may fall behind it; an iteration never takes less
than they do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.errors import PlanError
from planner.play.times import Trace
from planner.schedules import Pipeline, Schedule
from planner.schedules.compiling import compile_orders
from planner.schedules.program import BACKWARD, FORWARD, INPUT_GRAD, LAUNCH_SYNC, SYNC, Program

LONGEST_CYCLE = 12
"""Iterations after which a regime may repeat."""

MOST_ACTIONS = 400_000
"""Actions that are played at the most before the pace is taken from the second half of the run."""

_CLOSE = 1e-9


@dataclass(frozen=True, slots=True)
class Steady:
    """The pace of an asynchronous schedule.

    Attributes:
        iteration_s: time of one iteration in the periodic part.
        cycle: iterations after which the regime repeats, 0 when none was found.
        played: iterations that were played.
        trace: of these.
    """

    iteration_s: float
    cycle: int
    played: int
    trace: Trace


def find_steady(schedule: Schedule, pipeline: Pipeline, play: Callable[[Program], Trace]) -> Steady:
    """Play a growing number of iterations until the regime repeats; O(actions played).

    Args:
        schedule: one that runs on from one iteration to the next.
        pipeline: micro-batches of one iteration.
        play: simulates a program.

    Raises:
        PlanError: the schedule drains after each iteration.
    """
    if schedule.weight_policy.synchronous:
        raise PlanError(f"{schedule.name} drains after each iteration", hint="take the time of one iteration")
    return find_pace(
        lambda iterations: compile_orders(schedule.work(pipeline, iterations)),
        pipeline.micro_batches,
        reach_of(schedule, pipeline),
        play,
    )


def reach_of(schedule: Schedule, pipeline: Pipeline) -> int:
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
