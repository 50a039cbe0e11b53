"""What each rank holds along its order: weights of its stages and versions, activations of what is under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.memory import room_bytes
from planner.plans.findings import Fault, Finding
from planner.plans.types import Plan
from planner.schedules.held import lent_bytes, own_bytes
from planner.schedules.types import Action
from planner.units import format_bytes

Orders = Mapping[int, Sequence[Sequence[Action]]]
"""By rank, the actions of each of its lanes."""


def check_held(plan: Plan, orders: Orders, lenders: Orders) -> list[Finding]:
    """The first action of each rank at which it holds more than its device has; O(actions).

    Counted in the order of one lane, without a clock: what other ranks evict to this one is counted as if it were there
    all the time, as nothing in the orders says when it is not. Of a rank with several lanes only what rests is counted.

    Args:
        plan: the plan.
        orders: of the ranks that are looked at.
        lenders: of all ranks that may evict to one of these.
    """
    units = {stage.index: plan.predictions.stages[stage.index].unit_bytes for stage in plan.stages}
    lent = lent_bytes((lane for lanes in lenders.values() for lane in lanes), units)
    found = []
    for rank, lanes in orders.items():
        stages = plan.stages_of(rank)
        if not stages:
            continue
        terms = [plan.predictions.stages[stage] for stage in stages]
        resting = sum(_resting(plan, stage) for stage in stages) + round(lent.get(rank, 0))
        resting += max(t.memory.reserve_bytes for t in terms)
        resting += max(t.memory.workspace_bytes for t in terms)
        capacity = min(t.capacity_bytes for t in terms)
        room = room_bytes(capacity) - resting
        at, held = -1 if room >= 0 else 0, 0.0
        if len(lanes) == 1 and room >= 0:
            held, at = own_bytes(lanes[0], units, room)
        if at >= 0:
            message = (
                f"rank {rank} holds {format_bytes(resting + held)} of {format_bytes(capacity)} when {lanes[0][at]} runs"
            )
            if rank in lent:
                message += f", {format_bytes(lent[rank])} of it evicted from other ranks"
            hint = "keep fewer micro-batches, recompute, or cut the model into more stages"
            found.append(Finding(Fault.MEMORY, message, hint, lanes[0][at].stage, rank))
    return found


def _resting(plan: Plan, stage: int) -> int:
    memory = plan.predictions.stages[stage].memory
    return memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
