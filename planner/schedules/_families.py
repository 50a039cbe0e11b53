"""Families of schedules that differ by a line: one stage a worker, chunks, both directions, updates without a flush."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

import numpy as np

from planner.schedules._bidirectional import Lines
from planner.schedules._building_block import Block, block_order
from planner.schedules._chains import Flow, PassSeconds, busiest_chain_s, one_forward_one_backward_s
from planner.schedules._defaults import Defaults, dealt, finish, require, single
from planner.schedules._lines import one_forward_one_backward
from planner.schedules._zero_bubble import split_backward_order
from planner.schedules.held import HeldUnits
from planner.schedules.types import Action, ActivationUnit, Pipeline, Work


class Line(Defaults, Protocol):
    """Each replica of a stage on a worker of its own, with a known number of micro-batches in flight."""

    __slots__ = ()

    @abstractmethod
    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each stage, the most units that one replica keeps; O(stages)."""
        ...

    def held(self, pipeline: Pipeline) -> tuple[int, ...]:
        """The same by worker."""
        kept = self.in_flight(pipeline)
        return tuple(kept[stage] for stage, _ in pipeline.workers())

    def peaks(self, pipeline: Pipeline) -> tuple[HeldUnits, ...]:
        """The same by worker."""
        each = [HeldUnits((s,), np.array([[kept]], np.int64)) for s, kept in enumerate(self.in_flight(pipeline))]
        return tuple(each[stage] for stage, _ in pipeline.workers())


class OneForwardOneBackward(Line, Protocol):
    """A warm-up, then a backward and a forward in turn, the remaining backwards, one update."""

    __slots__ = ()

    @abstractmethod
    def warm_up(self, replicas: Sequence[int]) -> tuple[int, ...]:
        """Forwards that a replica of each stage runs before its first backward, when there are micro-batches enough."""
        ...

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """The warm-up of each stage, at most M / r."""
        pairs = zip(pipeline.replicas, self.warm_up(pipeline.replicas), strict=True)
        return tuple(min(pipeline.micro_batches // count, forwards) for count, forwards in pairs)

    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """Warm-up, alternation, drain, SYNC, UPDATE, for each worker; O(actions)."""
        require(self, pipeline)
        forwards = self.warm_up(pipeline.replicas)
        return tuple(
            (
                *one_forward_one_backward(stage, pipeline.micro_batches_of(stage, replica), forwards[stage]),
                *finish((stage,)),
            )
            for stage, replica in pipeline.workers()
        )

    def chain_s(self, pipeline: Pipeline, times: PassSeconds) -> float:
        """See `one_forward_one_backward_s`; O(stages^2)."""
        counts = [pipeline.micro_batches // count for count in pipeline.replicas]
        return one_forward_one_backward_s(counts, self.warm_up(pipeline.replicas), times)


class Dealt(Defaults, Protocol):
    """Orders of single replicas, the same for each replica."""

    __slots__ = ()

    @abstractmethod
    def line(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The orders of a pipeline of single replicas that it can serve."""
        ...

    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The orders of single replicas, for each of them."""
        return dealt(self, pipeline, self.line)


class Placed(Dealt, Protocol):
    """Stages placed by a rule: several on a worker, or one on several workers; equal replicas."""

    __slots__ = ()

    @abstractmethod
    def counts(self, pipeline: Pipeline) -> tuple[dict[int, int], ...]:
        """For each worker of a pipeline of single replicas its stages, ascending, and its micro-batches of each."""
        ...

    def placement(self, pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
        """The stages of each worker; all replicas of a worker stand together."""
        own = [tuple(stages) for stages in self.counts(single(pipeline))]
        return tuple(stages for stages in own for _ in range(pipeline.replicas[0]))

    def workload(self, pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
        """The micro-batches of each."""
        own = [tuple(stages.values()) for stages in self.counts(single(pipeline))]
        return tuple(counts for counts in own for _ in range(pipeline.replicas[0]))


class Chunked(Placed, Protocol):
    """Several chunks on each worker, one copy of the model: the worker of a chunk is `worker_of`."""

    __slots__ = ()

    unit: ClassVar[ActivationUnit] = ActivationUnit.CHUNK

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


class FoldedBlock(Chunked, Protocol):
    """Two chunks a worker in a V, from a repeated block; the backward in two parts."""

    __slots__ = ()

    spans: ClassVar[bool] = True
    split_backward: ClassVar[bool] = True

    @property
    def chunks_per_worker(self) -> int:
        """Two."""
        return 2

    @abstractmethod
    def limit(self, workers: int) -> int:
        """Chunks' activations that a worker keeps at the most."""
        ...

    @abstractmethod
    def block(self, workers: int) -> Block:
        """The slots of the repeated block."""
        ...

    def deferred(self, pipeline: Pipeline) -> int:
        """All that a worker may keep."""
        return self.limit(pipeline.stages // 2)

    def line(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The repeated block with its gaps filled, SYNC, UPDATE."""
        workers = pipeline.stages // 2
        orders = block_order(self.block(workers), pipeline.micro_batches, self.limit(workers))
        return tuple((*order, *finish((worker, pipeline.stages - 1 - worker))) for worker, order in enumerate(orders))


class SplitBackward(Dealt, Protocol):
    """One stage a worker, the backward in two parts, within a limit of micro-batches."""

    __slots__ = ()

    spans: ClassVar[bool] = True
    split_backward: ClassVar[bool] = True

    limit: int

    @abstractmethod
    def most(self, stages: int) -> int:
        """Micro-batches that a worker keeps at the most."""
        ...

    def refuses(self, pipeline: Pipeline) -> str:
        """A limit below one micro-batch."""
        return "" if self.limit >= 0 else f"a limit of {self.limit} micro-batches keeps none"

    def deferred(self, pipeline: Pipeline) -> int:
        """All that a worker may keep."""
        return self.most(pipeline.stages)

    def line(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """Forwards, input and weight gradients, SYNC, UPDATE."""
        orders = split_backward_order(pipeline.stages, pipeline.micro_batches, self.most(pipeline.stages))
        return tuple((*order, *finish((stage,))) for stage, order in enumerate(orders))


class BothWays(Placed, Protocol):
    """Pipelines in both directions through the same workers, each with its own copy of the stages."""

    __slots__ = ()

    def lines(self, pipeline: Pipeline) -> Lines:
        """The pipelines of single replicas: one in each direction."""
        return Lines(pipeline.stages, 1)

    def dealt(self, pipeline: Pipeline) -> Sequence[int]:
        """Micro-batches of each of the pipelines: every other one."""
        return -(-pipeline.micro_batches // 2), pipeline.micro_batches // 2

    def counts(self, pipeline: Pipeline) -> tuple[dict[int, int], ...]:
        """The stages of the pipelines that have micro-batches."""
        lines = self.lines(pipeline)
        found: tuple[dict[int, int], ...] = tuple({} for _ in range(pipeline.stages))
        for line, count in enumerate(self.dealt(pipeline)):
            for stage in range(pipeline.stages if count else 0):
                own = found[lines.worker(line, stage)]
                own[stage] = own.get(stage, 0) + count
        return tuple(dict(sorted(own.items())) for own in found)

    def crossings(self, pipeline: Pipeline) -> tuple[bool, ...]:
        """All but the first: neighbouring stages of a pipeline are on neighbouring workers."""
        return tuple(stage > 0 for stage in range(pipeline.stages))


class Flowing(Line, Protocol):
    """Never drains: an update without a flush, so that no worker waits once the pipeline is full."""

    __slots__ = ()

    @abstractmethod
    def warm_up(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Micro-batches that a replica of each stage takes in before its first backward."""
        ...

    @abstractmethod
    def lane(self, pipeline: Pipeline, stage: int, replica: int, iterations: int) -> Iterator[Action]:
        """The order of one worker."""
        ...

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """The warm-up of each stage; a run has micro-batches enough."""
        return self.warm_up(pipeline)

    def wait_s(self, pipeline: Pipeline, forward_s: float, backward_s: float, weight_s: float) -> float:
        """None once the pipeline is full."""
        return 0.0

    def exact(self, pipeline: Pipeline) -> bool:
        """Updates are counted once, however often there are."""
        return False

    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """One iteration, from an empty pipeline to an empty one."""
        return self.work(pipeline).lanes

    def work(self, pipeline: Pipeline, iterations: int = 1) -> Work:
        """Some iterations without draining in between."""
        require(self, pipeline)
        lanes = (tuple(self.lane(pipeline, stage, replica, iterations)) for stage, replica in pipeline.workers())
        return Work(tuple(lanes), versions=self.weight_versions(pipeline))

    def chain_s(self, pipeline: Pipeline, times: PassSeconds) -> float:
        """The work of the busiest worker in an iteration, its tail once, however often it updates."""
        flow = Flow(self.placement(pipeline), self.workload(pipeline), spans=True, early=True)
        return busiest_chain_s(flow, times)
