"""Event simulation: each worker runs its actions in order, as soon as what they need has arrived.

Orders are fixed, so no event queue is needed: one pass over the actions in a runnable sequence gives every time;
O(actions).

Two models of a transfer over the boundary before stage s, which takes `receive_s[s]` forward and `return_s[s]` back:

- BLOCKING: the worker of stage s is busy with it, before the forward (activations come in) and after the backward
  (their gradients go out). This is what the search charges: t_s = forward + backward + receive + return.
- OVERLAPPED: no worker is busy; the transfer takes the link from one worker to the other, one transfer at a time for
  each pair and direction, in the order in which the sender produced them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from planner.errors import PlanError
from planner.schedules.program import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    SYNC,
    UPDATE,
    WEIGHT_GRAD,
    Program,
    compile_orders,
)
from planner.schedules.types import Action


class Transfers(StrEnum):
    """What a transfer between stages occupies."""

    BLOCKING = "blocking"
    OVERLAPPED = "overlapped"


@dataclass(frozen=True, slots=True, eq=False)
class StageTimes:
    """Seconds of each stage's actions, float64 [stages] each, for one micro-batch on one replica unless said otherwise.

    Attributes:
        forward_s: forward computation.
        backward_s: whole backward computation, recomputation included.
        receive_s: transfer of the activations over the boundary before the stage; 0 for the first stage.
        return_s: transfer of their gradients back over that boundary.
        sync_s: gradient synchronisation, once per iteration.
        update_s: optimizer step, once per iteration.
        weight_grad_s: the part of `backward_s` that WEIGHT_GRAD takes where a schedule splits the backward.
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    receive_s: np.ndarray
    return_s: np.ndarray
    sync_s: np.ndarray
    update_s: np.ndarray
    weight_grad_s: np.ndarray

    @staticmethod
    def of(
        forward_s: Sequence[float] | np.ndarray,
        backward_s: Sequence[float] | np.ndarray,
        receive_s: Sequence[float] | np.ndarray | float = 0.0,
        sync_s: Sequence[float] | np.ndarray | float = 0.0,
        update_s: Sequence[float] | np.ndarray | float = 0.0,
        weight_grad_s: Sequence[float] | np.ndarray | None = None,
        return_s: Sequence[float] | np.ndarray | float | None = None,
    ) -> StageTimes:
        """Times from plain numbers; a single number holds for all stages (of a transfer: for all but the first).

        When not given, `weight_grad_s` is half of the backward and `return_s` equals `receive_s`.

        Raises:
            PlanError: lengths differ, or a time is negative or not finite.
        """
        stages = len(forward_s)
        returned = receive_s if return_s is None else return_s
        half = np.asarray(backward_s, float) / 2 if weight_grad_s is None else weight_grad_s
        given = (forward_s, backward_s, receive_s, returned, sync_s, update_s, half)
        columns = [np.asarray(c, float) for c in given]
        columns = [np.full(stages, float(c)) if c.ndim == 0 else c for c in columns]
        for at in (2, 3):
            if np.ndim(given[at]) == 0:
                columns[at][:1] = 0.0
        if any(c.shape != (stages,) for c in columns):
            raise PlanError("stage times differ in length", hint="give one number for each stage")
        if any(not np.isfinite(c).all() or (c < 0).any() for c in columns):
            raise PlanError("a stage time is negative or not finite", hint="times are seconds, 0 or more")
        return StageTimes(*columns)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """When everything happened. Arrays are [actions], aligned with `program`.

    A worker is occupied by an action from `start_s` to `end_s`; in between it computes from `compute_start_s` to
    `compute_end_s` and communicates the rest. For SYNC the worker is occupied only by the part that is not hidden.

    Attributes:
        program: the actions and what they wait for.
        start_s, compute_start_s, compute_end_s, end_s: seconds from the start of the iteration.
        transfer_start_s, transfer_end_s: [actions] the transfer that brought the action its tensor over a link
            (OVERLAPPED only; equal where there was none).
    """

    program: Program
    start_s: np.ndarray
    compute_start_s: np.ndarray
    compute_end_s: np.ndarray
    end_s: np.ndarray
    transfer_start_s: np.ndarray
    transfer_end_s: np.ndarray

    @property
    def makespan_s(self) -> float:
        """Seconds until the last worker is done."""
        return float(self.end_s.max())

    def compute_s(self) -> np.ndarray:
        """[workers] seconds of computation (SYNC and blocking transfers excluded)."""
        seconds = np.where(self.program.kind == SYNC, 0.0, self.compute_end_s - self.compute_start_s)
        return np.asarray(np.bincount(self.program.worker, seconds, self.program.workers))

    def communication_s(self) -> np.ndarray:
        """[workers] seconds in which the worker does nothing but communicate."""
        occupied = np.bincount(self.program.worker, self.end_s - self.start_s, self.program.workers)
        return np.asarray(np.maximum(occupied - self.compute_s(), 0.0))

    def idle_s(self) -> np.ndarray:
        """[workers] seconds of waiting, up to the end of the iteration."""
        return np.asarray(np.maximum(self.makespan_s - self.compute_s() - self.communication_s(), 0.0))

    def span_s(self) -> float:
        """Longest time from a worker's first start to its last end: the cost when iterations follow on each other."""
        first, last = self.program.offsets[:-1], self.program.offsets[1:] - 1
        return float((self.end_s[last] - self.start_s[first]).max())


def run(
    orders: Sequence[Sequence[Action]] | Program,
    times: StageTimes,
    *,
    transfers: Transfers = Transfers.BLOCKING,
    sync_overlap: float = 0.0,
) -> Trace:
    """Play the orders out.

    Args:
        orders: the actions of each worker in order, or the program compiled from them.
        times: seconds by stage.
        transfers: what a transfer between stages occupies.
        sync_overlap: fraction of a stage's last backward behind which its SYNC can hide (0 to 1).

    Raises:
        PlanError: the orders deadlock or are incomplete, or the times are for fewer stages.

    Complexity: O(actions).
    """
    program = orders if isinstance(orders, Program) else compile_orders(orders)
    if program.stages > len(times.forward_s):
        raise PlanError(
            f"the schedule has {program.stages} stages, but times are given for {len(times.forward_s)}",
            hint="give one time for each stage",
        )
    kind, stage = program.kind, program.stage
    duration = np.zeros(len(kind))
    for code, seconds in (
        (FORWARD, times.forward_s),
        (BACKWARD, times.backward_s),
        (INPUT_GRAD, times.backward_s - times.weight_grad_s),
        (WEIGHT_GRAD, times.weight_grad_s),
        (SYNC, times.sync_s),
        (UPDATE, times.update_s),
    ):
        duration[kind == code] = seconds[stage[kind == code]]
    hidden = sync_overlap * times.backward_s
    if transfers is Transfers.BLOCKING:
        return _play_blocking(program, duration, times, hidden)
    return _play_overlapped(program, duration, times, hidden)


def _boundary_s(program: Program, times: StageTimes) -> tuple[np.ndarray, np.ndarray]:
    """For each action, the transfers of its input and of its output back; 0 where the worker is the same."""
    source = program.source
    crossing = (source >= 0) & (program.worker[source] != program.worker)
    forward = crossing & (program.kind == FORWARD)
    gradient = crossing & (program.kind != FORWARD)
    incoming = np.where(forward, times.receive_s[program.stage], 0.0)
    incoming[gradient] = times.return_s[program.stage[gradient] + 1]
    outgoing = np.zeros(len(source))
    outgoing[source[gradient]] = incoming[gradient]
    return incoming, outgoing


def _play_blocking(program: Program, duration: np.ndarray, times: StageTimes, hidden: np.ndarray) -> Trace:
    incoming, outgoing = _boundary_s(program, times)
    before = np.where(program.kind == FORWARD, incoming, 0.0)
    before_s, work_s, after_s = before.tolist(), duration.tolist(), outgoing.tolist()
    source, worker, kind = program.source.tolist(), program.worker.tolist(), program.kind.tolist()
    forward, sync = FORWARD, SYNC
    starts = [0.0] * len(source)
    ends, arrival = starts.copy(), starts.copy()
    free = [0.0] * program.workers
    syncs = _Syncs(program, times.sync_s, hidden)
    for action in program.sequence.tolist():
        w = worker[action]
        start = free[w]
        if kind[action] == sync:
            starts[action], ends[action] = syncs.play(action, start, free)
            free[w] = ends[action]
            continue
        needed = source[action]
        if needed >= 0 and arrival[needed] > start:
            start = arrival[needed]
        starts[action] = start
        done = start + before_s[action] + work_s[action]
        ends[action] = free[w] = done + after_s[action]
        arrival[action] = done if kind[action] == forward else free[w]
    start_s, end_s = np.array(starts), np.array(ends)
    none = np.zeros(len(source))
    return Trace(program, start_s, start_s + before, end_s - outgoing, end_s, none, none)


def _play_overlapped(program: Program, duration: np.ndarray, times: StageTimes, hidden: np.ndarray) -> Trace:
    incoming, _ = _boundary_s(program, times)
    fed = np.flatnonzero((program.source >= 0) & (incoming > 0))
    pairs = program.worker[program.source[fed]] * program.workers + program.worker[fed]
    link_of, links = np.full(len(program.kind), -1, np.int64), np.unique(pairs, return_inverse=True)
    link_of[program.source[fed]] = links[1]
    lag_of = np.zeros(len(program.kind))
    lag_of[program.source[fed]] = incoming[fed]
    link, lag, work_s = link_of.tolist(), lag_of.tolist(), duration.tolist()
    source, worker, kind = program.source.tolist(), program.worker.tolist(), program.kind.tolist()
    starts = [0.0] * len(source)
    ends, sent, arrival = starts.copy(), starts.copy(), starts.copy()
    free, link_free = [0.0] * program.workers, [0.0] * len(links[0])
    syncs = _Syncs(program, times.sync_s, hidden)
    for action in program.sequence.tolist():
        w = worker[action]
        start = free[w]
        if kind[action] == SYNC:
            starts[action], ends[action] = syncs.play(action, start, free)
            free[w] = ends[action]
            continue
        needed = source[action]
        if needed >= 0 and arrival[needed] > start:
            start = arrival[needed]
        starts[action] = start
        done = ends[action] = free[w] = arrival[action] = start + work_s[action]
        route = link[action]
        if route >= 0:
            sent[action] = begin = max(done, link_free[route])
            arrival[action] = link_free[route] = begin + lag[action]
    start_s, end_s = np.array(starts), np.array(ends)
    transfer_start, transfer_end = np.zeros(len(source)), np.zeros(len(source))
    transfer_start[fed], transfer_end[fed] = np.array(sent)[program.source[fed]], np.array(arrival)[program.source[fed]]
    return Trace(program, start_s, start_s, end_s, end_s, transfer_start, transfer_end)


class _Syncs:
    """Collectives: they begin when the last member is there, less what is hidden behind its last backward."""

    def __init__(self, program: Program, sync_s: np.ndarray, hidden_s: np.ndarray) -> None:
        self._members: dict[int, list[int]] = {}
        for action in np.flatnonzero(program.kind == SYNC).tolist():
            self._members.setdefault(int(program.stage[action]), []).append(int(program.worker[action]))
        self._stage = program.stage
        self._exposed_s = np.maximum(sync_s - hidden_s, 0.0)
        self._begin: dict[int, float] = {}

    def play(self, action: int, ready: float, free: list[float]) -> tuple[float, float]:
        """Start and end of a member's share; all members' earlier work is done when the first member asks."""
        stage = int(self._stage[action])
        if stage not in self._begin:
            self._begin[stage] = max(free[w] for w in self._members[stage])
        begin = max(self._begin[stage], ready)
        return begin, begin + float(self._exposed_s[stage])
