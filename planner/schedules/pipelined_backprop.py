"""Schedules that never drain and keep only the newest weights: pipelined backpropagation and PipeMare.

Both correct the effect of the delay on training, stage by stage; the closed forms of the corrections are here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from planner.errors import PlanError, whole
from planner.schedules import SCHEDULES
from planner.schedules.pipedream import ContinuousSchedule
from planner.schedules.types import Facts, OptimizerScaling, Pipeline, StageCorrection, WeightPolicy


class Mitigation(StrEnum):
    """Correction of the delay; see `PipelinedBackprop`."""

    NONE = "none"
    WEIGHT_PREDICTION = "lwp"
    SPIKE_COMPENSATION = "sc"
    COMBINED = "lwp+sc"
    SPECTRAIN = "spectrain"


@dataclass(frozen=True, slots=True)
class PipelinedBackprop(ContinuousSchedule):
    """Pipelined backpropagation: an update after every sample.

    Stage s = 1..S keeps 2(S-s)+1 samples, and its gradient is applied D_s = 2(S-s) updates after the forward read the
    weights; the backward reads the newest. What a trainer may correct:

    - linear weight prediction: the forward uses w - eta T v, T = D (or 2D for prediction alone);
    - spike compensation: w <- w - eta (a v + b g), a = m^D, b = (1 - m^D) / (1 - m);
    - SpecTrain: both passes predict, by floor(k/2) + N - k - 1 and floor(k/2) updates at stage k;
    - the optimiser is scaled from batch N to N': m' = m^(N'/N), eta' = eta (1 - m') N' / ((1 - m) N).

    Attributes:
        mitigation: correction of the delay.
        momentum: momentum of the optimiser, for spike compensation.
    """

    mitigation: Mitigation = Mitigation.NONE
    momentum: float = 0.9

    key = "pipelined-backprop"
    updates_each = True
    facts = Facts(
        source="Kosson et al., MLSys 2021; Chen et al. 2018 (SpecTrain)",
        kept="2*(p-i)-1",
        idle="0",
        staleness="2*(p-1-i)",
    )

    weight_policy = WeightPolicy.NEWEST

    @property
    def weight_buffers(self) -> int:
        """1 for the predicted weights if the mitigation predicts, else 0."""
        return int(self.mitigation not in (Mitigation.NONE, Mitigation.SPIKE_COMPENSATION))

    def optimizer_scaling(self, batch: int, micro_batch: int) -> OptimizerScaling | None:
        """Momentum and rate scaled from the batch to one micro-batch, since every micro-batch is an update."""
        momentum, factor = scaled_optimizer(self.momentum, 1.0, batch, micro_batch)
        return OptimizerScaling(batch, micro_batch, self.momentum, momentum, factor)

    def corrections(self, pipeline: Pipeline, scaling: OptimizerScaling | None = None) -> tuple[StageCorrection, ...]:
        """Delay, prediction and compensation of each stage, for the scaled momentum."""
        delays, momentum = self.staleness(pipeline), scaling.momentum if scaling else self.momentum
        forward = backward = (0,) * pipeline.stages
        factors = [(1.0, 0.0)] * pipeline.stages
        if self.mitigation is Mitigation.SPECTRAIN:
            forward, backward = spectrain_horizons(pipeline.stages)
        if self.mitigation in (Mitigation.WEIGHT_PREDICTION, Mitigation.COMBINED):
            forward = delays
        if self.mitigation in (Mitigation.SPIKE_COMPENSATION, Mitigation.COMBINED):
            factors = [spike_compensation(momentum, delay) for delay in delays]
        return tuple(
            StageCorrection(
                forward_delay=float(delay),
                forward_horizon=ahead,
                backward_horizon=behind,
                velocity_factor=a,
                gradient_factor=b,
            )
            for delay, ahead, behind, (a, b) in zip(delays, forward, backward, factors, strict=True)
        )


@dataclass(frozen=True, slots=True)
class PipeMare(ContinuousSchedule):
    """PipeMare: learning rates and weights are corrected for the delay.

    Stage i = 1..P of a pipeline with N micro-batches a mini-batch computes its forward with weights that are on average
    tau_i = (2(P-i)+1)/N mini-batches older than those the gradient is applied to, and its backward with the newest
    ones. What a trainer needs for each stage:

    - T1: learning rate alpha_k / tau^p, p = 1 - min(k/K, 1), at step k of K annealed steps; where tau is below one
      mini-batch the rate stays as it is, since T1 lowers rates and never raises them;
    - T2: backward weights u = w - tau delta, close to those of the forward, where delta <- gamma delta +
      (1-gamma)(w_new - w_old), gamma = D^(1/tau);
    - T3: a number of first epochs is trained synchronously.

    The order keeps 2(P-i)+2 micro-batches at stage i (the forward of each comes before the backward whose place it
    takes), which makes the mean delay of the played order exactly tau.

    Attributes:
        synchronous_epochs: T3's first epochs with a flush.
        decay: T2's D.
        annealing_steps: T1's K; 0 leaves it to the trainer.
    """

    synchronous_epochs: int = 0
    decay: float = 0.135
    annealing_steps: int = 0

    key = "pipemare"
    facts = Facts(
        source="Yang et al., MLSys 2021",
        kept="2*(p-i)",
        idle="0",
        staleness="ceil((2*(p-i)-1)/m)",
    )

    weight_policy = WeightPolicy.NEWEST
    weight_buffers = 1

    def corrections(self, pipeline: Pipeline, scaling: OptimizerScaling | None = None) -> tuple[StageCorrection, ...]:
        """T1 at the first step, T2 and T3 for each stage; delays in mini-batches, which are its updates."""
        per_replica = pipeline.micro_batches // pipeline.replicas[0]
        return tuple(
            StageCorrection(
                forward_delay=tau,
                learning_rate_factor=min(1.0, pipemare_learning_rate(1.0, tau, 0, 1)),
                annealing_steps=self.annealing_steps,
                velocity_decay=pipemare_velocity_decay(tau, decay=self.decay),
                synchronous_epochs=self.synchronous_epochs,
            )
            for tau in pipemare_delays(pipeline.stages, per_replica)
        )


def pipemare_delays(stages: int, micro_batches: int) -> tuple[float, ...]:
    """tau of each stage's forward in mini-batches: (2(P-i)+1)/N, i = 1..P; the backward's is 0 (PipeDream's is tau).

    >>> formulas.pipemare_delays(4, 4)
    (1.75, 1.25, 0.75, 0.25)
    """
    whole(stages=stages, micro_batches=micro_batches)
    return tuple((2 * (stages - i) - 1) / micro_batches for i in range(stages))


def pipemare_learning_rate(base: float, tau: float, step: int, steps: int) -> float:
    """T1, the learning rate of a stage at step k of K annealed ones: base / tau^(1 - min(k/K, 1)).

    >>> [round(formulas.pipemare_learning_rate(0.1, 1.75, k, 100), 6) for k in (0, 50, 100)]
    [0.057143, 0.075593, 0.1]

    Raises:
        PlanError: the delay or the number of steps is not above 0.
    """
    if tau <= 0 or steps <= 0:
        raise PlanError(f"a delay of {tau} over {steps} steps cannot be annealed", hint="use numbers above 0")
    return base * float(tau ** -(1.0 - min(step / steps, 1.0)))


def pipemare_velocity_decay(tau_forward: float, tau_backward: float = 0.0, decay: float = 0.135) -> float:
    """T2, gamma = D^(1/(tau_fwd - tau_bkwd)) of the weights' velocity; 0 without delay.

    >>> [round(formulas.pipemare_velocity_decay(tau), 6) for tau in (1.75, 0.25)]
    [0.318455, 0.000332]
    """
    tau = tau_forward - tau_backward
    return float(decay ** (1.0 / tau)) if tau > 0 else 0.0


def spike_compensation(momentum: float, delay: int) -> tuple[float, float]:
    """SC_D: w <- w - eta (a v + b g) with a = m^D and b = (1 - m^D)/(1 - m); b = D for m = 1.

    >>> [round(x, 6) for x in formulas.spike_compensation(0.9, 4)]
    [0.6561, 3.439]

    Raises:
        PlanError: the momentum is not in [0, 1], or the delay below 0.
    """
    if not 0 <= momentum <= 1 or delay < 0:
        raise PlanError(f"no compensation for momentum {momentum} and delay {delay}", hint="use 0 <= momentum <= 1")
    factor = float(momentum**delay)
    return factor, (1.0 - factor) / (1.0 - momentum) if momentum < 1 else float(delay)


def spectrain_horizons(stages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Updates by which SpecTrain predicts at stage k of N: forward floor(k/2) + N - k - 1, backward floor(k/2).

    >>> formulas.spectrain_horizons(4)
    ((3, 2, 2, 1), (0, 0, 1, 1))
    """
    whole(stages=stages)
    backward = tuple(k // 2 for k in range(stages))
    return tuple(half + stages - k - 1 for k, half in enumerate(backward)), backward


def scaled_optimizer(momentum: float, learning_rate: float, batch: int, new_batch: int) -> tuple[float, float]:
    """Momentum and learning rate for another batch: m' = m^(N'/N), eta' = eta (1-m') N'/((1-m) N).

    >>> [round(x, 8) for x in formulas.scaled_optimizer(0.9, 0.1, 128, 1)]
    [0.99917721, 6.43e-06]
    """
    whole(batch=batch, new_batch=new_batch)
    scaled = float(momentum ** (new_batch / batch))
    return scaled, learning_rate * (1 - scaled) * new_batch / ((1 - momentum) * batch)


SCHEDULES.register("pipelined-backprop", PipelinedBackprop())
SCHEDULES.register("pipemare", PipeMare())
