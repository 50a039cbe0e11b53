"""From orders of work to a program: arrays of actions, what each waits for, an order in which all of them can run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.errors import PlanError
from planner.schedules.links import link
from planner.schedules.program import CODES, LAUNCH_SYNC, SYNC, Program
from planner.schedules.types import Action, OrderError, Work
from planner.schedules.versions import check_versions

_SHOWN_CYCLE = 12
"""Waits of a cycle that an error shows."""


def compile_orders(orders: Sequence[Sequence[Action]] | Work) -> Program:
    """Turn orders into arrays and find an order in which all actions can run; O(actions).

    Raises:
        PlanError: an action appears twice, lacks the one it needs, runs a backward away from its forward, reads a
            version of the weights that its worker does not hold, or the workers wait for each other in a cycle (the
            message shows it).
    """
    work = orders if isinstance(orders, Work) else Work(tuple(tuple(order) for order in orders))
    program = _columns(work)
    link(program)
    program.sequence[:] = _find_sequence(program)
    check_versions(program)
    return program


def _columns(work: Work) -> Program:
    flat = [action for lane in work.lanes for action in lane]
    if not flat:
        raise PlanError("the schedule has no actions", hint="give each worker at least one forward and backward")
    if len(work.lane_workers) != len(work.lanes):
        raise PlanError(f"{len(work.lanes)} lanes, but workers for {len(work.workers)}", hint="name one for each lane")
    lengths = [len(lane) for lane in work.lanes]
    none = np.full(len(flat), -1, np.int64)
    lane = np.repeat(np.arange(len(lengths)), lengths)
    return Program(
        kind=np.array([CODES[a.kind] for a in flat], np.int8),
        stage=np.array([a.stage for a in flat], np.int64),
        micro_batch=np.array([a.micro_batch for a in flat], np.int64),
        worker=np.asarray(work.lane_workers, np.int64)[lane],
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        source=none.copy(),
        sequence=none.copy(),
        lane=lane,
        part=np.array([a.part for a in flat], np.int64),
        peer=np.array([a.peer for a in flat], np.int64),
        version=np.array([a.version for a in flat], np.int64),
        paired=np.array([a.paired for a in flat], bool),
        after=none.copy(),
        exchange=none.copy(),
        work=work,
    )


def _find_sequence(program: Program) -> list[int]:
    """A topological order by a worklist over lanes; O(actions).

    Raises:
        PlanError: some lanes wait for each other in a cycle.
    """
    source, after, offsets = program.source.tolist(), program.after.tolist(), program.offsets.tolist()
    lanes = program.lane.tolist()
    wakes, siblings = _wakes(program)
    arrives, waits, members = _exchanges(program)
    last = len(source) - 1
    joined = [*program.paired.tolist()[1:], False]
    position = offsets[:-1]
    done, come = bytearray(len(source)), bytearray(len(source))
    present = [0] * len(members)
    waiting: list[list[int]] = [[] for _ in members]
    sequence: list[int] = []
    ready = list(range(len(position) - 1, -1, -1))
    while ready:
        lane = ready.pop()
        at, end = position[lane], offsets[lane + 1]
        while at < end:
            reach = at
            while True:
                if (source[reach] >= 0 and not done[source[reach]]) or (after[reach] >= 0 and not done[after[reach]]):
                    break
                if reach < last and joined[reach]:
                    reach += 1
                    continue
                reach = -1
                break
            if reach >= 0:
                break
            exchange = arrives[at]
            if exchange >= 0 and not come[at]:
                come[at] = 1
                present[exchange] += 1
                if present[exchange] == members[exchange]:
                    ready += waiting[exchange]
            exchange = waits[at]
            if exchange >= 0 and present[exchange] < members[exchange]:
                waiting[exchange].append(lane)
                break
            while True:
                done[at] = 1
                sequence.append(at)
                if wakes[at] >= 0:
                    ready.append(wakes[at])
                if at in siblings:
                    ready.append(siblings[at])
                at += 1
                if not joined[at - 1]:
                    break
        position[lane] = at
    if len(sequence) < len(source):
        raise _deadlock(program, position, done, lanes)
    return sequence


def _wakes(program: Program) -> tuple[list[int], dict[int, int]]:
    """For each action the other lane that waits for its tensor (-1: none), and the worker's other lane that does."""
    wakes = np.full(len(program.kind), -1, np.int64)
    fed = np.flatnonzero(program.source >= 0)
    fed = fed[program.lane[program.source[fed]] != program.lane[fed]]
    wakes[program.source[fed]] = program.lane[fed]
    fed = np.flatnonzero(program.after >= 0)
    fed = fed[program.lane[program.after[fed]] != program.lane[fed]]
    siblings = zip(program.after[fed].tolist(), program.lane[fed].tolist(), strict=True)
    return wakes.tolist(), dict(siblings)


def _exchanges(program: Program) -> tuple[list[int], list[int], list[int]]:
    """For each action the collective that it joins and the one that it waits for (-1: none); members of each."""
    launches = program.kind == LAUNCH_SYNC
    syncs = program.kind == SYNC
    key = program.exchange * program.workers + program.worker
    launched = syncs & np.isin(key, key[launches])
    joins = launches | (syncs & ~launched)
    arrives = np.where(joins, program.exchange, -1)
    waits = np.where(syncs, program.exchange, -1)
    return arrives.tolist(), waits.tolist(), np.bincount(program.exchange[joins]).tolist() if joins.any() else []


def _deadlock(program: Program, position: list[int], done: bytearray, lanes: list[int]) -> OrderError:
    """The error that names a cycle of waiting workers."""
    lane = next(k for k in range(program.lanes) if position[k] < program.offsets[k + 1])
    seen: dict[int, int] = {}
    steps: list[str] = []
    while lane not in seen:
        seen[lane] = len(steps)
        action = position[lane]
        reach, awaited = _awaited(program, action, position, done)
        whose = f" of worker {program.worker[awaited]}" if program.exchange[awaited] >= 0 else ""
        waits = f"waits for {program.label(awaited)}{whose}"
        steps.append(f"worker {program.worker[action]} at {program.label(reach)} {waits}")
        lane = lanes[awaited]
        if done[awaited]:
            break
    cycle = steps[seen.get(lane, 0) :]
    shown = "; ".join(cycle[:_SHOWN_CYCLE]) + (
        f"; and {len(cycle) - _SHOWN_CYCLE} more" if len(cycle) > _SHOWN_CYCLE else ""
    )
    hint = "reorder the actions of one of these workers"
    return program.error(position[lane], f"the schedule deadlocks: {shown}, which never runs", hint)


def _awaited(program: Program, action: int, position: list[int], done: bytearray) -> tuple[int, int]:
    """What a lane cannot run, and the action that keeps it from running."""
    reach = action
    while True:
        for needed in (int(program.source[reach]), int(program.after[reach])):
            if needed >= 0 and not done[needed]:
                return reach, needed
        if reach + 1 >= len(program.kind) or not program.paired[reach + 1]:
            break
        reach += 1
    members = np.flatnonzero(program.of(SYNC, LAUNCH_SYNC) & (program.exchange == program.exchange[action]))
    return action, int(next(m for m in members if position[program.lane[m]] < m))
