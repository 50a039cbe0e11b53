"""Runs a plan's actions without a clock: does every rank come to its end, or do some wait for each other for ever?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from planner.plans.findings import Fault, Finding
from planner.plans.scheduled import tied_groups
from planner.plans.types import Plan
from planner.schedules.types import Action, ActionKind

_BACKWARD = (ActionKind.BACKWARD, ActionKind.INPUT_GRAD)
_EXCHANGES = (ActionKind.SYNC, ActionKind.LAUNCH_SYNC)
_SHOWN = 8

Lane = tuple[int, int]
"""Rank and number of one of its lists of actions."""
Step = tuple[int, Action]
"""What must be over: an action of a rank, its backward called BACKWARD whole or not."""


def play(plan: Plan, orders: Mapping[int, Sequence[Sequence[Action]]]) -> list[Finding]:
    """The cycle of waiting ranks, if there is one. Sends never wait; O(actions * boundaries of a stage).

    Args:
        plan: the plan.
        orders: lists of actions by rank; ranks that are left out (doing what another of their group does) are not
            waited for.
    """
    found = _Run(plan, orders).to_the_end()
    return [found] if found else []


class _Run:
    """All lanes, how far each has come, and what has been done."""

    def __init__(self, plan: Plan, orders: Mapping[int, Sequence[Sequence[Action]]]) -> None:
        self._lanes = {(rank, at): lane for rank, lanes in orders.items() for at, lane in enumerate(lanes)}
        self._waits = _Waits(plan, orders)
        self._position = dict.fromkeys(self._lanes, 0)
        self._done: set[Step] = set()

    def to_the_end(self) -> Finding | None:
        """Play until nothing moves."""
        waiting: dict[Step, list[Lane]] = {}
        ready = sorted(self._lanes, reverse=True)
        while ready:
            lane = ready.pop()
            actions = self._lanes[lane]
            while self._position[lane] < len(actions):
                group = self._group(lane)
                for action in group:
                    met = self._waits.arrive(lane[0], action) if action.kind in _EXCHANGES else None
                    ready += waiting.pop(met, ()) if met else ()
                missing = self._missing(lane, group)
                if missing is not None:
                    waiting.setdefault(missing, []).append(lane)
                    break
                for action in group:
                    self._done.add((lane[0], _plain(action)))
                    ready += waiting.pop((lane[0], _plain(action)), ())
                self._position[lane] += len(group)
        stuck = [lane for lane, actions in self._lanes.items() if self._position[lane] < len(actions)]
        return self._cycle(stuck[0]) if stuck else None

    def _group(self, lane: Lane) -> Sequence[Action]:
        """The actions that a lane runs next, as one."""
        actions, start = self._lanes[lane], self._position[lane]
        stop = start + 1
        while stop < len(actions) and actions[stop].paired:
            stop += 1
        return actions[start:stop]

    def _missing(self, lane: Lane, group: Sequence[Action]) -> Step | None:
        for action in group:
            for step in self._waits.of(lane[0], action):
                if step not in self._done and not self._waits.met(step):
                    return step
        return None

    def _cycle(self, lane: Lane) -> Finding:
        """Follow who waits for whom from a stuck lane until one comes back."""
        chain: list[str] = []
        seen: dict[Lane, int] = {}
        at = lane
        while at not in seen and self._position[at] < len(self._lanes[at]):
            seen[at] = len(chain)
            group = self._group(at)
            missing = self._missing(at, group)
            if missing is None:
                break
            rank, awaited = self._waits.awaited(missing)
            action = next(a for a in group if missing in self._waits.of(at[0], a))
            chain.append(f"rank {at[0]} at {action} waits for {awaited} of rank {rank}")
            at = self._lane_of(rank, awaited)
        cycle = chain[seen.get(at, 0) :]
        shown = "; ".join(cycle[:_SHOWN]) + (f"; and {len(cycle) - _SHOWN} more" if len(cycle) > _SHOWN else "")
        place = min(self._position[at], len(self._lanes[at]) - 1)
        stage = self._lanes[at][place].stage
        return Finding(Fault.DEADLOCK, f"ranks wait for each other: {shown}", "reorder their actions", stage, at[0])

    def _lane_of(self, rank: int, awaited: Action) -> Lane:
        """The lane of a rank that has yet to run an action."""
        lanes = [lane for lane in self._lanes if lane[0] == rank]
        for lane in lanes:
            if any(_plain(a) == awaited for a in self._lanes[lane][self._position[lane] :]):
                return lane
        return lanes[0]


def _plain(action: Action) -> Action:
    """What others wait for: no version, no pairing; both kinds of backward alike."""
    kind = ActionKind.BACKWARD if action.kind is ActionKind.INPUT_GRAD else action.kind
    return Action(kind, action.stage, action.micro_batch, action.part)


class _Waits:
    """For each action of a rank, the actions of other ranks that must be over (or, for SYNC, reached)."""

    def __init__(self, plan: Plan, orders: Mapping[int, Sequence[Sequence[Action]]]) -> None:
        self._plan = plan
        self._sources: dict[int, set[int]] = {}
        self._sinks: dict[int, set[int]] = {}
        for boundary in plan.boundaries:
            for to in boundary.to_stages:
                self._sources.setdefault(to, set()).add(boundary.from_stage)
                if boundary.gradient:
                    self._sinks.setdefault(boundary.from_stage, set()).add(to)
        self._ranks = orders.keys()
        self._group = tied_groups((stage.index for stage in plan.stages), plan.shared_parameters)
        self._absent: dict[tuple[int, int], dict[int, Action]] = {}
        self._stated: set[Step] = set()
        for rank, lanes in orders.items():
            for action in (action for lane in lanes for action in lane):
                if action.kind in _EXCHANGES:
                    self._absent.setdefault(self._exchange(action), {}).setdefault(rank, action)
                elif action.kind in _MOVES:
                    self._stated.add((rank, _plain(action)))

    def of(self, rank: int, action: Action) -> Iterator[Step]:
        """Steps that an action of a rank waits for."""
        kind = action.kind
        if kind is ActionKind.SYNC:
            group, number = self._exchange(action)
            yield -1, Action(ActionKind.SYNC, group, number)
        elif kind in (ActionKind.FORWARD, ActionKind.RECEIVE_ACTIVATION):
            received = rank, _like(action, ActionKind.RECEIVE_ACTIVATION)
            if kind is ActionKind.FORWARD and received in self._stated:
                yield received
                return
            for stage in sorted(self._sources.get(action.stage, ())):
                yield from self._made(ActionKind.FORWARD, ActionKind.SEND_ACTIVATION, stage, action)
        elif kind in (*_BACKWARD, ActionKind.RECEIVE_GRADIENT):
            if kind is not ActionKind.RECEIVE_GRADIENT:
                yield rank, _like(action, ActionKind.FORWARD)
                received = rank, _like(action, ActionKind.RECEIVE_GRADIENT)
                if received in self._stated:
                    yield received
                    return
            for stage in sorted(self._sinks.get(action.stage, ())):
                yield from self._made(ActionKind.BACKWARD, ActionKind.SEND_GRADIENT, stage, action)

    def _made(self, kind: ActionKind, sent: ActionKind, stage: int, action: Action) -> Iterator[Step]:
        """What makes a tensor at another stage, or sends it where that is said."""
        for rank in self._plan.ranks_for(stage, action.micro_batch):
            if rank not in self._ranks:
                continue
            step = rank, Action(sent, stage, action.micro_batch, action.part)
            yield step if step in self._stated else (rank, Action(kind, stage, action.micro_batch, action.part))

    def _exchange(self, action: Action) -> tuple[int, int]:
        return self._group[action.stage], action.micro_batch

    def arrive(self, rank: int, action: Action) -> Step | None:
        """Note that a rank has come to an exchange; what is met when all have, None as long as some have not."""
        key = self._exchange(action)
        self._absent[key].pop(rank, None)
        return None if self._absent[key] else (-1, Action(ActionKind.SYNC, *key))

    def met(self, step: Step) -> bool:
        """Whether a step is an exchange that all ranks have come to."""
        return step[0] == -1 and not self._absent[step[1].stage, step[1].micro_batch]

    def awaited(self, step: Step) -> Step:
        """The step itself; of an exchange one that has not been come to."""
        if step[0] >= 0:
            return step
        absent = self._absent[step[1].stage, step[1].micro_batch]
        rank = min(absent)
        return rank, _plain(absent[rank])


_MOVES = (
    ActionKind.SEND_ACTIVATION,
    ActionKind.RECEIVE_ACTIVATION,
    ActionKind.SEND_GRADIENT,
    ActionKind.RECEIVE_GRADIENT,
)


def _like(action: Action, kind: ActionKind) -> Action:
    return Action(kind, action.stage, action.micro_batch, action.part)
