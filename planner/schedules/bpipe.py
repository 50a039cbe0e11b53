"""BPipe: 1F1B whose early workers lend activations to the late ones, so that all keep about the same.

Worker x < p/2 of 1F1B keeps p - x micro-batches, its partner p - 1 - x only x + 1. When a worker has ceil((p+2)/2), it
evicts the one it needs last to its partner before the next forward, and loads it back when a backward has made room
(Kim et al., ICML 2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules._defaults import Defaults, Facts, dealt, finish
from planner.schedules._lines import one_forward_one_backward
from planner.schedules.types import Action, ActionKind, Pipeline


@dataclass(frozen=True, slots=True)
class BPipe(Defaults):
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

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """What each worker itself keeps of its own stage."""
        own = pipeline.micro_batches // pipeline.replicas[0]
        return tuple(min(own, pipeline.stages - i, self.limit(pipeline.stages)) for i in range(pipeline.stages))

    def held(self, pipeline: Pipeline) -> tuple[int, ...]:
        """The most that each worker keeps, its partner's included: its own, and what the partner has too many of."""
        own, stages = self.in_flight(pipeline), pipeline.stages
        total = [min(pipeline.micro_batches // pipeline.replicas[0], stages - i) for i in range(stages)]
        guests = [total[stages - 1 - i] - own[stages - 1 - i] for i in range(stages)]
        return tuple(mine + other for mine, other in zip(own, guests, strict=True) for _ in range(pipeline.replicas[0]))

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
