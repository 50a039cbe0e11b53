"""Orders of work: typed actions per worker, and what an order keeps in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from planner.errors import PlanError
from planner.schedules.delays import OptimizerScaling, StageCorrection

if TYPE_CHECKING:
    import numpy as np

    from planner.schedules.held import HeldUnits


class OrderError(PlanError):
    """An order that cannot run; says which action of which lane is at fault.

    Args:
        message: what is wrong.
        lane: number of the lane.
        index: place of the action in it, from 0.
        where: worker and action, for people.
        hint: what to do about it.
    """

    def __init__(self, message: str, *, lane: int, index: int, where: str = "", hint: str = "") -> None:
        super().__init__(message, where=where, hint=hint)
        self.lane = lane
        self.index = index


class ActionKind(StrEnum):
    """What a worker does in one step; the value is the token used in plan files.

    BACKWARD is the whole backward; a schedule that splits it uses INPUT_GRAD (what the stage before waits for) and
    WEIGHT_GRAD (which nobody waits for) instead. Transfers between stages need no actions; an order that says when they
    happen uses SEND and RECEIVE. SYNC waits for a stage's gradients to be exchanged, LAUNCH_SYNC begins that without
    waiting. EVICT moves the activations of a micro-batch to another worker, LOAD brings them back; neither waits.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    SYNC = "S"
    UPDATE = "U"
    RECOMPUTE = "R"
    SEND_ACTIVATION = "SA"
    RECEIVE_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECEIVE_GRADIENT = "RG"
    EVICT = "E"
    LOAD = "L"
    LAUNCH_SYNC = "G"


class WeightPolicy(StrEnum):
    """Which versions of its weights a stage computes with."""

    SYNC = "sync"
    """One version; the pipeline drains before every update."""

    STASH = "stash"
    """Each micro-batch in flight keeps the version that its forward used."""

    DOUBLE_BUFFER = "2bw"
    """Two versions, swapped once per iteration."""

    VERTICAL = "vertical"
    """Each micro-batch uses at every stage the version that the first stage had when it entered."""

    NEWEST = "newest"
    """One version; forward and backward read what is newest, so they may differ."""

    @property
    def synchronous(self) -> bool:
        """Whether training means the same as without a pipeline."""
        return self is WeightPolicy.SYNC


class ActivationUnit(StrEnum):
    """What one unit of `Schedule.in_flight` is; counts of different units compare only through their bytes."""

    MICRO_BATCH = "micro-batch"
    CHUNK = "chunk"
    SUB_SEQUENCE = "sub-sequence"


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a worker: `F2.5` is the forward of stage 2 for micro-batch 5.

    Attributes:
        kind: what is done.
        stage: piece of the model.
        micro_batch: its number; for SYNC, LAUNCH_SYNC and UPDATE the number of the exchange, -1 when there is one only.
        part: sub-sequence of the micro-batch (`F2.5/0`), -1 when it is whole.
        version: version of the stage's weights that is read (`F2.5@3`: after three updates), -1 for the newest.
        peer: worker that keeps what EVICT takes away (`E2.5>1`), -1 for the host.
        paired: runs together with the action before it, as one (`+B2.5`).
    """

    kind: ActionKind
    stage: int
    micro_batch: int = -1
    part: int = -1
    version: int = -1
    peer: int = -1
    paired: bool = False

    def __str__(self) -> str:
        text = f"{self.kind.value}{self.stage}" + (f".{self.micro_batch}" if self.micro_batch >= 0 else "")
        text += f"/{self.part}" if self.part >= 0 else ""
        text += f"@{self.version}" if self.version >= 0 else ""
        text += f">{self.peer}" if self.peer >= 0 else ""
        return f"+{text}" if self.paired else text


@dataclass(frozen=True, slots=True)
class Work:
    """The orders of all workers, with what cannot be read off the actions.

    Attributes:
        lanes: the actions of each lane, in order; a worker that does two things at a time has two lanes.
        workers: the worker of each lane; empty when lane i is worker i.
        parts: sub-sequences of a micro-batch.
        causal: a sub-sequence needs those before it in the forward and those after it in the backward.
        shared: the lanes of a worker share its units: an action takes as long as the forward and backward together.
        streaming: a stage passes its result on while it works, as does the loss; only with `shared`.
        versions: by stage, versions of the weights that a worker can hold; empty when as many as are read.
        limits: by stage, micro-batches that a worker may keep, for which a forward on a lane of its own waits; empty
            when the orders themselves see to that.
    """

    lanes: tuple[tuple[Action, ...], ...]
    workers: tuple[int, ...] = ()
    parts: int = 1
    causal: bool = False
    shared: bool = False
    streaming: bool = False
    versions: tuple[int, ...] = ()
    limits: tuple[int, ...] = ()

    @property
    def lane_workers(self) -> tuple[int, ...]:
        """The worker of each lane."""
        return self.workers or tuple(range(len(self.lanes)))


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What a schedule orders: stages in a line, replicated each on its own, and micro-batches dealt round-robin.

    Micro-batch `m` runs on replica `m % replicas[s]` of stage `s`. Every entry of `replicas` divides `micro_batches`.
    Workers are numbered stage by stage: the replicas of stage 0 first, then those of stage 1, and so on.

    Raises:
        PlanError: no stage, no micro-batch, or replicas that do not divide the micro-batches.
    """

    replicas: tuple[int, ...]
    micro_batches: int

    def __post_init__(self) -> None:
        if not self.replicas or min(self.replicas) < 1 or self.micro_batches < 1:
            raise PlanError(
                f"a pipeline needs stages, replicas and micro-batches; got replicas {self.replicas} "
                f"and {self.micro_batches} micro-batches",
                hint="use at least one of each",
            )
        for count in dict.fromkeys(self.replicas):
            if self.micro_batches % count:
                raise PlanError(
                    f"{count} replicas do not divide {self.micro_batches} micro-batches",
                    where=f"stage {self.replicas.index(count)}",
                    hint="choose a number of micro-batches that every stage's replicas divide",
                )

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.replicas)

    def workers(self) -> list[tuple[int, int]]:
        """(stage, replica) of each worker in worker order."""
        return [(s, r) for s, count in enumerate(self.replicas) for r in range(count)]

    def micro_batches_of(self, stage: int, replica: int) -> range:
        """Micro-batches that one replica of a stage works on."""
        return range(replica, self.micro_batches, self.replicas[stage])


class Schedule(Protocol):
    """One way to order the work of a pipeline: an object registered in `planner.schedules.SCHEDULES`.

    Everything that the engine must know about a schedule is asked here. Schedules are hashable: what is counted in an
    order is counted once for a schedule and a pipeline.

    `Pipeline.stages` counts pieces of the model (chunks). A schedule that places several of them on one worker
    (interleaved, V, wave) or one on several workers (bidirectional) says so by `placement` and in its orders:
    everything that reads orders takes the stage from the action, never from the worker's number.
    """

    @property
    def name(self) -> str:
        """The name users choose it by, with the options that differ from the usual."""
        ...

    @property
    def weight_policy(self) -> WeightPolicy:
        """Which versions of the weights it computes with."""
        ...

    @property
    def activation_unit(self) -> ActivationUnit:
        """What one unit of `in_flight`, `held` and `peaks` is."""
        ...

    @property
    def parts(self) -> int:
        """Sub-sequences of a micro-batch: a unit is one `parts`-th of a stage's activations of a micro-batch."""
        ...

    @property
    def spans(self) -> bool:
        """Whether an iteration begins on each worker where its last one ended, not when all have ended."""
        ...

    @property
    def closed_form(self) -> bool:
        """Whether the closed form of a paced line of stages (`planner.space.evaluate`) describes its time."""
        ...

    @property
    def drains(self) -> bool:
        """Whether the pipeline is empty at the end of an iteration, so that one iteration can be played alone."""
        ...

    @property
    def launches(self) -> bool:
        """Whether exchanges of gradients are begun without waiting for them, so that work may hide them."""
        ...

    @property
    def fixed(self) -> Pipeline | None:
        """The only pipeline that it serves (orders written for one), None when it serves many."""
        ...

    @property
    def weight_buffers(self) -> int:
        """Buffers as large as a stage's weights, kept beside the versions (PipeMare's T2, predicted weights)."""
        ...

    @property
    def clock_distance(self) -> int | None:
        """Waves by which a replica may run ahead of the slowest; None where replicas do not run apart."""
        ...

    def supports(self, pipeline: Pipeline) -> str:
        """Why the schedule cannot serve the pipeline, empty when it can. O(stages)."""
        ...

    def stage_counts(self, workers: int) -> tuple[int, ...]:
        """Stages (chunks) that a pipeline over so many workers may have; empty when none. Replicas are left out."""
        ...

    def workers(self, pipeline: Pipeline) -> int:
        """Workers of one copy, replicas included. O(stages)."""
        ...

    def variants(self, workers: int, micro_batches: int, *, recompute: bool = False) -> tuple[Schedule, ...]:
        """The schedule with each combination of its options worth trying; those that can serve such a pipeline.

        A schedule with options of its own choice is its only variant.

        Args:
            workers: of one copy, single replicas.
            micro_batches: of one iteration.
            recompute: whether stages repeat their forward, so that keeping more micro-batches costs little.
        """
        ...

    def placement(self, pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
        """For each worker the stages whose weights it has, ascending. O(workers * stages of each)."""
        ...

    def holders(self, pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
        """For each stage the workers that have it, ascending: the inverse of `placement`."""
        ...

    def workload(self, pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
        """For each worker, the micro-batches that it works on of each of its stages, in the order of `placement`."""
        ...

    def crossings(self, pipeline: Pipeline) -> tuple[bool, ...]:
        """For each stage, whether its input comes from another worker: the other transfers cost nothing."""
        ...

    def recomputed_stages(self, pipeline: Pipeline) -> frozenset[int]:
        """Stages whose forwards the orders repeat by actions of their own: whole, from what enters the stage."""
        ...

    def weight_versions(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each stage, the versions of the weights that one replica keeps."""
        ...

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each stage, the most activation units (micro-batches, mostly) that one replica keeps at the same time."""
        ...

    def held(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each worker, the most units of all its stages together that it keeps at the same time."""
        ...

    def peaks(self, pipeline: Pipeline) -> tuple[HeldUnits, ...]:
        """For each worker, the units of each stage that it keeps at the same time, where none keeps more of all.

        The most bytes of activations that a worker keeps are `peaks[worker].most(unit_bytes)`, which is what the
        simulation finds, or more where lanes run side by side or activations are evicted: there it depends on the
        times. O(actions) at the most.
        """
        ...

    def staleness(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each stage, updates between reading the weights in a forward and applying the gradient, at the most."""
        ...

    def rhythm(self, pipeline: Pipeline) -> int:
        """Micro-batches after which the order repeats: fewer than an iteration's where it updates more often."""
        ...

    def exchanges(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each stage, how often its gradients are exchanged in an iteration."""
        ...

    def optimizer_scaling(self, batch: int, micro_batch: int) -> OptimizerScaling | None:
        """Momentum and learning rate for smaller updates than the user chose them for; None where they stay.

        Args:
            batch: samples of an iteration, for which the user chose them.
            micro_batch: samples of one micro-batch on all replicas and copies together.
        """
        ...

    def corrections(self, pipeline: Pipeline, scaling: OptimizerScaling | None = None) -> tuple[StageCorrection, ...]:
        """What each stage does about the age of its weights; () where there is nothing to do.

        Args:
            pipeline: replicas and micro-batches.
            scaling: the optimizer that the schedule is run with (`optimizer_scaling`).
        """
        ...

    def ramp(self, pipeline: Pipeline) -> tuple[float, float]:
        """Parts of the forwards before a worker's first stage, and of their backwards, that it is idle at the least
        while the pipeline fills and drains: nothing where iterations overlap."""
        ...

    def work(self, pipeline: Pipeline, iterations: int = 1) -> Work:
        """The orders of some iterations; an asynchronous schedule runs on from one to the next without draining."""
        ...

    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The actions of each lane, in order, for one iteration."""
        ...

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
        ...

    def idle_s(
        self, pipeline: Pipeline, forward_s: float, backward_s: float, weight_grad_s: float | None = None
    ) -> float:
        """Seconds that the busiest worker stands idle in an iteration of equal stages, by the published closed form.

        An estimate for other times than those of the publication, see the schedule.

        Args:
            pipeline: stages and micro-batches.
            forward_s: forward of one stage for one micro-batch.
            backward_s: whole backward of one.
            weight_grad_s: the part of the backward that computes weight gradients; None: half.
        """
        ...

    def exact(self, pipeline: Pipeline) -> bool:
        """Whether `critical_s` is the simulated iteration for any times of the stages, so that nothing need be played.

        For transfers that stop the worker, and exchanges and updates after the last backward.
        """
        ...

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
        ...


def suffix_replicas(replicas: Sequence[int]) -> tuple[int, ...]:
    """Replicas of each stage and all stages after it: what 1F1B's warm-up depends on."""
    total, sums = 0, []
    for count in reversed(replicas):
        total += count
        sums.append(total)
    return tuple(reversed(sums))
