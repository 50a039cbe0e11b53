"""GEMS: two copies of the model in opposite directions, one micro-batch under way at a time in each worker.

The next micro-batch enters from the other end as soon as the worker there has done its backward, p + 1 steps after the
one before; for F = B = 1 the time is (m-1)(p+1) + 2p. Each worker keeps one micro-batch and two stages' weights (Jain
et al., SC 2020).
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules._bidirectional import Lines
from planner.schedules._defaults import Defaults, Facts, dealt, finish
from planner.schedules.types import Action, ActionKind, Pipeline


@dataclass(frozen=True, slots=True)
class Gems(Defaults):
    """Alternating directions, least memory."""

    key = "gems"
    facts = Facts(
        decides="two directions, one micro-batch at a time",
        bubble="1-2m/((m-1)(p+1)+2p) for B=F",
        memory="1 micro-batch, 2 stages' weights",
        staleness="0",
        source="Jain et al., SC 2020",
    )

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """One micro-batch at every stage."""
        return (1,) * pipeline.stages

    def held(self, pipeline: Pipeline) -> tuple[int, ...]:
        """One micro-batch on every worker."""
        return (1,) * sum(pipeline.replicas)

    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The orders of single replicas, for each of them."""
        return dealt(self, pipeline, self._line)

    def _line(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """Micro-batches in turn from the first and from the last worker."""
        depth, lines = pipeline.stages, Lines(pipeline.stages, 1)
        orders: list[list[tuple[int, Action]]] = [[] for _ in range(depth)]
        for m in range(pipeline.micro_batches):
            start = m * (depth + 1)
            for stage in range(depth):
                own = orders[lines.worker(m % 2, stage)]
                own.append((start + stage, Action(ActionKind.FORWARD, stage, m)))
                own.append((start + 2 * depth - 1 - stage, Action(ActionKind.BACKWARD, stage, m)))
        closed = []
        for own in orders:
            actions = [action for _, action in sorted(own, key=lambda entry: entry[0])]
            closed.append((*actions, *finish(sorted({action.stage for action in actions}))))
        return tuple(closed)


SCHEDULES.register("gems", Gems())
