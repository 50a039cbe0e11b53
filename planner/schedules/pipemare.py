"""PipeMare: no bubble, no stashed weights; learning rates and weights are corrected for the delay instead.

Stage i = 1..P of a pipeline with N micro-batches a mini-batch computes its forward with weights that are on average
tau_i = (2(P-i)+1)/N mini-batches older than those the gradient is applied to, and its backward with the newest ones
(Yang et al., MLSys 2021). What a trainer needs for each stage:

- T1: learning rate alpha_k / tau^p, p = 1 - min(k/K, 1), at step k of K annealed steps;
- T2: backward weights u = w - tau delta, close to those of the forward, where delta <- gamma delta + (1-gamma)(w_new -
  w_old), gamma = D^(1/tau);
- T3: a number of first epochs is trained synchronously.

The order keeps 2(P-i)+2 micro-batches at stage i (the forward of each comes before the backward whose place it takes),
which makes the mean delay of the played order exactly tau.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.errors import PlanError
from planner.schedules import SCHEDULES
from planner.schedules._defaults import Facts
from planner.schedules._families import Flowing
from planner.schedules._flows import NEWEST, flowing, own_micro_batches, update_every
from planner.schedules.delays import OptimizerScaling, StageCorrection
from planner.schedules.types import Action, Pipeline, WeightPolicy


@dataclass(frozen=True, slots=True)
class PipeMare(Flowing):
    """Asynchronous, without stashing.

    Attributes:
        synchronous_epochs: T3's first epochs with a flush.
        decay: T2's D.
    """

    synchronous_epochs: int = 0
    decay: float = 0.135

    key = "pipemare"
    policy = WeightPolicy.NEWEST
    facts = Facts(
        decides="no flush, no stash; T1, T2, T3 by stage; synchronous_epochs, decay",
        bubble="0 when full",
        memory="2(p-i) micro-batches at stage i, 1 weight version, 1 buffer for T2",
        staleness="(2(p-i)-1)/m mini-batches forward, 0 backward",
        source="Yang et al., MLSys 2021",
    )

    @property
    def weight_buffers(self) -> int:
        """Buffers as large as the weights that the correction keeps: T2's velocity of the weights."""
        return 1

    def warm_up(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Micro-batches that each stage takes in before its first backward."""
        return tuple(2 * (pipeline.stages - i) for i in range(pipeline.stages))

    def staleness(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Mini-batches at the most: tau rounded up."""
        own = pipeline.micro_batches // pipeline.replicas[0]
        return tuple(-(-(k - 1) // own) for k in self.warm_up(pipeline))

    def corrections(self, pipeline: Pipeline, scaling: OptimizerScaling | None = None) -> tuple[StageCorrection, ...]:
        """T1 at the first step, T2 and T3 for each stage; delays in mini-batches, which are its updates."""
        own = pipeline.micro_batches // pipeline.replicas[0]
        return tuple(
            StageCorrection(
                forward_delay=tau,
                learning_rate_factor=learning_rate_factor(tau, 0, 1),
                velocity_decay=velocity_decay(tau, self.decay),
                synchronous_epochs=self.synchronous_epochs,
            )
            for tau in delays(pipeline.stages, own)
        )

    def lane(self, pipeline: Pipeline, stage: int, replica: int, iterations: int) -> Iterator[Action]:
        """Newest weights, an update after each iteration's backwards."""
        count = pipeline.replicas[0]
        own = own_micro_batches(pipeline, stage, replica, iterations)
        update = update_every(stage, count, pipeline.micro_batches // count)
        return flowing(stage, own, self.warm_up(pipeline)[stage], lambda _: NEWEST, update)


def delays(stages: int, micro_batches: int) -> tuple[float, ...]:
    """tau of each stage in mini-batches: (2(P-i)+1)/N, i = 1..P."""
    return tuple((2 * (stages - i) - 1) / micro_batches for i in range(stages))


def learning_rate_factor(tau: float, step: int, steps: int) -> float:
    """T1 at one step: tau^-(1 - min(step / steps, 1)).

    Raises:
        PlanError: the delay or the number of steps is not above 0.
    """
    if tau <= 0 or steps <= 0:
        raise PlanError(f"a delay of {tau} over {steps} steps cannot be annealed", hint="use numbers above 0")
    return float(tau ** -(1.0 - min(step / steps, 1.0)))


def velocity_decay(tau: float, decay: float = 0.135) -> float:
    """T2's gamma = D^(1/tau); 0 without delay."""
    return float(decay ** (1.0 / tau)) if tau > 0 else 0.0


def stashed_copies(stages: int, micro_batches: int) -> float:
    """Extra weight copies that PipeDream keeps on average, in the same units: mean tau = P / N."""
    return sum(delays(stages, micro_batches)) / stages


def mean_throughput(stages: int, micro_batches: int, synchronous_share: float) -> float:
    """Throughput relative to no bubble when a share of the epochs is synchronous (T3): they run at N/(N+P-1)."""
    flushed = (micro_batches + stages - 1) / micro_batches
    return 1.0 / (synchronous_share * flushed + 1.0 - synchronous_share)


SCHEDULES.register("pipemare", PipeMare())
