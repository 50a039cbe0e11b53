"""A plan's step by worker: seconds by part and memory by kind of a device, all its stages (chunks) together."""

from __future__ import annotations

from collections.abc import Sequence

from planner.plans.readings import schedule_of
from planner.plans.types import Plan
from planner.space.steps import (
    NOTHING_EXPOSED,
    ExposedSeconds,
    MemoryBytes,
    StageTerms,
    StepView,
    step_view,
)


def shares_in_words(plan: Plan, step: StepView) -> str:
    """`bubble 2.1%, exposed communication 3.4%`: the bubble of a pipeline alone, and what several devices expose."""
    words = [f"bubble {step.bubble:.1%}"] if len(plan.stages) > 1 else []
    words += [f"exposed communication {step.exposed:.1%}"] if step.devices > 1 else []
    return ", ".join(words)


def chunked(step: StepView) -> bool:
    """True if a device holds several stages (chunks), so that a stage's figures are not a device's."""
    return any(len(worker.stages) > 1 for worker in step.workers)


def stages_in_words(stages: Sequence[int]) -> str:
    """`0, 2, 4, 6`; long lists without their middle."""
    texts = [str(stage) for stage in stages]
    return ", ".join(texts if len(texts) <= MOST_CHUNKS else [*texts[:3], "...", texts[-1]])


_SAME = (
    "forward_s", "backward_s", "recompute_s", "receive_s", "return_s", "sync_s", "exposed_sync_s", "tied_sync_s",
    "update_s", "in_flight", "capacity_bytes", "unit_bytes", "host_bytes", "move_s", "weight_grad_s",
)  # fmt: skip
"""Fields with the same name and meaning in `StageTerms` and `StagePrediction`."""


MOST_CHUNKS = 6
"""Chunks of a device that are named; of more, the first and the last."""


def plan_step(plan: Plan, iteration_s: float | None = None) -> StepView:
    """The step of each worker of a plan.

    Args:
        plan: the plan.
        iteration_s: seconds of the step; by default those that the plan states (simulated where they are known).

    Raises:
        UsageError: no schedule has the plan's name.
        PlanError: the orders of a schedule of the user's own cannot run.
    """
    stages = [_terms(plan, index) for index in range(len(plan.stages))]
    seconds = plan.predictions.reached_s if iteration_s is None else iteration_s
    return step_view(plan.configuration, schedule_of(plan), stages, seconds)


def _terms(plan: Plan, index: int) -> StageTerms:
    """A stage's predictions as terms of the judge."""
    said = plan.predictions.stages[index]
    turning, waiting = said.halves_bytes or (said.unit_bytes, said.unit_bytes)
    memory = MemoryBytes(**{kind: float(size) for kind, size in said.memory.by_kind().items()})
    exposed = exposed_seconds(plan, index)
    figures = {name: getattr(said, name) for name in _SAME}
    return StageTerms(**figures, memory=memory, turning_bytes=turning, waiting_bytes=waiting, exposed=exposed)


def exposed_seconds(plan: Plan, index: int) -> ExposedSeconds:
    """What a stage exposes; of files of before minor version 8, communication inside a group by its collectives."""
    said = plan.predictions.stages[index]
    if said.exposed != NOTHING_EXPOSED or not plan.sharding_of(index):
        return said.exposed
    both_s, forward_s, recompute_s = plan.inside_s(index)
    forward_s = min(forward_s, both_s)
    return ExposedSeconds(forward_s, both_s - forward_s, min(recompute_s, forward_s), plan.summed_s(index))
