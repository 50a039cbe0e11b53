"""Interleaved 1F1B: each worker runs several chunks of the model, so that the pipeline fills in smaller steps.

Chunk c of worker r is stage c p + r. Micro-batches go through in groups of p. Bubble (p-1)/(v m + p - 1) over total
time for v chunks a worker; worker r keeps min(m v, 2 (p - r - 1) + (v - 1) p + 1) chunks' activations, and activations
cross workers v times as often (Narayanan et al., SC 2021).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from planner.schedules import SCHEDULES
from planner.schedules._defaults import Facts, finish
from planner.schedules._families import Chunked
from planner.schedules.types import Action, ActionKind, Pipeline

_MOST_CHUNKS = 20
"""Chunks of a worker worth trying."""


@dataclass(frozen=True, slots=True)
class Interleaved(Chunked):
    """1F1B over chunks.

    Attributes:
        chunks: stages on each worker.
    """

    chunks: int = 2

    key = "interleaved"
    facts = Facts(
        decides="1F1B over v chunks a worker; chunks",
        bubble="(p-1)/(vm+p-1)",
        memory="2(p-i-1)+(v-1)p+1 chunks",
        staleness="0",
        source="Narayanan et al., SC 2021",
    )

    @property
    def chunks_per_worker(self) -> int:
        """v."""
        return self.chunks

    def options(self, *, recompute: bool) -> Iterable[dict[str, Any]]:
        """2 to 20 chunks."""
        return ({"chunks": count} for count in range(2, _MOST_CHUNKS + 1))

    def worker_of(self, stage: int, workers: int) -> int:
        """Round and round."""
        return stage % workers

    def refuses(self, pipeline: Pipeline) -> str:
        """Stages that do not make equal chunks, or micro-batches that do not make groups of p."""
        workers = pipeline.stages // max(self.chunks, 1)
        if not (reason := Chunked.refuses(self, pipeline)) and pipeline.micro_batches % workers:
            return f"{pipeline.micro_batches} micro-batches do not make groups of {workers}, one for each worker"
        return reason

    def held(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Chunks' activations of each worker: its warm-up and one more."""
        workers, count = pipeline.stages // self.chunks, pipeline.replicas[0]
        total = pipeline.micro_batches // count * self.chunks
        kept = [min(total, self._warm_up(workers, r) + 1) for r in range(workers)]
        return tuple(k for k in kept for _ in range(count))

    def few(self, pipeline: Pipeline) -> Pipeline:
        """Four groups: a worker has filled up after two, and keeps the same from group to group."""
        workers = pipeline.stages // self.chunks
        return Pipeline(pipeline.replicas, min(pipeline.micro_batches, 4 * workers))

    def line(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """Warm-up, alternation, drain, SYNC and UPDATE of each chunk."""
        workers = pipeline.stages // self.chunks
        return tuple(
            (*self._worker(workers, r, pipeline.micro_batches), *finish(range(r, pipeline.stages, workers)))
            for r in range(workers)
        )

    def _warm_up(self, workers: int, r: int) -> int:
        return 2 * (workers - r - 1) + (self.chunks - 1) * workers

    def _worker(self, workers: int, r: int, micro_batches: int) -> Iterator[Action]:
        total = micro_batches * self.chunks
        ahead = min(total, self._warm_up(workers, r))

        def step(kind: ActionKind, k: int) -> Action:
            group, within = divmod(k, workers * self.chunks)
            chunk, m = divmod(within, workers)
            chunk = chunk if kind is ActionKind.FORWARD else self.chunks - 1 - chunk
            return Action(kind, chunk * workers + r, group * workers + m)

        for k in range(ahead):
            yield step(ActionKind.FORWARD, k)
        for k in range(ahead, total):
            yield step(ActionKind.FORWARD, k)
            yield step(ActionKind.BACKWARD, k - ahead)
        for k in range(total - ahead, total):
            yield step(ActionKind.BACKWARD, k)


SCHEDULES.register("interleaved", Interleaved())
