"""Ranks and micro-batches: a decision's copies and replicas numbered as the plan numbers them.

Replica j of a stage with R replicas in each of D copies is replica j // D of copy j % D, and micro-batch m of the plan
is micro-batch m // D of copy m % D. With that numbering every stage is dealt its micro-batches in one plain round:
micro-batch m runs on replica m % (D * R). All ranks of a replica's group do the same actions.
"""

from __future__ import annotations

from collections.abc import Mapping

from planner import schedules
from planner.schedules.types import Action, Pipeline
from planner.space.layout import slice_width, stage_groups
from planner.space.types import Decision


def world_size(decision: Decision) -> int:
    """Ranks that a decision's slices take up, idle ones included."""
    return decision.copies * slice_width(decision)


def rank_groups(decision: Decision) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """For each stage its replicas in the plan's order, each a group of ranks."""
    return tuple(
        tuple(tuple(group) for group in groups.transpose(1, 0, 2).reshape(-1, groups.shape[2]).tolist())
        for groups in stage_groups(decision)
    )


def rank_actions(decision: Decision) -> Mapping[int, tuple[Action, ...]]:
    """What every rank does in one iteration, with the plan's micro-batch numbers.

    Raises:
        UsageError: no schedule has that name.
        PlanError: the replicas do not divide the micro-batches.
    """
    pipeline = Pipeline(tuple(stage.replicas for stage in decision.stages), decision.micro_batches)
    groups = stage_groups(decision)
    order = schedules.get(decision.schedule).order(pipeline)
    found: dict[int, tuple[Action, ...]] = {}
    for (stage, replica), actions in zip(pipeline.workers(), order, strict=True):
        for copy in range(decision.copies):
            own = tuple(
                Action(a.kind, a.stage, a.micro_batch * decision.copies + copy if a.micro_batch >= 0 else -1)
                for a in actions
            )
            found.update(dict.fromkeys(groups[stage][copy, replica].tolist(), own))
    return found
