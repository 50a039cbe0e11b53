"""Orders of one's own as a schedule: for as many stages and micro-batches as they have, and no others."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from planner.errors import PlanError
from planner.schedules._chains import PassSeconds
from planner.schedules._defaults import Defaults, Facts
from planner.schedules.compiling import compile_orders
from planner.schedules.held import HeldUnits, count_held
from planner.schedules.program import FORWARD, LAUNCH_SYNC, RECOMPUTE, SYNC, UPDATE, Program
from planner.schedules.types import Action, ActionKind, ActivationUnit, Pipeline, Schedule, WeightPolicy, Work
from planner.schedules.versions import peak_versions, staleness
from planner.schedules.whole import COUNTED, by_worker, check_numbers, check_whole, policy_of


@dataclass(frozen=True, slots=True, eq=False)
class OwnOrders(Defaults):
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
    facts = Facts("its own orders", "as played", "as counted", "as counted", "the user")

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
        return count_held(by_worker(self.orders), self.placement(pipeline))

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """The limits that the orders state, else counted."""
        return self.orders.limits or Defaults.in_flight(self, pipeline)

    def ramp(self, pipeline: Pipeline) -> tuple[float, float]:
        """Nothing is known of it."""
        return 0.0, 0.0

    def wait_s(self, pipeline: Pipeline, forward_s: float, backward_s: float, weight_s: float) -> float:
        """Nothing is known of it."""
        return 0.0

    def exact(self, pipeline: Pipeline) -> bool:
        """Nothing is proven."""
        return False

    def chain_s(self, pipeline: Pipeline, times: PassSeconds) -> float:
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
