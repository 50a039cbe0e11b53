"""Check a plan's orders: every action once, on its routed rank, without deadlock, within memory.

What the schedule section claims of the orders (weight versions, staleness, averages, weight policy) must hold.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from planner.errors import PlanError, UsageError
from planner.memory import room_bytes
from planner.plans.findings import PLAN_AGAIN, Fault, Finding, mismatches
from planner.plans.rank_schedule import lay_out, met_in_order, tied_groups
from planner.plans.readings import leaders, malformed, one_copy, schedule_of, work_of
from planner.plans.types import Plan
from planner.schedules import Action, ActionKind, OrderError, WeightPolicy, Work
from planner.schedules.compiling import compile_orders
from planner.schedules.held import lent_bytes, own_bytes
from planner.units import format_bytes

Lanes = Mapping[int, Sequence[Sequence[Action]]]
"""By rank, the actions of each of its lanes."""
Key = tuple[ActionKind, int, int, int]
"""Kind, stage, micro-batch (number of an exchange or update) and part of an action."""

_EXCHANGES = (ActionKind.SYNC, ActionKind.LAUNCH_SYNC)
_COUNTED = (*_EXCHANGES, ActionKind.UPDATE)
_BACKWARD = (ActionKind.BACKWARD, ActionKind.INPUT_GRAD)
_ENDS = (*_BACKWARD, ActionKind.WEIGHT_GRAD)
_WORKER = re.compile(r"worker ([0-9]+)")
_REPETITIONS = 2
"""How often the repeating part of a schedule that never drains is played."""
_REPEATED = (ActionKind.EVICT, ActionKind.LOAD)


def check_schedule(plan: Plan) -> list[Finding]:
    """Findings about the explicit actions; O(actions)."""
    findings = [Finding(Fault.ACTIONS_UNREADABLE, message, "plan again") for message in malformed(plan)]
    if findings:
        return findings
    orders, findings = _read_orders(plan, one_copy(plan))
    if findings:
        return findings
    everyone, orders = orders, _distinct(plan, orders)
    for rank, lanes in orders.items():
        findings += _unknown(plan, rank, lanes)
    if findings:
        return findings
    findings += _replicas(plan, orders)
    for rank, lanes in orders.items():
        findings += _counts(plan, rank, lanes)
        for actions in lanes:
            findings += _order(plan, rank, actions)
    findings = findings or list(_compiled(plan, orders))
    if not findings and plan.schedule.continuous:
        findings += _run_twice(plan)
    return findings or check_held(plan, orders, everyone)


def _read_orders(plan: Plan, checked: range) -> tuple[Lanes, list[Finding]]:
    """The orders of the checked ranks, by rank and lane, and findings about lines that cannot be read."""
    findings: list[Finding] = []
    orders: dict[int, dict[int, Sequence[Action]]] = {}
    for line in plan.schedule.orders:
        actions_by_line: dict[tuple[int, int, int], Sequence[Action]] = {}
        if len(line.first) != len(line.ranks) or line.step < 1 or min(line.first, default=0) < 0:
            message = f"the actions of ranks {list(line.ranks)} do not say each rank's first micro-batch and step"
            findings.append(Finding(Fault.ACTIONS_UNREADABLE, message, rank=line.ranks[0] if line.ranks else -1))
            continue
        for rank, first in zip(line.ranks, line.first, strict=True):
            if rank not in checked and len(checked) < plan.world_size:
                continue
            if line.lane in orders.get(rank, {}):
                findings.append(Finding(Fault.RANK_TWICE, f"rank {rank} has two lists of actions", rank=rank))
            try:
                key = (line.lane, first, rank if ">" in line.actions else -1)
                actions_by_line[key] = actions_by_line.get(key) or line.expand(rank)
                orders.setdefault(rank, {})[line.lane] = actions_by_line[key]
            except PlanError as error:
                message = f"rank {rank}: {error.problem.message}"
                findings.append(Finding(Fault.ACTIONS_UNREADABLE, message, error.problem.hint, rank=rank))
                break
    all_ranks = len(checked) == plan.world_size
    needed = {rank for stage in plan.stages for rank in stage.ranks if all_ranks or rank in checked}
    for rank in sorted(needed - orders.keys()) if not findings else ():
        stage = plan.stage_of(rank)
        findings.append(Finding(Fault.ACTION_MISSING, f"rank {rank} of stage {stage} has no actions", "", stage, rank))
    return {rank: [lanes[at] for at in sorted(lanes)] for rank, lanes in orders.items()}, findings


def _distinct(plan: Plan, orders: Lanes) -> Lanes:
    """The orders without ranks that do the same as the first rank of their group."""
    groups = [group for s in plan.stages for group in s.replicas if len(group) > 1 and group[0] in orders]
    same = {rank for group in groups for rank in group[1:] if orders[rank] == orders[group[0]]}
    return {rank: lanes for rank, lanes in orders.items() if rank not in same}


def _unknown(plan: Plan, rank: int, lanes: Sequence[Sequence[Action]]) -> Iterator[Finding]:
    """Actions of stages or micro-batches that do not exist, or that belong on another rank."""
    last, parts = plan.micro_batches.count * plan.schedule.iterations, plan.schedule.parts
    for action in dict.fromkeys(action for actions in lanes for action in actions):
        at, counted = action.stage, action.kind in _COUNTED
        if at >= len(plan.stages) or (not counted and action.micro_batch >= last) or action.part >= parts:
            message = f"rank {rank} runs {action}, which is no stage, micro-batch or part of the plan"
            yield Finding(Fault.ACTION_UNKNOWN, message, "", at, rank)
        elif action.peer >= plan.world_size:
            message = f"rank {rank} runs {action}, but the world has {plan.world_size} ranks"
            yield Finding(Fault.ACTION_UNKNOWN, message, "", at, rank)
        elif action.kind is ActionKind.EVICT and action.peer == rank:
            hint = "name another rank, or none for the host"
            yield Finding(Fault.ACTION_UNKNOWN, f"rank {rank} runs {action}, which evicts to itself", hint, at, rank)
        elif at not in plan.stages_of(rank):
            place = f"routed to rank {_routed_ranks(plan, action)}" if not counted else "not its own"
            message = f"rank {rank} runs {action}, which is {place}: it is no replica of stage {at}"
            yield Finding(Fault.ACTION_ROUTE, message, "micro-batch m runs on replica m % replicas", at, rank)
        elif not counted and plan.routing == "round_robin" and rank not in plan.ranks_for(at, action.micro_batch):
            message = f"rank {rank} runs {action}, which is routed to rank {_routed_ranks(plan, action)}"
            yield Finding(Fault.ACTION_ROUTE, message, "micro-batch m runs on replica m % replicas", at, rank)


def _routed_ranks(plan: Plan, action: Action) -> str:
    try:
        return ", ".join(map(str, plan.ranks_for(action.stage, action.micro_batch)))
    except PlanError:
        return "none"


def _replicas(plan: Plan, orders: Lanes) -> Iterator[Finding]:
    """In a plan routed by its orders, each micro-batch runs on one replica of each stage."""
    if plan.routing == "round_robin":
        return
    for stage in plan.stages:
        ran: dict[int, set[int]] = {}
        groups = [(replica, group[0]) for replica, group in enumerate(stage.replicas) if group[0] in orders]
        for replica, rank in groups:
            for action in (a for actions in orders[rank] for a in actions):
                if action.kind is ActionKind.FORWARD and action.stage == stage.index:
                    ran.setdefault(action.micro_batch, set()).add(replica)
        step = plan.copies if len(groups) < len(stage.replicas) else 1
        for m in range(0, plan.micro_batches.count * plan.schedule.iterations, step):
            if len(ran.get(m, ())) != 1:
                where = f"on replicas {sorted(ran[m])}" if m in ran else "nowhere"
                fault = Fault.ACTION_TWICE if m in ran else Fault.ACTION_MISSING
                yield Finding(fault, f"micro-batch {m} runs {where} at stage {stage.index}", "", stage.index)


def _key(action: Action) -> Key:
    return action.kind, action.stage, action.micro_batch, action.part


def _text(key: Key) -> str:
    return str(Action(*key))


def _counts(plan: Plan, rank: int, lanes: Sequence[Sequence[Action]]) -> Iterator[Finding]:
    """The rank runs each of its actions exactly once."""
    counts = Counter(_key(action) for actions in lanes for action in actions)
    for key, count in counts.items():
        if count > 1 and key[0] not in _REPEATED:
            yield Finding(Fault.ACTION_TWICE, f"rank {rank} runs {_text(key)} {count} times", "", key[1], rank)
    for stage in plan.stages_of(rank):
        for key in _wanted(plan, rank, stage, counts):
            if key not in counts:
                yield Finding(Fault.ACTION_MISSING, f"rank {rank} never runs {_text(key)}", "", stage, rank)


def _wanted(plan: Plan, rank: int, stage: int, counts: Mapping[Key, int]) -> Iterator[Key]:
    """Actions that a rank must run of a stage: forward, backward (whole or in halves), exchange and update."""
    replicas = plan.stages[stage].replicas
    replica = next(index for index, group in enumerate(replicas) if rank in group)
    parts = range(plan.schedule.parts) if plan.schedule.parts > 1 else (-1,)
    if plan.routing == "round_robin":
        micro_batches: Sequence[int] = range(
            replica, plan.micro_batches.count * plan.schedule.iterations, len(replicas)
        )
    else:
        micro_batches = sorted({m for kind, at, m, _ in counts if kind is ActionKind.FORWARD and at == stage})
    for m in micro_batches:
        for part in parts:
            yield ActionKind.FORWARD, stage, m, part
            if (ActionKind.INPUT_GRAD, stage, m, part) in counts:
                yield ActionKind.WEIGHT_GRAD, stage, m, part
            else:
                yield ActionKind.BACKWARD, stage, m, part
    if plan.schedule.weight_policy == WeightPolicy.SYNC:
        yield ActionKind.SYNC, stage, -1, -1
        yield ActionKind.UPDATE, stage, -1, -1
        return
    kinds = {kind for kind, at, *_ in counts if at == stage}
    if ActionKind.UPDATE not in kinds:
        yield ActionKind.UPDATE, stage, 0, -1
    if len(replicas) > 1 and not kinds & set(_EXCHANGES):
        yield ActionKind.SYNC, stage, 0, -1


def _order(plan: Plan, rank: int, actions: Sequence[Action]) -> Iterator[Finding]:
    """Backward after forward, weight gradients after input gradients, synchronisation after both, update last."""
    position = {_key(action): index for index, action in enumerate(actions)}
    ends = {a.stage: _key(a) for a in actions if a.kind in _ENDS}
    drains = plan.schedule.weight_policy == WeightPolicy.SYNC
    for key, index in position.items():
        kind, stage, number, part = key
        before: Key | None = None
        if kind in _BACKWARD:
            before = ActionKind.FORWARD, stage, number, part
        elif kind is ActionKind.WEIGHT_GRAD:
            before = ActionKind.INPUT_GRAD, stage, number, part
        elif kind in _EXCHANGES and drains:
            before = ends.get(stage)
        elif kind is ActionKind.UPDATE and drains:
            before = ActionKind.SYNC, stage, number, part
        if before is not None and position.get(before, -1) > index:
            message = f"rank {rank} runs {_text(key)} before {_text(before)}"
            yield Finding(Fault.ACTION_ORDER, message, "put it after", stage, rank)


def _compiled(plan: Plan, orders: Lanes) -> Iterator[Finding]:
    """Findings of compiling the orders: deadlocks, weight versions, parts, sends, evictions, limits in flight.

    The orders of the first rank of each group are compiled, then those of ranks with orders of their own.
    """
    leading, _ = leaders(plan)
    groups = {group[0]: group for stage in plan.stages for group in stage.replicas}
    for place in range(max(map(len, groups.values()))):
        ranks = [_at_place(groups[rank], place, orders) for rank in leading]
        if place == 0 or ranks != leading:
            yield from _blocked(plan, ranks)


def _at_place(group: Sequence[int], place: int, orders: Lanes) -> int:
    """The rank at a place of a group where it has orders of its own, else the group's first rank."""
    return group[place] if place < len(group) and group[place] in orders else group[0]


def _blocked(plan: Plan, ranks: Sequence[int]) -> Iterator[Finding]:
    """Findings about why the orders of the given ranks, one of each replica, cannot run."""
    work = _with_shared_exchanges(work_of(plan, ranks), tied_groups(range(len(plan.stages)), plan.shared_parameters))
    try:
        compile_orders(work)
    except OrderError as error:
        rank, message = ranks[work.lane_workers[error.lane]], error.problem.message
        stage = work.lanes[error.lane][error.index].stage
        if "deadlock" in message:
            readable = _WORKER.sub(lambda found: f"rank {ranks[int(found[1])]}", message)
            yield Finding(Fault.DEADLOCK, readable, "reorder their actions", stage, rank)
        else:
            fault = Fault.WEIGHT_VERSION if "version" in message else Fault.ACTION_ORDER
            yield Finding(fault, f"rank {rank}: {message}", error.problem.hint, stage, rank)
    except PlanError as error:
        yield Finding(Fault.ACTION_ORDER, error.problem.message, error.problem.hint)


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
                action = action._replace(stage=group[action.stage])
                if (worker, action) in exchanged:
                    continue
                exchanged.add((worker, action))
            lanes[-1].append(action)
    return replace(work, lanes=tuple(map(tuple, lanes)))


def _run_twice(plan: Plan) -> Iterator[Finding]:
    """The repeating part of a schedule that never drains runs when it is repeated."""
    ranks, copies = leaders(plan)
    try:
        compile_orders(work_of(plan, ranks, _REPETITIONS, copies))
    except PlanError as error:
        message = f"what goes on for ever does not run twice: {error.problem.message}"
        yield Finding(Fault.ACTION_ORDER, message, error.problem.hint)


def check_claims(plan: Plan) -> Iterator[Finding]:
    """World size, routing and schedule section are those that the schedule gives for the plan's configuration.

    A schedule of the user's own is taken from the orders and laid out on ranks like any other. O(actions).

    Args:
        plan: a plan whose configuration agrees with the rest of it, and whose orders run.
    """
    user_orders = plan.schedule.given == "orders"
    try:
        rank_schedule = lay_out(plan.configuration, schedule=schedule_of(plan))
    except (PlanError, UsageError) as error:
        fault, message = Fault.SCHEDULE_CLAIM if user_orders else Fault.CONFIGURATION, error.problem.message
        yield Finding(fault, message if user_orders else f"configuration: {message}", error.problem.hint)
        return
    for at, groups in enumerate(
        rank_schedule.groups if not user_orders else ()
    ):  # orders of one's own may put a stage elsewhere
        misplaced = sorted(set(groups).symmetric_difference(plan.stages[at].replicas))
        if misplaced:
            listed = ", ".join(f"{group[0]}-{group[-1]}" for group in misplaced[:4])
            message = f"stages[{at}].replicas is not where configuration puts the stage: ranks {listed} are in one only"
            yield Finding(Fault.CONFIGURATION, message, PLAN_AGAIN, at)
    merged = met_in_order(rank_schedule.section.orders, tied_groups(range(len(plan.stages)), plan.shared_parameters))
    section = replace(rank_schedule.section, orders=merged, given=plan.schedule.given)
    claims = {"world_size": rank_schedule.world_size, "routing": rank_schedule.routing, "schedule": section}
    yield from mismatches(plan, ((Fault.SCHEDULE_CLAIM, (what,), value) for what, value in claims.items()))


def check_held(plan: Plan, orders: Lanes, lenders: Lanes) -> list[Finding]:
    """A finding for each rank that exceeds its device's memory, at the first action where it does; O(actions).

    Memory is counted in the order of one lane, without a clock. What other ranks evict to a rank counts all the time,
    since the orders do not say when it leaves. Of a rank with several lanes only resident state is counted.

    Args:
        plan: the plan.
        orders: orders of the checked ranks.
        lenders: orders of all ranks that may evict to one of these.
    """
    units = {stage.index: plan.predictions.stages[stage.index].unit_bytes for stage in plan.stages}
    lent = lent_bytes((lane for lanes in lenders.values() for lane in lanes), units)
    findings = []
    for rank, lanes in orders.items():
        stages = plan.stages_of(rank)
        if not stages:
            continue
        terms = [plan.predictions.stages[stage] for stage in stages]
        resting = sum(_resting(plan, stage) for stage in stages) + round(lent.get(rank, 0))
        resting += max(t.memory.reserve_bytes for t in terms)
        resting += max(t.memory.workspace_bytes for t in terms)
        capacity = min(t.capacity_bytes for t in terms)
        free_bytes = room_bytes(capacity) - resting
        at, held = -1 if free_bytes >= 0 else 0, 0.0
        if len(lanes) == 1 and free_bytes >= 0:
            held, at = own_bytes(lanes[0], units, free_bytes)
        if at >= 0:
            message = (
                f"rank {rank} holds {format_bytes(resting + held)} of {format_bytes(capacity)} when {lanes[0][at]} runs"
            )
            if rank in lent:
                message += f", {format_bytes(lent[rank])} of it evicted from other ranks"
            hint = "keep fewer micro-batches, recompute, or cut the model into more stages"
            findings.append(Finding(Fault.MEMORY, message, hint, lanes[0][at].stage, rank))
    return findings


def _resting(plan: Plan, stage: int) -> int:
    """Bytes of weights, gradients and optimizer state of a stage's device."""
    memory = plan.predictions.stages[stage].memory
    return memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
