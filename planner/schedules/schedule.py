"""What a schedule answers; the answers given here are those of synchronous schedules over equal replicas."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

from planner.errors import PlanError
from planner.registry import name_with_options
from planner.schedules.critical_chains import Flow, PassSeconds, busiest_chain_s
from planner.schedules.facts import Facts, evaluate
from planner.schedules.held import HeldUnits, count_held
from planner.schedules.orders import finish, follow_on, replicate
from planner.schedules.types import (
    Action,
    ActivationUnit,
    OptimizerScaling,
    Pipeline,
    StageCorrection,
    WeightPolicy,
    Work,
)

if TYPE_CHECKING:
    import numpy as np


class Schedule(Protocol):
    """One way to order the work of a pipeline: an object registered in `planner.schedules.SCHEDULES`.

    Everything that the engine must know about a schedule is asked here. A schedule is a frozen dataclass; its fields
    are its options. It gives its order and what differs from the answers below. Schedules are hashable: what is counted
    in an order is counted once for a schedule and a pipeline.

    `Pipeline.stages` counts pieces of the model (chunks). A schedule that places several of them on one worker
    (interleaved, V, wave) or one on several workers (bidirectional) says so by `placement` and in its orders:
    everything that reads orders takes the stage from the action, never from the worker's number.
    """

    __slots__ = ()

    key: ClassVar[str]
    """The name it is registered by."""
    facts: ClassVar[Facts]
    """What it says of itself, in expressions."""
    spans: ClassVar[bool] = False
    """Whether an iteration begins on each worker where its last one ended, not when all have ended."""
    closed_form: ClassVar[bool] = False
    """Whether the closed form of a paced line of stages (`planner.space.evaluate`) describes its time."""
    split_backward: ClassVar[bool] = False
    """Whether weight gradients are actions of their own."""

    @property
    def name(self) -> str:
        """The name users choose it by, with the options that differ from the usual (`chimera:pairs=2`)."""
        return name_with_options(self, self.key)

    @property
    def weight_policy(self) -> WeightPolicy:
        """Which versions of the weights it computes with."""
        return WeightPolicy.SYNC

    @property
    def activation_unit(self) -> ActivationUnit:
        """What one unit of `in_flight`, `held` and `peaks` is."""
        return ActivationUnit.MICRO_BATCH

    @property
    def parts(self) -> int:
        """Sub-sequences of a micro-batch: a unit is one `parts`-th of a stage's activations of a micro-batch."""
        return 1

    @property
    def drains(self) -> bool:
        """Whether the pipeline is empty at the end of an iteration, so that one iteration can be played alone."""
        return self.weight_policy.synchronous

    @property
    def launches(self) -> bool:
        """Whether exchanges of gradients are begun without waiting for them, so that work may hide them."""
        return False

    @property
    def fixed(self) -> Pipeline | None:
        """The only pipeline that it serves (orders written for one), None when it serves many."""
        return None

    @property
    def weight_buffers(self) -> int:
        """Buffers as large as a stage's weights, kept beside the versions (PipeMare's T2, predicted weights)."""
        return 0

    @property
    def clock_distance(self) -> int | None:
        """Waves by which a replica may run ahead of the slowest; None where replicas do not run apart."""
        return None

    @property
    def chunks_per_worker(self) -> int:
        """Stages for each worker."""
        return 1

    def stage_counts(self, workers: int) -> tuple[int, ...]:
        """Stages (chunks) that a pipeline over so many workers may have; empty when none. Replicas are left out."""
        return (workers * self.chunks_per_worker,)

    def workers(self, pipeline: Pipeline) -> int:
        """Workers of one copy, replicas included. O(stages)."""
        return sum(pipeline.replicas) // self.chunks_per_worker

    def variants(self, workers: int, micro_batches: int, *, recompute: bool = False) -> tuple[Schedule, ...]:
        """The schedule with each combination of its options worth trying; those that can serve such a pipeline.

        A schedule with options of its own choice is its only variant.

        Args:
            workers: of one copy, single replicas.
            micro_batches: of one iteration.
            recompute: whether stages repeat their forward, so that keeping more micro-batches costs little.
        """
        tried: Iterable[Schedule] = (self,)
        if self.name == self.key:
            tried = (dataclasses.replace(cast(Any, self), **own) for own in self.options(recompute=recompute))
        return tuple(
            one
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

    def supports(self, pipeline: Pipeline) -> str:
        """Why the schedule cannot serve the pipeline, empty when it can; most need equal replicas. O(stages)."""
        if len(set(pipeline.replicas)) > 1:
            return f"{self.key} needs the same number of replicas at every stage, not {pipeline.replicas}"
        return self.refuses(single(pipeline))

    def refuses(self, pipeline: Pipeline) -> str:
        """Why the schedule cannot serve a pipeline of single replicas, empty when it can."""
        return ""

    @abstractmethod
    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The actions of each lane, in order, for one iteration.

        Raises:
            PlanError: the schedule cannot serve the pipeline; says why.
        """
        ...

    def work(self, pipeline: Pipeline, iterations: int = 1) -> Work:
        """The orders of some iterations; an asynchronous schedule runs on from one to the next without draining."""
        return Work(follow_on(self.order(pipeline), pipeline.micro_batches, iterations), parts=self.parts)

    def placement(self, pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
        """For each worker the stages whose weights it has, ascending. O(workers * stages of each)."""
        return tuple((stage,) for stage, _ in pipeline.workers())

    def holders(self, pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
        """For each stage the workers that have it, ascending: the inverse of `placement`."""
        found: list[list[int]] = [[] for _ in pipeline.replicas]
        for worker, stages in enumerate(self.placement(pipeline)):
            for stage in stages:
                found[stage].append(worker)
        return tuple(map(tuple, found))

    def workload(self, pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
        """For each worker, the micro-batches that it works on of each of its stages, in the order of `placement`."""
        return tuple(
            tuple(pipeline.micro_batches // pipeline.replicas[stage] for stage in stages)
            for stages in self.placement(pipeline)
        )

    def crossings(self, pipeline: Pipeline) -> tuple[bool, ...]:
        """For each stage, whether its input comes from another worker: the other transfers cost nothing."""
        holders = self.holders(pipeline)
        return (False, *(before != here for before, here in pairwise(holders)))

    def recomputed_stages(self, pipeline: Pipeline) -> frozenset[int]:
        """Stages whose forwards the orders repeat by actions of their own: whole, from what enters the stage."""
        return frozenset()

    def terms(self, pipeline: Pipeline) -> dict[str, Any]:
        """Values of the names that its facts use: p and m of one replica, and its options."""
        own = single(pipeline)
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(cast(Any, self))}
        return {"p": self.workers(own), "m": own.micro_batches, **options}

    def by_place(self, text: str, pipeline: Pipeline, places: int) -> tuple[int, ...]:
        """What one of its facts gives for i = 0, 1, ...: of workers or stages of one replica."""
        terms = self.terms(pipeline)
        return tuple(evaluate(text, {**terms, "i": i}) for i in range(places))

    def weight_versions(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each stage, the versions of the weights that one replica keeps."""
        return self.by_place(self.facts.versions, pipeline, pipeline.stages)

    def staleness(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each stage, updates between reading the weights in a forward and applying the gradient, at the most."""
        return self.by_place(self.facts.staleness, pipeline, pipeline.stages)

    def few(self, pipeline: Pipeline) -> Pipeline:
        """A pipeline of single replicas with fewer micro-batches in which as much is kept."""
        return pipeline

    def peaks(self, pipeline: Pipeline) -> tuple[HeldUnits, ...]:
        """For each worker, the units of each stage that it keeps at the same time, where none keeps more of all.

        The most bytes of activations that a worker keeps are `peaks[worker].most(unit_bytes)`, which is what the
        simulation finds, or more where lanes run side by side or activations are evicted: there it depends on the
        times. Counted in the order of one replica, of few micro-batches where these show it; O(actions), once.
        """
        require(self, pipeline)
        count, own = pipeline.replicas[0], _counted(cast(Hashable, self), self.few(single(pipeline)))
        if count > 1:
            return tuple(held for held in own for _ in range(count))
        return own

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each stage, the most activation units (micro-batches, mostly) that one replica keeps at the same time."""
        found = [0] * pipeline.stages
        for held in self.peaks(pipeline):
            for stage, units in held.own().items():
                found[stage] = max(found[stage], units)
        return tuple(found)

    def held(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each worker, the most units of all its stages together that it keeps at the same time: by `facts.kept`,
        from `peaks` where that is a bound."""
        if self.facts.kept_bound:
            return tuple(held.total for held in self.peaks(pipeline))
        kept = self.by_place(self.facts.kept, pipeline, self.workers(single(pipeline)))
        return tuple(units for units in kept for _ in range(pipeline.replicas[0]))

    def rhythm(self, pipeline: Pipeline) -> int:
        """Micro-batches after which the order repeats: fewer than an iteration's where it updates more often."""
        return pipeline.micro_batches

    def exchanges(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each stage, how often its gradients are exchanged in an iteration."""
        return (1,) * pipeline.stages

    def optimizer_scaling(self, batch: int, micro_batch: int) -> OptimizerScaling | None:
        """Momentum and learning rate for smaller updates than the user chose them for; None where they stay.

        Args:
            batch: samples of an iteration, for which the user chose them.
            micro_batch: samples of one micro-batch on all replicas and copies together.
        """
        return None

    def corrections(self, pipeline: Pipeline, scaling: OptimizerScaling | None = None) -> tuple[StageCorrection, ...]:
        """What each stage does about the age of its weights; () where there is nothing to do.

        Args:
            pipeline: replicas and micro-batches.
            scaling: the optimizer that the schedule is run with (`optimizer_scaling`).
        """
        return ()

    def warm_up_after(
        self, replicas: np.ndarray, passing: np.ndarray, micro_batches: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """`in_flight` as a recurrence from the last stage to the first, for searches that add stages in front.

        Args:
            replicas: of the stage in front.
            passing: micro-batches that pass the stage behind before its first backward; 0 behind the last. Broadcast
                against `replicas`.
            micro_batches: of one iteration.

        Returns:
            Micro-batches that a replica of the stage keeps; those that pass the stage before its first backward; and
            forwards that a replica has left to run while a micro-batch goes to the last stage and the first gradient
            comes back from it. None where the count does not follow from the later stages in this way.
        """
        return None

    def idle_s(
        self, pipeline: Pipeline, forward_s: float, backward_s: float, weight_grad_s: float | None = None
    ) -> float:
        """Seconds that the busiest worker stands idle in an iteration of equal stages, by `facts.idle`.

        An estimate for other times than those of the publication, see the schedule.

        Args:
            pipeline: stages and micro-batches.
            forward_s: forward of one stage for one micro-batch.
            backward_s: whole backward of one.
            weight_grad_s: the part of the backward that computes weight gradients; None: half.
        """
        weight_s = backward_s / 2 if weight_grad_s is None else weight_grad_s
        times = {"F": forward_s, "B": backward_s, "W": weight_s}
        return cast(float, evaluate(self.facts.idle, {**self.terms(pipeline), **times}))

    def exact(self, pipeline: Pipeline) -> bool:
        """Whether `critical_s` is the simulated iteration for any times of the stages, so that nothing need be played.

        For transfers that stop the worker, and exchanges and updates after the last backward. A single worker never
        waits; of others nothing is proven.
        """
        return pipeline.stages == 1

    def flow(self, pipeline: Pipeline) -> Flow:
        """How its micro-batches go through the workers, for `critical_s`."""
        placement = self.placement(pipeline)
        deferred = (self.deferred(single(pipeline)),) * len(placement) if self.split_backward else ()
        return Flow(placement, self.workload(pipeline), deferred=deferred, spans=self.spans, launches=self.launches)

    def ramp(self, pipeline: Pipeline) -> tuple[float, float]:
        """Parts of the forwards before a worker's first stage, and of their backwards, that it is idle at the least
        while the pipeline fills and drains: nothing where iterations overlap, no drain where weight gradients or
        repeated forwards may fill it."""
        flow = self.flow(pipeline)
        if flow.spans or not self.drains:
            return 0.0, 0.0
        return flow.forward_step, 0.0 if flow.early or flow.deferred else flow.backward_step

    def deferred(self, pipeline: Pipeline) -> int:
        """Weight gradients that a worker may leave for the time after its last input gradient: all that it keeps."""
        return max(self.by_place(self.facts.kept, pipeline, self.workers(pipeline)))

    def critical_s(
        self,
        pipeline: Pipeline,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        tail_s: Sequence[float],
        weight_grad_s: Sequence[float] = (),
        transfer_s: Sequence[float] = (),
    ) -> float:
        """Length of the longest chain of waits that can be written down in closed form. O(stages * holders).

        Never longer than the simulated iteration, whatever the stages and replicas, when transfers stop the worker
        (where they run beside the work: leave them out) and a paired forward and backward take as long as one after
        the other. Of an asynchronous schedule the time between iterations once the pipeline is full.

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
        split = self.split_backward
        return self.chain_s(
            pipeline, PassSeconds.of(forward_s, backward_s, tail_s, weight_grad_s, transfer_s, split=split)
        )

    def chain_s(self, pipeline: Pipeline, times: PassSeconds) -> float:
        """Filling, the work of one worker, draining: the worker for which this is longest. O(stages * holders)."""
        return busiest_chain_s(self.flow(pipeline), times)


class Dealt(Schedule, Protocol):
    """Orders of single replicas, the same for each replica; each worker ends with exchange and update of its stages."""

    __slots__ = ()

    @abstractmethod
    def line(self, pipeline: Pipeline) -> Iterable[Iterable[Action]]:
        """Forwards, backwards and what goes with them of each worker, for a pipeline of single replicas."""
        ...

    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The orders of single replicas with SYNC and UPDATE, for each replica: lane k of replica q is k count + q."""
        require(self, pipeline)
        own = single(pipeline)
        lanes = [
            (*actions, *finish(stages)) for actions, stages in zip(self.line(own), self.placement(own), strict=True)
        ]
        return replicate(lanes, pipeline.replicas[0])


class Placed(Dealt, Protocol):
    """Stages placed by a rule: several on a worker, or one on several workers; equal replicas."""

    __slots__ = ()

    @abstractmethod
    def counts(self, pipeline: Pipeline) -> tuple[dict[int, int], ...]:
        """For each worker of a pipeline of single replicas its stages, ascending, and its micro-batches of each."""
        ...

    def placement(self, pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
        """The stages of each worker; all replicas of a worker stand together."""
        own = [tuple(stages) for stages in self.counts(single(pipeline))]
        return tuple(stages for stages in own for _ in range(pipeline.replicas[0]))

    def workload(self, pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
        """The micro-batches of each."""
        own = [tuple(stages.values()) for stages in self.counts(single(pipeline))]
        return tuple(counts for counts in own for _ in range(pipeline.replicas[0]))


class Line(Schedule, Protocol):
    """Each replica of a stage on a worker of its own, with a known number of micro-batches in flight."""

    __slots__ = ()

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each stage, the most units that one replica keeps, by `facts.kept`; O(stages)."""
        terms, own = self.terms(pipeline), [pipeline.micro_batches // count for count in pipeline.replicas]
        return tuple(evaluate(self.facts.kept, {**terms, "i": i, "m": count}) for i, count in enumerate(own))

    def held(self, pipeline: Pipeline) -> tuple[int, ...]:
        """The same by worker."""
        kept = self.in_flight(pipeline)
        return tuple(kept[stage] for stage, _ in pipeline.workers())

    def peaks(self, pipeline: Pipeline) -> tuple[HeldUnits, ...]:
        """The same by worker."""
        each = [HeldUnits.of({stage: kept}) for stage, kept in enumerate(self.in_flight(pipeline))]
        return tuple(each[stage] for stage, _ in pipeline.workers())


def single(pipeline: Pipeline) -> Pipeline:
    """The pipeline of one replica of equally replicated stages."""
    if pipeline.replicas[0] == 1:
        return pipeline
    return Pipeline((1,) * pipeline.stages, pipeline.micro_batches // pipeline.replicas[0])


@lru_cache(maxsize=512)
def _counted(schedule: Hashable, pipeline: Pipeline) -> tuple[HeldUnits, ...]:
    chosen = cast(Schedule, schedule)
    return count_held(chosen.order(pipeline), chosen.placement(pipeline))


def require(schedule: Schedule, pipeline: Pipeline) -> None:
    """Refuse a pipeline that the schedule cannot serve.

    Raises:
        PlanError: says why.
    """
    reason = schedule.supports(pipeline)
    if reason:
        raise PlanError(reason, hint="change the stages, the micro-batches, or the schedule")
