"""From orders of work to a program: arrays of actions, what each waits for, an order in which all of them can run.

Orders that can never run are refused with the action at fault.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.errors import PlanError
from planner.schedules.program import (
    BACKWARD,
    CODES,
    EVICT,
    FORWARD,
    INPUT_GRAD,
    LAUNCH_SYNC,
    LOAD,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    RECOMPUTE,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    SYNC,
    UPDATE,
    WEIGHT_GRAD,
    Program,
    check_versions,
)
from planner.schedules.types import Action, OrderError, Work

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


_ROLES = {
    kind: (BACKWARD, INPUT_GRAD) if kind == BACKWARD else (kind,)
    for kind in (
        FORWARD,
        BACKWARD,
        WEIGHT_GRAD,
        RECOMPUTE,
        SEND_ACTIVATION,
        RECEIVE_ACTIVATION,
        SEND_GRADIENT,
        RECEIVE_GRADIENT,
        LOAD,
    )
}
"""Kinds of which a micro-batch has one at a stage: what makes the gradient of a stage's input counts as a backward."""

_Tables = dict[int, np.ndarray]
"""By role, the action of each key (stage, unit), -1 where there is none."""


def link(program: Program) -> None:
    """Fill `source`, `after` and `exchange`, and refuse what can never run; O(actions)."""
    compute = ~program.of(SYNC, UPDATE, LAUNCH_SYNC)
    parts = program.work.parts
    below = np.flatnonzero((program.stage < 0) | (compute & (program.micro_batch < 0)))
    if len(below):
        raise program.error(int(below[0]), "an action names a stage or micro-batch below 0", "number both from 0")
    wrong = np.flatnonzero(compute & ((program.part >= parts) | ((parts > 1) & (program.part < 0))))
    if len(wrong):
        hint = "number the parts of a micro-batch from 0"
        raise program.error(int(wrong[0]), f"the part of {program.label(wrong[0])} is not one of {parts}", hint)
    unit = program.unit
    width = max(int(unit[compute].max(initial=0)) + 1, 1)
    key = np.where(compute, program.stage * width + unit, 0)
    tables = _tables(program, key, program.stages * width)
    _tensors(program, tables, key, width)
    _own(program, tables, key)
    _moves(program, tables, key, width)
    if parts > 1 and program.work.causal:
        _causal(program, tables, key)
    _evictions(program, tables, key)
    if program.work.limits:
        _limits(program)
    _number_exchanges(program)
    first = program.offsets[:-1][np.diff(program.offsets) > 0]
    lonely = first[program.paired[first]]
    if len(lonely):
        raise program.error(int(lonely[0]), "the first action of an order is paired with none", "remove its '+'")


def _tables(program: Program, key: np.ndarray, size: int) -> _Tables:
    present = np.bincount(program.kind, minlength=LAUNCH_SYNC + 1)
    nothing = np.full(size, -1, np.int64)
    return {
        role: _table(program, program.of(*kinds), key, size) if present[list(kinds)].any() else nothing
        for role, kinds in _ROLES.items()
    }


def _table(program: Program, chosen: np.ndarray, key: np.ndarray, size: int) -> np.ndarray:
    """Action by key for the chosen actions, -1 where there is none; each key at most once, but for LOADs."""
    indices = np.flatnonzero(chosen)
    counts = np.bincount(key[indices], minlength=size)
    if len(indices) and counts.max() > 1 and program.kind[indices[0]] != LOAD:
        twice = indices[np.flatnonzero(counts[key[indices]] > 1)[-1]]
        hint = "each micro-batch runs once through each stage"
        raise program.error(int(twice), f"{program.label(twice)} is scheduled more than once", hint)
    table = np.full(size, -1, np.int64)
    table[key[indices]] = indices
    return table


def _moves(program: Program, tables: _Tables, key: np.ndarray, width: int) -> None:
    """What is sent is received, and the other way round, by the stage after (gradients: before)."""
    for code, other, by, what in (
        (SEND_ACTIVATION, tables[RECEIVE_ACTIVATION], 1, "receives"),
        (RECEIVE_ACTIVATION, tables[SEND_ACTIVATION], -1, "sends"),
        (SEND_GRADIENT, tables[RECEIVE_GRADIENT], -1, "receives"),
        (RECEIVE_GRADIENT, tables[SEND_GRADIENT], 1, "sends"),
    ):
        moves = np.flatnonzero(program.kind == code)
        stage = program.stage[moves] + by
        inside = (stage >= 0) & (stage < program.stages)
        met = np.full(len(moves), -1, np.int64)
        met[inside] = other[key[moves[inside]] + by * width]
        alone = np.flatnonzero(met < 0)
        if len(alone):
            at = int(moves[alone[0]])
            whom = f"stage {stage[alone[0]]} never {what} it" if inside[alone[0]] else f"no stage {what} it"
            hint = "give each send its receive at the neighbouring stage, or leave both out"
            raise program.error(at, f"{program.label(at)}: {whom}", hint)


def _tensors(program: Program, tables: _Tables, key: np.ndarray, width: int) -> None:
    """Sources in neighbouring stages; an explicit SEND or RECEIVE takes the place of the computation."""
    stage, source = program.stage, program.source
    for makes, sends, receives, by, has_other, receipt, origin in (
        (FORWARD, SEND_ACTIVATION, RECEIVE_ACTIVATION, -width, stage > 0, "input", "the forward of the stage before"),
        (
            BACKWARD,
            SEND_GRADIENT,
            RECEIVE_GRADIENT,
            width,
            stage < program.stages - 1,
            "gradient",
            "the backward of the stage after",
        ),
    ):
        made = np.where(tables[sends] >= 0, tables[sends], tables[makes])
        needs = np.flatnonzero(program.of(*_ROLES[makes]) & has_other)
        received = tables[receives][key[needs]]
        _require_before(program, needs[received >= 0], received[received >= 0], f"the receipt of its {receipt}")
        needs = np.concatenate([needs[received < 0], np.flatnonzero((program.kind == receives) & has_other)])
        source[needs] = made[key[needs] + by]
        _require(program, needs, source[needs], origin)


def _own(program: Program, tables: _Tables, key: np.ndarray) -> None:
    """Actions that need another of the same stage, micro-batch and worker."""
    kind = program.kind
    for needy, needed, what in (
        ((BACKWARD, INPUT_GRAD), FORWARD, "its forward"),
        ((WEIGHT_GRAD,), BACKWARD, "its input gradient"),
        ((RECOMPUTE,), FORWARD, "its forward"),
        ((SEND_ACTIVATION,), FORWARD, "its forward"),
        ((SEND_GRADIENT,), BACKWARD, "its backward"),
        ((EVICT,), FORWARD, "its forward"),
    ):
        found = np.flatnonzero(program.of(*needy))
        _require_own(program, found, tables[needed][key[found]], what)
    again = np.flatnonzero(kind == RECOMPUTE)
    late = again[tables[BACKWARD][key[again]] < again]
    if len(late):
        raise program.error(int(late[0]), f"{program.label(late[0])} comes after its backward", "recompute before it")
    halves = np.flatnonzero(kind == WEIGHT_GRAD)
    whole = halves[kind[tables[BACKWARD][key[halves]]] == BACKWARD]
    if len(whole):
        message = f"{program.label(whole[0])} is a part of the whole backward of the same micro-batch"
        raise program.error(int(whole[0]), message, "make that an input gradient, or leave this out")
    split = np.flatnonzero(kind == INPUT_GRAD)
    _require(program, split, tables[WEIGHT_GRAD][key[split]], "its weight gradient")
    forwards = np.flatnonzero(kind == FORWARD)
    _require(program, forwards, tables[BACKWARD][key[forwards]], "its backward")


def _causal(program: Program, tables: _Tables, key: np.ndarray) -> None:
    """Sub-sequences in order forward, in reverse order backward, on one lane."""
    forwards = np.flatnonzero((program.kind == FORWARD) & (program.part > 0))
    _require_before(program, forwards, tables[FORWARD][key[forwards] - 1], "the forward of the part before")
    backwards = np.flatnonzero(program.of(BACKWARD, INPUT_GRAD) & (program.part < program.work.parts - 1))
    _require_before(program, backwards, tables[BACKWARD][key[backwards] + 1], "the backward of the part after")


def _evictions(program: Program, tables: _Tables, key: np.ndarray) -> None:
    """LOAD needs the EVICT before it; a backward needs its last LOAD; what takes memory waits for EVICTs under way."""
    if not (program.kind == EVICT).any() and not (program.kind == LOAD).any():
        return
    away: dict[int, int] = {}
    pending: dict[int, int] = {}
    for action in np.flatnonzero(program.of(EVICT, LOAD, FORWARD, BACKWARD, INPUT_GRAD)).tolist():
        kind, unit, lane = program.kind[action], int(key[action]), int(program.lane[action])
        if kind == EVICT:
            if 0 <= tables[BACKWARD][unit] < action and program.lane[tables[BACKWARD][unit]] == lane:
                raise _misplaced(program, action, "comes after its backward")
            if unit in away:
                raise _misplaced(program, action, "is evicted twice without a load in between")
            away[unit] = pending[lane] = action
        elif kind == LOAD:
            if unit not in away:
                raise _misplaced(program, action, "loads what was not evicted")
            program.after[action] = max(away.pop(unit), pending.pop(lane, -1))
        elif kind == FORWARD:
            program.after[action] = pending.pop(lane, -1)
        elif unit in away:
            raise _misplaced(program, action, "needs activations that are evicted")
        elif tables[LOAD][unit] >= 0:
            program.after[action] = tables[LOAD][unit]


def _misplaced(program: Program, action: int, what: str) -> OrderError:
    hint = "evict after the forward, load before the backward"
    return program.error(action, f"{program.label(action)} {what}", hint)


def _limits(program: Program) -> None:
    """A forward waits for the backward that makes room for it."""
    place = program.worker * program.stages + program.stage
    for stage, limit in enumerate(program.work.limits):
        for worker in np.unique(program.worker[program.stage == stage]).tolist():
            here = place == worker * program.stages + stage
            forwards = np.flatnonzero(here & (program.kind == FORWARD))[limit:]
            backwards = np.flatnonzero(here & program.of(BACKWARD, WEIGHT_GRAD))
            program.after[forwards] = backwards[: len(forwards)]


def _number_exchanges(program: Program) -> None:
    """Number the collectives: one for each stage and number."""
    chosen = np.flatnonzero(program.of(SYNC, LAUNCH_SYNC))
    if not len(chosen):
        return
    names = np.stack([program.stage[chosen], program.micro_batch[chosen]])
    program.exchange[chosen] = np.unique(names, axis=1, return_inverse=True)[1].ravel()
    for code, does in ((SYNC, "synchronises"), (LAUNCH_SYNC, "launches the synchronisation of")):
        mine = chosen[program.kind[chosen] == code]
        pairs = program.exchange[mine] * program.workers + program.worker[mine]
        _, kept = np.unique(pairs, return_index=True)
        if len(kept) < len(pairs):
            again = int(np.delete(mine, kept)[0])
            hint = "one for each stage, worker and number"
            raise program.error(again, f"a worker {does} a stage more than once", hint)


def _require(program: Program, needs: np.ndarray, found: np.ndarray, what: str) -> None:
    missing = needs[found < 0]
    if len(missing):
        hint = "schedule every micro-batch forward and backward through every stage"
        raise program.error(int(missing[0]), f"{program.label(missing[0])} needs {what}, which no worker runs", hint)


def _require_own(program: Program, needs: np.ndarray, found: np.ndarray, what: str) -> None:
    """The action found must exist on the same worker; earlier in its order, or on another lane and then waited for."""
    _require(program, needs, found, what)
    other = program.lane[found] != program.lane[needs]
    _require_before(program, needs[~other], found[~other], what)
    away = needs[program.worker[found] != program.worker[needs]]
    if len(away):
        raise _not_before(program, away[0], what)
    program.after[needs[other]] = found[other]


def _require_before(program: Program, needs: np.ndarray, found: np.ndarray, what: str) -> None:
    """The action found must exist, on the same lane, earlier in its order."""
    _require(program, needs, found, what)
    wrong = needs[(program.lane[found] != program.lane[needs]) | (found > needs)]
    if len(wrong):
        raise _not_before(program, wrong[0], what)


def _not_before(program: Program, action: int, what: str) -> OrderError:
    hint = "what a forward keeps is used by the backward of the same worker, later in its order"
    return program.error(int(action), f"{program.label(action)} does not come after {what} on the same worker", hint)
