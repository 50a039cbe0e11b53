"""The time of a priced configuration, by playing its schedule with the durations of its stages, and a lower bound."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from planner import schedules
from planner.play import Conditions, StageTimes, Transfers, weight_part_s
from planner.play.measure import PlayedSchedule, play_schedule
from planner.schedules import Schedule
from planner.space.configuration import Configuration
from planner.space.types import Certificate, Evaluation, StageTerms
from planner.space.workers import pipeline_of

MOST_MICRO_BATCHES = 1_000_000
"""Most micro-batches of one copy of a pipeline that are played, since every action of each is."""

ALONE = "this configuration alone, in any order of its work"
"""The space of the bound of a configuration that was named, not searched."""


def times_of_terms(stages: Sequence[StageTerms], recomputed: Collection[int] = ()) -> StageTimes:
    """Durations of actions by stage; where recomputation is an action of its own, backwards are without it."""
    recompute_s = np.array([t.recompute_s for t in stages])
    separate_s = recompute_s if len(recomputed) else np.zeros_like(recompute_s)
    return StageTimes.of(
        [t.forward_s for t in stages],
        np.array([t.backward_s for t in stages]) - separate_s,
        [t.receive_s for t in stages],
        [t.exposed_sync_s for t in stages],
        [t.update_s for t in stages],
        [weight_part_s(t.backward_s, t.recompute_s, t.weight_grad_s) for t in stages],
        return_s=[t.return_s for t in stages],
        recompute_s=recompute_s,
        evict_s=[t.evict_s for t in stages],
    )


def play_terms(configuration: Configuration, schedule: Schedule, stages: Sequence[StageTerms]) -> PlayedSchedule:
    """Play one copy of a configuration, since all copies are equal. O(actions).

    A pipeline that never drains is timed between iterations of its periodic part. Its gradients are exchanged in
    parallel with the work, and the slower of the two counts.
    """
    pipeline = pipeline_of(configuration)
    times = times_of_terms(stages, schedule.recomputed_stages(pipeline))
    played = play_schedule(schedule, pipeline, times, Conditions(configuration.transfers))
    if schedule.drains or len(stages) < 2:
        return played
    exchanges_s = (t.sync_s * n for t, n in zip(stages, schedule.exchanges(pipeline), strict=True))
    return replace(played, iteration_s=max(played.iteration_s, *exchanges_s))


def played_s(
    configuration: Configuration, evaluation: Evaluation, schedule_of: Callable[[str], Schedule] = schedules.get
) -> float:
    """Simulated seconds of an iteration of a judged configuration.

    Configurations of more than `MOST_MICRO_BATCHES` micro-batches are not played: their evaluation's time is taken.

    O(actions).
    """
    if configuration.micro_batches > MOST_MICRO_BATCHES:
        return evaluation.iteration_s
    return play_terms(configuration, schedule_of(configuration.schedule), evaluation.stages).iteration_s


def least_s(configuration: Configuration, schedule: Schedule, stages: Sequence[StageTerms]) -> float:
    """Lower bound on the played time of a configuration: the schedule's critical path in closed form.

    For a pipeline that never drains, it bounds the time between iterations. O(stages * holders).
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
        [weight_part_s(t.backward_s, t.recompute_s, t.weight_grad_s) for t in stages],
        (receive_s + return_s).tolist(),
    )
    if schedule.drains or len(stages) < 2:
        return chain_s
    exchanges = schedule.exchanges(pipeline)
    return max(chain_s, *(t.sync_s * n for t, n in zip(stages, exchanges, strict=True)))


def certificate_alone(configuration: Configuration, stages: Sequence[StageTerms], reached_s: float) -> Certificate:
    """The certificate of one named configuration: its critical path bounds every order of its work.

    Args:
        configuration: the configuration.
        stages: terms of its stages.
        reached_s: simulated seconds of an iteration.
    """
    bound_s = min(reached_s, least_s(configuration, schedules.get(configuration.schedule), stages))
    return Certificate(bound_s, max(0.0, 1.0 - bound_s / reached_s) if reached_s > 0 else 0.0, ALONE, False)
