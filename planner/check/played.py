"""Does a plan take what it says when its own orders are played with its own times, and keep what it says?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from planner.errors import PlanError
from planner.plans import Fault, Finding, Plan
from planner.play.memory import peak_in_flight
from planner.simulate import Timeline, closed_form_s, simulate
from planner.simulate.timeline import times_of
from planner.units import format_seconds

TOLERANCE = 1e-6
_AGAIN = "plan again instead of editing the file"


def check_played(plan: Plan, *, closed: bool) -> list[Finding]:
    """Findings about the plan's times and the micro-batches that its stages keep, played anew; O(actions).

    Args:
        plan: a plan whose orders run.
        closed: the iteration time is the closed form of the search.
    """
    try:
        timeline = simulate(plan)
        times = times_of(plan)
    except PlanError as error:
        return [Finding(Fault.PREDICTIONS, f"cannot be simulated: {error.problem.message}", error.problem.hint)]
    found = list(_simulated(plan, timeline))
    if closed:
        copies = plan.copies
        replicas = [len(stage.replicas) // copies for stage in plan.stages]
        expected_s = closed_form_s(replicas, plan.micro_batches.count // copies, times)
        found += _compared("iteration_s", plan.predictions.iteration_s, expected_s, "the closed form of its terms")
    elif plan.schedule.given:
        found += _compared("iteration_s", plan.predictions.iteration_s, timeline.step_s, "its simulation")
    return [*found, *_kept(plan, timeline)]


def _simulated(plan: Plan, timeline: Timeline) -> Iterator[Finding]:
    said = plan.predictions.simulated_iteration_s
    if said is not None:
        yield from _compared("simulated_iteration_s", said, timeline.step_s, "the simulation of its own terms")


def _compared(what: str, said_s: float, right_s: float, by: str) -> Iterator[Finding]:
    if not math.isclose(said_s, right_s, rel_tol=TOLERANCE):
        message = f"{what} is {format_seconds(said_s)} in the file, {format_seconds(right_s)} by {by}"
        yield Finding(Fault.PREDICTIONS, message, _AGAIN)


def _kept(plan: Plan, timeline: Timeline) -> Iterator[Finding]:
    """The most micro-batches of a stage that a rank keeps along its order, or may keep, are what the plan says."""
    peaks = plan.schedule.limits or peak_in_flight(timeline.trace.program).max(axis=0).tolist()
    for stage, (terms, peak) in enumerate(zip(plan.predictions.stages, peaks, strict=True)):
        if terms.in_flight != peak:
            message = f"the orders keep {peak} micro-batches of stage {stage}, the plan says {terms.in_flight}"
            yield Finding(Fault.PREDICTIONS, message, _AGAIN, stage)
