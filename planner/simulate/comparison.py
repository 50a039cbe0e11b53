"""Compare the predicted with the simulated iteration time, and attribute the difference to effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.play import Conditions, StageTimes, Transfers, run
from planner.schedules import Pipeline, Schedule
from planner.schedules.program import Program
from planner.space.evaluate import fill_and_pace_s, tail_s

NEGLIGIBLE = 1e-6
"""Effects below this fraction of the predicted time are left out, because the plan's figures are rounded."""


Effect = tuple[str, float, str]
"""One cause of a difference: its name, seconds (positive ones make the prediction longer than the simulation), and its
meaning."""


@dataclass(frozen=True, slots=True)
class TimeComparison:
    """Predicted and simulated time of an iteration; the effects add up to their difference.

    Attributes:
        predicted_s: the plan's own time.
        closed_form_s: the closed form, recomputed from the plan's stage terms; 0 if the schedule has none.
        critical_s: the schedule's longest chain of waits in closed form; 0 if it has none.
        simulated_s: the simulated time.
        effects: those larger than `NEGLIGIBLE`, in the order in which they are subtracted.
    """

    predicted_s: float
    closed_form_s: float
    critical_s: float
    simulated_s: float
    effects: tuple[Effect, ...]

    @property
    def difference(self) -> float:
        """(predicted - simulated) / simulated."""
        return (self.predicted_s - self.simulated_s) / self.simulated_s if self.simulated_s else 0.0


def closed_form_s(replicas: Sequence[int], micro_batches: int, times: StageTimes) -> float:
    """The closed form by which the search ranks decisions (`planner.space.evaluate`), from times by stage."""
    return _body_s(replicas, micro_batches, times) + _tail_s(times)


def _body_s(replicas: Sequence[int], micro_batches: int, times: StageTimes) -> float:
    """The closed form without synchronisation and update."""
    stage_s = times.forward_s + times.backward_s + times.receive_s + times.return_s
    return fill_and_pace_s(replicas, micro_batches, stage_s.tolist())


def _tail_s(times: StageTimes) -> float:
    return tail_s((times.sync_s + times.update_s).tolist(), (times.backward_s + times.return_s).tolist())


def measured(predicted_s: float, simulated_s: float) -> TimeComparison:
    """The comparison for a schedule without a closed form, whose predicted time is itself simulated."""
    gap = ("measurement", predicted_s - simulated_s, "the plan's time was measured under other conditions")
    effects = (gap,) if abs(gap[1]) > NEGLIGIBLE * predicted_s else ()
    return TimeComparison(predicted_s, 0.0, 0.0, simulated_s, effects)


def compare(
    predicted_s: float,
    schedule: Schedule,
    pipeline: Pipeline,
    program: Program,
    times: StageTimes,
    transfers: Transfers,
) -> TimeComparison:
    """Split the difference between prediction and simulation into effects, by up to three simulations; O(actions).

    Args:
        predicted_s: the plan's iteration time.
        schedule: the schedule.
        pipeline: replicas and micro-batches of one copy.
        program: the actions of one copy.
        times: seconds by stage; `sync_s` is the exposed part.
        transfers: the model of transfers of the simulation.
    """
    zeros = np.zeros(pipeline.stages)
    silent = replace(times, sync_s=zeros, update_s=zeros)
    body = _body_s(pipeline.replicas, pipeline.micro_batches, times)
    closed = body + _tail_s(times)
    body_simulated = run(program, silent).makespan_s
    blocking = run(program, times).makespan_s
    simulated = blocking if transfers is Transfers.BLOCKING else run(program, times, Conditions(transfers)).makespan_s
    critical_body = _critical_s(schedule, pipeline, silent)
    effects = [
        ("stated time", predicted_s - closed, "the plan's time is not what its stage terms give"),
        *_body_effects(body, critical_body, body_simulated),
        (
            "synchronisation",
            closed - body - (blocking - body_simulated),
            "synchronisation and update last longer or shorter past the last backward than the closed form's lead says",
        ),
        ("overlapped transfers", blocking - simulated, "transfers run beside computation instead of in line"),
    ]
    return TimeComparison(
        predicted_s=predicted_s,
        closed_form_s=closed,
        critical_s=_critical_s(schedule, pipeline, times),
        simulated_s=simulated,
        effects=tuple(e for e in effects if abs(e[1]) > NEGLIGIBLE * predicted_s),
    )


def _body_effects(closed: float, critical: float, simulated: float) -> list[Effect]:
    """Effects without synchronisation and update: closed form against simulation, by way of the critical path."""
    if critical <= 0:
        return [("pipeline", closed - simulated, "filling, pace and draining of the pipeline")]
    return [
        (
            "filled waits",
            closed - critical,
            "the slowest stage fills part of its wait for the stages after it with other micro-batches",
        ),
        ("queueing", critical - simulated, "micro-batches wait for each other at stages and replicas"),
    ]


def _critical_s(schedule: Schedule, pipeline: Pipeline, times: StageTimes) -> float:
    """The schedule's longest chain of waits; 0 if it has none."""
    return schedule.critical_s(
        pipeline,
        (times.forward_s + times.receive_s).tolist(),
        (times.backward_s + times.return_s).tolist(),
        (times.sync_s + times.update_s).tolist(),
    )
