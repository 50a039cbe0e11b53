"""Pipelined backpropagation: an update after every sample, no flush, no stashed weights.

Stage s = 1..S keeps 2(S-s)+1 samples, and its gradient is applied D_s = 2(S-s) updates after the forward read the
weights; the backward reads the newest (Petrowski et al. 1993; Kosson et al., MLSys 2021). What a trainer may correct:

- linear weight prediction: the forward uses w - eta T v, T = D (or 2D for prediction alone);
- spike compensation: w <- w - eta (a v + b g), a = m^D, b = (1 - m^D) / (1 - m);
- SpecTrain (Chen et al. 2018): both passes predict, by floor(k/2) + N - k - 1 and floor(k/2) updates at stage k;
- the optimiser is scaled from batch N to N': m' = m^(N'/N), eta' = eta (1 - m') N' / ((1 - m) N).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from planner.errors import PlanError
from planner.schedules import SCHEDULES
from planner.schedules._defaults import Facts
from planner.schedules._families import Flowing
from planner.schedules._flows import NEWEST, flowing, own_micro_batches, update_every
from planner.schedules.delays import OptimizerScaling, StageCorrection
from planner.schedules.types import Action, Pipeline, WeightPolicy


class Mitigation(StrEnum):
    """How the delay is corrected."""

    NONE = "none"
    WEIGHT_PREDICTION = "lwp"
    SPIKE_COMPENSATION = "sc"
    COMBINED = "lwp+sc"
    SPECTRAIN = "spectrain"


@dataclass(frozen=True, slots=True)
class PipelinedBackprop(Flowing):
    """An update after every sample.

    Attributes:
        mitigation: correction of the delay.
        momentum: of the optimiser, for spike compensation.
    """

    mitigation: Mitigation = Mitigation.NONE
    momentum: float = 0.9

    key = "pipelined-backprop"
    policy = WeightPolicy.NEWEST
    facts = Facts(
        decides="update after every sample, no flush, no stash; mitigation, momentum",
        bubble="0 when full",
        memory="2(p-i)-1 samples at stage i, 1 weight version",
        staleness="2(p-1-i) updates forward, 0 backward",
        source="Kosson et al., MLSys 2021; Chen et al. 2018 (SpecTrain)",
    )

    @property
    def weight_buffers(self) -> int:
        """Buffers as large as the weights that the correction keeps: the predicted weights, where it predicts."""
        return int(self.mitigation not in (Mitigation.NONE, Mitigation.SPIKE_COMPENSATION))

    def warm_up(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Samples that each stage takes in before its first backward."""
        return tuple(2 * (pipeline.stages - i) - 1 for i in range(pipeline.stages))

    def staleness(self, pipeline: Pipeline) -> tuple[int, ...]:
        """2 (S - s) updates, s = 1..S."""
        return tuple(k - 1 for k in self.warm_up(pipeline))

    def optimizer_scaling(self, batch: int, micro_batch: int) -> OptimizerScaling | None:
        """An update is of one micro-batch: momentum and rate follow from those of the batch."""
        momentum, factor = scaled_optimizer(self.momentum, 1.0, batch, micro_batch)
        return OptimizerScaling(batch, micro_batch, self.momentum, momentum, factor)

    def corrections(self, pipeline: Pipeline, scaling: OptimizerScaling | None = None) -> tuple[StageCorrection, ...]:
        """Delay, prediction and compensation of each stage, for the momentum that it is run with."""
        chosen, stages = self.mitigation, pipeline.stages
        momentum = scaling.momentum if scaling else self.momentum
        found = []
        for stage, delay in enumerate(self.staleness(pipeline)):
            forward = backward = 0
            if chosen is Mitigation.SPECTRAIN:
                forward, backward = spectrain_horizons(stages, stage)
            elif chosen in (Mitigation.WEIGHT_PREDICTION, Mitigation.COMBINED):
                forward = delay
            a, b = 1.0, 0.0
            if chosen in (Mitigation.SPIKE_COMPENSATION, Mitigation.COMBINED):
                a, b = spike_compensation(momentum, delay)
            found.append(
                StageCorrection(
                    forward_delay=float(delay),
                    forward_horizon=forward,
                    backward_horizon=backward,
                    velocity_factor=a,
                    gradient_factor=b,
                )
            )
        return tuple(found)

    def exchanges(self, pipeline: Pipeline) -> tuple[int, ...]:
        """After each micro-batch of a replica."""
        return (pipeline.micro_batches // pipeline.replicas[0],) * pipeline.stages

    def rhythm(self, pipeline: Pipeline) -> int:
        """Micro-batches after which the order repeats: one for each replica."""
        return pipeline.replicas[0]

    def lane(self, pipeline: Pipeline, stage: int, replica: int, iterations: int) -> Iterator[Action]:
        """Newest weights, an update after each backward."""
        own = own_micro_batches(pipeline, stage, replica, iterations)
        update = update_every(stage, pipeline.replicas[stage], 1)
        return flowing(stage, own, self.warm_up(pipeline)[stage], lambda _: NEWEST, update)


def spike_compensation(momentum: float, delay: int) -> tuple[float, float]:
    """a = m^D and b = (1 - m^D) / (1 - m); b = D for m = 1.

    Raises:
        PlanError: the momentum is not in [0, 1], or the delay below 0.
    """
    if not 0 <= momentum <= 1 or delay < 0:
        raise PlanError(f"no compensation for momentum {momentum} and delay {delay}", hint="use 0 <= momentum <= 1")
    factor = float(momentum**delay)
    return factor, (1.0 - factor) / (1.0 - momentum) if momentum < 1 else float(delay)


def spectrain_horizons(stages: int, stage: int) -> tuple[int, int]:
    """Updates by which SpecTrain predicts at stage k of N: floor(k/2) + N - k - 1 forward, floor(k/2) backward."""
    return stage // 2 + stages - stage - 1, stage // 2


def scaled_optimizer(momentum: float, learning_rate: float, batch: int, new_batch: int) -> tuple[float, float]:
    """Momentum and learning rate for another batch size: m^(N'/N) and eta (1 - m') N' / ((1 - m) N)."""
    scaled = float(momentum ** (new_batch / batch))
    return scaled, learning_rate * (1 - scaled) * new_batch / ((1 - momentum) * batch)


def fill_drain_utilisation(stages: int, samples: int) -> float:
    """Use of the workers when the pipeline drains after N samples, forward and backward side by side: N/(N+2S-2)."""
    return samples / (samples + 2 * stages - 2)


def fill_drain_bound(stages: int, samples: int) -> float:
    """The published bound, N/(N+2S)."""
    return samples / (samples + 2 * stages)


SCHEDULES.register("pipelined-backprop", PipelinedBackprop())
