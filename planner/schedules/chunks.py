"""Schedules that fill the pipeline in smaller steps: several chunks per worker, or parts of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from planner.schedules import SCHEDULES
from planner.schedules.orders import admission, in_turn, list_schedule, unslotted, waits
from planner.schedules.schedule import Schedule, single
from planner.schedules.types import Action, ActionKind, ActivationUnit, Facts, Pipeline, Work

_MAX_CHUNKS = 20
"""Most chunks per worker worth trying."""


class ChunkedSchedule(Schedule, Protocol):
    """A schedule with several chunks on each worker and one copy of the model, placed by `worker_of`."""

    __slots__ = ()

    activation_unit: ActivationUnit = ActivationUnit.CHUNK
    shares_workers: ClassVar[bool] = True

    def worker_of(self, stage: int, workers: int) -> int:
        """The worker of a chunk: a zigzag down the workers and up again (a V for two chunks)."""
        leg, at = divmod(stage, workers)
        return workers - 1 - at if leg % 2 else at

    def counts(self, pipeline: Pipeline) -> tuple[dict[int, int], ...]:
        """All micro-batches for every chunk of a worker."""
        workers = pipeline.stages // self.chunks_per_worker
        by_worker: tuple[dict[int, int], ...] = tuple({} for _ in range(workers))
        for stage in range(pipeline.stages):
            by_worker[self.worker_of(stage, workers)][stage] = single(pipeline).micro_batches
        return tuple(stages for stages in by_worker for _ in range(pipeline.replicas[0]))

    def refuses(self, pipeline: Pipeline) -> str:
        """Refuses numbers of stages that are no multiple of the chunks per worker."""
        chunks = self.chunks_per_worker
        if chunks < 1 or pipeline.stages % chunks:
            return f"{pipeline.stages} stages do not make {chunks} chunks on each worker"
        return ""


@dataclass(frozen=True, slots=True)
class Interleaved(ChunkedSchedule):
    """Interleaved 1F1B: each worker runs several chunks of the model, so that the pipeline fills in smaller steps.

    Chunk c of worker r is stage c p + r. Micro-batches go through in groups of g >= p; the last group may be smaller,
    but not below p. Bubble (p-1)/(v m + p - 1) over total time for v chunks a worker; activations cross workers v times
    as often. (Groups: Megatron Core, `microbatch_group_size_per_vp_stage`.)

    Attributes:
        chunks: stages on each worker.
        group: micro-batches that pass a chunk in a row; 0 for as many as there are workers.
    """

    chunks: int = 2
    group: int = 0

    key = "interleaved"
    facts = Facts(
        source="Narayanan et al., SC 2021",
        kept="min(m*chunks, 2*(p-i-1)+(chunks-1)*min(max(group, p), m)+1)",
    )

    @property
    def chunks_per_worker(self) -> int:
        """v."""
        return self.chunks

    def holding(self, chunks: int) -> Schedule | None:
        """As many as are named, also beyond those that are worth trying."""
        return replace(self, chunks=chunks) if chunks > 1 else None

    def options(self, workers: int, micro_batches: int, *, recompute: bool) -> Iterable[dict[str, Any]]:
        """2 to 20 chunks."""
        return ({"chunks": count} for count in range(2, _MAX_CHUNKS + 1))

    def worker_of(self, stage: int, workers: int) -> int:
        """The worker of a chunk, round-robin."""
        return stage % workers

    def refuses(self, pipeline: Pipeline) -> str:
        """Refuses stages that do not make equal chunks, and micro-batches that do not make groups of at least p."""
        if reason := ChunkedSchedule.refuses(self, pipeline):
            return reason
        workers = pipeline.stages // self.chunks
        if self.group and self.group < workers:
            return f"groups of {self.group} micro-batches are smaller than the {workers} workers"
        if 0 < pipeline.micro_batches % self._group(workers) < workers:
            fewest = f"of {workers} and more" if self.group else f"of {workers}"
            return f"{pipeline.micro_batches} micro-batches do not make groups {fewest}, one for each worker"
        return ""

    def shortened(self, pipeline: Pipeline) -> Pipeline:
        """Four groups: a worker reaches its peak after two, and every further group repeats it."""
        enough = 4 * self._group(pipeline.stages // self.chunks)
        return Pipeline(pipeline.replicas, min(pipeline.micro_batches, enough))

    def kept_of_each(self, pipeline: Pipeline) -> tuple[float, ...]:
        """After the forwards that come before the first backward, of which the last chunk has run the fewest."""
        workers, replicas = pipeline.stages // self.chunks, pipeline.replicas[0]
        size = min(self._group(workers), pipeline.micro_batches // replicas)
        return tuple(float(min(2 * (workers - r - 1) + 1, size)) for r in range(workers) for _ in range(replicas))

    def _group(self, workers: int) -> int:
        """Micro-batches of a group."""
        return self.group or workers

    def worker_orders(self, pipeline: Pipeline) -> Iterable[Iterable[Action]]:
        """Warm-up, alternation and drain over all chunks of each worker."""
        workers = pipeline.stages // self.chunks
        return (self._worker(workers, r, pipeline.micro_batches) for r in range(workers))

    def _worker(self, workers: int, r: int, micro_batches: int) -> Iterator[Action]:
        """The order of worker r."""
        size = min(self._group(workers), micro_batches)

        def steps(kind: ActionKind, stages: range) -> list[Action]:
            firsts = range(0, micro_batches, size)
            groups = (range(first, min(first + size, micro_batches)) for first in firsts)
            return [Action(kind, stage, m) for group in groups for stage in stages for m in group]

        stages = range(r, self.chunks * workers, workers)
        forwards, backwards = steps(ActionKind.FORWARD, stages), steps(ActionKind.BACKWARD, stages[::-1])
        return in_turn(forwards, backwards, 2 * (workers - r - 1) + (self.chunks - 1) * size + 1)


@dataclass(frozen=True, slots=True)
class Hanayo(ChunkedSchedule):
    """Hanayo: the model zigzags over the workers in W waves of 2P chunks, with one copy of the weights.

    Chunk c is on worker c mod P of an even leg, mirrored on an odd one, so that a micro-batch turns around on one
    worker. For m = P and B = 2F the bubble is (2P-2) / (3PW + 2P - 2), which no order can beat. A worker takes a
    backward if it can, else the forward of the latest chunk; a micro-batch enters while fewer than P are under way.

    Attributes:
        waves: W; each worker has 2W chunks.
    """

    waves: int = 1

    key = "hanayo"
    facts = Facts(
        source="Liu et al., SC 2023",
        kept="2*waves*p",
        kept_bound=True,
        idle="2*(p-1)*B",
        idle_holds="m == p and B == 2*F",
    )

    @property
    def chunks_per_worker(self) -> int:
        """2W."""
        return 2 * self.waves

    def options(self, workers: int, micro_batches: int, *, recompute: bool) -> Iterable[dict[str, Any]]:
        """1, 2 and 4 waves."""
        return ({}, {"waves": 2}, {"waves": 4})

    def worker_orders(self, pipeline: Pipeline) -> Iterable[Iterable[Action]]:
        """List schedule: backwards before forwards, later chunks before earlier ones."""
        workers = pipeline.stages // (2 * self.waves)
        tasks = [
            (Action(kind, chunk, m), self.worker_of(chunk, workers), (urgency, -chunk, m))
            for m in range(pipeline.micro_batches)
            for chunk in range(pipeline.stages)
            for urgency, kind in enumerate((ActionKind.BACKWARD, ActionKind.FORWARD))
        ]
        return unslotted(list_schedule(tasks, waits(tasks), *admission(tasks, 1, workers)))


@dataclass(frozen=True, slots=True)
class Seq1F1B(Schedule):
    """Seq1F1B: 1F1B over sub-sequences, so that the pipeline fills in steps of 1/k of a micro-batch.

    A micro-batch's k sub-sequences go forward in order and backward in reverse, as causal attention wants. Stage i
    keeps p - 1 - i + k of them; the bubble for sub-sequences of equal cost is (p-1)/(km+p-1).

    Attributes:
        splits: k, sub-sequences of a micro-batch.
    """

    splits: int = 2

    key = "seq1f1b"
    activation_unit = ActivationUnit.SUB_SEQUENCE
    facts = Facts(
        source="Sun et al., 2024",
        kept="min(m*splits, p-1-i+splits)",
        idle="(p-1)*(F+B)/splits",
    )

    def refuses(self, pipeline: Pipeline) -> str:
        """Refuses fewer than one sub-sequence."""
        return "" if self.splits >= 1 else f"{self.splits} sub-sequences make no micro-batch"

    def options(self, workers: int, micro_batches: int, *, recompute: bool) -> Iterable[dict[str, Any]]:
        """2, 4 and 8 sub-sequences."""
        return ({}, {"splits": 4}, {"splits": 8})

    @property
    def parts(self) -> int:
        """k."""
        return self.splits

    def worker_orders(self, pipeline: Pipeline) -> Iterable[Iterable[Action]]:
        """Warm-up, alternation and drain of each stage."""
        parts = range(self.splits) if self.splits > 1 else (-1,)
        micro_batches = range(pipeline.micro_batches)
        for stage, kept in enumerate(self.in_flight(pipeline)):
            forwards = [Action(ActionKind.FORWARD, stage, m, part) for m in micro_batches for part in parts]
            backwards = [Action(ActionKind.BACKWARD, stage, m, part) for m in micro_batches for part in reversed(parts)]
            yield in_turn(forwards, backwards, kept)

    def work(self, pipeline: Pipeline, iterations: int = 1) -> Work:
        """The orders with causal sub-sequences."""
        work = Schedule.work(self, pipeline, iterations)
        return replace(work, causal=self.splits > 1)


SCHEDULES.register("interleaved", Interleaved())
SCHEDULES.register("hanayo", Hanayo())
SCHEDULES.register("seq1f1b", Seq1F1B())
