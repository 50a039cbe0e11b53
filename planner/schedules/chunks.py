"""Smaller pieces, so that the pipeline fills in smaller steps: chunks of the model, or parts of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from planner.schedules import SCHEDULES
from planner.schedules.critical_chains import Flow
from planner.schedules.facts import Facts
from planner.schedules.orders import Task, in_turn, list_schedule
from planner.schedules.schedule import Dealt, Line, Placed
from planner.schedules.types import Action, ActionKind, ActivationUnit, Pipeline, Work

_MOST_CHUNKS = 20
"""Chunks of a worker worth trying."""


class Chunked(Placed, Protocol):
    """Several chunks on each worker, one copy of the model: the worker of a chunk is `worker_of`."""

    __slots__ = ()

    activation_unit: ActivationUnit = ActivationUnit.CHUNK

    def worker_of(self, stage: int, workers: int) -> int:
        """A V, or more legs of a zigzag: down the workers, and up again."""
        leg, at = divmod(stage, workers)
        return workers - 1 - at if leg % 2 else at

    def counts(self, pipeline: Pipeline) -> tuple[dict[int, int], ...]:
        """All micro-batches at every chunk."""
        workers = pipeline.stages // self.chunks_per_worker
        found: tuple[dict[int, int], ...] = tuple({} for _ in range(workers))
        for stage in range(pipeline.stages):
            found[self.worker_of(stage, workers)][stage] = pipeline.micro_batches
        return found

    def refuses(self, pipeline: Pipeline) -> str:
        """Stages that do not make as many chunks on each worker."""
        chunks = self.chunks_per_worker
        if chunks < 1 or pipeline.stages % chunks:
            return f"{pipeline.stages} stages do not make {chunks} chunks on each worker"
        return ""


@dataclass(frozen=True, slots=True)
class Interleaved(Chunked):
    """Interleaved 1F1B: each worker runs several chunks of the model, so that the pipeline fills in smaller steps.

    Chunk c of worker r is stage c p + r. Micro-batches go through in groups of g >= p; the last group may be smaller,
    but not below p. Bubble (p-1)/(v m + p - 1) over total time for v chunks a worker; activations cross workers v times
    as often. (Groups: Megatron Core, `microbatch_group_size_per_vp_stage`.)

    Attributes:
        chunks: stages on each worker.
        group: micro-batches that go through a chunk in a row; 0 for one for each worker.
    """

    chunks: int = 2
    group: int = 0

    key = "interleaved"
    facts = Facts(
        decides="1F1B over v chunks a worker; chunks, group",
        source="Narayanan et al., SC 2021",
        kept="min(m*chunks, 2*(p-i-1)+(chunks-1)*min(max(group, p), m)+1)",
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
        """Stages that do not make equal chunks, or micro-batches that do not make groups of p and more."""
        if reason := Chunked.refuses(self, pipeline):
            return reason
        workers = pipeline.stages // self.chunks
        if self.group and self.group < workers:
            return f"groups of {self.group} micro-batches are smaller than the {workers} workers"
        if 0 < pipeline.micro_batches % self._group(workers) < workers:
            fewest = f"of {workers} and more" if self.group else f"of {workers}"
            return f"{pipeline.micro_batches} micro-batches do not make groups {fewest}, one for each worker"
        return ""

    def few(self, pipeline: Pipeline) -> Pipeline:
        """Four groups: a worker has filled up after two, and keeps the same from group to group."""
        most = 4 * self._group(pipeline.stages // self.chunks)
        return Pipeline(pipeline.replicas, min(pipeline.micro_batches, most))

    def _group(self, workers: int) -> int:
        return self.group or workers

    def line(self, pipeline: Pipeline) -> Iterable[Iterable[Action]]:
        """Warm-up, alternation and drain of all chunks of a worker."""
        workers = pipeline.stages // self.chunks
        return (self._worker(workers, r, pipeline.micro_batches) for r in range(workers))

    def _worker(self, workers: int, r: int, micro_batches: int) -> Iterator[Action]:
        size = min(self._group(workers), micro_batches)

        def steps(kind: ActionKind, stages: range) -> list[Action]:
            firsts = range(0, micro_batches, size)
            groups = (range(first, min(first + size, micro_batches)) for first in firsts)
            return [Action(kind, stage, m) for group in groups for stage in stages for m in group]

        stages = range(r, self.chunks * workers, workers)
        forwards, backwards = steps(ActionKind.FORWARD, stages), steps(ActionKind.BACKWARD, stages[::-1])
        return in_turn(forwards, backwards, 2 * (workers - r - 1) + (self.chunks - 1) * size + 1)


@dataclass(frozen=True, slots=True)
class Hanayo(Chunked):
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
        decides="zigzag over the workers in W waves; waves",
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

    def options(self, *, recompute: bool) -> Iterable[dict[str, Any]]:
        """1, 2 and 4 waves."""
        return ({}, {"waves": 2}, {"waves": 4})

    def line(self, pipeline: Pipeline) -> Iterable[Iterable[Action]]:
        """Backwards before forwards, later chunks before earlier ones."""
        workers = pipeline.stages // (2 * self.waves)
        forward, backward = ActionKind.FORWARD, ActionKind.BACKWARD
        tasks = []
        for m in range(pipeline.micro_batches):
            for c in range(pipeline.stages):
                place, own = self.worker_of(c, workers), Action(forward, c, m)
                tasks.append(Task(own, place, (1, -c, m), (Action(forward, c - 1, m),), opens=c == 0))
                tasks.append(Task(Action(backward, c, m), place, (0, -c, m), (own, Action(backward, c + 1, m))))
        under_way = 0

        def may_open(_: Action) -> bool:
            return under_way < workers

        def taken(action: Action) -> None:
            nonlocal under_way
            if action.stage == 0:
                under_way += 1 if action.kind is forward else -1

        return list_schedule(tasks, workers, may_open, taken)


@dataclass(frozen=True, slots=True)
class Seq1F1B(Line, Dealt):
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
        decides="1F1B over k sub-sequences of a micro-batch; splits",
        source="Sun et al., 2024",
        kept="min(m*splits, p-1-i+splits)",
        idle="(p-1)*(F+B)/splits",
    )

    def refuses(self, pipeline: Pipeline) -> str:
        """Fewer than one sub-sequence."""
        return "" if self.splits >= 1 else f"{self.splits} sub-sequences make no micro-batch"

    def options(self, *, recompute: bool) -> Iterable[dict[str, Any]]:
        """2, 4 and 8 sub-sequences."""
        return ({}, {"splits": 4}, {"splits": 8})

    @property
    def parts(self) -> int:
        """k."""
        return self.splits

    def flow(self, pipeline: Pipeline) -> Flow:
        """A sub-sequence at a time."""
        return replace(Line.flow(self, pipeline), forward_step=1 / self.splits, backward_step=1 / self.splits)

    def line(self, pipeline: Pipeline) -> Iterable[Iterable[Action]]:
        """Warm-up, alternation, drain of each stage."""
        parts = range(self.splits) if self.splits > 1 else (-1,)
        micro_batches = range(pipeline.micro_batches)
        for stage, kept in enumerate(self.in_flight(pipeline)):
            forwards = [Action(ActionKind.FORWARD, stage, m, part) for m in micro_batches for part in parts]
            backwards = [Action(ActionKind.BACKWARD, stage, m, part) for m in micro_batches for part in reversed(parts)]
            yield in_turn(forwards, backwards, kept)

    def work(self, pipeline: Pipeline, iterations: int = 1) -> Work:
        """The orders over sub-sequences, each of which needs those before it."""
        work = Line.work(self, pipeline, iterations)
        return replace(work, causal=self.splits > 1)


SCHEDULES.register("interleaved", Interleaved())
SCHEDULES.register("hanayo", Hanayo())
SCHEDULES.register("seq1f1b", Seq1F1B())
