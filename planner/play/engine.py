"""Event simulation: each lane runs its actions in order, each as soon as its inputs have arrived.

Orders are fixed, so no event queue is needed: one pass over the actions in a runnable sequence gives all times.
O(actions).

There are two models of a transfer over the boundary before stage s, which takes `receive_s[s]` forward and
`return_s[s]` back:

- BLOCKING: the transfer occupies the worker of stage s, before the forward (activations come in) and after the backward
  (their gradients go out). This is what the search charges: t_s = forward + backward + receive + return.
- OVERLAPPED: the transfer occupies only the link from one worker to the other, one transfer at a time per pair and
  direction, in the order in which the sender produced them.

Explicit SENDs and RECEIVEs move these moments: the transfer begins at the SEND, and the worker waits at the RECEIVE.
Moves of activations occupy a worker's copy engine, one at a time; the worker continues meanwhile, but its next action
that takes memory waits for them. A launched synchronisation runs beside the work, one at a time on a worker.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.errors import PlanError
from planner.play.times import Conditions, StageTimes, Trace, Transfers
from planner.schedules import Action, Work
from planner.schedules.compiling import compile_orders, exchanges
from planner.schedules.evictions import MOVES
from planner.schedules.program import Code, Program
from planner.sums import float_sum

_BLOCKING = Conditions()
_EXCHANGED = (Code.SYNC, Code.LAUNCH_SYNC)


def run(
    orders: Sequence[Sequence[Action]] | Work | Program,
    times: StageTimes,
    conditions: Conditions = _BLOCKING,
) -> Trace:
    """Simulate orders.

    Args:
        orders: the actions of each worker in order, or the program compiled from them.
        times: seconds by stage.
        conditions: how actions share workers and links; by default transfers block their worker.

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
    return _Play(program, times, conditions).trace()


def _durations(program: Program, times: StageTimes, conditions: Conditions) -> np.ndarray:
    """float64 [actions], seconds of computation."""
    kind, stage = program.kind, program.stage
    duration = np.zeros(len(kind))
    both = times.forward_s + times.backward_s
    for code, seconds in (
        (Code.FORWARD, both if program.work.shared else times.forward_s),
        (Code.BACKWARD, both if program.work.shared else times.backward_s),
        (Code.INPUT_GRAD, times.backward_s - times.weight_grad_s),
        (Code.WEIGHT_GRAD, times.weight_grad_s),
        (Code.RECOMPUTE, times.recompute_s),
        (Code.UPDATE, times.update_s),
    ):
        of_kind = kind == code
        duration[of_kind] = seconds[stage[of_kind]]
    if program.work.parts > 1:
        duration *= np.where(program.part >= 0, 1.0 / program.work.parts, 1.0)
    if conditions.slowdown:
        duration *= np.asarray(conditions.slowdown, float)[program.worker]
    return duration


def _boundary_s(program: Program, times: StageTimes) -> tuple[np.ndarray, np.ndarray]:
    """(seconds to transfer each action's input, seconds to transfer its gradient output); 0 within one worker."""
    source = program.source
    crossing = (source >= 0) & (program.worker[source] != program.worker)
    activations = program.of(Code.FORWARD, Code.RECEIVE_ACTIVATION)
    forward = crossing & activations
    gradient = crossing & ~activations
    incoming = np.where(forward, times.receive_s[program.stage], 0.0)
    incoming[gradient] = times.return_s[program.stage[gradient] + 1]
    incoming *= np.where(program.part >= 0, 1.0 / program.work.parts, 1.0)
    outgoing = np.zeros(len(source))
    outgoing[source[gradient]] = incoming[gradient]
    return incoming, outgoing


class _Play:
    """One pass over the actions in a runnable sequence."""

    def __init__(self, program: Program, times: StageTimes, conditions: Conditions) -> None:
        self._program, self._times = program, times
        self._duration = _durations(program, times, conditions)
        count = len(program.kind)
        incoming, outgoing = _boundary_s(program, times)
        self._link, self._lag, self._links = np.full(count, -1, np.int64), np.zeros(count), 0
        self._receivers = np.flatnonzero((program.source >= 0) & (incoming > 0))
        if conditions.transfers is Transfers.BLOCKING:
            self._before = np.where(program.of(Code.FORWARD, Code.RECEIVE_ACTIVATION), incoming, 0.0)
            self._after = outgoing
            self._receivers = self._receivers[:0]
        else:
            self._before, self._after = np.zeros(count), np.zeros(count)
            producers = program.source[self._receivers]
            pairs = program.worker[producers] * program.workers + program.worker[self._receivers]
            names, self._link[producers] = np.unique(pairs, return_inverse=True)
            self._lag[producers], self._links = incoming[self._receivers], len(names)
        self._exchanges = _Exchanges(program, times)
        self._pair_overlap = conditions.pair_overlap
        self._copy_free, self._link_free = [0.0] * program.workers, [0.0] * self._links
        self._list_columns()

    def _list_columns(self) -> None:
        """Columns as lists, which the loops read faster than arrays."""
        program = self._program
        self._sources, self._needs, self._lanes = program.source.tolist(), program.after.tolist(), program.lane.tolist()
        self._kinds, self._joined = program.kind.tolist(), [*program.paired.tolist(), False]
        self._work_s = self._duration.tolist()
        self._span_s = (self._before + self._duration + self._after).tolist()
        self._links_of, self._lag_s = self._link.tolist(), self._lag.tolist()
        early, own_early = self._streamed()
        self._early, self._own_early = early.tolist(), own_early.tolist()

    def trace(self) -> Trace:
        """Run the pass and collect the times of all actions; O(actions)."""
        program = self._program
        starts, ends, sent, arrival = self._pass()
        start_s, end_s = np.array(starts), np.array(ends)
        transfer_start, transfer_end = np.zeros(len(start_s)), np.zeros(len(start_s))
        producers = program.source[self._receivers]
        transfer_start[self._receivers], transfer_end[self._receivers] = (
            np.array(sent)[producers],
            np.array(arrival)[producers],
        )
        moved = program.of(*MOVES)
        transfer_start[moved], transfer_end[moved] = np.array(sent)[moved], np.array(arrival)[moved]
        begin, finish = self._exchanges.windows()
        before, after = self._before, self._after
        middle = (start_s + before, np.maximum(end_s - after, start_s + before))
        return Trace(program, start_s, *middle, end_s, transfer_start, transfer_end, begin, finish)

    def _streamed(self) -> tuple[np.ndarray, np.ndarray]:
        """How long before its end an action's result is available: (to neighbours, to its own backward)."""
        program, times, zeros = self._program, self._times, np.zeros(len(self._duration))
        if not program.work.streaming:
            return zeros, zeros
        work_s = np.where(program.kind == Code.FORWARD, times.forward_s[program.stage], times.backward_s[program.stage])
        is_last_forward = (program.kind == Code.FORWARD) & (program.stage == program.stages - 1)
        return self._duration - work_s, np.where(is_last_forward, self._duration, 0.0)

    def _pass(self) -> tuple[list[float], list[float], list[float], list[float]]:
        """The main loop: (start, end, begin of transfer, arrival of the result) of each action."""
        program = self._program
        source, needs, lanes = self._sources, self._needs, self._lanes
        span_s, link, lag_s, unusual = self._span_s, self._links_of, self._lag_s, self._unusual()
        starts = [0.0] * len(source)
        ends, sent, arrival, own = starts.copy(), starts.copy(), starts.copy(), starts.copy()
        free, link_free = [0.0] * program.lanes, self._link_free
        self._starts, self._ends, self._sent = starts, ends, sent
        self._arrival, self._own, self._free = arrival, own, free
        for action in program.sequence.tolist():
            if unusual[action]:
                self._play_unusual(action)
                continue
            lane = lanes[action]
            start = free[lane]
            needed = source[action]
            if needed >= 0 and arrival[needed] > start:
                start = arrival[needed]
            needed = needs[action]
            if needed >= 0 and own[needed] > start:
                start = own[needed]
            starts[action] = start
            done = start + span_s[action]
            ends[action] = free[lane] = own[action] = done
            route = link[action]
            if route < 0:
                arrival[action] = done
            else:
                sent[action] = begin = done if done > link_free[route] else link_free[route]
                arrival[action] = link_free[route] = begin + lag_s[action]
        return starts, ends, sent, arrival

    def _unusual(self) -> list[bool]:
        """True for actions that need more than a start, a duration and a link: see `_play_unusual`."""
        program = self._program
        unusual = program.of(Code.SYNC, Code.LAUNCH_SYNC, *MOVES) | program.paired
        unusual[:-1] |= program.paired[1:]
        if program.work.streaming:
            unusual[:] = True
        return [bool(x) for x in unusual.tolist()]

    def _play_unusual(self, action: int) -> None:
        """Simulate an exchange, a move of activations, or a group of paired actions."""
        kind, lane = self._kinds[action], self._lanes[action]
        if kind in _EXCHANGED:
            self._starts[action], self._ends[action] = self._exchanges.play(action, self._free[lane], self._ends)
            self._free[lane] = self._ends[action]
        elif not self._joined[action]:
            self._play_group(action)
        if kind in MOVES:
            worker = int(self._program.worker[action])
            self._sent[action] = begin = max(self._starts[action], self._copy_free[worker])
            finish = begin + float(self._times.evict_s[self._program.stage[action]])
            self._own[action] = self._arrival[action] = self._copy_free[worker] = finish

    def _play_group(self, first: int) -> None:
        """Simulate an action and those paired with it as one."""
        last = first + 1
        while self._joined[last]:
            last += 1
        lane, members = self._lanes[first], range(first, last)
        start, work_s = self._free[lane], self._work_s
        for m in members:
            source, needed = self._sources[m], self._needs[m]
            if source >= 0:
                start = max(start, self._arrival[source])
            if needed >= 0:
                start = max(start, self._own[needed])
        end = start + float_sum(self._span_s[first:last])
        if len(set(self._kinds[first:last])) > 1:
            end -= self._pair_overlap * min(work_s[first:last])
        for m in members:
            self._starts[m], self._ends[m] = start, end
            self._own[m] = end - self._own_early[m]
            self._arrival[m] = end - self._early[m]
            route = self._links_of[m]
            if route >= 0:
                self._sent[m] = begin = max(self._arrival[m], self._link_free[route])
                self._arrival[m] = self._link_free[route] = begin + self._lag_s[m]
        self._free[lane] = end


class _Exchanges:
    """Collectives: they begin when the last member has arrived; only the part not hidden behind work takes time."""

    def __init__(self, program: Program, times: StageTimes) -> None:
        self._program = program
        self._members: dict[int, list[int]] = {}
        arrives, _, _ = exchanges(program)
        for action in np.flatnonzero(arrives >= 0).tolist():
            self._members.setdefault(int(arrives[action]), []).append(action)
        self._launched = set(program.exchange[program.kind == Code.LAUNCH_SYNC].tolist())
        self._begin = np.zeros(len(program.kind))
        self._finish = np.zeros(len(program.kind))
        self._window: dict[int, tuple[float, float]] = {}
        self._busy = [0.0] * program.workers
        self._first = program.offsets[:-1][program.lane]
        self._sync_s = times.sync_s

    def play(self, action: int, ready: float, ends: list[float]) -> tuple[float, float]:
        """(start, end) of a SYNC or LAUNCH_SYNC on its lane: the part of the collective that the lane waits for."""
        if self._program.kind[action] == Code.LAUNCH_SYNC:
            return ready, ready
        exchange = int(self._program.exchange[action])
        if exchange not in self._window:
            self._window[exchange] = self._collective(exchange, int(self._program.stage[action]), ends)
        self._begin[action], self._finish[action] = self._window[exchange]
        end = max(ready, float(self._finish[action]))
        return min(max(ready, float(self._begin[action])), end), end

    def _collective(self, exchange: int, stage: int, ends: list[float]) -> tuple[float, float]:
        """(begin, end) of a collective, once all its members have arrived."""
        members = self._members[exchange]
        last_arrival = max((ends[m - 1] for m in members if m > self._first[m]), default=0.0)
        if exchange not in self._launched:
            return last_arrival, last_arrival + float(self._sync_s[stage])
        workers = {int(self._program.worker[m]) for m in members}
        begin = max(last_arrival, *(self._busy[w] for w in workers))
        finish = begin + float(self._sync_s[stage])
        for worker in workers:
            self._busy[worker] = finish
        return begin, finish

    def windows(self) -> tuple[np.ndarray, np.ndarray]:
        """float64 [actions], begin and end of the collective of each SYNC; 0 for other actions."""
        return self._begin, self._finish
