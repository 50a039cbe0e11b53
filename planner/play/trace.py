"""When every action ran: what a simulation finds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.schedules.program import LAUNCH_SYNC, SYNC, Program


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """When everything happened. Arrays are [actions], aligned with `program`.

    A worker is occupied by an action from `start_s` to `end_s`; in between it computes from `compute_start_s` to
    `compute_end_s` and communicates the rest. For SYNC the worker is occupied only by the part that is not hidden.

    Attributes:
        program: the actions and what they wait for.
        start_s, compute_start_s, compute_end_s, end_s: seconds from the start of the iteration.
        transfer_start_s, transfer_end_s: [actions] the transfer that brought the action its tensor over a link
            (OVERLAPPED only; equal where there was none), or what EVICT and LOAD move.
        exchange_start_s, exchange_end_s: [actions] for SYNC and LAUNCH_SYNC the collective, hidden part included.
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

        Two actions that run as one count once; lanes that share a worker count the share that they get of it.
        """
        seconds = np.where(self.program.of(SYNC, LAUNCH_SYNC), 0.0, self.compute_end_s - self.compute_start_s)
        seconds = np.where(self.program.paired, 0.0, seconds)
        if self.program.work.shared:
            seconds = seconds / 2
        return np.asarray(np.bincount(self.program.worker, seconds, self.program.workers))

    def communication_s(self) -> np.ndarray:
        """[workers] seconds in which the worker does nothing but communicate."""
        seconds = np.where(self.program.paired, 0.0, self.end_s - self.start_s)
        if self.program.work.shared:
            seconds = seconds / 2
        occupied = np.bincount(self.program.worker, seconds, self.program.workers)
        return np.asarray(np.maximum(occupied - self.compute_s(), 0.0))

    def idle_s(self) -> np.ndarray:
        """[workers] seconds of waiting, up to the end of the iteration."""
        return np.asarray(np.maximum(self.makespan_s - self.compute_s() - self.communication_s(), 0.0))

    def spans_s(self) -> np.ndarray:
        """[workers] time from a worker's first start to its last end."""
        first = np.full(self.program.workers, np.inf)
        last = np.zeros(self.program.workers)
        np.minimum.at(first, self.program.worker, self.start_s)
        np.maximum.at(last, self.program.worker, self.end_s)
        return np.asarray(np.where(np.isfinite(first), last - np.where(np.isfinite(first), first, 0.0), 0.0))

    def span_s(self) -> float:
        """Longest time from a worker's first start to its last end: the cost when iterations follow on each other."""
        return float(self.spans_s().max())
