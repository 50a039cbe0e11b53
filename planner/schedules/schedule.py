"""The interface of schedules, with defaults for synchronous schedules over equal replicas."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

from planner.errors import PlanError
from planner.registry import name_with_options, options_of
from planner.schedules.critical_chains import PassSeconds, busiest_chain_s
from planner.schedules.held import HeldUnits, count_held
from planner.schedules.orders import finish, repeated
from planner.schedules.types import (
    Action,
    ActivationUnit,
    Facts,
    OptimizerScaling,
    Pipeline,
    StageCorrection,
    WeightPolicy,
    Work,
    evaluate,
)

if TYPE_CHECKING:
    import numpy as np


class Schedule(Protocol):
    """An order of the work of a pipeline, registered in `planner.schedules.SCHEDULES`.

    Everything that the engine needs to know about a schedule is a method here. A schedule is a frozen dataclass whose
    fields are its options. It defines its order and overrides the defaults that do not hold for it. Schedules are
    hashable, so that figures counted along an order are cached by schedule and pipeline.

    `Pipeline.stages` counts pieces of the model (chunks). A schedule may place several of them on one worker
    (interleaved, V, wave) or one on several workers (bidirectional); `placement` and its orders say so. Readers of
    orders must take the stage from the action, never from the worker's number.
    """

    __slots__ = ()

    key: str
    """The name that it is registered by."""
    facts: Facts
    """Its memory, idle time and weight versions as expressions."""
    spans: ClassVar[bool] = False
    """True if each worker begins its next iteration when it ends its last one, not when all workers have ended."""
    closed_form: ClassVar[bool] = False
    """True if the closed form of `planner.space.evaluate` describes its time."""
    split_backward: ClassVar[bool] = False
    """True if weight gradients are separate actions."""
    early: bool = False
    """True if recomputation runs before the gradient arrives, so that the drain has no bound."""
    deals: ClassVar[bool] = False
    """True if its orders are of all replicas, which may be unequal; else all replicas have the same order."""
    shares_workers: ClassVar[bool] = False
    """True if a worker may keep activations of several stages, or a stage have several workers beside its replicas."""

    @property
    def name(self) -> str:
        """The name that users choose it by, with the options that differ from the defaults (`chimera:pairs=2`)."""
        return name_with_options(self, self.key)

    @property
    def weight_policy(self) -> WeightPolicy:
        """Which versions of the weights its stages compute with."""
        return WeightPolicy.SYNC

    @property
    def activation_unit(self) -> ActivationUnit:
        """The unit that `in_flight`, `held` and `peaks` count: a micro-batch, or a part of it if it has several."""
        return ActivationUnit.SUB_SEQUENCE if self.parts > 1 else ActivationUnit.MICRO_BATCH

    @property
    def parts(self) -> int:
        """Sub-sequences of a micro-batch; a unit then is 1 / `parts` of a stage's activations of a micro-batch."""
        return 1

    @property
    def drains(self) -> bool:
        """True if the pipeline is empty at the end of an iteration, so that one iteration can be simulated alone."""
        return self.weight_policy.synchronous

    @property
    def launches(self) -> bool:
        """True if gradient exchanges are launched without waiting, so that work may hide them."""
        return False

    @property
    def fixed(self) -> Pipeline | None:
        """The only pipeline that it serves, for orders written for one; None if it serves many."""
        return None

    @property
    def weight_buffers(self) -> int:
        """Buffers of the size of a stage's weights in addition to the versions (PipeMare's T2, predicted weights)."""
        return 0

    @property
    def clock_distance(self) -> int | None:
        """Waves by which a replica may run ahead of the slowest; None if replicas run in step."""
        return None

    @property
    def chunks_per_worker(self) -> int:
        """Number of stages on each worker."""
        return 1

    def holding(self, chunks: int) -> Schedule | None:
        """The schedule with so many stages on each worker, where an option says how many; else None."""
        return None

    def stage_counts(self, workers: int) -> tuple[int, ...]:
        """Numbers of stages (chunks) that it supports on so many workers of single replicas; empty if none."""
        return (workers * self.chunks_per_worker,)

    def workers(self, pipeline: Pipeline) -> int:
        """Number of workers of one copy, replicas included. O(stages)."""
        return sum(pipeline.replicas) // self.chunks_per_worker

    def variants(self, workers: int, micro_batches: int, *, recompute: bool = False) -> tuple[Schedule, ...]:
        """The schedule with each combination of options worth trying that supports such a pipeline.

        A schedule whose options were set is its only variant.

        Args:
            workers: workers of one copy of single replicas.
            micro_batches: micro-batches of one iteration.
            recompute: stages may recompute, so that keeping more micro-batches costs little.
        """
        candidates: Iterable[Schedule] = (self,)
        if self.name == self.key:
            sets = self.options(workers, micro_batches, recompute=recompute)
            candidates = (dataclasses.replace(cast(Any, self), **options) for options in sets)
        return tuple(
            variant
            for variant in candidates
            if not variant.supports(Pipeline((1,) * variant.stage_counts(workers)[0], micro_batches))
        )

    def options(self, workers: int, micro_batches: int, *, recompute: bool) -> Iterable[dict[str, Any]]:
        """Sets of options worth trying for such a pipeline, the defaults first."""
        return ({},)

    def supports(self, pipeline: Pipeline) -> str:
        """Why the schedule does not support the pipeline; empty if it does. Most need equal replicas. O(stages)."""
        if len(set(pipeline.replicas)) > 1:
            return f"{self.key} needs the same number of replicas at every stage, not {pipeline.replicas}"
        return self.refuses(single(pipeline))

    def refuses(self, pipeline: Pipeline) -> str:
        """Why the schedule does not support a pipeline of single replicas; empty if it does."""
        return ""

    @abstractmethod
    def worker_orders(self, pipeline: Pipeline) -> Iterable[Iterable[Action]]:
        """The order of each worker, without the final SYNC and UPDATE of its stages.

        The pipeline has single replicas, except where the schedule `deals` with replicas itself.
        """
        ...

    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The actions of each lane, in order, for one iteration.

        Raises:
            PlanError: the schedule does not support the pipeline; says why.
        """
        return self.work(pipeline).lanes

    def work(self, pipeline: Pipeline, iterations: int = 1) -> Work:
        """The orders of several iterations; an asynchronous schedule does not drain between them.

        Each worker ends an iteration with SYNC and UPDATE of its stages. Where all replicas have the same order, worker
        k of replica q is lane k * replicas + q.

        Raises:
            PlanError: the schedule does not support the pipeline; says why.
        """
        require(self, pipeline)
        dealt = pipeline if self.deals else single(pipeline)
        lanes = [
            (*actions, *finish(stages))
            for actions, stages in zip(self.worker_orders(dealt), self.placement(dealt), strict=True)
        ]
        replicas = 1 if self.deals else pipeline.replicas[0]
        return Work(repeated(lanes, replicas, dealt.micro_batches, iterations), parts=self.parts)

    def counts(self, pipeline: Pipeline) -> tuple[dict[int, int], ...]:
        """For each worker, its micro-batches by stage, stages ascending; the replicas of a worker are neighbours."""
        return tuple({stage: pipeline.micro_batches // pipeline.replicas[stage]} for stage, _ in pipeline.workers())

    def placement(self, pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
        """For each worker the stages that it holds, ascending. O(workers * stages per worker)."""
        return tuple(map(tuple, self.counts(pipeline)))

    def holders(self, pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
        """For each stage the workers that hold it, ascending: the inverse of `placement`."""
        workers_of_stage: list[list[int]] = [[] for _ in pipeline.replicas]
        for worker, stages in enumerate(self.placement(pipeline)):
            for stage in stages:
                workers_of_stage[stage].append(worker)
        return tuple(map(tuple, workers_of_stage))

    def workload(self, pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
        """For each worker, the number of micro-batches that it runs of each of its stages, in `placement` order."""
        return tuple(tuple(stages.values()) for stages in self.counts(pipeline))

    def crossings(self, pipeline: Pipeline) -> tuple[bool, ...]:
        """For each stage, True if its input comes from another worker; other transfers are free."""
        holders = self.holders(pipeline)
        return (False, *(before != after for before, after in pairwise(holders)))

    def recomputed_stages(self, pipeline: Pipeline) -> frozenset[int]:
        """Stages that the orders recompute by RECOMPUTE actions, whole, from their input."""
        return frozenset()

    def terms(self, pipeline: Pipeline) -> dict[str, Any]:
        """Values of the names in its facts: p and m of one replica, and its options."""
        one_replica = single(pipeline)
        options = {field.name: getattr(self, field.name) for field in options_of(self)}
        return {"p": self.workers(one_replica), "m": one_replica.micro_batches, **options}

    def by_place(self, text: str, pipeline: Pipeline, places: int) -> tuple[int, ...]:
        """The value of a fact for i = 0, ..., places - 1: workers or stages of one replica."""
        terms = self.terms(pipeline)
        return tuple(evaluate(text, {**terms, "i": i}) for i in range(places))

    def weight_versions(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each stage, the number of weight versions that one replica keeps."""
        return self.by_place(self.facts.versions, pipeline, pipeline.stages)

    def staleness(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each stage, most updates between reading the weights in a forward and applying the gradient."""
        return self.by_place(self.facts.staleness, pipeline, pipeline.stages)

    def shortened(self, pipeline: Pipeline) -> Pipeline:
        """The pipeline with as few micro-batches as show its peak memory; given and returned with single replicas."""
        return pipeline

    def peaks(self, pipeline: Pipeline) -> tuple[HeldUnits, ...]:
        """For each worker, the Pareto set of units of each stage that it keeps at the same time.

        `peaks[worker].most(unit_bytes)` is the worker's peak of activation bytes. The simulation finds the same, or
        less if lanes run side by side or activations are evicted, because the peak then depends on the times. Counted
        along the order of one replica of the `shortened` pipeline, O(actions) and cached; by `facts.kept` where that is
        the exact number of each stage.
        """
        if self._known:
            by_stage = [HeldUnits.of(stage, kept) for stage, kept in enumerate(self.in_flight(pipeline))]
            return tuple(by_stage[stage] for stage, _ in pipeline.workers())
        require(self, pipeline)
        count, held_by_worker = pipeline.replicas[0], _counted(cast(Hashable, self), self.shortened(single(pipeline)))
        if count > 1:
            return tuple(held for held in held_by_worker for _ in range(count))
        return held_by_worker

    @property
    def _known(self) -> bool:
        """True if `facts.kept` is what each stage keeps: exact, of workers with one stage each."""
        return not (self.shares_workers or self.facts.kept_bound)

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each stage, most activation units (usually micro-batches) that one replica keeps at the same time."""
        if self._known:
            terms, counts = self.terms(pipeline), [pipeline.micro_batches // count for count in pipeline.replicas]
            return tuple(evaluate(self.facts.kept, {**terms, "i": i, "m": count}) for i, count in enumerate(counts))
        most_units = [0] * pipeline.stages
        for held in self.peaks(pipeline):
            for stage, units in held.own().items():
                most_units[stage] = max(most_units[stage], units)
        return tuple(most_units)

    def held(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each worker, most units of all its stages together that it keeps at the same time.

        From `facts.kept`, or counted by `peaks` if that fact is only an upper bound.
        """
        if self._known or self.facts.kept_bound:
            return tuple(held.total for held in self.peaks(pipeline))
        kept = self.by_place(self.facts.kept, pipeline, self.workers(single(pipeline)))
        return tuple(units for units in kept for _ in range(pipeline.replicas[0]))

    def kept_of_each(self, pipeline: Pipeline) -> tuple[float, ...]:
        """For each worker, units that it keeps of each of its stages at the least, averaged over some moments.

        The worker's peak of activation bytes is no less than this many times one unit of all its stages together. 0
        where backwards are split or a worker keeps activations of others.
        """
        return tuple(
            0.0 if held.splits or held.guests else float(held.units.mean(axis=0).min(initial=math.inf))
            for held in self.peaks(pipeline)
        )

    def rhythm(self, pipeline: Pipeline) -> int:
        """Micro-batches after which the order repeats; fewer than an iteration's if it updates more often."""
        return pipeline.micro_batches

    def exchanges(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each stage, number of gradient exchanges in an iteration."""
        return (1,) * pipeline.stages

    def updates(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each stage, number of optimizer steps in an iteration: by default one after each exchange."""
        return self.exchanges(pipeline)

    def optimizer_scaling(self, batch: int, micro_batch: int) -> OptimizerScaling | None:
        """Momentum and learning rate adapted to updates smaller than the batch; None if they stay as they are.

        Args:
            batch: samples of an iteration, which the user chose them for.
            micro_batch: samples of one micro-batch on all replicas and copies together.
        """
        return None

    def corrections(self, pipeline: Pipeline, scaling: OptimizerScaling | None = None) -> tuple[StageCorrection, ...]:
        """Corrections of each stage for the age of its weights; empty if there are none.

        Args:
            pipeline: replicas and micro-batches.
            scaling: the adapted optimizer (`optimizer_scaling`).
        """
        return ()

    def warm_up_after(
        self, replicas: np.ndarray, passing: np.ndarray, micro_batches: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """`in_flight` as a recurrence from the last stage to the first, for searches that put stages in front.

        Args:
            replicas: replicas of the new first stage.
            passing: micro-batches that pass the stage after it before that stage's first backward; 0 after the last
                stage. Broadcast against `replicas`.
            micro_batches: micro-batches of one iteration.

        Returns:
            (micro-batches that a replica of the stage keeps, micro-batches that pass the stage before its first
            backward, forwards that a replica has left to run while a micro-batch travels to the last stage and its
            gradient back). None if the schedule has no such recurrence.
        """
        return None

    def idle_s(
        self, pipeline: Pipeline, forward_s: float, backward_s: float, weight_grad_s: float | None = None
    ) -> float:
        """Idle seconds of the busiest worker in an iteration of equal stages, by `facts.idle`.

        An estimate unless `facts.idle_holds` is true for these times.

        Args:
            pipeline: stages and micro-batches.
            forward_s: forward of one stage for one micro-batch.
            backward_s: whole backward of one stage for one micro-batch.
            weight_grad_s: the part of the backward that computes weight gradients; by default half.
        """
        weight_s = backward_s / 2 if weight_grad_s is None else weight_grad_s
        times = {"F": forward_s, "B": backward_s, "W": weight_s}
        return cast(float, evaluate(self.facts.idle, {**self.terms(pipeline), **times}))

    def exact(self, pipeline: Pipeline) -> bool:
        """True if `critical_s` equals the simulated iteration time for any stage times, so that none need be simulated.

        Assumes transfers that block the worker, and exchanges and updates after the last backward. By default only a
        pipeline of a single worker, which never waits.
        """
        return pipeline.stages == 1

    @property
    def forward_step(self) -> float:
        """Micro-batches after whose forward the next stage continues."""
        return 1 / self.parts

    def ramp(self, pipeline: Pipeline) -> tuple[float, float]:
        """Least idle time of a worker while the pipeline fills and drains, as factors (fill, drain).

        The factors multiply the time of the forwards (fill) and backwards (drain) of all stages before the worker's
        first. Both are 0 if iterations overlap; the drain is 0 if weight gradients or recomputation may fill it.
        """
        if self.spans or not self.drains:
            return 0.0, 0.0
        return self.forward_step, 0.0 if self.early or self.split_backward else 1 / self.parts

    def deferred(self, pipeline: Pipeline) -> int:
        """Most weight gradients that a worker may postpone past its last input gradient: all that it keeps."""
        return max(self.by_place(self.facts.kept, pipeline, self.workers(single(pipeline))))

    def critical_s(
        self,
        pipeline: Pipeline,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        tail_s: Sequence[float],
        weight_grad_s: Sequence[float] = (),
        transfer_s: Sequence[float] = (),
    ) -> float:
        """Longest chain of waits that has a closed form, in seconds. O(stages * holders).

        A lower bound on the simulated iteration for any stages and replicas, if transfers block the worker (leave them
        out if they overlap) and a paired forward and backward take as long as one after the other. For an asynchronous
        schedule, a lower bound on the time between iterations once the pipeline is full.

        Args:
            pipeline: replicas and micro-batches.
            forward_s: by stage, forward of one micro-batch and the transfer that it waits for, if it `crosses`.
            backward_s: by stage, backward of one micro-batch and the transfer that follows, if the stage `crosses`.
                With the repeated forward where the stage is recomputed.
            tail_s: by stage, synchronisation and update after the last backward.
            weight_grad_s: by stage, the part of `backward_s` that computes weight gradients; empty: half.
            transfer_s: by stage, the part of both that is transfers; empty: none. Read where forward and backward
                share a worker.
        """
        require(self, pipeline)
        nothing = [0.0] * len(backward_s)
        weight_s = (weight_grad_s or [b / 2 for b in backward_s]) if self.split_backward else nothing
        gradient_s = [b - w for b, w in zip(backward_s, weight_s, strict=True)]
        return self.chain_s(pipeline, PassSeconds(forward_s, gradient_s, weight_s, tail_s, transfer_s or nothing))

    def chain_s(self, pipeline: Pipeline, times: PassSeconds) -> float:
        """Fill, work and drain of the worker for which their sum is longest, in seconds. O(stages * holders)."""
        return busiest_chain_s(self, pipeline, times)


def single(pipeline: Pipeline) -> Pipeline:
    """The pipeline of one replica, for equally replicated stages."""
    if pipeline.replicas[0] == 1:
        return pipeline
    return Pipeline((1,) * pipeline.stages, pipeline.micro_batches // pipeline.replicas[0])


@lru_cache(maxsize=512)
def _counted(schedule: Hashable, pipeline: Pipeline) -> tuple[HeldUnits, ...]:
    """`Schedule.peaks` of single replicas, counted along the order."""
    typed = cast(Schedule, schedule)
    return count_held(typed.work(pipeline).by_worker(), typed.placement(pipeline))


def require(schedule: Schedule, pipeline: Pipeline) -> None:
    """Refuse a pipeline that the schedule does not support.

    Raises:
        PlanError: says why.
    """
    reason = schedule.supports(pipeline)
    if reason:
        raise PlanError(reason, hint="change the stages, the micro-batches, or the schedule")
