"""What the runtime executes of a plan, and what it refuses by name before a process starts."""

from __future__ import annotations

from collections.abc import Mapping

from planner.errors import PlanError
from planner.plans import Fault, Plan, Requirement, requirements, validate
from planner.units import plural

EXECUTED: Mapping[Requirement, str] = {
    Requirement.PIPELINE: "as it stands",
    Requirement.REPLICATED_STAGE: "as it stands",
    Requirement.UNEQUAL_REPLICATION: "as it stands",
    Requirement.SKIP_EDGES: "sent straight to the stage that reads it",
    Requirement.MULTI_TENSOR_BOUNDARY: "as it stands",
    Requirement.DUPLICATED_NODES: "as it stands",
    Requirement.TIED_PARAMETERS: "summed once over all ranks that hold it, in the exchange of its stages",
    Requirement.SEPARATE_COPIES: "as it stands",
    Requirement.MID_MODULE_CUT: "as it stands",
    Requirement.RECOMPUTE: "a stage at a time",
    Requirement.ZERO1: "as it stands",
    Requirement.ZERO2: "after every backward where the replicas run the same actions, else once an iteration",
    Requirement.ZERO3: "for every pass where the replicas run the same actions, else once an iteration",
    Requirement.ASYNC_WEIGHTS: "as it stands",
    Requirement.CORRECTIONS: "as it stands; first epochs that are synchronous are trained under another plan",
    Requirement.EVICTIONS: "activations stay on their rank: the same values, more memory",
    Requirement.MULTI_STAGE_RANK: "as it stands",
    Requirement.SPLIT_BACKWARD: "each half runs the shared part of the backward",
    Requirement.IDLE_RANKS: "as it stands",
    Requirement.TENSOR_PARALLEL: "as it stands",
    Requirement.SEQUENCE_PARALLEL: "as it stands",
    Requirement.EXPERT_PARALLEL: "operators that choose experts are computed whole",
    Requirement.VOCABULARY_PARALLEL: "as it stands",
    Requirement.RING_ATTENTION: "keys and values are gathered, not passed around",
    Requirement.HALO_EXCHANGE: "the whole tensor is gathered, not its borders",
    Requirement.SHARED_STATISTICS: "the whole tensor is gathered, not its statistics",
    Requirement.INTERLEAVED_SPLIT: "as it stands",
    Requirement.PADDED_SPLIT: "pieces are uneven, without padding",
    Requirement.ORDER_ROUTING: "as it stands",
    Requirement.SUB_SEQUENCES: "as it stands; the loss of a micro-batch is taken in its last part",
    Requirement.LANES: "merged in an order in which each action has what it needs",
    Requirement.STREAMING: "a stage passes on whole results",
    Requirement.PAIRED_ACTIONS: "one after the other",
    Requirement.EXPLICIT_TRANSFERS: "as it stands",
    Requirement.EXPLICIT_RECOMPUTE: "as it stands",
    Requirement.EARLY_EXCHANGE: "as it stands",
    Requirement.IN_FLIGHT_LIMITS: "as it stands",
    Requirement.PARTIAL_UPDATES: "as it stands",
    Requirement.BOUNDED_STALENESS: "a copy waits for the waves that its order names and has no newer ones",
    Requirement.MIXED_RECOMPUTE: "as it stands",
    Requirement.MODULE_RECOMPUTE: "the modules are kept: the same values, more memory",
    Requirement.EXCHANGE_SCHEME: "as one reduction of all gradients of a stage",
    Requirement.MIXED_SHARDINGS: "as it stands",
    Requirement.CONTEXT_PARALLEL: "as it stands",
    Requirement.BATCH_PARALLEL: "as it stands",
    Requirement.FREE_LAYOUTS: "as it stands",
    Requirement.GATHERED_WEIGHTS: "as it stands",
}
"""How each requirement of a plan is executed."""

REFUSED: Mapping[Requirement, str] = {
    Requirement.OFFLOAD: "state is not moved to the host",
}
"""Requirements that are refused, and why."""

_NOT_EXECUTED = frozenset({Fault.DIGEST, Fault.MEMORY, Fault.PREDICTIONS})
"""Kinds of findings about what a plan predicts, and about its text."""


def refusals(plan: Plan) -> tuple[str, ...]:
    """What of a plan the runtime does not execute, each with its reason; () where it executes all of it."""
    reasons = [f"{needed}: {REFUSED[needed]}" for needed in requirements(plan, divided=False) if needed in REFUSED]
    if plan.schedule.parts > 1 and not plan.schedule.causal:
        reasons.append(f"{Requirement.SUB_SEQUENCES}: parts of a micro-batch that are not runs of its sequence")
    if plan.schedule.parts > 1 and plan.shardings:
        reasons.append(f"{Requirement.SUB_SEQUENCES}: parts are not shared by a group of ranks")
    if plan.schedule.clock_distance is not None and any(stage.zero for stage in plan.stages):
        reasons.append(f"{Requirement.BOUNDED_STALENESS}: copies that run ahead of each other share no optimizer state")
    return tuple(reasons)


def require_executable(plan: Plan) -> None:
    """See that a plan's parts agree and that the runtime executes everything in it.

    Predictions and the digest are not looked at: they change nothing in what is executed. O(actions + operators).

    Raises:
        PlanError: they do not, or it does not; the first finding is named and the others counted, or all reasons named.
    """
    wrong = [finding for finding in validate(plan) if finding.fault not in _NOT_EXECUTED]
    if wrong:
        first = min(wrong, key=lambda finding: finding.fault is Fault.REQUIRES)
        more = f", and {plural(len(wrong) - 1, 'further finding')}" if wrong[1:] else ""
        raise PlanError(f"{first.fault}: {first.message}{more}", where="plan", hint="`shardplan check` tells all")
    found = refusals(plan)
    if found:
        raise PlanError(
            f"cannot be run: {'; '.join(found)}", where=f"schedule {plan.schedule.name}",
            hint="plan with another --schedule, such as 1f1b or interleaved",
        )  # fmt: skip
