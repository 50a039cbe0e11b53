"""Orders of one's own as a schedule: for as many stages and micro-batches as they have, and no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.errors import PlanError
from planner.schedules._defaults import count_held
from planner.schedules.compiling import compile_orders
from planner.schedules.program import LAUNCH_SYNC, SYNC, UPDATE, Program
from planner.schedules.types import Action, ActionKind, ActivationUnit, Pipeline, WeightPolicy, Work
from planner.schedules.versions import peak_versions, staleness
from planner.schedules.whole import COUNTED, by_worker, check_numbers, check_whole, policy_of


@dataclass(frozen=True, slots=True, eq=False)
class OwnOrders:
    """A schedule that is its orders. Made by `own_schedule`.

    Attributes:
        key: what it is called.
        orders: the actions of all lanes.
        program: the same compiled.
        policy: which versions of the weights it computes with.
    """

    key: str
    orders: Work
    program: Program
    policy: WeightPolicy

    drains = True
    """Also where old weights are read, the orders end with an empty pipeline."""

    @property
    def name(self) -> str:
        """What it is called."""
        return self.key

    @property
    def weight_policy(self) -> WeightPolicy:
        """`sync` when every stage updates once, after all of its gradients; else by the versions that are read."""
        return self.policy

    @property
    def activation_unit(self) -> ActivationUnit:
        """A micro-batch, or its parts."""
        return ActivationUnit.SUB_SEQUENCE if self.orders.parts > 1 else ActivationUnit.MICRO_BATCH

    @property
    def spans(self) -> bool:
        """An iteration ends for all workers together."""
        return False

    @property
    def stages(self) -> int:
        """Stages that the orders have."""
        return self.program.stages

    @property
    def micro_batches(self) -> int:
        """Micro-batches that the orders have."""
        return int(self.program.micro_batch[~self.program.of(SYNC, LAUNCH_SYNC, UPDATE)].max()) + 1

    def supports(self, pipeline: Pipeline) -> str:
        """Why the orders cannot serve a pipeline, empty when they can: they are for one only."""
        if pipeline.replicas != (1,) * self.stages or pipeline.micro_batches != self.micro_batches:
            return (
                f"{self.key} has {self.stages} stages and {self.micro_batches} micro-batches, not "
                f"{pipeline.stages} stages of {pipeline.replicas} replicas and {pipeline.micro_batches} micro-batches"
            )
        return ""

    def work(self, pipeline: Pipeline, iterations: int = 1) -> Work:
        """The orders; they are of one iteration.

        Raises:
            PlanError: another pipeline, or more than one iteration.
        """
        reason = self.supports(pipeline) or ("" if iterations == 1 else f"{self.key} has the order of one iteration")
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
        if self.policy.synchronous:
            return (0,) * self.stages
        return tuple(int(most) for most in staleness(self.program).forward_most)

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each stage, the most units that one worker keeps; O(actions)."""
        return self.orders.limits or count_held(by_worker(self.orders), self.stages)[0]

    def held(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each worker, the most units of all its stages together; O(actions)."""
        return count_held(by_worker(self.orders), self.stages)[1]

    def placement(self, pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
        """For each worker the stages that it has."""
        return tuple(tuple(sorted({a.stage for a in lane})) for lane in by_worker(self.orders))

    def critical_s(
        self, pipeline: Pipeline, forward_s: Sequence[float], backward_s: Sequence[float], tail_s: Sequence[float]
    ) -> float:
        """No chain of waits is known in closed form."""
        return 0.0


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
    return dataclasses.replace(action, micro_batch=-1) if action.kind in COUNTED else action
