"""The schedule as a plan file has it: orders of all ranks, versions of the weights, corrections of old gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.plans.orders import RankOrder
from planner.schedules.types import OptimizerScaling as OptimizerScaling
from planner.schedules.types import StageCorrection as StageCorrection

Given = Literal["", "name", "orders", "configuration"]


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
            user's own and the name only what they are called, "configuration" where the user named all degrees; left
            out where the search or a system chose it.
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
