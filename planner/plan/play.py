"""Runs a plan's actions without a clock: does every rank come to its end, or do some wait for each other for ever?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.plan.findings import Fault, Finding
from planner.plan.types import Plan
from planner.schedules.types import Action, ActionKind

_BACKWARD = (ActionKind.BACKWARD, ActionKind.INPUT_GRAD)
_SHOWN = 8

Step = tuple[int, Action]


def play(plan: Plan, orders: Mapping[int, Sequence[Action]]) -> list[Finding]:
    """The cycle of waiting ranks, if there is one. Sends never wait; O(actions * boundaries of a stage)."""
    waits = _Waits(plan, orders)
    position = dict.fromkeys(orders, 0)
    done: set[Step] = set()
    waiting: dict[Step, list[int]] = {}
    ready = sorted(orders, reverse=True)
    while ready:
        rank = ready.pop()
        actions = orders[rank]
        while position[rank] < len(actions):
            action = actions[position[rank]]
            if action.kind is ActionKind.SYNC:
                done.add((rank, action))
                missing = waits.barrier(rank, action)
            else:
                missing = next((step for step in waits.of(action) if step not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            done.add((rank, action))
            position[rank] += 1
            ready += waiting.pop((rank, action), ())
            if action.kind is ActionKind.SYNC:
                ready += waiting.pop(waits.barrier_key(action.stage), ())
    stuck = [rank for rank in orders if position[rank] < len(orders[rank])]
    return [_cycle(waits, orders, position, done, stuck[0])] if stuck else []


class _Waits:
    """For each action of a rank, the actions of other ranks that must be over (or, for SYNC, reached)."""

    def __init__(self, plan: Plan, orders: Mapping[int, Sequence[Action]]) -> None:
        self._plan = plan
        self._sources: dict[int, set[int]] = {}
        self._sinks: dict[int, set[int]] = {}
        for boundary in plan.boundaries:
            for to in boundary.to_stages:
                self._sources.setdefault(to, set()).add(boundary.from_stage)
                if boundary.gradient:
                    self._sinks.setdefault(boundary.from_stage, set()).add(to)
        self._group = _tied_groups(plan)
        syncs = [(rank, a) for rank, actions in orders.items() for a in actions if a.kind is ActionKind.SYNC]
        self._absent: dict[int, set[Step]] = {}
        for rank, action in syncs:
            self._absent.setdefault(self._group[action.stage], set()).add((rank, action))
        self._backward = dict.fromkeys(range(len(plan.stages)), ActionKind.BACKWARD)
        for actions in orders.values():
            self._backward.update({a.stage: a.kind for a in actions if a.kind is ActionKind.INPUT_GRAD})

    def of(self, action: Action) -> list[Step]:
        """Steps of neighbouring stages that an action waits for."""
        if action.kind is ActionKind.FORWARD:
            sources = sorted(self._sources.get(action.stage, ()))
            return [step for stage in sources for step in self._routed(ActionKind.FORWARD, stage, action)]
        if action.kind in _BACKWARD:
            sinks = sorted(self._sinks.get(action.stage, ()))
            return [step for stage in sinks for step in self._routed(self._backward[stage], stage, action)]
        return []

    def _routed(self, kind: ActionKind, stage: int, action: Action) -> list[Step]:
        ranks = self._plan.ranks_for(stage, action.micro_batch)
        return [(rank, Action(kind, stage, action.micro_batch)) for rank in ranks]

    def barrier(self, rank: int, action: Action) -> Step | None:
        """Note that a rank has come to its SYNC; None when all of its group have, else what to wait for."""
        absent = self._absent[self._group[action.stage]]
        absent.discard((rank, action))
        return self.barrier_key(action.stage) if absent else None

    def barrier_key(self, stage: int) -> Step:
        """What the ranks wait for that have come to a SYNC."""
        return -1, Action(ActionKind.SYNC, self._group[stage])

    def awaited(self, action: Action, done: set[Step]) -> Step:
        """A step that keeps an action from running."""
        if action.kind is ActionKind.SYNC:
            return min(self._absent[self._group[action.stage]], key=lambda step: (step[0], step[1].stage))
        return next(step for step in self.of(action) if step not in done)


def _tied_groups(plan: Plan) -> dict[int, int]:
    """For each stage the lowest of those that synchronise with it, because they share parameters."""
    group = {stage.index: stage.index for stage in plan.stages}
    for shared in plan.shared_parameters:
        joined = {group[stage] for stage in shared.stages}
        group = {stage: min(joined) if home in joined else home for stage, home in group.items()}
    return group


def _cycle(
    waits: _Waits,
    orders: Mapping[int, Sequence[Action]],
    position: Mapping[int, int],
    done: set[Step],
    rank: int,
) -> Finding:
    """Follow who waits for whom from a stuck rank until a rank comes back."""
    chain: list[str] = []
    seen: dict[int, int] = {}
    while rank not in seen and position[rank] < len(orders[rank]):
        seen[rank] = len(chain)
        action = orders[rank][position[rank]]
        other, awaited = waits.awaited(action, done)
        chain.append(f"rank {rank} at {action} waits for {awaited} of rank {other}")
        rank = other
    cycle = chain[seen.get(rank, 0) :]
    shown = "; ".join(cycle[:_SHOWN]) + (f"; and {len(cycle) - _SHOWN} more" if len(cycle) > _SHOWN else "")
    action = orders[rank][min(position[rank], len(orders[rank]) - 1)]
    return Finding(Fault.DEADLOCK, f"ranks wait for each other: {shown}", "reorder their actions", action.stage, rank)
