"""What most schedules share: one version of the weights, counts read off the order, options in the name."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

from planner.errors import PlanError
from planner.registry import name_with_options
from planner.schedules._chains import Flow, PassSeconds, busiest_chain_s
from planner.schedules.delays import OptimizerScaling, StageCorrection
from planner.schedules.held import HeldUnits, count_held
from planner.schedules.types import (
    Action,
    ActionKind,
    ActivationUnit,
    Pipeline,
    Schedule,
    WeightPolicy,
    Work,
)

if TYPE_CHECKING:
    import numpy as np


LineOrders = Callable[[Pipeline], tuple[tuple[Action, ...], ...]]
"""Orders of a pipeline of single replicas."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the table of schedules says about one.

    Attributes:
        decides: what it decides, in a few words.
        bubble: its bubble for equal stages, over total time unless said otherwise; p workers, m micro-batches.
        memory: what a worker keeps.
        staleness: age of the weights behind a gradient.
        source: where it was published.
    """

    decides: str
    bubble: str
    memory: str
    staleness: str
    source: str


class Defaults(Protocol):
    """Answers that hold for a synchronous schedule over equal replicas; a schedule gives its order and what differs.

    A schedule is a frozen dataclass; its fields are its options. What a worker keeps is counted in the order; the
    families in `_families` know it, and where stages are.
    """

    __slots__ = ()

    key: ClassVar[str]
    facts: ClassVar[Facts]
    unit: ClassVar[ActivationUnit] = ActivationUnit.MICRO_BATCH
    policy: ClassVar[WeightPolicy] = WeightPolicy.SYNC
    spans: ClassVar[bool] = False
    closed_form: ClassVar[bool] = False
    split_backward: ClassVar[bool] = False
    """Whether weight gradients are actions of their own."""

    @property
    def name(self) -> str:
        """The name users choose it by, with the options that differ from the usual (`chimera:pairs=2`)."""
        return name_with_options(self, self.key)

    @property
    def weight_policy(self) -> WeightPolicy:
        """Which versions of the weights it computes with."""
        return self.policy

    @property
    def activation_unit(self) -> ActivationUnit:
        """What one unit of `in_flight` is."""
        return self.unit

    @property
    def parts(self) -> int:
        """Micro-batches are whole."""
        return 1

    @property
    def drains(self) -> bool:
        """Synchronous schedules end with an empty pipeline."""
        return self.weight_policy.synchronous

    @property
    def launches(self) -> bool:
        """Exchanges follow the work."""
        return False

    @property
    def fixed(self) -> Pipeline | None:
        """It serves many pipelines."""
        return None

    @property
    def weight_buffers(self) -> int:
        """None beside the versions."""
        return 0

    @property
    def clock_distance(self) -> int | None:
        """Replicas do not run apart."""
        return None

    @property
    def chunks_per_worker(self) -> int:
        """Stages for each worker: one."""
        return 1

    def stage_counts(self, workers: int) -> tuple[int, ...]:
        """As many chunks on each worker as the schedule wants."""
        return (workers * self.chunks_per_worker,)

    def workers(self, pipeline: Pipeline) -> int:
        """One for each replica and `chunks_per_worker` stages."""
        return sum(pipeline.replicas) // self.chunks_per_worker

    def variants(self, workers: int, micro_batches: int, *, recompute: bool = False) -> tuple[Schedule, ...]:
        """Those of `options` that can serve so many workers; the schedule itself where its options are chosen."""
        tried: Iterable[Defaults] = (self,)
        if self.name == self.key:
            tried = (dataclasses.replace(cast(Any, self), **own) for own in self.options(recompute=recompute))
        return tuple(
            cast("Schedule", one)
            for one in tried
            if not one.supports(Pipeline((1,) * one.stage_counts(workers)[0], micro_batches))
            and (one.name == self.name or one.worthwhile(workers, micro_batches))
        )

    def options(self, *, recompute: bool) -> Iterable[dict[str, Any]]:
        """Options worth trying beside the usual ones, which come first."""
        return ({},)

    def worthwhile(self, workers: int, micro_batches: int) -> bool:
        """Whether these options differ in their order from the usual ones for such a pipeline."""
        return True

    def weight_versions(self, pipeline: Pipeline) -> tuple[int, ...]:
        """One version of the weights at every stage."""
        return (1,) * pipeline.stages

    def staleness(self, pipeline: Pipeline) -> tuple[int, ...]:
        """None: every gradient is applied to the weights that it was computed with."""
        return (0,) * pipeline.stages

    def rhythm(self, pipeline: Pipeline) -> int:
        """An iteration."""
        return pipeline.micro_batches

    def exchanges(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Once at every stage."""
        return (1,) * pipeline.stages

    def optimizer_scaling(self, batch: int, micro_batch: int) -> OptimizerScaling | None:
        """Updates are of the batch that the user chose."""
        return None

    def corrections(self, pipeline: Pipeline, scaling: OptimizerScaling | None = None) -> tuple[StageCorrection, ...]:
        """Nothing to correct."""
        return ()

    def recomputed_stages(self, pipeline: Pipeline) -> frozenset[int]:
        """None."""
        return frozenset()

    def supports(self, pipeline: Pipeline) -> str:
        """Why the schedule cannot serve the pipeline, empty when it can: it must have equal replicas everywhere."""
        if len(set(pipeline.replicas)) > 1:
            return f"{self.key} needs the same number of replicas at every stage, not {pipeline.replicas}"
        return self.refuses(single(pipeline))

    def refuses(self, pipeline: Pipeline) -> str:
        """Why the schedule cannot serve a pipeline of single replicas, empty when it can."""
        return ""

    @abstractmethod
    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The actions of each lane for one iteration.

        Raises:
            PlanError: the schedule cannot serve the pipeline; says why.
        """
        ...

    def work(self, pipeline: Pipeline, iterations: int = 1) -> Work:
        """The orders of some iterations, one after the other."""
        return Work(follow_on(self.order(pipeline), pipeline.micro_batches, iterations), parts=self.parts)

    def placement(self, pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
        """Each replica of a stage on a worker of its own."""
        return tuple((stage,) for stage, _ in pipeline.workers())

    def holders(self, pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
        """The inverse of `placement`."""
        found: list[list[int]] = [[] for _ in pipeline.replicas]
        for worker, stages in enumerate(self.placement(pipeline)):
            for stage in stages:
                found[stage].append(worker)
        return tuple(map(tuple, found))

    def workload(self, pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
        """All micro-batches of its replica at every stage of a worker."""
        return tuple(
            tuple(pipeline.micro_batches // pipeline.replicas[stage] for stage in stages)
            for stages in self.placement(pipeline)
        )

    def crossings(self, pipeline: Pipeline) -> tuple[bool, ...]:
        """All but the first, and those whose stage before is on the same workers."""
        holders = self.holders(pipeline)
        return (False, *(before != here for before, here in pairwise(holders)))

    def few(self, pipeline: Pipeline) -> Pipeline:
        """A pipeline of single replicas with fewer micro-batches in which as much is kept."""
        return pipeline

    def peaks(self, pipeline: Pipeline) -> tuple[HeldUnits, ...]:
        """Counted in the order of one replica, of few micro-batches where these show it; O(actions), once."""
        require(self, pipeline)
        count, own = pipeline.replicas[0], _counted(cast(Hashable, self), self.few(single(pipeline)))
        if count > 1:
            return tuple(held for held in own for _ in range(count))
        return own

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each stage, the most units that one worker keeps, from `peaks`."""
        found = [0] * pipeline.stages
        for held in self.peaks(pipeline):
            for stage, units in held.own().items():
                found[stage] = max(found[stage], units)
        return tuple(found)

    def held(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each worker, the most units of all its stages together, from `peaks`."""
        return tuple(held.total for held in self.peaks(pipeline))

    def warm_up_after(
        self, replicas: np.ndarray, passing: np.ndarray, micro_batches: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """No recurrence is known."""
        return None

    def idle_s(
        self, pipeline: Pipeline, forward_s: float, backward_s: float, weight_grad_s: float | None = None
    ) -> float:
        """See `wait_s`, of one replica."""
        weight_s = backward_s / 2 if weight_grad_s is None else weight_grad_s
        return self.wait_s(single(pipeline), forward_s, backward_s, weight_s)

    def wait_s(self, pipeline: Pipeline, forward_s: float, backward_s: float, weight_s: float) -> float:
        """Filling and draining, a forward and a backward for each worker but one: (p - 1)(F + B)."""
        return (self.workers(pipeline) - 1) * (forward_s + backward_s)

    def exact(self, pipeline: Pipeline) -> bool:
        """A single worker never waits; of others nothing is proven."""
        return pipeline.stages == 1

    def flow(self, pipeline: Pipeline) -> Flow:
        """How its micro-batches go through the workers, for `critical_s`."""
        placement = self.placement(pipeline)
        deferred = (self.deferred(single(pipeline)),) * len(placement) if self.split_backward else ()
        return Flow(placement, self.workload(pipeline), deferred=deferred, spans=self.spans, launches=self.launches)

    def ramp(self, pipeline: Pipeline) -> tuple[float, float]:
        """The steps of its flow; no drain where weight gradients or repeated forwards may fill it."""
        flow = self.flow(pipeline)
        if flow.spans or not self.drains:
            return 0.0, 0.0
        return flow.forward_step, 0.0 if flow.early or flow.deferred else flow.backward_step

    def deferred(self, pipeline: Pipeline) -> int:
        """Weight gradients that a worker may leave for the time after its last input gradient: all that it keeps."""
        return max(self.held(pipeline))

    def critical_s(
        self,
        pipeline: Pipeline,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        tail_s: Sequence[float],
        weight_grad_s: Sequence[float] = (),
        transfer_s: Sequence[float] = (),
    ) -> float:
        """See `chain_s`."""
        require(self, pipeline)
        split = self.split_backward
        return self.chain_s(
            pipeline, PassSeconds.of(forward_s, backward_s, tail_s, weight_grad_s, transfer_s, split=split)
        )

    def chain_s(self, pipeline: Pipeline, times: PassSeconds) -> float:
        """Filling, the work of one worker, draining: the worker for which this is longest. O(stages * holders)."""
        return busiest_chain_s(self.flow(pipeline), times)


def single(pipeline: Pipeline) -> Pipeline:
    """The pipeline of one replica of equally replicated stages."""
    if pipeline.replicas[0] == 1:
        return pipeline
    return Pipeline((1,) * pipeline.stages, pipeline.micro_batches // pipeline.replicas[0])


@lru_cache(maxsize=512)
def _counted(schedule: Hashable, pipeline: Pipeline) -> tuple[HeldUnits, ...]:
    chosen = cast(Defaults, schedule)
    return count_held(chosen.order(pipeline), chosen.placement(pipeline))


def dealt(schedule: Defaults, pipeline: Pipeline, line: LineOrders) -> tuple[tuple[Action, ...], ...]:
    """The orders of equal replicas from those of single ones; lane k of replica q is number k * replicas + q.

    Args:
        schedule: whose they are.
        pipeline: with replicas.
        line: gives the orders of a pipeline of single replicas.

    Raises:
        PlanError: the schedule cannot serve the pipeline; says why.
    """
    require(schedule, pipeline)
    return replicate(line(single(pipeline)), pipeline.replicas[0])


def require(schedule: Defaults, pipeline: Pipeline) -> None:
    """Refuse a pipeline that the schedule cannot serve.

    Raises:
        PlanError: says why.
    """
    reason = schedule.supports(pipeline)
    if reason:
        raise PlanError(reason, hint="change the stages, the micro-batches, or the schedule")


def finish(stages: Iterable[int], number: int = -1) -> Iterator[Action]:
    """SYNC of all stages of a worker, then UPDATE of all."""
    own = tuple(stages)
    yield from (Action(ActionKind.SYNC, stage, number) for stage in own)
    yield from (Action(ActionKind.UPDATE, stage, number) for stage in own)


def replicate(orders: Sequence[Sequence[Action]], count: int) -> tuple[tuple[Action, ...], ...]:
    """The orders `count` times, micro-batches dealt round-robin; all copies of an order stand together."""
    if count == 1:
        return tuple(tuple(order) for order in orders)
    lane_of = {lane: lane for lane in range(len(orders))}
    return tuple(
        tuple(
            dataclasses.replace(
                a,
                micro_batch=a.micro_batch * count + replica if _numbered(a) else a.micro_batch,
                peer=lane_of[a.peer] * count + replica if a.peer >= 0 else -1,
            )
            for a in order
        )
        for order in orders
        for replica in range(count)
    )


def follow_on(
    orders: Sequence[Sequence[Action]], micro_batches: int, iterations: int
) -> tuple[tuple[Action, ...], ...]:
    """The orders repeated, with numbers that go on."""
    if iterations == 1:
        return tuple(tuple(order) for order in orders)
    return tuple(
        tuple(
            dataclasses.replace(a, micro_batch=a.micro_batch + i * micro_batches if _numbered(a) else i)
            for i in range(iterations)
            for a in order
        )
        for order in orders
    )


def _numbered(action: Action) -> bool:
    return action.kind not in (ActionKind.SYNC, ActionKind.UPDATE, ActionKind.LAUNCH_SYNC)
