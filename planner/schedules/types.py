"""Orders of work: typed actions per worker, and what an order keeps in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from planner.errors import PlanError


class ActionKind(StrEnum):
    """What a worker does in one step; the value is the token used in plan files.

    BACKWARD is the whole backward; a schedule that splits it uses INPUT_GRAD (what the stage before waits for) and
    WEIGHT_GRAD (which nobody waits for) instead.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    SYNC = "S"
    UPDATE = "U"


class WeightPolicy(StrEnum):
    """Which versions of its weights a stage computes with."""

    SYNC = "sync"
    """One version; the pipeline drains before every update."""

    STASH = "stash"
    """Each micro-batch in flight keeps the version that its forward used."""

    DOUBLE_BUFFER = "2bw"
    """Two versions, swapped once per iteration."""


class ActivationUnit(StrEnum):
    """What one unit of `Schedule.in_flight` is; counts of different units compare only through their bytes."""

    MICRO_BATCH = "micro-batch"
    CHUNK = "chunk"
    SUB_SEQUENCE = "sub-sequence"


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a worker: `F` of stage 2 for micro-batch 5; `micro_batch` is -1 for SYNC and UPDATE."""

    kind: ActionKind
    stage: int
    micro_batch: int = -1

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}" + (f".{self.micro_batch}" if self.micro_batch >= 0 else "")


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
        for stage, count in enumerate(self.replicas):
            if self.micro_batches % count:
                raise PlanError(
                    f"{count} replicas do not divide {self.micro_batches} micro-batches",
                    where=f"stage {stage}",
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

    A schedule that places several stages on one worker (interleaved, bidirectional) gives that worker actions of
    several stages; everything that reads orders takes the stage from the action, never from the worker's number.
    """

    @property
    def name(self) -> str:
        """The name users choose it by."""
        ...

    @property
    def weight_policy(self) -> WeightPolicy:
        """Which versions of the weights it computes with."""
        ...

    @property
    def activation_unit(self) -> ActivationUnit:
        """What one unit of `in_flight` is."""
        ...

    def weight_versions(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each stage, the versions of the weights that one replica keeps."""
        ...

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each stage, the most activation units (micro-batches, mostly) that one replica keeps at the same time."""
        ...

    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The actions of each worker, in order, for one iteration, ending with SYNC and UPDATE."""
        ...

    def critical_s(
        self, pipeline: Pipeline, forward_s: Sequence[float], backward_s: Sequence[float], tail_s: Sequence[float]
    ) -> float:
        """Length of the longest chain of waits that can be written down in closed form.

        Never longer than the simulated iteration, whatever the stages and replicas; each schedule says when it is
        equal.

        Args:
            pipeline: replicas and micro-batches.
            forward_s: by stage, forward of one micro-batch and the transfer that it waits for.
            backward_s: by stage, backward of one micro-batch and the transfer that follows.
            tail_s: by stage, synchronisation and update after the last backward.
        """
        ...


def suffix_replicas(replicas: Sequence[int]) -> tuple[int, ...]:
    """Replicas of each stage and all stages after it: what 1F1B's warm-up depends on."""
    total, sums = 0, []
    for count in reversed(replicas):
        total += count
        sums.append(total)
    return tuple(reversed(sums))
