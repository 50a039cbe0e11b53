"""What each rank holds along its order: weights of its stages and versions, activations of what is under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.plan.findings import Fault, Finding
from planner.plan.types import Plan
from planner.schedules.types import Action, ActionKind
from planner.units import format_bytes

_TOLERANCE = 1e-9
_TAKES = (ActionKind.FORWARD, ActionKind.LOAD)
_GIVES = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD, ActionKind.EVICT)


def check_held(plan: Plan, orders: Mapping[int, Sequence[Sequence[Action]]]) -> list[Finding]:
    """The first action of each rank at which it holds more than its device has; O(actions).

    Counted in the order of one lane, without a clock: what other ranks have evicted to this one is left to the
    simulation, and of a rank with several lanes only what rests is counted.
    """
    found = []
    for rank, lanes in orders.items():
        stages = plan.stages_of(rank)
        if not stages:
            continue
        terms = {stage: plan.predictions.stages[stage] for stage in stages}
        resting = sum(_resting(plan, stage) for stage in stages)
        resting += max(t.memory.reserve_bytes for t in terms.values())
        resting += max(t.memory.workspace_bytes for t in terms.values())
        room = min(t.capacity_bytes for t in terms.values()) * (1 + _TOLERANCE) - resting
        at = -1 if room >= 0 else 0
        held = 0
        if len(lanes) == 1 and room >= 0:
            units = {stage: terms[stage].unit_bytes for stage in stages}
            at, held = _overfull(lanes[0], units, room)
        if at >= 0:
            capacity = min(t.capacity_bytes for t in terms.values())
            message = (
                f"rank {rank} holds {format_bytes(resting + held)} of {format_bytes(capacity)} when {lanes[0][at]} runs"
            )
            hint = "keep fewer micro-batches, recompute, or cut the model into more stages"
            found.append(Finding(Fault.MEMORY, message, hint, lanes[0][at].stage, rank))
    return found


def _resting(plan: Plan, stage: int) -> int:
    memory = plan.predictions.stages[stage].memory
    return memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes


def _overfull(actions: Sequence[Action], unit_bytes: Mapping[int, int], room: float) -> tuple[int, int]:
    """Place of the first action that needs more than there is room for, and what is then held; -1 when none does."""
    held = 0
    for at, action in enumerate(actions):
        if action.kind in _TAKES:
            held += unit_bytes[action.stage]
            if held > room:
                return at, held
        elif action.kind in _GIVES:
            held -= unit_bytes[action.stage]
    return -1, 0
