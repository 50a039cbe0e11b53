"""Check a plan's orders: those of its schedule, able to run, and within the memory of every rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from planner.errors import PlanError
from planner.memory import room_bytes
from planner.plans.findings import PLAN_AGAIN, Fault, Finding, differences
from planner.plans.rank_schedule import tied_groups
from planner.plans.readings import leaders, malformed, work_of
from planner.plans.records import ScheduleSection
from planner.plans.types import Plan
from planner.schedules import Action, ActionKind, OrderError, Work
from planner.schedules.compiling import compile_orders
from planner.schedules.custom_orders import check_numbers
from planner.schedules.held import lent_bytes, own_bytes
from planner.units import format_bytes

_EXCHANGES = (ActionKind.SYNC, ActionKind.LAUNCH_SYNC)
_WORKER = re.compile(r"worker ([0-9]+)")


def check_orders(plan: Plan, right: ScheduleSection) -> list[Finding]:
    """Findings about the schedule section; O(actions).

    Orders that are not the schedule's are compiled for a reason that says more: a cycle of waits, an action that lacks
    another.

    Args:
        plan: a plan whose stages are those of its configuration.
        right: the schedule laid out on ranks.
    """
    said, path = plan.schedule, ("schedule",)
    found = [
        d.finding(plan, Fault.ORDERS) for d in differences(replace(said, orders=()), replace(right, orders=()), path)
    ]
    lines, right_lines = _lines(said), _lines(right)
    for key in sorted(lines.keys() | right_lines.keys()):
        line, right_line = lines.get(key, ...), right_lines.get(key, ...)
        if line != right_line:
            rank, place = key[0], (*path, "orders", f"rank {key[0]}")
            own = (d.finding(plan, Fault.ORDERS) for d in differences(line, right_line, place))
            found += [replace(finding, rank=rank, stage=plan.stage_of(rank)) for finding in own]
    why = list(_stuck(plan)) if found or said.given == "orders" else []
    return [*found, *why] or check_held(plan)


def _lines(section: ScheduleSection) -> dict[tuple[int, int], dict[str, Any]]:
    """The line of actions of each rank and lane; a second one of the same lane stands behind all lanes."""
    lines: dict[tuple[int, int], dict[str, Any]] = {}
    for number, order in enumerate(section.orders):
        for rank, first in zip(order.ranks, order.first, strict=True):
            lane = order.lane if (rank, order.lane) not in lines else len(section.orders) + number
            lines[rank, lane] = {"first": first, "step": order.step, "actions": order.actions}
    return lines


def _stuck(plan: Plan) -> Iterator[Finding]:
    """A finding about why the orders of one copy cannot run; none if they can."""
    ranks, copies = leaders(plan)
    try:
        for message in malformed(plan):
            yield Finding(Fault.ORDERS, message)
            return
        shared = tied_groups(range(len(plan.stages)), plan.shared_parameters)
        work = work_of(plan, ranks, copies=copies)
        check_numbers(work)
        work = _with_shared_exchanges(work, shared)
        compile_orders(work)
    except OrderError as error:
        if error.lane >= len(work.lanes):
            yield Finding(Fault.ORDERS, error.problem.message, error.problem.hint)
            return
        rank, message = ranks[work.lane_workers[error.lane]], error.problem.message
        lane = work.lanes[error.lane]
        stage = lane[error.index].stage if error.index < len(lane) else plan.stage_of(rank)
        if "deadlock" in message:
            message = _WORKER.sub(lambda found: f"rank {ranks[int(found[1])]}", message)
        else:
            message = f"rank {rank}: {message}"
        yield Finding(Fault.ORDERS, message, error.problem.hint, stage, rank)
    except PlanError as error:
        yield Finding(Fault.ORDERS, error.problem.message, error.problem.hint or PLAN_AGAIN)


def _with_shared_exchanges(work: Work, group: Mapping[int, int]) -> Work:
    """The orders with one exchange for stages that sum gradients of the same parameters, under the lowest stage."""
    if all(stage == lowest for stage, lowest in group.items()):
        return work
    exchanged: set[tuple[int, Action]] = set()
    lanes: list[list[Action]] = []
    for worker, lane in zip(work.lane_workers, work.lanes, strict=True):
        lanes.append([])
        for action in lane:
            if action.kind in _EXCHANGES:
                action = action._replace(stage=group.get(action.stage, action.stage))
                if (worker, action) in exchanged:
                    continue
                exchanged.add((worker, action))
            lanes[-1].append(action)
    return replace(work, lanes=tuple(map(tuple, lanes)))


def check_held(plan: Plan) -> list[Finding]:
    """A finding for each rank of a copy that exceeds its device's memory, at the first action where it does.

    Memory is counted in the order of one lane, without a clock. What other ranks evict to a rank counts all the time,
    since the orders do not say when it leaves. Of a rank with several lanes only resident state is counted. O(actions).
    """
    ranks, _ = leaders(plan)
    units = {stage.index: plan.predictions.stages[stage.index].unit_bytes for stage in plan.stages}
    orders = {rank: plan.lanes(rank) for rank in ranks}
    lent = lent_bytes((lane for lanes in orders.values() for lane in lanes), units)
    findings = []
    for rank, lanes in orders.items():
        terms = [plan.predictions.stages[stage] for stage in plan.stages_of(rank)]
        memory = [t.memory for t in terms]
        resting = sum(m.weights_bytes + m.gradients_bytes + m.optimizer_bytes for m in memory)
        resting += max(m.reserve_bytes for m in memory) + max(m.workspace_bytes for m in memory)
        resting += round(lent.get(rank, 0))
        capacity = min(t.capacity_bytes for t in terms)
        free_bytes = room_bytes(capacity) - resting
        at, held = -1 if free_bytes >= 0 else 0, 0.0
        if len(lanes) == 1 and free_bytes >= 0:
            held, at = own_bytes(lanes[0], units, free_bytes)
        if at >= 0:
            total, action = format_bytes(resting + held), lanes[0][at]
            message = f"rank {rank} holds {total} of {format_bytes(capacity)} when {action} runs"
            if rank in lent:
                message += f", {format_bytes(lent[rank])} of it evicted from other ranks"
            hint = "keep fewer micro-batches, recompute, or cut the model into more stages"
            findings.append(Finding(Fault.MEMORY, message, hint, action.stage, rank))
    return findings
