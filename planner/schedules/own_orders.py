"""Orders of one's own as a schedule: for as many stages and micro-batches as they have, and no others.

Are they whole: numbers without gaps, sends with receives, every gradient applied by an update? What cannot run at all
is found when they are compiled; the checks here find what would run and train something else.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from planner.errors import PlanError
from planner.schedules.compiling import compile_orders
from planner.schedules.critical_chains import PassSeconds
from planner.schedules.facts import Facts
from planner.schedules.held import HeldUnits, count_held
from planner.schedules.program import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    LAUNCH_SYNC,
    RECOMPUTE,
    SYNC,
    UPDATE,
    WEIGHT_GRAD,
    Program,
    peak_versions,
    staleness,
    version_use,
)
from planner.schedules.schedule import Schedule
from planner.schedules.types import Action, ActionKind, ActivationUnit, OrderError, Pipeline, WeightPolicy, Work

COUNTED = (ActionKind.SYNC, ActionKind.LAUNCH_SYNC, ActionKind.UPDATE)
"""Kinds whose number is that of an exchange or update, not of a micro-batch."""

_ENDS = (ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)
_SPARSE = 64
"""Times as many pairs of stage and micro-batch as actions: such orders cannot be whole."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnOrders(Schedule):
    """A schedule that is its orders. Made by `own_schedule`.

    Attributes:
        title: what it is called.
        orders: the actions of all lanes.
        program: the same compiled.
        weights: which versions of the weights it computes with.
    """

    title: str
    orders: Work
    program: Program
    weights: WeightPolicy

    key = "custom"
    facts = Facts(decides="its own orders", source="the user", kept="0", kept_bound=True, idle="0")

    @property
    def name(self) -> str:
        """What it is called."""
        return self.title

    @property
    def weight_policy(self) -> WeightPolicy:
        """`sync` when every stage updates once, after all of its gradients; else by the versions that are read."""
        return self.weights

    @property
    def activation_unit(self) -> ActivationUnit:
        """A micro-batch, or its parts."""
        return ActivationUnit.SUB_SEQUENCE if self.orders.parts > 1 else ActivationUnit.MICRO_BATCH

    @property
    def parts(self) -> int:
        """As the orders say."""
        return self.orders.parts

    @property
    def drains(self) -> bool:
        """Also where old weights are read, the orders end with an empty pipeline."""
        return True

    @property
    def launches(self) -> bool:
        """As the orders do."""
        return bool(self.program.of(LAUNCH_SYNC).any())

    @property
    def fixed(self) -> Pipeline | None:
        """That of the orders."""
        numbered = ~self.program.of(SYNC, LAUNCH_SYNC, UPDATE)
        return Pipeline((1,) * self.program.stages, int(self.program.micro_batch[numbered].max()) + 1)

    def stage_counts(self, workers: int) -> tuple[int, ...]:
        """Those of the orders, for as many workers as they have."""
        return (self.program.stages,) if workers == self.program.workers else ()

    def workers(self, pipeline: Pipeline) -> int:
        """Those of the orders."""
        return self.program.workers

    def variants(self, workers: int, micro_batches: int, *, recompute: bool = False) -> tuple[Schedule, ...]:
        """The orders, where they are for such a pipeline."""
        counts = self.stage_counts(workers)
        return (self,) if counts and not self.supports(Pipeline((1,) * counts[0], micro_batches)) else ()

    def supports(self, pipeline: Pipeline) -> str:
        """Why the orders cannot serve a pipeline, empty when they can: they are for one only."""
        if pipeline != (own := self.fixed) and own:
            return (
                f"{self.name} has {own.stages} stages and {own.micro_batches} micro-batches, not "
                f"{pipeline.stages} stages of {pipeline.replicas} replicas and {pipeline.micro_batches} micro-batches"
            )
        return ""

    def work(self, pipeline: Pipeline, iterations: int = 1) -> Work:
        """The orders; they are of one iteration.

        Raises:
            PlanError: another pipeline, or more than one iteration.
        """
        reason = self.supports(pipeline) or ("" if iterations == 1 else f"{self.name} has the order of one iteration")
        if reason:
            raise PlanError(reason, hint="write orders for it")
        return self.orders

    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The actions of each lane."""
        return self.work(pipeline).lanes

    def weight_versions(self, pipeline: Pipeline) -> tuple[int, ...]:
        """As many as the orders state, else as they need."""
        return self.orders.versions or tuple(peak_versions(self.program).tolist())

    def staleness(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Counted in the orders."""
        if self.weights.synchronous:
            return (0,) * self.program.stages
        return tuple(int(most) for most in staleness(self.program).forward_most)

    def exchanges(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Counted in the orders: launched exchanges of a worker, else its exchanges, else its updates."""
        found = [0] * self.program.stages
        for lane in by_worker(self.orders):
            counts = Counter((action.stage, action.kind) for action in lane)
            for stage in {action.stage for action in lane}:
                kinds = (counts[stage, k] for k in (ActionKind.LAUNCH_SYNC, ActionKind.SYNC, ActionKind.UPDATE))
                found[stage] = max(found[stage], next(filter(None, kinds), 0))
        return tuple(found)

    def recomputed_stages(self, pipeline: Pipeline) -> frozenset[int]:
        """Those that the orders recompute."""
        return frozenset(self.program.stage[self.program.of(RECOMPUTE)].tolist())

    def placement(self, pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
        """For each worker the stages that it has."""
        return tuple(tuple(sorted({a.stage for a in lane})) for lane in by_worker(self.orders))

    def workload(self, pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
        """Counted in the orders; parts of a micro-batch as a whole."""
        return tuple(
            tuple(len({a.micro_batch for a in lane if a.stage == s and a.kind is ActionKind.FORWARD}) for s in stages)
            for stages, lane in zip(self.placement(pipeline), by_worker(self.orders), strict=True)
        )

    def crossings(self, pipeline: Pipeline) -> tuple[bool, ...]:
        """Where some micro-batch comes from another worker."""
        program = self.program
        away = (program.source >= 0) & (program.worker[program.source] != program.worker) & program.of(FORWARD)
        crossed = set(program.stage[away].tolist())
        return tuple(stage in crossed for stage in range(program.stages))

    def peaks(self, pipeline: Pipeline) -> tuple[HeldUnits, ...]:
        """Counted along the orders, lanes of a worker one after the other; O(actions)."""
        return _counted(self, pipeline)

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """The limits that the orders state, else counted."""
        return self.orders.limits or Schedule.in_flight(self, pipeline)

    def ramp(self, pipeline: Pipeline) -> tuple[float, float]:
        """Nothing is known of it."""
        return 0.0, 0.0

    def exact(self, pipeline: Pipeline) -> bool:
        """Nothing is proven."""
        return False

    def chain_s(self, pipeline: Pipeline, times: PassSeconds) -> float:
        """No chain of waits is known in closed form."""
        return 0.0


@functools.lru_cache(maxsize=2)
def _counted(own: OwnOrders, pipeline: Pipeline) -> tuple[HeldUnits, ...]:
    return count_held(by_worker(own.orders), own.placement(pipeline))


def own_schedule(work: Work, name: str = "custom") -> OwnOrders:
    """A schedule from orders, with the exchange and the update of each stage at its end where they have none.

    Raises:
        PlanError: the orders cannot run; shows the cycle, or names the action.
    """
    check_numbers(work)
    policy = policy_of(work)
    if policy.synchronous:
        work = _closed(work)
    program = compile_orders(work)
    check_whole(program)
    return OwnOrders(name, work, program, policy)


def _closed(work: Work) -> Work:
    """Each stage of a worker exchanged once and updated once, without numbers: at the end where nothing is said."""
    lanes = [[_unnumbered(action) for action in lane] for lane in work.lanes]
    last = {worker: at for at, worker in enumerate(work.lane_workers)}
    for worker, at in last.items():
        own = [lane for lane, w in zip(lanes, work.lane_workers, strict=True) if w == worker]
        stages = sorted({a.stage for lane in own for a in lane})
        synced = {a.stage for lane in own for a in lane if a.kind is ActionKind.SYNC}
        updated = {a.stage for lane in own for a in lane if a.kind is ActionKind.UPDATE}
        for place, lane in enumerate(lanes):
            if work.lane_workers[place] == worker:
                lanes[place] = [b for a in lane for b in _preceded(a, synced)]
        lanes[at] += [Action(ActionKind.SYNC, s) for s in stages if s not in synced | updated]
        lanes[at] += [Action(ActionKind.UPDATE, s) for s in stages if s not in updated]
    return dataclasses.replace(work, lanes=tuple(tuple(lane) for lane in lanes))


def _preceded(action: Action, synced: set[int]) -> Iterator[Action]:
    """An update with the exchange that it needs."""
    if action.kind is ActionKind.UPDATE and action.stage not in synced:
        yield Action(ActionKind.SYNC, action.stage)
    yield action


def _unnumbered(action: Action) -> Action:
    return action._replace(micro_batch=-1) if action.kind in COUNTED else action


def check_numbers(work: Work) -> None:
    """Refuse orders whose stages or micro-batches leave a number out, or that evict to nobody; O(actions).

    Raises:
        OrderError: names the action that shows it.
    """
    stages = {action.stage for action in _actions(work)}
    numbers = {action.micro_batch for action in _actions(work) if action.kind not in COUNTED}
    _without_gap(work, stages, "stage", lambda action: action.stage)
    _without_gap(work, numbers, "micro-batch", lambda action: -1 if action.kind in COUNTED else action.micro_batch)
    forwards = [action for action in _actions(work) if action.kind is ActionKind.FORWARD]
    wanted = len(stages) * len(numbers) * work.parts
    if wanted > _SPARSE * max(1, len(forwards)):
        message = f"{len(forwards)} forwards for {len(stages)} stages and {len(numbers)} micro-batches"
        raise _fault(work, lambda _: True, message, "run every micro-batch through every stage")
    workers = max(work.lane_workers, default=-1) + 1
    for lane, worker in enumerate(work.lane_workers):
        for index, action in enumerate(work.lanes[lane]):
            if action.kind is ActionKind.EVICT and (action.peer >= workers or action.peer == worker):
                whom = "the worker itself" if action.peer == worker else f"worker {action.peer} of {workers}"
                message = f"{action._replace(peer=-1)} evicts to {whom}"
                hint = "name another worker, or none for the host"
                raise OrderError(message, lane=lane, index=index, where=f"worker {worker}", hint=hint)


def check_whole(program: Program) -> None:
    """Refuse orders in which a worker exchanges or updates what it does not compute, or drops gradients; O(actions).

    Raises:
        OrderError: names the action.
    """
    place = program.worker * program.stages + program.stage
    ends = program.of(BACKWARD, INPUT_GRAD, WEIGHT_GRAD)
    foreign = np.flatnonzero(program.of(SYNC, LAUNCH_SYNC, UPDATE) & ~np.isin(place, place[ends]))
    if len(foreign):
        at = int(foreign[0])
        message = f"{program.label(at)} is of a stage of which worker {program.worker[at]} computes nothing"
        raise program.error(at, message, "leave it to the workers that have the stage")
    if policy_of(program.work).synchronous:
        _exchanged_last(program, place, ends)
        return
    lost = np.flatnonzero(ends & (version_use(program).applied < 0))
    if len(lost):
        at = int(lost[-1])
        message = f"no update of stage {program.stage[at]} comes after {program.label(at)}: its gradient is dropped"
        raise program.error(at, message, f"put U{program.stage[at]} after it")


def _exchanged_last(program: Program, place: np.ndarray, ends: np.ndarray) -> None:
    """Where the pipeline drains, a stage's exchange comes after all of its gradients, its update after the exchange."""
    for code, before, what in (
        (SYNC, ends, "is exchanged"),
        (LAUNCH_SYNC, ends, "is exchanged"),
        (UPDATE, program.kind == SYNC, "updates the weights"),
    ):
        last = np.full(program.workers * program.stages * program.lanes, -1, np.int64)
        key = place * program.lanes + program.lane
        chosen = np.flatnonzero(before)
        np.maximum.at(last, key[chosen], chosen)
        early = np.flatnonzero((program.kind == code) & (last[key] > np.arange(len(key))))
        if len(early):
            at = int(early[0])
            message = f"{program.label(at)} {what} before {program.label(last[key[at]])} on the same worker"
            raise program.error(at, message, "put it after")


def policy_of(work: Work) -> WeightPolicy:
    """What orders do with their weights: without updates, or with each after all gradients of its stage, `sync`."""
    if not any(action.kind is ActionKind.UPDATE for action in _actions(work)):
        return WeightPolicy.SYNC
    if any(action.version >= 0 for action in _actions(work)):
        return WeightPolicy.STASH
    for lane in by_worker(work):
        ended: dict[int, int] = {a.stage: at for at, a in enumerate(lane) if a.kind in _ENDS}
        places: dict[int, list[int]] = {}
        for at, action in enumerate(lane):
            if action.kind is ActionKind.UPDATE:
                places.setdefault(action.stage, []).append(at)
        if any(len(own) > 1 or own[0] < ended.get(stage, -1) for stage, own in places.items()):
            return WeightPolicy.NEWEST
    return WeightPolicy.SYNC


def by_worker(work: Work) -> list[list[Action]]:
    """The lanes of each worker one after the other."""
    found: list[list[Action]] = [[] for _ in range(max(work.lane_workers, default=-1) + 1)]
    for worker, lane in zip(work.lane_workers, work.lanes, strict=True):
        found[worker] += lane
    return found


def _actions(work: Work) -> Iterator[Action]:
    return (action for lane in work.lanes for action in lane)


def _without_gap(work: Work, found: Iterable[int], what: str, number: Callable[[Action], int]) -> None:
    known = set(found)
    missing = next((k for k in range(max(known, default=-1) + 1) if k not in known), -1)
    if missing >= 0 or not known:
        gap = f"{what} {max(missing, 0)} has no actions"
        hint = f"number {what}es from 0 without gaps" if what.endswith("h") else f"number {what}s from 0 without gaps"
        raise _fault(work, lambda action: number(action) > missing, gap, hint)


def _fault(work: Work, shows: Callable[[Action], bool], message: str, hint: str) -> OrderError:
    """The error at the first action that shows it."""
    for lane, actions in enumerate(work.lanes):
        for index, action in enumerate(actions):
            if shows(action):
                where = f"worker {work.lane_workers[lane]}"
                return OrderError(f"{message}, but {action} is there", lane=lane, index=index, where=where, hint=hint)
    return OrderError(message, lane=0, index=0, hint=hint)
