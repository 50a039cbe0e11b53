"""What a backend must be able to do, read off a plan."""

from __future__ import annotations

from planner.plans.flags import Requirement
from planner.plans.types import Plan
from planner.schedules.types import ActionKind, WeightPolicy


def requirements(plan: Plan, *, divided: bool) -> tuple[Requirement, ...]:
    """Capabilities that a plan needs, in the order of `Requirement`.

    Args:
        plan: the plan; its own `requires` is not looked at.
        divided: whether a layer is divided between stages (only the model knows).
    """
    counts = [len(stage.replicas) for stage in plan.stages]
    sharded = {stage.zero for stage in plan.stages if len(stage.replicas) > 1}
    pairs = [(b.from_stage, to) for b in plan.boundaries for to in b.to_stages]
    holds = {
        Requirement.PIPELINE: len(plan.stages) > 1,
        Requirement.REPLICATED_STAGE: max(counts, default=0) > 1,
        Requirement.UNEQUAL_REPLICATION: len(set(counts)) > 1,
        Requirement.SKIP_EDGES: any(to != source + 1 for source, to in pairs),
        Requirement.MULTI_TENSOR_BOUNDARY: len(set(pairs)) < len(pairs),
        Requirement.DUPLICATED_NODES: any(len(entry.stages) > 1 for entry in plan.duplicated),
        Requirement.TIED_PARAMETERS: any(s.reduction == "sum" for s in plan.shared_parameters),
        Requirement.SEPARATE_COPIES: any(s.reduction == "none" for s in plan.shared_parameters),
        Requirement.MID_MODULE_CUT: divided,
        Requirement.RECOMPUTE: any(stage.recompute for stage in plan.stages),
        Requirement.ZERO1: 1 in sharded,
        Requirement.ZERO2: 2 in sharded,
        Requirement.ZERO3: 3 in sharded,
        Requirement.ASYNC_WEIGHTS: plan.schedule.weight_policy != WeightPolicy.SYNC,
        Requirement.MULTI_STAGE_RANK: any(len(plan.stages_of(rank)) > 1 for s in plan.stages for rank in s.ranks),
        Requirement.SPLIT_BACKWARD: _splits_backward(plan),
        Requirement.IDLE_RANKS: bool(plan.idle_ranks),
        **_inside(plan),
    }
    return tuple(requirement for requirement in Requirement if holds[requirement])


def _splits_backward(plan: Plan) -> bool:
    return any(str(ActionKind.WEIGHT_GRAD) in order.actions for order in plan.schedule.orders)


def _inside(plan: Plan) -> dict[Requirement, bool]:
    """What groups of several ranks need."""
    used = {stage.sharding for stage in plan.stages if stage.sharding}
    shardings = [s for s in plan.shardings if s.name in used]
    entries = [entry for sharding in shardings for entry in sharding.blocks]
    dealt = {holding.what for entry in entries for holding in entry.holdings}
    reasons = {collective.reason for entry in entries for collective in entry.collectives}
    layouts = {text for entry in entries for o in entry.operators for text in (*o.reads, *o.writes)}
    layouts |= {text for entry in entries for p in entry.tensors for text in (p.value, p.gradient, p.optimizer)}
    return {
        Requirement.TENSOR_PARALLEL: any(stage.group_ranks > 1 for stage in plan.stages),
        Requirement.SEQUENCE_PARALLEL: any("sequence" in s.boundaries for s in shardings),
        Requirement.EXPERT_PARALLEL: "experts" in dealt,
        Requirement.VOCABULARY_PARALLEL: "rows" in dealt,
        Requirement.RING_ATTENTION: "ring" in reasons,
        Requirement.HALO_EXCHANGE: "halo" in reasons,
        Requirement.SHARED_STATISTICS: "statistics" in reasons,
        Requirement.INTERLEAVED_SPLIT: any("~" in text for text in layouts),
        Requirement.PADDED_SPLIT: any(s.padded for s in shardings),
    }
