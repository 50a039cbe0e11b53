"""The actions of each rank as one sequence: lanes are merged so that no rank waits for one that waits for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planner.errors import PlanError
from planner.plans import Plan
from planner.plans.records import SharedParameter
from planner.schedules import Action, ActionKind


@dataclass(frozen=True, slots=True)
class TiedExchanges:
    """Tied weights whose gradients a rank has still to sum in this iteration.

    The gradient of a weight that several stages hold is summed in an exchange (`S`) of these stages: each rank takes
    part in the last one that it runs for any of them. Tied weights that ranks have in common are summed one after the
    other in the last exchange of all their stages, so that every rank sums them in the order of the plan.

    Attributes:
        ties: tied weights of the rank's stages, in the order of the plan.
        stages: for each of them, the stages in whose exchanges it may be summed.
        left: for each of them, the exchanges of these stages that the rank has still to run.
    """

    ties: tuple[SharedParameter, ...]
    stages: tuple[frozenset[int], ...]
    left: list[int]

    def last(self, action: Action) -> tuple[SharedParameter, ...]:
        """Tied weights whose gradients are summed in this action, which has not run yet."""
        if action.kind is not ActionKind.SYNC:
            return ()
        return tuple(
            tie
            for tie, stages, left in zip(self.ties, self.stages, self.left, strict=True)
            if left == 1 and action.stage in stages
        )

    def done(self, action: Action) -> tuple[SharedParameter, ...]:
        """Tied weights whose gradients are summed in this action, which is counted as run."""
        summed = self.last(action)
        if action.kind is ActionKind.SYNC:
            self.left[:] = [n - (action.stage in own) for own, n in zip(self.stages, self.left, strict=True)]
        return summed


def tied_exchanges(plan: Plan, actions: Iterable[Action]) -> TiedExchanges:
    """Count the exchanges of tied weights among a rank's actions."""
    synced = [action.stage for action in actions if action.kind is ActionKind.SYNC]
    own = [tie for tie in plan.shared_parameters if tie.reduction == "sum" and set(tie.stages) & set(synced)]
    stages = [_stages_together(plan, tie) for tie in own]
    return TiedExchanges(tuple(own), tuple(stages), [sum(stage in each for stage in synced) for each in stages])


def _stages_together(plan: Plan, tie: SharedParameter) -> frozenset[int]:
    """The stages of a tied weight, and of all others that have ranks in common with it or with one of these."""
    summed = [set(other.stages) for other in plan.shared_parameters if other.reduction == "sum"]
    stages, before = set(tie.stages), set[int]()
    while stages != before:
        before, ranks = set(stages), {rank for stage in stages for rank in plan.stages[stage].ranks}
        stages = stages.union(*(own for own in summed if any(ranks & set(plan.stages[s].ranks) for s in own)))
    return frozenset(stages)


_BACK = (ActionKind.BACKWARD, ActionKind.INPUT_GRAD)
_Key = tuple[ActionKind, int, int, int]
"""Kind, stage, number and part of an action."""


class _OrderSimulation:
    """Simulates the orders of all ranks without time: an action runs as soon as its dependencies have run."""

    def __init__(self, plan: Plan, times: int) -> None:
        self.plan = plan
        self.lanes = {
            (rank, k): lane for rank in range(plan.world_size) for k, lane in enumerate(plan.lanes(rank, times))
        }
        self.at = dict.fromkeys(self.lanes, 0)
        self.done: set[tuple[_Key, int]] = set()
        self.arrived: dict[tuple[int, int], set[tuple[int, int]]] = {}
        self.counts: dict[tuple[int, int, str], int] = {}
        kinds = {(a.kind, a.stage) for lane in self.lanes.values() for a in lane}
        self.explicit = kinds
        self.feeds: dict[int, list[int]] = {}
        self.readers: dict[int, list[int]] = {}
        for b in plan.boundaries:
            for to in b.to_stages:
                self.feeds.setdefault(to, []).append(b.from_stage)
                if b.gradient:
                    self.readers.setdefault(b.from_stage, []).append(to)
        self.synced = self._expected()
        ranks = dict.fromkeys(rank for rank, _ in self.lanes)
        actions = {rank: [a for (r, _), lane in self.lanes.items() if r == rank for a in lane] for rank in ranks}
        self.tied = {rank: tied_exchanges(plan, actions[rank]) for rank in ranks}
        self.met: dict[str, set[int]] = {}

    def _expected(self) -> dict[tuple[int, int], set[tuple[int, int]]]:
        """Lanes (rank, number) that take part in each exchange, by stage and number of the exchange."""
        lanes_of: dict[tuple[int, int], set[tuple[int, int]]] = {}
        for place, lane in self.lanes.items():
            for a in lane:
                if a.kind in (ActionKind.SYNC, ActionKind.LAUNCH_SYNC):
                    lanes_of.setdefault((a.stage, a.micro_batch), set()).add(place)
        return lanes_of

    def ready(self, place: tuple[int, int], a: Action) -> bool:
        """Whether all dependencies of an action have run; notes that its lane has come to an exchange."""
        if a.kind is ActionKind.SYNC:
            self._arrive(place, a)
            key = a.stage, a.micro_batch
            return self.arrived[key] == self.synced[key] and self._ties_complete(place[0], a)
        if a.kind is ActionKind.FORWARD and not self._has_room(place[0], a):
            return False
        return all(self._has_run(kinds, a._replace(stage=stage)) for kinds, stage in self._needs(a)) and all(
            self._has_run(kinds, a._replace(part=part)) for kinds, part in self._needs_parts(a)
        )

    def _arrive(self, place: tuple[int, int], a: Action) -> None:
        """Note that a lane waits in an exchange, or has begun it early."""
        self.arrived.setdefault((a.stage, a.micro_batch), set()).add(place)

    def _ties_complete(self, rank: int, a: Action) -> bool:
        """Whether all ranks have come to the sum of the tied weights that belongs to an action."""
        waiting = False
        for tie in self.tied[rank].last(a):
            waiting_ranks = self.met.setdefault(tie.parameter, set())
            waiting_ranks.add(rank)
            waiting |= waiting_ranks < {rank for stage in tie.stages for rank in self.plan.stages[stage].ranks}
        return not waiting

    def _needs(self, a: Action) -> Iterable[tuple[tuple[ActionKind, ...], int]]:
        """Dependencies on stages, for the same micro-batch and part: (kinds of which one must have run, stage)."""
        received = (ActionKind.RECEIVE_ACTIVATION, a.stage) in self.explicit
        if a.kind is ActionKind.RECEIVE_ACTIVATION or (a.kind is ActionKind.FORWARD and not received):
            for stage in self.feeds.get(a.stage, ()):
                sends = (ActionKind.SEND_ACTIVATION, stage) in self.explicit
                yield (ActionKind.SEND_ACTIVATION if sends else ActionKind.FORWARD,), stage
        returned = (ActionKind.RECEIVE_GRADIENT, a.stage) in self.explicit
        if a.kind is ActionKind.RECEIVE_GRADIENT or (a.kind in _BACK and not returned):
            for stage in self.readers.get(a.stage, ()):
                sends = (ActionKind.SEND_GRADIENT, stage) in self.explicit
                yield (ActionKind.SEND_GRADIENT,) if sends else _BACK, stage
        if a.kind in _BACK:
            yield (ActionKind.FORWARD,), a.stage
        if a.kind is ActionKind.WEIGHT_GRAD:
            yield (ActionKind.INPUT_GRAD,), a.stage

    def _needs_parts(self, a: Action) -> Iterable[tuple[tuple[ActionKind, ...], int]]:
        """Dependencies on other parts of the micro-batch: (kinds of which one must have run, part)."""
        if a.kind is ActionKind.FORWARD and a.part > 0:
            yield (ActionKind.FORWARD,), a.part - 1
        if a.kind in _BACK and 0 <= a.part < self.plan.schedule.parts - 1:
            yield _BACK, a.part + 1

    def _has_run(self, kinds: tuple[ActionKind, ...], a: Action) -> bool:
        """Whether an action of one of these kinds has run on all ranks of its group."""
        ranks = self.plan.ranks_for(a.stage, a.micro_batch)
        return any(all(((kind, a.stage, a.micro_batch, a.part), rank) in self.done for rank in ranks) for kind in kinds)

    def _has_room(self, rank: int, a: Action) -> bool:
        limits = self.plan.schedule.limits
        if not limits:
            return True
        began, ended = (self.counts.get((rank, a.stage, word), 0) for word in ("F", "end"))
        return began - ended < limits[a.stage]

    def finish(self, place: tuple[int, int], a: Action) -> None:
        """Note that an action has run."""
        rank = place[0]
        self.tied[rank].done(a)
        self.done.add(((a.kind, a.stage, a.micro_batch, a.part), rank))
        if a.kind is ActionKind.LAUNCH_SYNC:
            self._arrive(place, a)
        ends = a.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD)
        if ends or a.kind is ActionKind.FORWARD:
            word = "end" if ends else "F"
            self.counts[rank, a.stage, word] = self.counts.get((rank, a.stage, word), 0) + 1
        self.at[place] += 1


def sequences(plan: Plan, times: int = 1) -> Mapping[int, tuple[Action, ...]]:
    """The actions of every rank as one sequence that cannot deadlock.

    Lanes of a rank are merged in the order in which the dependencies of their actions are met. O(actions * ranks) at
    the worst.

    Args:
        plan: the plan.
        times: iterations of the steady state, where the pipeline never drains.

    Raises:
        PlanError: the orders block each other; the waiting actions are named.
    """
    simulation = _OrderSimulation(plan, times)
    merged: dict[int, list[Action]] = {rank: [] for rank in range(plan.world_size)}
    moved = True
    while moved:
        moved = False
        for place, lane in simulation.lanes.items():
            while simulation.at[place] < len(lane) and simulation.ready(place, lane[simulation.at[place]]):
                action = lane[simulation.at[place]]
                merged[place[0]].append(action)
                simulation.finish(place, action)
                moved = True
    waiting = [
        f"rank {p[0]} at {lane[simulation.at[p]]}"
        for p, lane in simulation.lanes.items()
        if simulation.at[p] < len(lane)
    ]
    if waiting:
        raise PlanError(
            f"the orders block each other: {', '.join(waiting[:4])}", where="schedule",
            hint="shardplan check shows the cycle",
        )  # fmt: skip
    return {rank: tuple(actions) for rank, actions in merged.items()}
