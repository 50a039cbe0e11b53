"""User-written orders as a schedule, for exactly the stages and micro-batches that they have.

Compiling finds orders that cannot run. The checks here find orders that would run but train something else: numbers
with gaps, exchanges before their gradients, gradients that no update applies.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from planner.errors import PlanError
from planner.schedules.compiling import compile_orders
from planner.schedules.critical_chains import PassSeconds
from planner.schedules.evictions import check_peers
from planner.schedules.program import Code, Program, peak_versions, staleness, version_use
from planner.schedules.schedule import Schedule
from planner.schedules.types import Action, ActionKind, Facts, OrderError, Pipeline, WeightPolicy, Work

COUNTED = (ActionKind.SYNC, ActionKind.LAUNCH_SYNC, ActionKind.UPDATE)
"""Kinds whose `micro_batch` is the number of an exchange or update."""

_ENDS = (ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)
_MAX_PAIRS_PER_FORWARD = 64
"""Orders with more than this many (stage, micro-batch) pairs per forward are incomplete and refused early."""


@dataclass(frozen=True, slots=True, eq=False)
class CustomOrders(Schedule):
    """A schedule given by its orders; made by `custom_schedule`.

    Attributes:
        name: its name.
        orders: the actions of all lanes.
        program: the compiled orders.
        weight_policy: `sync` if every stage updates once, after all of its gradients; else by the versions that are
            read.
    """

    name: str = field()
    orders: Work
    program: Program
    weight_policy: WeightPolicy = field()

    key = "custom"
    drains = True
    facts = Facts(source="the user", kept="0", kept_bound=True, idle="0")

    @property
    def parts(self) -> int:
        """Sub-sequences of a micro-batch in the orders."""
        return self.orders.parts

    @property
    def launches(self) -> bool:
        """True if the orders launch exchanges."""
        return bool(self.program.of(Code.LAUNCH_SYNC).any())

    @property
    def fixed(self) -> Pipeline | None:
        """The pipeline of the orders."""
        numbered = ~self.program.of(Code.SYNC, Code.LAUNCH_SYNC, Code.UPDATE)
        return Pipeline((1,) * self.program.stages, int(self.program.micro_batch[numbered].max()) + 1)

    def stage_counts(self, workers: int) -> tuple[int, ...]:
        """The stages of the orders, if the number of workers is theirs."""
        return (self.program.stages,) if workers == self.program.workers else ()

    def workers(self, pipeline: Pipeline) -> int:
        """The workers of the orders."""
        return self.program.workers

    def variants(self, workers: int, micro_batches: int, *, recompute: bool = False) -> tuple[Schedule, ...]:
        """The orders themselves if they are for such a pipeline; else nothing."""
        counts = self.stage_counts(workers)
        return (self,) if counts and not self.supports(Pipeline((1,) * counts[0], micro_batches)) else ()

    def supports(self, pipeline: Pipeline) -> str:
        """Why the orders do not serve a pipeline; empty only for the one that they are for."""
        if pipeline != (fixed := self.fixed) and fixed:
            return (
                f"{self.name} has {fixed.stages} stages and {fixed.micro_batches} micro-batches, not "
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

    def worker_orders(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The actions of each lane, exchanges and updates included."""
        return self.orders.lanes

    def weight_versions(self, pipeline: Pipeline) -> tuple[int, ...]:
        """The versions that the orders state, else as many as they need."""
        return self.orders.versions or tuple(peak_versions(self.program).tolist())

    def staleness(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Counted along the orders."""
        if self.weight_policy.synchronous:
            return (0,) * self.program.stages
        return tuple(int(most) for most in staleness(self.program).forward_most)

    def exchanges(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Counted along the orders: a worker's launched exchanges, else its exchanges, else its updates."""
        exchanges = [0] * self.program.stages
        for lane in self.orders.by_worker():
            counts = Counter((action.stage, action.kind) for action in lane)
            for stage in {action.stage for action in lane}:
                kinds = (counts[stage, k] for k in (ActionKind.LAUNCH_SYNC, ActionKind.SYNC, ActionKind.UPDATE))
                exchanges[stage] = max(exchanges[stage], next(filter(None, kinds), 0))
        return tuple(exchanges)

    def recomputed_stages(self, pipeline: Pipeline) -> frozenset[int]:
        """Stages with RECOMPUTE actions in the orders."""
        return frozenset(self.program.stage[self.program.of(Code.RECOMPUTE)].tolist())

    def counts(self, pipeline: Pipeline) -> tuple[dict[int, int], ...]:
        """Counted along the orders; parts of a micro-batch count once."""
        passes = [{(a.stage, a.kind, a.micro_batch) for a in lane} for lane in self.orders.by_worker()]
        return tuple(
            {s: sum(k is ActionKind.FORWARD for at, k, _ in own if at == s) for s in sorted({at for at, _, _ in own})}
            for own in passes
        )

    def crossings(self, pipeline: Pipeline) -> tuple[bool, ...]:
        """True for stages of which some micro-batch comes from another worker."""
        program = self.program
        away = (program.source >= 0) & (program.worker[program.source] != program.worker) & program.of(Code.FORWARD)
        crossed = set(program.stage[away].tolist())
        return tuple(stage in crossed for stage in range(program.stages))

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """The limits that the orders state, else counted."""
        return self.orders.limits or Schedule.in_flight(self, pipeline)

    def ramp(self, pipeline: Pipeline) -> tuple[float, float]:
        """(0, 0): no bound is known."""
        return 0.0, 0.0

    def exact(self, pipeline: Pipeline) -> bool:
        """False: nothing is proven."""
        return False

    def chain_s(self, pipeline: Pipeline, times: PassSeconds) -> float:
        """0: no chain of waits is known in closed form."""
        return 0.0


def custom_schedule(work: Work, name: str = "custom") -> CustomOrders:
    """A schedule from orders; synchronous orders get the exchanges and updates that they lack at their end.

    Raises:
        PlanError: the orders cannot run; shows the cycle, or names the action.
    """
    check_numbers(work)
    policy = policy_of(work)
    if policy.synchronous:
        work = _with_updates(work)
    program = compile_orders(work)
    check_whole(program)
    return CustomOrders(name, work, program, policy)


def _with_updates(work: Work) -> Work:
    """Add the missing exchange and update of each stage at the end of its worker, and drop exchange numbers."""
    lanes: list[list[Action]] = [[] for _ in work.lanes]
    last = dict(zip(work.lane_workers, lanes, strict=True))
    for worker, actions in enumerate(work.by_worker()):
        stages = sorted({a.stage for a in actions})
        synced = {a.stage for a in actions if a.kind is ActionKind.SYNC}
        updated = {a.stage for a in actions if a.kind is ActionKind.UPDATE}
        for at in (at for at, owner in enumerate(work.lane_workers) if owner == worker):
            for action in work.lanes[at]:
                if action.kind is ActionKind.UPDATE and action.stage not in synced:
                    lanes[at].append(Action(ActionKind.SYNC, action.stage))
                lanes[at].append(action._replace(micro_batch=-1) if action.kind in COUNTED else action)
        missing = {ActionKind.SYNC: synced | updated, ActionKind.UPDATE: updated}
        last.get(worker, []).extend(Action(k, s) for k, there in missing.items() for s in stages if s not in there)
    return dataclasses.replace(work, lanes=tuple(map(tuple, lanes)))


def check_numbers(work: Work) -> None:
    """Refuse orders that skip a stage or micro-batch number, or that move activations to no other worker; O(actions).

    Raises:
        OrderError: names an action that shows it.
    """
    stages = {action.stage for action in _actions(work)}
    numbers = {action.micro_batch for action in _actions(work) if action.kind not in COUNTED}
    _refuse_gaps(work, stages, "stage", lambda action: action.stage)
    _refuse_gaps(work, numbers, "micro-batch", lambda action: -1 if action.kind in COUNTED else action.micro_batch)
    forwards = [action for action in _actions(work) if action.kind is ActionKind.FORWARD]
    wanted = len(stages) * len(numbers) * work.parts
    if wanted > _MAX_PAIRS_PER_FORWARD * max(1, len(forwards)):
        message = f"{len(forwards)} forwards for {len(stages)} stages and {len(numbers)} micro-batches"
        raise _fault(work, lambda _: True, message, "run every micro-batch through every stage")
    check_peers(work)


def check_whole(program: Program) -> None:
    """Refuse orders in which a worker exchanges or updates a stage it does not compute, or drops gradients; O(actions).

    Raises:
        OrderError: names the action.
    """
    place = program.worker * program.stages + program.stage
    ends = program.of(Code.BACKWARD, Code.INPUT_GRAD, Code.WEIGHT_GRAD)
    foreign = np.flatnonzero(program.of(Code.SYNC, Code.LAUNCH_SYNC, Code.UPDATE) & ~np.isin(place, place[ends]))
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
    """Refuse synchronous orders that exchange a stage before all its gradients or update it before the exchange."""
    for code, before, what in (
        (Code.SYNC, ends, "is exchanged"),
        (Code.LAUNCH_SYNC, ends, "is exchanged"),
        (Code.UPDATE, program.kind == Code.SYNC, "updates the weights"),
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
    """The weight policy of orders: `sync` without updates, or if every update follows all gradients of its stage."""
    if not any(action.kind is ActionKind.UPDATE for action in _actions(work)):
        return WeightPolicy.SYNC
    if any(action.version >= 0 for action in _actions(work)):
        return WeightPolicy.STASH
    for lane in work.by_worker():
        last_gradient: dict[int, int] = {a.stage: at for at, a in enumerate(lane) if a.kind in _ENDS}
        updates_of_stage: dict[int, list[int]] = {}
        for at, action in enumerate(lane):
            if action.kind is ActionKind.UPDATE:
                updates_of_stage.setdefault(action.stage, []).append(at)
        if any(
            len(updates) > 1 or updates[0] < last_gradient.get(stage, -1) for stage, updates in updates_of_stage.items()
        ):
            return WeightPolicy.NEWEST
    return WeightPolicy.SYNC


def _actions(work: Work) -> Iterator[Action]:
    """All actions of all lanes."""
    return (action for lane in work.lanes for action in lane)


def _refuse_gaps(work: Work, numbers: Iterable[int], what: str, number: Callable[[Action], int]) -> None:
    """Refuse numbers of stages or micro-batches that do not run from 0 without gaps."""
    known = set(numbers)
    missing = next((k for k in range(max(known, default=-1) + 1) if k not in known), -1)
    if missing >= 0 or not known:
        gap = f"{what} {max(missing, 0)} has no actions"
        hint = f"number {what}es from 0 without gaps" if what.endswith("h") else f"number {what}s from 0 without gaps"
        raise _fault(work, lambda action: number(action) > missing, gap, hint)


def _fault(work: Work, shows: Callable[[Action], bool], message: str, hint: str) -> OrderError:
    """An error at the first action for which `shows` is true."""
    for lane, actions in enumerate(work.lanes):
        for index, action in enumerate(actions):
            if shows(action):
                where = f"worker {work.lane_workers[lane]}"
                return OrderError(f"{message}, but {action} is there", lane=lane, index=index, where=where, hint=hint)
    return OrderError(message, lane=0, index=0, hint=hint)
