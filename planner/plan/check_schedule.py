"""Every action once on its routed rank, in an order that runs to the end."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from planner.errors import PlanError
from planner.plan.findings import Fault, Finding
from planner.plan.play import play
from planner.plan.types import Plan
from planner.schedules.types import Action, ActionKind

_ONCE = (ActionKind.SYNC, ActionKind.UPDATE)
_BACKWARD = (ActionKind.BACKWARD, ActionKind.INPUT_GRAD)


def check_schedule(plan: Plan) -> list[Finding]:
    """Findings about the explicit actions; O(actions)."""
    orders, found = _read_orders(plan)
    if found:
        return found
    for rank, actions in orders.items():
        found += _unknown(plan, rank, actions)
    if found:
        return found
    for rank, actions in orders.items():
        found += _counts(plan, rank, actions)
        found += _order(rank, actions)
    return found or play(plan, orders)


def _read_orders(plan: Plan) -> tuple[dict[int, tuple[Action, ...]], list[Finding]]:
    found: list[Finding] = []
    orders: dict[int, tuple[Action, ...]] = {}
    for line in plan.schedule.orders:
        if len(line.first) != len(line.ranks) or line.step < 1 or min(line.first, default=0) < 0:
            message = f"the actions of ranks {list(line.ranks)} do not say each rank's first micro-batch and step"
            found.append(Finding(Fault.ACTIONS_UNREADABLE, message, rank=line.ranks[0] if line.ranks else -1))
            continue
        for rank in line.ranks:
            if rank in orders:
                found.append(Finding(Fault.RANK_TWICE, f"rank {rank} has two lists of actions", rank=rank))
            try:
                orders[rank] = line.expand(rank)
            except PlanError as error:
                message = f"rank {rank}: {error.problem.message}"
                found.append(Finding(Fault.ACTIONS_UNREADABLE, message, error.problem.hint, rank=rank))
                break
    needed = {rank for stage in plan.stages for rank in stage.ranks}
    for rank in sorted(needed - orders.keys()) if not found else ():
        stage = plan.stage_of(rank)
        found.append(Finding(Fault.ACTION_MISSING, f"rank {rank} of stage {stage} has no actions", "", stage, rank))
    return orders, found


def _unknown(plan: Plan, rank: int, actions: Sequence[Action]) -> Iterator[Finding]:
    """Actions of stages or micro-batches that do not exist, or that belong on another rank."""
    for action in dict.fromkeys(actions):
        at = action.stage
        if at >= len(plan.stages) or action.micro_batch >= plan.micro_batches.count:
            message = f"rank {rank} runs {action}, which is no stage or micro-batch of the plan"
            yield Finding(Fault.ACTION_UNKNOWN, message, "", at, rank)
        elif action.kind in _ONCE:
            if at not in plan.stages_of(rank):
                message = f"rank {rank} runs {action} but is no replica of stage {at}"
                yield Finding(Fault.ACTION_ROUTE, message, "", at, rank)
        elif rank not in plan.ranks_for(at, action.micro_batch):
            right = list(plan.ranks_for(at, action.micro_batch))
            message = f"rank {rank} runs {action}, which is routed to rank {', '.join(map(str, right))}"
            yield Finding(Fault.ACTION_ROUTE, message, "micro-batch m runs on replica m % replicas", at, rank)


def _counts(plan: Plan, rank: int, actions: Sequence[Action]) -> Iterator[Finding]:
    """Each of the rank's actions exactly once."""
    counts = Counter(actions)
    for action, count in counts.items():
        if count > 1:
            yield Finding(Fault.ACTION_TWICE, f"rank {rank} runs {action} {count} times", "", action.stage, rank)
    for stage in plan.stages_of(rank):
        replicas = plan.stages[stage].replicas
        own = next(index for index, group in enumerate(replicas) if rank in group)
        split = any(action.kind is ActionKind.INPUT_GRAD and action.stage == stage for action in counts)
        halves = (ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD) if split else (ActionKind.BACKWARD,)
        wanted = itertools.chain(
            (
                Action(kind, stage, m)
                for m in range(own, plan.micro_batches.count, len(replicas))
                for kind in (ActionKind.FORWARD, *halves)
            ),
            (Action(kind, stage) for kind in _ONCE),
        )
        for action in wanted:
            if action not in counts:
                yield Finding(Fault.ACTION_MISSING, f"rank {rank} never runs {action}", "", stage, rank)


def _order(rank: int, actions: Sequence[Action]) -> Iterator[Finding]:
    """Backward after forward, weight gradients after input gradients, synchronisation after both, update last."""
    place = {action: index for index, action in enumerate(actions)}
    ends = _last_backwards(actions)
    for action, index in place.items():
        before: Action | None = None
        if action.kind in _BACKWARD:
            before = Action(ActionKind.FORWARD, action.stage, action.micro_batch)
        elif action.kind is ActionKind.WEIGHT_GRAD:
            before = Action(ActionKind.INPUT_GRAD, action.stage, action.micro_batch)
        elif action.kind is ActionKind.SYNC:
            before = ends.get(action.stage)
        elif action.kind is ActionKind.UPDATE:
            before = Action(ActionKind.SYNC, action.stage)
        if before is not None and place.get(before, -1) > index:
            message = f"rank {rank} runs {action} before {before}"
            yield Finding(Fault.ACTION_ORDER, message, "put it after", action.stage, rank)


def _last_backwards(actions: Sequence[Action]) -> Mapping[int, Action]:
    return {a.stage: a for a in actions if a.kind in (*_BACKWARD, ActionKind.WEIGHT_GRAD)}
