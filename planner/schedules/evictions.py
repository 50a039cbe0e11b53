"""Evictions: activations of a micro-batch that a worker moves to another worker, or to the host, and brings back.

All that orders with EVICT and LOAD mean is here: where they may stand, what they wait for, who holds how much for whom,
and how long a move takes. Elsewhere they are moves, of the kinds `AWAY` and `BACK`. BPipe's orders have them, and a
user's may.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from planner.schedules.program import Code, Program
from planner.schedules.types import Action, ActionKind, OrderError, Work

AWAY, BACK = ActionKind.EVICT, ActionKind.LOAD
MOVES = (Code.EVICT, Code.LOAD)
"""Kinds of moves in a program: away, and back."""


class Links(Protocol):
    """Links of one level, as a cluster or a plan has them."""

    @property
    def size(self) -> int:
        """Units of the level below in one group."""
        ...

    @property
    def latency_s(self) -> float:
        """Seconds before the first byte."""
        ...

    @property
    def device_byte_per_s(self) -> float:
        """What one device can send."""
        ...


def link_moves(program: Program, tables: Mapping[int, np.ndarray], key: np.ndarray) -> None:
    """Link evictions: LOAD waits for its EVICT, a backward for its LOAD, and a forward or LOAD for pending EVICTs.

    Args:
        program: of which `after` is filled in.
        tables: by kind, the action of each key, -1 for none.
        key: int64 [actions], number of stage and micro-batch.

    Raises:
        OrderError: an eviction or load stands in the wrong place; names it.
    """
    if not any((program.kind == kind).any() for kind in MOVES):
        return
    evicted: dict[int, int] = {}
    pending: dict[int, int] = {}
    for action in np.flatnonzero(
        program.of(Code.EVICT, Code.LOAD, Code.FORWARD, Code.BACKWARD, Code.INPUT_GRAD)
    ).tolist():
        kind, unit, lane = program.kind[action], int(key[action]), int(program.lane[action])
        if kind == Code.EVICT:
            if 0 <= tables[Code.BACKWARD][unit] < action and program.lane[tables[Code.BACKWARD][unit]] == lane:
                raise _misplaced(program, action, "comes after its backward")
            if unit in evicted:
                raise _misplaced(program, action, "is evicted twice without a load in between")
            evicted[unit] = pending[lane] = action
        elif kind == Code.LOAD:
            if unit not in evicted:
                raise _misplaced(program, action, "loads what was not evicted")
            program.after[action] = max(evicted.pop(unit), pending.pop(lane, -1))
        elif kind == Code.FORWARD:
            program.after[action] = pending.pop(lane, -1)
        elif unit in evicted:
            raise _misplaced(program, action, "needs activations that are evicted")
        elif tables[Code.LOAD][unit] >= 0:
            program.after[action] = tables[Code.LOAD][unit]


def _misplaced(program: Program, action: int, what: str) -> OrderError:
    """The error of an eviction or load in the wrong place."""
    hint = "evict after the forward, load before the backward"
    return program.error(action, f"{program.label(action)} {what}", hint)


def check_peers(work: Work) -> None:
    """Refuse orders that evict to no other worker; O(actions).

    Raises:
        OrderError: names an action that shows it.
    """
    workers = max(work.lane_workers, default=-1) + 1
    for lane, worker in enumerate(work.lane_workers):
        for index, action in enumerate(work.lanes[lane]):
            if action.kind is AWAY and (action.peer >= workers or action.peer == worker):
                whom = "the worker itself" if action.peer == worker else f"worker {action.peer} of {workers}"
                message = f"{action._replace(peer=-1)} evicts to {whom}"
                hint = "name another worker, or none for the host"
                raise OrderError(message, lane=lane, index=index, where=f"worker {worker}", hint=hint)


def guest_units_of(orders: Sequence[Sequence[Action]]) -> dict[int, dict[int, int]]:
    """By worker and stage, most units of others that it holds; workers and stages without any are left out."""
    guests: dict[int, dict[int, int]] = {}
    for stage in sorted({a.stage for order in orders for a in order if a.kind is AWAY}):
        of_stage = [[a for a in order if a.stage == stage] for order in orders]
        for peer, count in lent_bytes(of_stage, {stage: 1}).items():
            guests.setdefault(peer, {})[stage] = int(count)
    return guests


def lent_bytes(
    lanes: Iterable[Sequence[Action]], unit_bytes: Mapping[int, float] | Sequence[float]
) -> dict[int, float]:
    """Peak bytes that other workers have evicted to each worker; workers without any are left out.

    Holds for any times of the actions: the peak of each lane along its order, summed over lanes, since the orders do
    not say when two lanes reach their peaks. O(actions).

    Args:
        lanes: orders of all lanes.
        unit_bytes: by stage, bytes of one unit.
    """
    peak_bytes: dict[int, float] = {}
    for lane in lanes:
        evicted_to: dict[tuple[int, int, int], int] = {}
        held_bytes: dict[int, float] = {}
        lane_peak_bytes: dict[int, float] = {}
        for action in lane:
            unit = action.stage, action.micro_batch, action.part
            if action.kind is AWAY and action.peer >= 0:
                evicted_to[unit] = action.peer
                held_bytes[action.peer] = held_bytes.get(action.peer, 0.0) + unit_bytes[action.stage]
                lane_peak_bytes[action.peer] = max(lane_peak_bytes.get(action.peer, 0.0), held_bytes[action.peer])
            elif action.kind is BACK and unit in evicted_to:
                held_bytes[evicted_to.pop(unit)] -= unit_bytes[action.stage]
        for peer, size in lane_peak_bytes.items():
            peak_bytes[peer] = peak_bytes.get(peer, 0.0) + size
    return peak_bytes


def moves_of(program: Program) -> Iterator[tuple[np.ndarray, float, np.ndarray]]:
    """For moves away (1.0) and back (-1.0), if there are any: the actions, that sign, and who holds what they move."""
    for kind, sign in zip(MOVES, (1.0, -1.0), strict=True):
        moved = np.flatnonzero(program.kind == kind)
        if len(moved):
            yield moved, sign, _hosts(program, moved)


def _hosts(program: Program, moved: np.ndarray) -> np.ndarray:
    """The worker that holds the moved activations: for a LOAD, the peer of its EVICT."""
    peers: dict[tuple[int, int], int] = {}
    unit = program.unit
    for action in np.flatnonzero(program.kind == MOVES[0]).tolist():
        peers[int(program.stage[action]), int(unit[action])] = int(program.peer[action])
    return np.array([peers[int(program.stage[a]), int(unit[a])] for a in moved.tolist()], np.int64)


def slowest_moves_s(
    moves: Iterable[tuple[int, int, int]], levels: Sequence[Links], unit_bytes: Sequence[float]
) -> list[float]:
    """By stage, seconds of the slowest move of a micro-batch's activations to another rank; 0 without any.

    Args:
        moves: stage, rank and the rank that holds them.
        levels: links, innermost first.
        unit_bytes: by stage, bytes of one unit.
    """
    slowest_s = [0.0] * len(unit_bytes)
    for stage, rank, peer in moves:
        group = 1
        for level in levels:
            group *= level.size
            if rank // group == peer // group:
                seconds = level.latency_s + unit_bytes[stage] / level.device_byte_per_s
                slowest_s[stage] = max(slowest_s[stage], seconds)
                break
    return slowest_s
