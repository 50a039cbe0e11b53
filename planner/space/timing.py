"""The time of a priced configuration: its orders of work, played with the durations of its stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from planner import schedules
from planner.play import Conditions, StageTimes, Trace, Transfers
from planner.play.measure import play_schedule
from planner.schedules import Schedule
from planner.space.configuration import Configuration
from planner.space.types import Certificate, Evaluation, StageTerms
from planner.space.workers import pipeline_of

MOST_MICRO_BATCHES = 1_000_000
"""Micro-batches of one copy of a pipeline that are played at the most: every action of them is."""

ALONE = "this configuration alone, in any order of its work"
"""What the bound of a configuration that was not searched for speaks of."""


@dataclass(frozen=True, slots=True, eq=False)
class Timing:
    """What playing a configuration found.

    Attributes:
        iteration_s: time of an iteration: of the global batch, by the schedule's convention.
        bubble: share of the workers' time in which they compute nothing.
        trace: what was played, of one copy: one iteration, or as many as show the pace.
    """

    iteration_s: float
    bubble: float
    trace: Trace


def times_of_terms(schedule: Schedule, stages: Sequence[StageTerms], recomputed: Collection[int] = ()) -> StageTimes:
    """Durations of actions by stage; where orders repeat forwards by actions of their own, backwards are without them.

    A weight gradient takes half of its backward without recomputation.
    """
    again = np.array([t.recompute_s for t in stages])
    own = again if len(recomputed) else np.zeros_like(again)
    return StageTimes.of(
        [t.forward_s for t in stages],
        np.array([t.backward_s for t in stages]) - own,
        [t.receive_s for t in stages],
        [t.exposed_sync_s for t in stages],
        [t.update_s for t in stages],
        [(t.backward_s - t.recompute_s) / 2 for t in stages],
        return_s=[t.return_s for t in stages],
        recompute_s=again,
        evict_s=[t.evict_s for t in stages],
    )


def play_terms(configuration: Configuration, schedule: Schedule, stages: Sequence[StageTerms]) -> Timing:
    """Play a configuration; its copies are alike, so one is played. O(actions).

    A pipeline that never drains takes the time between iterations in its periodic part; its gradients travel beside
    the work, and the slower of the two counts.
    """
    pipeline = pipeline_of(configuration)
    times = times_of_terms(schedule, stages, schedule.recomputed_stages(pipeline))
    found = play_schedule(schedule, pipeline, times, Conditions(configuration.transfers))
    iteration_s = found.iteration_s
    if not schedule.drains and len(stages) > 1:
        exchanges = schedule.exchanges(pipeline)
        iteration_s = max(iteration_s, *(t.sync_s * n for t, n in zip(stages, exchanges, strict=True)))
    busy_s = float(found.trace.compute_s().mean()) / found.played
    return Timing(iteration_s, max(0.0, 1.0 - busy_s / iteration_s) if iteration_s > 0 else 0.0, found.trace)


def played_s(
    configuration: Configuration, evaluation: Evaluation, schedule_of: Callable[[str], Schedule] = schedules.get
) -> float:
    """Seconds of an iteration of a judged configuration when it is played; its closed form where it has too many
    micro-batches for that.

    O(actions).
    """
    if configuration.micro_batches > MOST_MICRO_BATCHES:
        return evaluation.iteration_s
    return play_terms(configuration, schedule_of(configuration.schedule), evaluation.stages).iteration_s


def least_s(configuration: Configuration, schedule: Schedule, stages: Sequence[StageTerms]) -> float:
    """The schedule's longest chain of waits in closed form: no play of the configuration is faster.

    Of a pipeline that never drains the time between iterations. O(stages * holders).
    """
    pipeline = pipeline_of(configuration)
    blocking = configuration.transfers is Transfers.BLOCKING
    crosses = np.array(schedule.crossings(pipeline), float) * blocking
    receive_s = crosses * np.array([t.receive_s for t in stages])
    return_s = crosses * np.array([t.return_s for t in stages])
    chain_s = schedule.critical_s(
        pipeline,
        (np.array([t.forward_s for t in stages]) + receive_s).tolist(),
        (np.array([t.backward_s for t in stages]) + return_s).tolist(),
        [t.exposed_sync_s + t.update_s for t in stages],
        [(t.backward_s - t.recompute_s) / 2 for t in stages],
        (receive_s + return_s).tolist(),
    )
    if schedule.drains or len(stages) < 2:
        return chain_s
    exchanges = schedule.exchanges(pipeline)
    return max(chain_s, *(t.sync_s * n for t, n in zip(stages, exchanges, strict=True)))


def certificate_alone(configuration: Configuration, stages: Sequence[StageTerms], reached_s: float) -> Certificate:
    """What is known of one configuration alone: its longest chain of waits bounds every order of its work.

    Args:
        configuration: what was played.
        stages: terms of its stages.
        reached_s: seconds of an iteration as it was played.
    """
    bound_s = min(reached_s, least_s(configuration, schedules.get(configuration.schedule), stages))
    return Certificate(bound_s, max(0.0, 1.0 - bound_s / reached_s) if reached_s > 0 else 0.0, ALONE, False)
