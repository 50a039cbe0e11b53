"""BPipe: 1F1B whose early workers lend activations to the late ones, so that all keep about the same.

Worker x < p/2 of 1F1B keeps p - x micro-batches, its partner p - 1 - x only x + 1. When a worker has ceil((p+2)/2), it
evicts the one it needs last to its partner before the next forward, and loads it back when a backward has made room
(Kim et al., ICML 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.schedules import SCHEDULES
from planner.schedules._defaults import Facts, dealt, finish
from planner.schedules._families import OneForwardOneBackward
from planner.schedules._lines import one_forward_one_backward
from planner.schedules.held import HeldUnits
from planner.schedules.types import Action, ActionKind, Pipeline


@dataclass(frozen=True, slots=True)
class BPipe(OneForwardOneBackward):
    """1F1B with balanced activations."""

    key = "bpipe"
    facts = Facts(
        decides="1F1B, evicts activations to the mirrored worker",
        bubble="(p-1)/(m+p-1)",
        memory="at most ceil((p+2)/2) micro-batches on every worker",
        staleness="0",
        source="Kim et al., ICML 2023",
    )

    def limit(self, stages: int) -> int:
        """ceil((p + 2) / 2) micro-batches."""
        return (stages + 3) // 2

    def warm_up(self, replicas: Sequence[int]) -> tuple[int, ...]:
        """Stages from here to the end."""
        return tuple(range(len(replicas), 0, -1))

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """What each worker itself keeps of its own stage."""
        return tuple(min(kept, self.limit(pipeline.stages)) for kept in OneForwardOneBackward.in_flight(self, pipeline))

    def peaks(self, pipeline: Pipeline) -> tuple[HeldUnits, ...]:
        """Of each worker its own, and beside these what the mirrored worker has too many of."""
        taken, own = OneForwardOneBackward.in_flight(self, pipeline), self.in_flight(pipeline)
        found = []
        for stage, _ in pipeline.workers():
            other = pipeline.stages - 1 - stage
            lent = taken[other] - own[other]
            row, stages = ([own[stage], lent], (stage, other)) if lent else ([own[stage]], (stage,))
            found.append(HeldUnits(stages, np.array([row], np.int64), guests=len(stages) - 1))
        return tuple(found)

    def held(self, pipeline: Pipeline) -> tuple[int, ...]:
        """The most that each worker keeps, its partner's included."""
        return tuple(held.total for held in self.peaks(pipeline))

    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The orders of single replicas, for each of them."""
        return dealt(self, pipeline, self._line)

    def _line(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """1F1B with EVICT and LOAD, SYNC, UPDATE."""
        return tuple((*self._worker(stage, pipeline), *finish((stage,))) for stage in range(pipeline.stages))

    def _worker(self, stage: int, pipeline: Pipeline) -> Iterator[Action]:
        stages, limit = pipeline.stages, self.limit(pipeline.stages)
        here: list[int] = []
        away: list[int] = []
        plain = one_forward_one_backward(stage, range(pipeline.micro_batches), stages - stage)
        for action in plain:
            m = action.micro_batch
            if action.kind is ActionKind.FORWARD:
                if len(here) == limit:
                    away.append(here.pop())
                    yield Action(ActionKind.EVICT, stage, away[-1], peer=stages - 1 - stage)
                here.append(m)
                yield action
                continue
            yield action
            here.remove(m)
            if m + 1 in away:
                away.remove(m + 1)
                here.insert(0, m + 1)
                yield Action(ActionKind.LOAD, stage, m + 1)


SCHEDULES.register("bpipe", BPipe())
