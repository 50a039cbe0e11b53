"""Schedules with one stage a worker that drain at every update: GPipe, and 1F1B with its relatives.

GPipe: all forwards, then all backwards, then one synchronous update. Bubble over total time (S-1)/(M+S-1) for S equal
stages and M micro-batches (Huang et al., NeurIPS 2019). Every stage keeps all of its micro-batches. The backwards run
in the order of the forwards; the reverse order takes the same time and memory. Re-materialisation keeps only a stage's
input for each micro-batch and recomputes the forward before the backward. With `recompute` the order has actions for
it: after the gradient has arrived, or with `early` while the stage waits for it.

1F1B: warm-up forwards, alternating backwards and forwards, remaining backwards. Same bubble as GPipe for equal stages,
with at most S-i micro-batches kept by stage i (Narayanan et al., SOSP 2019 and ICML 2021; DAPPLE's early backward).

Unequal replication. Let stage i have r(i) replicas, each with w(i) forwards before its first backward, n(i) = r(i) w(i)
in all. A replica's first backward needs its own w forwards, so every stage before must let n(i) micro-batches pass
before it waits for a gradient itself, and have one more in work on each of its replicas to keep pace:

    w(last) = 1        w(i) = 1 + ceil(n(i+1) / r(i))        (never more than a replica's micro-batches)

For equal replicas this is S - i, and n(i) is the number of workers from stage i to the end. The number of workers
from here to the end, divided by r(i) and rounded up, is the smallest warm-up for which nothing deadlocks, but where
few replicas feed many that feed few it lets the many wait for each other's gradients: with replicas (1, 8, 1) and
balanced stages an iteration then takes four times as long. The rule above keeps within a few per cent of the ideal
(see docs/simulate.md).

No deadlock: stage i+1 runs the backward of micro-batch m after the forward of m + n(i+1) - r(i+1); stage i runs that
forward after the backward of m + n(i+1) - r(i+1) - n(i) < m. Each wait is for work of a smaller micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import ClassVar, Protocol

import numpy as np

from planner.errors import PlanError
from planner.schedules import SCHEDULES
from planner.schedules.critical_chains import PassSeconds, one_forward_one_backward_s
from planner.schedules.orders import finish, in_turn, repeated
from planner.schedules.schedule import Schedule, require, single
from planner.schedules.types import Action, ActionKind, Facts, Pipeline, Work
from planner.sums import float_sum


@dataclass(frozen=True, slots=True)
class GPipe(Schedule):
    """All forwards, then all backwards.

    Attributes:
        recompute: the order recomputes each forward before its backward.
        early: the recomputation does not wait for the gradient.
    """

    recompute: bool = False
    early: bool = False

    key = "gpipe"
    closed_form = deals = True
    facts = Facts(
        source="Huang et al., NeurIPS 2019",
        kept="m",
    )

    def supports(self, pipeline: Pipeline) -> str:
        """Any replication."""
        return ""

    def recomputed_stages(self, pipeline: Pipeline) -> frozenset[int]:
        """All stages with `recompute`, else none."""
        return frozenset(range(pipeline.stages)) if self.recompute else frozenset()

    def warm_up_after(
        self, replicas: np.ndarray, passing: np.ndarray, micro_batches: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """M / r, independent of the later stages.

        Backwards begin when each replica of the last stage has run its last forward.
        """
        kept = np.broadcast_to(micro_batches // replicas, np.broadcast_shapes(replicas.shape, passing.shape))
        through = np.where(passing > 0, passing, replicas)
        return kept.copy(), through, np.maximum(-(-passing // replicas) - 1, 0)

    def exact(self, pipeline: Pipeline) -> bool:
        """True for equal replicas without recompute actions."""
        return len(set(pipeline.replicas)) == 1 and not self.recompute

    def worker_orders(self, pipeline: Pipeline) -> Iterable[Iterable[Action]]:
        """All forwards, then all backwards, for each worker; O(actions)."""
        for stage, replica in pipeline.workers():
            micro_batches = pipeline.micro_batches_of(stage, replica)
            forwards = (Action(ActionKind.FORWARD, stage, m) for m in micro_batches)
            yield chain(forwards, self._backwards(stage, stage == pipeline.stages - 1, micro_batches))

    def _backwards(self, stage: int, last: bool, micro_batches: range) -> Iterator[Action]:
        """Backwards of a stage, with recomputation if the order has it."""
        for m in micro_batches:
            if self.recompute and not self.early and not last:
                yield Action(ActionKind.RECEIVE_GRADIENT, stage, m)
            if self.recompute:
                yield Action(ActionKind.RECOMPUTE, stage, m)
            yield Action(ActionKind.BACKWARD, stage, m)
            if self.recompute and not self.early and stage:
                yield Action(ActionKind.SEND_GRADIENT, stage, m)

    def chain_s(self, pipeline: Pipeline, times: PassSeconds) -> float:
        """Longest chain of waits; equal to the simulated time when all stages have equal replicas. O(stages).

        With `recompute` the backward is given with its recomputation; when that is early, only the busiest worker
        counts. The last stage begins its backwards when its forwards are done: the slowest stage of each direction
        counts, so this exceeds the sum over stages plus (M/r - 1) times the slowest stage where those are two. Where
        the last stage has several replicas, the first of them begins its backwards before the last micro-batch has
        come, and the last one ends no earlier than that micro-batch's way back; a stage of few replicas between
        stages of more may be the busiest.
        """
        busiest = Schedule.chain_s(self, pipeline, times)
        if self.early:
            return busiest
        share = [pipeline.micro_batches // count for count in pipeline.replicas]
        before = pipeline.micro_batches - pipeline.replicas[-1]
        forwards = float_sum(times.forward) + max(
            before // count * f for count, f in zip(pipeline.replicas, times.forward, strict=True)
        )
        last = float_sum(times.forward) + max((count - 1) * f for count, f in zip(share, times.forward, strict=True))
        last += (share[-1] - 1) * times.gradient[-1]
        total, drained, slowest = busiest, 0.0, 0.0
        for count, b, tail in zip(reversed(share), reversed(times.gradient), reversed(times.tail), strict=True):
            drained += b
            slowest = max(slowest, (count - 1) * b)
            total = max(total, forwards + drained + slowest + tail, last + drained + tail)
        return total


SCHEDULES.register("gpipe", GPipe())


def one_forward_one_backward(stage: int, micro_batches: Sequence[int], forwards: int) -> Iterator[Action]:
    """`forwards` forwards, then backwards and forwards alternately, then the remaining backwards."""
    passes = [[Action(kind, stage, m) for m in micro_batches] for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)]
    return in_turn(passes[0], passes[1], forwards)


def paced_warm_up(replicas: Sequence[int]) -> tuple[int, ...]:
    """Warm-up forwards per replica of each stage that keep every stage fed: 1 + ceil(n(i+1) / r(i)).

    n(i) = r(i) w(i) micro-batches pass stage i in its warm-up. The recurrence runs from the last stage to the first,
    so a search that puts stages in front only carries n of the stage added last.
    """
    forwards: list[int] = []
    passing = 0
    for count in reversed(replicas):
        forwards.append(1 + -(-passing // count))
        passing = count * forwards[-1]
    return tuple(reversed(forwards))


def least_warm_up(replicas: Sequence[int]) -> tuple[int, ...]:
    """Fewest warm-up forwards per replica that never deadlock: workers from the stage to the end over its replicas."""
    total, forwards = 0, []
    for count in reversed(replicas):
        total += count
        forwards.append(-(-total // count))
    return tuple(reversed(forwards))


class OneForwardOneBackward(Schedule, Protocol):
    """A schedule of warm-up, alternation and drain, with one update per iteration."""

    __slots__ = ()

    deals: ClassVar[bool] = True
    warm_up_per_stage: int = 1
    """Warm-up forwards per stage that follows."""

    def warm_up(self, replicas: Sequence[int]) -> tuple[int, ...]:
        """Warm-up forwards per replica of each stage, if there are enough micro-batches."""
        return tuple(self.warm_up_per_stage * behind + 1 for behind in reversed(range(len(replicas))))

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """The warm-up of each stage, at most the micro-batches of a replica."""
        pairs = zip(pipeline.replicas, self.warm_up(pipeline.replicas), strict=True)
        return tuple(min(pipeline.micro_batches // count, forwards) for count, forwards in pairs)

    def worker_orders(self, pipeline: Pipeline) -> Iterable[Iterable[Action]]:
        """Warm-up, alternation, drain, for each worker; O(actions)."""
        forwards = self.warm_up(pipeline.replicas)
        for stage, replica in pipeline.workers():
            yield one_forward_one_backward(stage, pipeline.micro_batches_of(stage, replica), forwards[stage])

    def chain_s(self, pipeline: Pipeline, times: PassSeconds) -> float:
        """See `one_forward_one_backward_s`; O(stages^2)."""
        counts = [pipeline.micro_batches // count for count in pipeline.replicas]
        return one_forward_one_backward_s(counts, self.warm_up(pipeline.replicas), times)


@dataclass(frozen=True, slots=True)
class OneFOneB(OneForwardOneBackward):
    """One forward, one backward; one weight version; flush at the end of the iteration."""

    key = "1f1b"
    closed_form = True
    facts = Facts(
        source="Narayanan et al., SOSP 2019 and ICML 2021",
        kept="min(m, p-i)",
    )

    def supports(self, pipeline: Pipeline) -> str:
        """Any replication."""
        return ""

    def warm_up(self, replicas: Sequence[int]) -> tuple[int, ...]:
        """w(i) of each stage, see the module."""
        return paced_warm_up(replicas)

    def warm_up_after(
        self, replicas: np.ndarray, passing: np.ndarray, micro_batches: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """The recurrence of `paced_warm_up`."""
        forwards = 1 + -(-passing // replicas)
        kept = np.minimum(micro_batches // replicas, forwards)
        return kept, forwards * replicas, kept - 1


class WarmUp(StrEnum):
    """Length of DAPPLE's warm-up."""

    NEAR = "a"
    """One more than the stages that follow."""

    FAR = "b"
    """Twice as many, so that transfers overlap with computation."""


@dataclass(frozen=True, slots=True)
class Dapple(OneFOneB):
    """DAPPLE's early backward: stage i runs K(i) forwards first; policy A without a limit is 1F1B with a flush.

    K(i) = min(p - i, what fits in memory), or min(2 (p - i) - 1, what fits) where transfers are slow (policies A, B).

    Attributes:
        policy_of: NEAR (`a`) or FAR (`b`).
        most: most micro-batches that fit in memory; 0: no limit.
    """

    policy_of: WarmUp = WarmUp.NEAR
    most: int = 0

    key = "dapple"
    closed_form = False
    warm_up_per_stage = 2
    facts = Facts(
        source="Fan et al., PPoPP 2021",
        kept="min(m, p-i, most or p)",
        idle_holds="(most or p) >= p",
    )

    def supports(self, pipeline: Pipeline) -> str:
        """Any replication; with a limit or policy B only equal replicas."""
        if self.most < 0:
            return f"a limit of {self.most} micro-batches keeps none"
        if (self.most or self.policy_of is WarmUp.FAR) and len(set(pipeline.replicas)) > 1:
            return f"{self.name} needs the same number of replicas at every stage, not {pipeline.replicas}"
        return ""

    def warm_up(self, replicas: Sequence[int]) -> tuple[int, ...]:
        """K(i) of each stage."""
        as_1f1b = self.policy_of is WarmUp.NEAR
        forwards = paced_warm_up(replicas) if as_1f1b else OneForwardOneBackward.warm_up(self, replicas)
        return tuple(min(k, self.most or k) for k in forwards)

    def warm_up_after(
        self, replicas: np.ndarray, passing: np.ndarray, micro_batches: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """As for 1F1B with policy A and no limit; else None."""
        usual = self.policy_of is WarmUp.NEAR and not self.most
        return OneFOneB.warm_up_after(self, replicas, passing, micro_batches) if usual else None


BAPIPE = "Zhao et al., 2020 (BaPipe)"


@dataclass(frozen=True, slots=True)
class BaPipe(OneForwardOneBackward):
    """BaPipe's orders of 1F1B, which differ in how transfers run and in their warm-up.

    - 1F1B-AS, on accelerators that stream transfers into the computation: no transfer costs time of its own when each
      boundary carries a stage's activations in the time of a forward;
    - 1F1B-SNO, on devices that wait for their transfers, of SR one way;
    - 1F1B-SO: twice the warm-up, so that transfers of SR, up to half of F + B, run beside the work. The published bound
      of what stage i keeps is 2 (p - i), one micro-batch more than it does.

    Attributes:
        key: its name.
        warm_up_per_stage: warm-up forwards per stage that follows.
        facts: what it keeps.
    """

    key: str
    warm_up_per_stage: int = field()
    facts: Facts = field(compare=False)


@dataclass(frozen=True, slots=True)
class BaPipeFbp(Schedule):
    """BaPipe's FBP-AS: forward and backward units of one accelerator work at the same time, each with its share.

    A forward then takes as long as forward and backward together, and so does a backward. With a stage that begins when
    its input is complete the time is (m + 2p - 1)(F + B). With `fill_overlap` a stage passes its result on while it
    works and the loss follows at once: (m + p - 1)(F + B), the published time, and half the micro-batches (the
    published figure stays 2 (p - i)). Each worker has two lanes, 2i for forwards and 2i + 1 for backwards; a forward
    waits until the memory that the schedule claims has room for it.

    Attributes:
        fill_overlap: results are passed on while they are computed.
    """

    fill_overlap: bool = False

    key = "bapipe-fbp"
    facts = Facts(
        source=BAPIPE,
        kept="min(m, (1 if fill_overlap else 2)*(p-i))",
        idle="(p-1 if fill_overlap else 2*p-1)*(F+B)",
    )

    def worker_orders(self, pipeline: Pipeline) -> Iterable[tuple[Action, ...]]:
        """Two lanes for each stage, exchange and update included."""
        for stage in range(pipeline.stages):
            yield tuple(Action(ActionKind.FORWARD, stage, m) for m in range(pipeline.micro_batches))
            backwards = (Action(ActionKind.BACKWARD, stage, m) for m in range(pipeline.micro_batches))
            yield (*backwards, *finish((stage,)))

    def work(self, pipeline: Pipeline, iterations: int = 1) -> Work:
        """The lanes, which share their worker, with the limit on micro-batches kept.

        Raises:
            PlanError: more than one iteration; the forward lane does not wait for the update on the other.
        """
        if iterations > 1:
            raise PlanError(f"{self.key} gives the order of one iteration, not {iterations}", hint="ask for one")
        require(self, pipeline)
        count = pipeline.replicas[0]
        lanes = repeated(tuple(self.worker_orders(single(pipeline))), count, pipeline.micro_batches, 1)
        return Work(
            lanes,
            workers=tuple(k // (2 * count) * count + k % count for k in range(len(lanes))),
            shared=True,
            streaming=self.fill_overlap,
            limits=self.in_flight(pipeline),
        )

    def exact(self, pipeline: Pipeline) -> bool:
        """False: nothing is proven for unequal stages."""
        return False

    def chain_s(self, pipeline: Pipeline, times: PassSeconds) -> float:
        """The longest chain through one lane of a stage, where an action takes t = F + B; O(stages).

        All stages before forward, m times t there, all stages after and all stages backward. With `fill_overlap` a
        stage before or after costs only its own F and B, and the loss follows at once.
        """
        both = [f + b - t for f, b, t in zip(times.forward, times.gradient, times.transfer, strict=True)]
        count = pipeline.micro_batches // pipeline.replicas[0]
        if self.fill_overlap:
            passing = float_sum(times.forward[:-1]) + float_sum(times.gradient[1:])
            return passing + (count - 1) * max(both) + both[0] + times.tail[0]
        return 2 * float_sum(both) + (count - 1) * max(both) + times.tail[0]


@dataclass(frozen=True, slots=True)
class BPipe(OneForwardOneBackward):
    """BPipe: 1F1B whose early workers evict activations to the late ones, so that all keep about the same.

    Worker x < p/2 of 1F1B keeps p - x micro-batches, its partner p - 1 - x only x + 1. When a worker has
    ceil((p+2)/2), it evicts the one it needs last to its partner before the next forward, and loads it back when a
    backward has made room.
    """

    key = "bpipe"
    deals = False
    shares_workers = True
    facts = Facts(
        source="Kim et al., ICML 2023",
        kept="min(m, p-i, ceil((p+2)/2))",
    )

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """What each worker keeps of its own stage, without what it evicted."""
        return Schedule.in_flight(self, pipeline)

    def shortened(self, pipeline: Pipeline) -> Pipeline:
        """As many micro-batches as the first stage would keep, and as many again that take their place."""
        return Pipeline(pipeline.replicas, min(pipeline.micro_batches, 2 * pipeline.stages))

    def held(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Peak units of each worker, those of its partner included."""
        return tuple(held.total for held in self.peaks(pipeline))

    def worker_orders(self, pipeline: Pipeline) -> Iterable[Iterable[Action]]:
        """1F1B with EVICT and LOAD."""
        return (self._worker(stage, pipeline) for stage in range(pipeline.stages))

    def _worker(self, stage: int, pipeline: Pipeline) -> Iterator[Action]:
        """The order of one worker: evict the latest micro-batch when memory is full, load it back in time."""
        stages, limit = pipeline.stages, (pipeline.stages + 3) // 2
        kept: list[int] = []
        evicted: list[int] = []
        plain = one_forward_one_backward(stage, range(pipeline.micro_batches), stages - stage)
        for action in plain:
            m = action.micro_batch
            if action.kind is ActionKind.FORWARD:
                if len(kept) == limit:
                    evicted.append(kept.pop())
                    yield Action(ActionKind.EVICT, stage, evicted[-1], peer=stages - 1 - stage)
                kept.append(m)
                yield action
                continue
            yield action
            kept.remove(m)
            if m + 1 in evicted:
                evicted.remove(m + 1)
                kept.insert(0, m + 1)
                yield Action(ActionKind.LOAD, stage, m + 1)


SCHEDULES.register("1f1b", OneFOneB())
SCHEDULES.register("dapple", Dapple())
SCHEDULES.register("bapipe-as", BaPipe("bapipe-as", 1, Facts(BAPIPE, kept="min(m, p-i)")))
SCHEDULES.register("bapipe-sno", BaPipe("bapipe-sno", 1, Facts(BAPIPE, kept="min(m, p-i)")))
SCHEDULES.register("bapipe-so", BaPipe("bapipe-so", 2, Facts(BAPIPE, kept="min(m, 2*(p-i)-1)")))
SCHEDULES.register("bapipe-fbp", BaPipeFbp())
SCHEDULES.register("bpipe", BPipe())
