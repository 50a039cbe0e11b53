"""The schedule as a plan file has it: orders of all ranks, versions of the weights, corrections of old gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.plan.orders import RankOrder

Given = Literal["", "name", "orders"]


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


@dataclass(frozen=True, slots=True)
class ScheduleSection:
    """Who does what in which order. What does not apply is left out of the file.

    Attributes:
        name: name of the schedule, with options.
        weight_policy: which versions of the weights are used: "sync" means one version, updated after a flush; "stash":
            a backward reads the version of its forward; "2bw": two versions, swapped once an iteration; "vertical":
            every stage reads the version that the first had when the micro-batch entered; "newest": what is newest.
        orders: the explicit actions of every rank.
        iterations: iterations that the orders span, what goes on for ever taken once; micro-batches are numbered on.
        parts: parts of a micro-batch (sub-sequences), numbered from 0.
        causal: a part needs those before it in the forward and those after it in the backward.
        side_by_side: a rank runs its lanes at the same time, each at half of its speed.
        streaming: a stage passes its result on while it works.
        spans: an iteration begins on each rank where its last one ended, not when all have ended.
        versions: by stage, versions of its weights that a rank keeps; left out where it is one.
        limits: by stage, micro-batches that a rank may keep; a forward waits for room. Left out where orders see to it.
        staleness: by stage, most updates between the weights that a forward reads and the update that applies its
            gradient; left out where there is none.
        averaged: by stage, micro-batches whose gradients make one update, where that is less than an iteration: each is
            multiplied by one over that, not by `gradient_scale`. Left out where an update has a whole iteration's.
        clock_distance: updates of other copies that a micro-batch may lack, in waves; left out where copies wait for
            each other at every update.
        transfers: what a transfer between stages occupies in the predictions: "blocking" its receiver too, "overlapped"
            the link alone.
        corrections: by stage.
        optimizer: for another batch size.
        given: how the user gave the schedule: "name" where it was asked for by name, "orders" where the orders are the
            user's own and the name only what they are called; left out where the search or a system chose it.
    """

    name: str
    weight_policy: str
    orders: tuple[RankOrder, ...]
    iterations: int = 1
    parts: int = 1
    causal: bool = False
    side_by_side: bool = False
    streaming: bool = False
    spans: bool = False
    versions: tuple[int, ...] = ()
    limits: tuple[int, ...] = ()
    staleness: tuple[int, ...] = ()
    averaged: tuple[int, ...] = ()
    clock_distance: int | None = None
    transfers: Literal["blocking", "overlapped"] = "blocking"
    corrections: tuple[StageCorrection, ...] = ()
    optimizer: OptimizerScaling | None = None
    given: Given = ""

    @property
    def continuous(self) -> bool:
        """Whether something goes on for ever: the pipeline does not drain after an iteration."""
        return any(order.period for order in self.orders)
