"""What asynchronous training does about old weights: corrections by stage, an optimizer for smaller batches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageCorrection:
    """What one stage does so that training with old weights converges; what it does not do is left out.

    Attributes:
        forward_delay: updates between the weights that a forward reads and the update that applies its gradient, on
            average.
        backward_delay: the same for the weights that the backward reads.
        learning_rate_factor: the learning rate is multiplied by this at the first step, annealed to 1 (PipeMare's T1:
            delay to the power -(1 - step / steps)).
        velocity_decay: a backward reads w - (forward delay - backward delay) * d, about what its forward read, with
            d <- g d + (1 - g) (new w - old w) at every update; this is g (PipeMare's T2).
        synchronous_epochs: first epochs that are trained with a flush after every update (T3).
        forward_horizon: a forward reads weights predicted by so many updates: w - rate * horizon * velocity.
        backward_horizon: the same for the backward.
        velocity_factor: the update is w - rate * (a velocity + b gradient); this is a (spike compensation).
        gradient_factor: b.
    """

    forward_delay: float
    backward_delay: float = 0.0
    learning_rate_factor: float = 1.0
    velocity_decay: float = 0.0
    synchronous_epochs: int = 0
    forward_horizon: int = 0
    backward_horizon: int = 0
    velocity_factor: float = 1.0
    gradient_factor: float = 0.0


@dataclass(frozen=True, slots=True)
class OptimizerScaling:
    """Momentum and learning rate for another batch than the one that they were chosen for.

    Attributes:
        reference_batch: samples of an update for which momentum and learning rate hold.
        batch: samples of an update here.
        reference_momentum: the momentum there.
        momentum: here.
        learning_rate_factor: of the learning rate.
    """

    reference_batch: int
    batch: int
    reference_momentum: float
    momentum: float
    learning_rate_factor: float
