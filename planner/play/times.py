"""Inputs and result of the simulation: durations by stage, sharing of workers and links, and the trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from planner.errors import PlanError
from planner.schedules.program import Code, Program

Seconds = Sequence[float] | np.ndarray | float
"""Seconds by stage, or one number for all stages."""


class Transfers(StrEnum):
    """What a transfer between stages occupies."""

    BLOCKING = "blocking"
    OVERLAPPED = "overlapped"


@dataclass(frozen=True, slots=True, eq=False)
class StageTimes:
    """Seconds of each stage's actions, float64 [stages] each, for one micro-batch on one replica unless said otherwise.

    Attributes:
        forward_s: forward computation.
        backward_s: whole backward computation, recomputation included unless the order has actions for it.
        receive_s: transfer of the activations over the boundary before the stage; 0 for the first stage.
        return_s: transfer of their gradients back over that boundary.
        sync_s: gradient synchronisation, once per iteration.
        update_s: optimizer step, once per iteration.
        weight_grad_s: the part of `backward_s` that WEIGHT_GRAD takes if the schedule splits the backward.
        recompute_s: RECOMPUTE, if the order has it.
        evict_s: moving the activations away, or bringing them back.
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    receive_s: np.ndarray
    return_s: np.ndarray
    sync_s: np.ndarray
    update_s: np.ndarray
    weight_grad_s: np.ndarray
    recompute_s: np.ndarray
    evict_s: np.ndarray

    @staticmethod
    def of(
        forward_s: Sequence[float] | np.ndarray,
        backward_s: Seconds,
        receive_s: Seconds = 0.0,
        sync_s: Seconds = 0.0,
        update_s: Seconds = 0.0,
        weight_grad_s: Seconds | None = None,
        return_s: Seconds | None = None,
        recompute_s: Seconds | None = None,
        evict_s: Seconds = 0.0,
    ) -> StageTimes:
        """Times from plain numbers; a single number holds for all stages (for transfers: all but the first).

        By default `weight_grad_s` is half of the backward, `return_s` equals `receive_s` and `recompute_s` equals
        `forward_s`.

        Raises:
            PlanError: lengths differ, a time is negative or not finite, or the weight gradient takes longer than the
                backward that it is a part of.
        """
        stages = len(forward_s)
        returned = receive_s if return_s is None else return_s
        weight_grad = np.asarray(backward_s, float) / 2 if weight_grad_s is None else weight_grad_s
        recompute = forward_s if recompute_s is None else recompute_s
        given = (forward_s, backward_s, receive_s, returned, sync_s, update_s, weight_grad, recompute, evict_s)
        columns = [np.asarray(c, float) for c in given]
        columns = [np.full(stages, float(c)) if c.ndim == 0 else c for c in columns]
        for at in (2, 3):
            if np.ndim(given[at]) == 0:
                columns[at][:1] = 0.0
        if any(c.shape != (stages,) for c in columns):
            raise PlanError("stage times differ in length", hint="give one number for each stage")
        if any(not np.isfinite(c).all() or (c < 0).any() for c in columns):
            raise PlanError("a stage time is negative or not finite", hint="times are seconds, 0 or more")
        if (columns[6] > columns[1]).any():
            raise PlanError(
                "a weight gradient takes longer than its whole backward",
                where=f"stage {int(np.argmax(columns[6] > columns[1]))}",
                hint="`weight_grad_s` is a part of `backward_s`",
            )
        return StageTimes(*columns)


def weight_part_s(backward_s: float, recompute_s: float, known_s: float | None) -> float:
    """Seconds of a split backward that WEIGHT_GRAD takes: half of it without recomputation where that is not known."""
    return (backward_s - recompute_s) / 2 if known_s is None else known_s


@dataclass(frozen=True, slots=True)
class Conditions:
    """How actions share workers and links.

    Attributes:
        transfers: what a transfer between stages occupies.
        pair_overlap: fraction of the shorter of a paired forward and backward that costs nothing (0 to 1).
        slowdown: by worker, factor on all its computation; empty: 1.
    """

    transfers: Transfers = Transfers.BLOCKING
    pair_overlap: float = 0.0
    slowdown: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Times of all actions. Arrays are float64 [actions], aligned with `program`.

    A worker is occupied by an action from `start_s` to `end_s`; in between it computes from `compute_start_s` to
    `compute_end_s` and communicates the rest. For SYNC the worker is occupied only by the part that is not hidden.

    Attributes:
        program: the actions and their dependencies.
        start_s, compute_start_s, compute_end_s, end_s: seconds from the start of the iteration.
        transfer_start_s, transfer_end_s: the transfer of the action's input over a link (OVERLAPPED only; equal if
            there was none), or of what EVICT and LOAD move.
        exchange_start_s, exchange_end_s: the collective of a SYNC or LAUNCH_SYNC, hidden part included.
    """

    program: Program
    start_s: np.ndarray
    compute_start_s: np.ndarray
    compute_end_s: np.ndarray
    end_s: np.ndarray
    transfer_start_s: np.ndarray
    transfer_end_s: np.ndarray
    exchange_start_s: np.ndarray
    exchange_end_s: np.ndarray

    @property
    def makespan_s(self) -> float:
        """Seconds until the last worker is done."""
        return float(self.end_s.max())

    def compute_s(self) -> np.ndarray:
        """[workers] seconds of computation (synchronisation and blocking transfers excluded).

        Paired actions count once; lanes that share a worker count half each.
        """
        seconds = np.where(self.program.of(Code.SYNC, Code.LAUNCH_SYNC), 0.0, self.compute_end_s - self.compute_start_s)
        seconds = np.where(self.program.paired, 0.0, seconds)
        if self.program.work.shared:
            seconds = seconds / 2
        return np.asarray(np.bincount(self.program.worker, seconds, self.program.workers))

    def communication_s(self) -> np.ndarray:
        """[workers] seconds in which the worker only communicates."""
        seconds = np.where(self.program.paired, 0.0, self.end_s - self.start_s)
        if self.program.work.shared:
            seconds = seconds / 2
        occupied = np.bincount(self.program.worker, seconds, self.program.workers)
        return np.asarray(np.maximum(occupied - self.compute_s(), 0.0))

    def span_s(self) -> float:
        """Longest time from a worker's first start to its last end: the time of overlapping iterations."""
        first, last = np.full(self.program.workers, np.inf), np.zeros(self.program.workers)
        np.minimum.at(first, self.program.worker, self.start_s)
        np.maximum.at(last, self.program.worker, self.end_s)
        return float(np.max(last - first, where=np.isfinite(first), initial=0.0))
