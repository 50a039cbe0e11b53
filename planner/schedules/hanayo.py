"""Hanayo: the model zigzags over the workers in W waves of 2P chunks, with one copy of the weights.

Chunk c is on worker c mod P of an even leg, mirrored on an odd one, so that a micro-batch turns around on one worker.
For m = P and B = 2F the bubble is (2P-2) / (3PW + 2P - 2) (Liu et al., SC 2023), which no order can beat. A worker
takes a backward if it can, else the forward of the latest chunk; a micro-batch enters while fewer than P are under way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from planner.schedules import SCHEDULES
from planner.schedules._defaults import Facts, finish
from planner.schedules._families import Chunked
from planner.schedules._greedy import Task, list_schedule
from planner.schedules.types import Action, ActionKind, Pipeline


@dataclass(frozen=True, slots=True)
class Hanayo(Chunked):
    """Waves of chunks.

    Attributes:
        waves: W; each worker has 2W chunks.
    """

    waves: int = 1

    key = "hanayo"
    facts = Facts(
        decides="zigzag over the workers in W waves; waves",
        bubble="(2p-2)/(3pW+2p-2) for B=2F, m=p",
        memory="up to 2Wp chunks",
        staleness="0",
        source="Liu et al., SC 2023",
    )

    @property
    def chunks_per_worker(self) -> int:
        """2W."""
        return 2 * self.waves

    def options(self, *, recompute: bool) -> Iterable[dict[str, Any]]:
        """1, 2 and 4 waves."""
        return ({}, {"waves": 2}, {"waves": 4})

    def wait_s(self, pipeline: Pipeline, forward_s: float, backward_s: float, weight_s: float) -> float:
        """(2p - 2) B, published for B = 2F and m = p."""
        return 2 * (self.workers(pipeline) - 1) * backward_s

    def line(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """Backwards before forwards, later chunks before earlier ones."""
        stages, total = pipeline.stages, pipeline.micro_batches
        workers = stages // (2 * self.waves)
        place = [self.worker_of(c, workers) for c in range(stages)]
        tasks = []
        for m in range(total):
            for c in range(stages):
                needs = (_number(stages, m, c - 1, 0),) if c else ()
                tasks.append(Task(place[c], 1, (1, -c, m), needs, opens=c == 0))
                back = _number(stages, m, c + 1, 1) if c < stages - 1 else _number(stages, m, c, 0)
                tasks.append(Task(place[c], 1, (0, -c, m), (back,)))
        under_way = 0

        def may_open(_: int) -> bool:
            return under_way < workers

        def taken(task: int) -> None:
            nonlocal under_way
            if task // 2 % stages == 0:
                under_way += 1 if task % 2 == 0 else -1

        orders = list_schedule(tasks, workers, may_open, taken)
        kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
        return tuple(
            (
                *(Action(kinds[t % 2], t // 2 % stages, t // 2 // stages) for t in order),
                *finish(c for c in range(stages) if place[c] == worker),
            )
            for worker, order in enumerate(orders)
        )


def _number(stages: int, m: int, chunk: int, backward: int) -> int:
    return 2 * (m * stages + chunk) + backward


SCHEDULES.register("hanayo", Hanayo())
