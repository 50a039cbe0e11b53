"""Orders of work: typed actions per worker, and what an order keeps in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class ActionKind(StrEnum):
    """What a worker does in one step; the value is the token used in plan files."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    SYNC = "S"
    UPDATE = "U"


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a worker: `F` of stage 2 for micro-batch 5; `micro_batch` is -1 for SYNC and UPDATE."""

    kind: ActionKind
    stage: int
    micro_batch: int = -1


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What a schedule orders: stages in a line, replicated each on its own, and micro-batches dealt round-robin.

    Micro-batch `m` runs on replica `m % replicas[s]` of stage `s`. Every entry of `replicas` divides `micro_batches`.
    Workers are numbered stage by stage: the replicas of stage 0 first, then those of stage 1, and so on.
    """

    replicas: tuple[int, ...]
    micro_batches: int

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
    """One way to order the work of a pipeline."""

    name: str
    weight_policy: str
    """"sync" (one version, flush), "stash", "2bw", ..."""

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each stage, the most micro-batches whose activations one replica keeps at the same time."""
        ...

    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The actions of each worker, in order, for one iteration, ending with SYNC and UPDATE."""
        ...


def suffix_replicas(replicas: Sequence[int]) -> tuple[int, ...]:
    """Replicas of each stage and all stages after it: what 1F1B's warm-up depends on."""
    total, sums = 0, []
    for count in reversed(replicas):
        total += count
        sums.append(total)
    return tuple(reversed(sums))
