"""What most schedules share: one version of the weights, counts read off the order, options in the name."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from planner.errors import PlanError
from planner.registry import name_with_options
from planner.schedules.types import Action, ActionKind, ActivationUnit, Pipeline, WeightPolicy, Work

Line = Callable[[Pipeline], tuple[tuple[Action, ...], ...]]
"""Orders of a pipeline of single replicas."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the table of schedules says about one.

    Attributes:
        decides: what it decides, in a few words.
        bubble: its bubble for equal stages, over total time unless said otherwise; p workers, m micro-batches.
        memory: what a worker keeps.
        staleness: age of the weights behind a gradient.
        source: where it was published.
    """

    decides: str
    bubble: str
    memory: str
    staleness: str
    source: str


class Defaults(Protocol):
    """Answers that hold for a synchronous schedule over equal replicas; a schedule gives its order and what differs.

    A schedule is a frozen dataclass; its fields are its options.
    """

    __slots__ = ()

    key: ClassVar[str]
    facts: ClassVar[Facts]
    unit: ClassVar[ActivationUnit] = ActivationUnit.MICRO_BATCH
    policy: ClassVar[WeightPolicy] = WeightPolicy.SYNC
    spans: ClassVar[bool] = False
    closed_form: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The name users choose it by, with the options that differ from the usual (`chimera:pairs=2`)."""
        return name_with_options(self, self.key)

    @property
    def weight_policy(self) -> WeightPolicy:
        """Which versions of the weights it computes with."""
        return self.policy

    @property
    def activation_unit(self) -> ActivationUnit:
        """What one unit of `in_flight` is."""
        return self.unit

    def weight_versions(self, pipeline: Pipeline) -> tuple[int, ...]:
        """One version of the weights at every stage."""
        return (1,) * pipeline.stages

    def staleness(self, pipeline: Pipeline) -> tuple[int, ...]:
        """None: every gradient is applied to the weights that it was computed with."""
        return (0,) * pipeline.stages

    @property
    def drains(self) -> bool:
        """Whether the pipeline is empty at the end of an iteration."""
        return self.policy.synchronous

    @property
    def weight_buffers(self) -> int:
        """Buffers as large as the weights beside these."""
        return 0

    def exchanges(self, pipeline: Pipeline) -> tuple[float, ...]:
        """By stage, how often its gradients are exchanged in an iteration."""
        return (1.0,) * pipeline.stages

    def recomputed_stages(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Stages whose forward the orders repeat by actions of their own."""
        return ()

    def peaks(self, pipeline: Pipeline) -> tuple[np.ndarray, ...]:
        """By worker, int64 [k, stages it holds]: the greatest numbers of units held at the same time; O(actions)."""
        work, placement = self.work(pipeline), self.placement(pipeline)
        found: list[set[tuple[int, ...]]] = [set() for _ in placement]
        for worker, lane in zip(work.lane_workers, work.lanes, strict=True):
            held = dict.fromkeys(placement[worker], 0)
            for action in lane:
                change = _change(action)
                if change:
                    held[action.stage] += change
                    if change > 0:
                        found[worker].add(tuple(held.values()))
        pairs = zip(found, placement, strict=True)
        return tuple(np.array(sorted(own), dtype=np.int64).reshape(-1, len(stages)) for own, stages in pairs)

    def supports(self, pipeline: Pipeline) -> str:
        """Why the schedule cannot serve the pipeline, empty when it can: it must have equal replicas everywhere."""
        if len(set(pipeline.replicas)) > 1:
            return f"{self.key} needs the same number of replicas at every stage, not {pipeline.replicas}"
        own = dataclasses.replace(pipeline, replicas=(1,) * pipeline.stages)
        own = dataclasses.replace(own, micro_batches=pipeline.micro_batches // pipeline.replicas[0])
        return self.refuses(own)

    def refuses(self, pipeline: Pipeline) -> str:
        """Why the schedule cannot serve a pipeline of single replicas, empty when it can."""
        return ""

    @abstractmethod
    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The actions of each lane for one iteration.

        Raises:
            PlanError: the schedule cannot serve the pipeline; says why.
        """
        ...

    def work(self, pipeline: Pipeline, iterations: int = 1) -> Work:
        """The orders of some iterations, one after the other."""
        return Work(follow_on(self.order(pipeline), pipeline.micro_batches, iterations))

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each stage, the most units that one worker keeps; counted in the order, O(actions)."""
        by_stage, _ = count_held(self.order(pipeline), pipeline.stages)
        return by_stage

    def held(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each worker, the most units of all its stages together; counted in the order, O(actions)."""
        _, by_worker = count_held(self.order(pipeline), pipeline.stages)
        return by_worker

    def placement(self, pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
        """For each worker the stages whose weights it has, ascending; O(actions)."""
        work = self.work(pipeline)
        hosted: list[set[int]] = [set() for _ in range(max(work.lane_workers) + 1)]
        for worker, lane in zip(work.lane_workers, work.lanes, strict=True):
            hosted[worker].update(action.stage for action in lane)
        return tuple(tuple(sorted(stages)) for stages in hosted)

    def critical_s(
        self, pipeline: Pipeline, forward_s: Sequence[float], backward_s: Sequence[float], tail_s: Sequence[float]
    ) -> float:
        """The work of the busiest worker, its tails included; equal when that worker never waits. O(actions).

        Transfers that stay on one worker cost nothing when simulated, so only those times should be given that do.
        """
        require(self, pipeline)
        work_s = [pipeline.micro_batches * (f + b) for f, b in zip(forward_s, backward_s, strict=True)]
        return max(
            sum(work_s[stage] * share + tail_s[stage] for stage, share in hosted.items())
            for hosted in shares_of_stages(self.order(pipeline), pipeline.stages)
        )


def dealt(schedule: Defaults, pipeline: Pipeline, line: Line) -> tuple[tuple[Action, ...], ...]:
    """The orders of equal replicas from those of single ones; lane k of replica q is number k * replicas + q.

    Args:
        schedule: whose they are.
        pipeline: with replicas.
        line: gives the orders of a pipeline of single replicas.

    Raises:
        PlanError: the schedule cannot serve the pipeline; says why.
    """
    require(schedule, pipeline)
    count = pipeline.replicas[0]
    own = Pipeline((1,) * pipeline.stages, pipeline.micro_batches // count)
    return replicate(line(own), count)


def require(schedule: Defaults, pipeline: Pipeline) -> None:
    """Refuse a pipeline that the schedule cannot serve.

    Raises:
        PlanError: says why.
    """
    reason = schedule.supports(pipeline)
    if reason:
        raise PlanError(reason, hint="change the stages, the micro-batches, or the schedule")


def finish(stages: Iterable[int], number: int = -1) -> Iterator[Action]:
    """SYNC of all stages of a worker, then UPDATE of all."""
    own = tuple(stages)
    yield from (Action(ActionKind.SYNC, stage, number) for stage in own)
    yield from (Action(ActionKind.UPDATE, stage, number) for stage in own)


def replicate(orders: Sequence[Sequence[Action]], count: int) -> tuple[tuple[Action, ...], ...]:
    """The orders `count` times, micro-batches dealt round-robin; all copies of an order stand together."""
    if count == 1:
        return tuple(tuple(order) for order in orders)
    lane_of = {lane: lane for lane in range(len(orders))}
    return tuple(
        tuple(
            dataclasses.replace(
                a,
                micro_batch=a.micro_batch * count + replica if _numbered(a) else a.micro_batch,
                peer=lane_of[a.peer] * count + replica if a.peer >= 0 else -1,
            )
            for a in order
        )
        for order in orders
        for replica in range(count)
    )


def follow_on(
    orders: Sequence[Sequence[Action]], micro_batches: int, iterations: int
) -> tuple[tuple[Action, ...], ...]:
    """The orders repeated, with numbers that go on."""
    if iterations == 1:
        return tuple(tuple(order) for order in orders)
    return tuple(
        tuple(
            dataclasses.replace(a, micro_batch=a.micro_batch + i * micro_batches if _numbered(a) else i)
            for i in range(iterations)
            for a in order
        )
        for order in orders
    )


def _numbered(action: Action) -> bool:
    return action.kind not in (ActionKind.SYNC, ActionKind.UPDATE, ActionKind.LAUNCH_SYNC)


def count_held(orders: Sequence[Sequence[Action]], stages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Most units kept, by stage (of any one worker) and by worker, counted along each order; O(actions)."""
    by_stage, by_worker = [0] * stages, []
    for order in orders:
        here: dict[int, int] = {}
        total = most = 0
        for action in order:
            change = _change(action)
            if change:
                here[action.stage] = here.get(action.stage, 0) + change
                total += change
                most = max(most, total)
                by_stage[action.stage] = max(by_stage[action.stage], here[action.stage])
        by_worker.append(most)
    return tuple(by_stage), tuple(by_worker)


def _change(action: Action) -> int:
    if action.kind in (ActionKind.FORWARD, ActionKind.LOAD):
        return 1
    return -1 if action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD, ActionKind.EVICT) else 0


def shares_of_stages(orders: Sequence[Sequence[Action]], stages: int) -> list[dict[int, float]]:
    """For each order, the stages that it runs and the part of all micro-batches that it runs of each."""
    counts: list[dict[int, int]] = []
    total = [0] * stages
    for order in orders:
        mine: dict[int, int] = {}
        for action in order:
            if action.kind is ActionKind.FORWARD:
                mine[action.stage] = mine.get(action.stage, 0) + 1
                total[action.stage] += 1
        counts.append(mine)
    return [{stage: count / total[stage] for stage, count in mine.items()} for mine in counts]
