"""Compile orders of work into a program: arrays of actions, their dependencies, and a sequence in which all can run.

Orders that can never run are refused with the action at fault.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.errors import PlanError
from planner.schedules.evictions import MOVES, link_moves
from planner.schedules.program import CODES, Code, Program, check_versions
from planner.schedules.types import Action, OrderError, Work

_SHOWN_CYCLE = 12
"""Most waits of a cycle that an error message lists."""


def compile_orders(orders: Sequence[Sequence[Action]] | Work) -> Program:
    """Compile orders into a program, and find a sequence in which all actions can run; O(actions).

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
    """A program with the columns of the actions; dependencies and sequence are not filled in yet."""
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
    """A topological order of all actions, by a worklist over lanes; O(actions).

    Raises:
        PlanError: some lanes wait for each other in a cycle.
    """
    source, after, offsets = program.source.tolist(), program.after.tolist(), program.offsets.tolist()
    lanes = program.lane.tolist()
    wakes, siblings = _wakes(program)
    arrives, waits, members = (column.tolist() for column in exchanges(program))
    last = len(source) - 1
    joined = [*program.paired.tolist()[1:], False]
    position = offsets[:-1]
    done, arrived = bytearray(len(source)), bytearray(len(source))
    present = [0] * len(members)
    waiting: list[list[int]] = [[] for _ in members]
    sequence: list[int] = []
    ready = list(range(len(position) - 1, -1, -1))
    while ready:
        lane = ready.pop()
        at, end = position[lane], offsets[lane + 1]
        while at < end:
            blocked = at
            while True:
                if (source[blocked] >= 0 and not done[source[blocked]]) or (
                    after[blocked] >= 0 and not done[after[blocked]]
                ):
                    break
                if blocked < last and joined[blocked]:
                    blocked += 1
                    continue
                blocked = -1
                break
            if blocked >= 0:
                break
            exchange = arrives[at]
            if exchange >= 0 and not arrived[at]:
                arrived[at] = 1
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
    """(by action the lane that waits for its tensor, -1 for none; by action the sibling lane that waits for it)."""
    wakes = np.full(len(program.kind), -1, np.int64)
    fed = np.flatnonzero(program.source >= 0)
    fed = fed[program.lane[program.source[fed]] != program.lane[fed]]
    wakes[program.source[fed]] = program.lane[fed]
    fed = np.flatnonzero(program.after >= 0)
    fed = fed[program.lane[program.after[fed]] != program.lane[fed]]
    siblings = zip(program.after[fed].tolist(), program.lane[fed].tolist(), strict=True)
    return wakes.tolist(), dict(siblings)


def exchanges(program: Program) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int64 [actions], exchange that each action joins or -1, and that it waits for or -1; members of each exchange."""
    launches = program.kind == Code.LAUNCH_SYNC
    syncs = program.kind == Code.SYNC
    key = program.exchange * program.workers + program.worker
    launched = syncs & np.isin(key, key[launches])
    joins = launches | (syncs & ~launched)
    arrives = np.where(joins, program.exchange, -1)
    waits = np.where(syncs, program.exchange, -1)
    return arrives, waits, np.bincount(program.exchange[joins])


def _deadlock(program: Program, position: list[int], done: bytearray, lanes: list[int]) -> OrderError:
    """The error that shows a cycle of workers waiting for each other."""
    lane = next(k for k in range(program.lanes) if position[k] < program.offsets[k + 1])
    seen: dict[int, int] = {}
    steps: list[str] = []
    while lane not in seen:
        seen[lane] = len(steps)
        action = position[lane]
        stuck, awaited = _awaited(program, action, position, done)
        whose = f" of worker {program.worker[awaited]}" if program.exchange[awaited] >= 0 else ""
        waits = f"waits for {program.label(awaited)}{whose}"
        steps.append(f"worker {program.worker[action]} at {program.label(stuck)} {waits}")
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
    """(the action that a lane is stuck at, the action that it waits for)."""
    stuck = action
    while True:
        for needed in (int(program.source[stuck]), int(program.after[stuck])):
            if needed >= 0 and not done[needed]:
                return stuck, needed
        if stuck + 1 >= len(program.kind) or not program.paired[stuck + 1]:
            break
        stuck += 1
    members = np.flatnonzero(program.of(Code.SYNC, Code.LAUNCH_SYNC) & (program.exchange == program.exchange[action]))
    return action, int(next(m for m in members if position[program.lane[m]] < m))


_ACTIVATIONS = (Code.FORWARD, Code.SEND_ACTIVATION, Code.RECEIVE_ACTIVATION)
_GRADIENTS = (Code.BACKWARD, Code.SEND_GRADIENT, Code.RECEIVE_GRADIENT)
"""Kinds that make a tensor for a neighbouring stage, send it and receive it."""
_ROLES = {
    kind: (Code.BACKWARD, Code.INPUT_GRAD) if kind == Code.BACKWARD else (kind,)
    for kind in (
        *(Code.FORWARD, Code.BACKWARD, Code.WEIGHT_GRAD, Code.RECOMPUTE),
        *(*_ACTIVATIONS[1:], *_GRADIENTS[1:], Code.LOAD),
    )
}
"""Kinds that occur once per micro-batch and stage; an INPUT_GRAD takes the role of the BACKWARD."""

_FEW_KEYS, _KEYS_AN_ACTION = 1 << 24, 64
"""Most keys of a table: so many, and so many for each action. One replica of many has gaps in its numbers: of 32,768
ranks with 48 chunks and 61,440 micro-batches it has three million keys for 1,632 actions."""

_Tables = dict[int, np.ndarray]
"""By role, the action of each key (stage, unit); -1 if there is none."""


def link(program: Program) -> None:
    """Fill in `source`, `after` and `exchange`, and refuse orders that can never run; O(actions)."""
    compute = ~program.of(Code.SYNC, Code.UPDATE, Code.LAUNCH_SYNC)
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
    if program.stages * width > _FEW_KEYS + _KEYS_AN_ACTION * len(unit):
        message = f"{len(unit)} actions are numbered up to stage {program.stages - 1} and micro-batch {width - 1}"
        raise program.error(int(np.argmax(np.where(compute, unit, -1))), message, "number both from 0, without gaps")
    key = np.where(compute, program.stage * width + unit, 0)
    tables: _Tables = {
        role: _table(program, program.of(*kinds), key, program.stages * width) for role, kinds in _ROLES.items()
    }
    _link_neighbours(program, tables, key, width)
    _link_own_stage(program, tables, key)
    _check_transfers(program, tables, key, width)
    if parts > 1 and program.work.causal:
        _check_causal(program, tables, key)
    link_moves(program, tables, key)
    if program.work.limits:
        _link_limits(program)
    _number_exchanges(program)
    first = program.offsets[:-1][np.diff(program.offsets) > 0]
    lonely = first[program.paired[first]]
    if len(lonely):
        raise program.error(int(lonely[0]), "the first action of an order is paired with none", "remove its '+'")


def _table(program: Program, chosen: np.ndarray, key: np.ndarray, size: int) -> np.ndarray:
    """The chosen action of each key, -1 if there is none; refuses a key that occurs twice, except for LOADs."""
    indices = np.flatnonzero(chosen)
    counts = np.bincount(key[indices], minlength=size)
    if len(indices) and counts.max() > 1 and program.kind[indices[0]] != Code.LOAD:
        twice = indices[np.flatnonzero(counts[key[indices]] > 1)[-1]]
        hint = "each micro-batch runs once through each stage"
        raise program.error(int(twice), f"{program.label(twice)} is scheduled more than once", hint)
    table = np.full(size, -1, np.int64)
    table[key[indices]] = indices
    return table


def _check_transfers(program: Program, tables: _Tables, key: np.ndarray, width: int) -> None:
    """Refuse a SEND without its RECEIVE at the neighbouring stage, or a RECEIVE without its SEND."""
    for code, other, by, what in (
        (Code.SEND_ACTIVATION, tables[Code.RECEIVE_ACTIVATION], 1, "receives"),
        (Code.RECEIVE_ACTIVATION, tables[Code.SEND_ACTIVATION], -1, "sends"),
        (Code.SEND_GRADIENT, tables[Code.RECEIVE_GRADIENT], -1, "receives"),
        (Code.RECEIVE_GRADIENT, tables[Code.SEND_GRADIENT], 1, "sends"),
    ):
        moves = np.flatnonzero(program.kind == code)
        stage = program.stage[moves] + by
        inside = (stage >= 0) & (stage < program.stages)
        matching = np.full(len(moves), -1, np.int64)
        matching[inside] = other[key[moves[inside]] + by * width]
        unmatched = np.flatnonzero(matching < 0)
        if len(unmatched):
            at = int(moves[unmatched[0]])
            whom = f"stage {stage[unmatched[0]]} never {what} it" if inside[unmatched[0]] else f"no stage {what} it"
            hint = "give each send its receive at the neighbouring stage, or leave both out"
            raise program.error(at, f"{program.label(at)}: {whom}", hint)


def _link_neighbours(program: Program, tables: _Tables, key: np.ndarray, width: int) -> None:
    """Fill in sources in neighbouring stages; an explicit SEND or RECEIVE stands for the computation."""
    stage, source = program.stage, program.source
    for makes, sends, receives, by, has_other, receipt, origin in (
        (*_ACTIVATIONS, -width, stage > 0, "input", "the forward of the stage before"),
        (*_GRADIENTS, width, stage < program.stages - 1, "gradient", "the backward of the stage after"),
    ):
        made = np.where(tables[sends] >= 0, tables[sends], tables[makes])
        needs = np.flatnonzero(program.of(*_ROLES[makes]) & has_other)
        received = tables[receives][key[needs]]
        _require_before(program, needs[received >= 0], received[received >= 0], f"the receipt of its {receipt}")
        needs = np.concatenate([needs[received < 0], np.flatnonzero((program.kind == receives) & has_other)])
        source[needs] = made[key[needs] + by]
        _require(program, needs, source[needs], origin)


def _link_own_stage(program: Program, tables: _Tables, key: np.ndarray) -> None:
    """Check and link actions that need another action of the same stage, micro-batch and worker."""
    kind = program.kind
    for needy, needed, what in (
        ((Code.BACKWARD, Code.INPUT_GRAD), Code.FORWARD, "its forward"),
        ((Code.WEIGHT_GRAD,), Code.BACKWARD, "its input gradient"),
        ((Code.RECOMPUTE,), Code.FORWARD, "its forward"),
        ((Code.SEND_ACTIVATION,), Code.FORWARD, "its forward"),
        ((Code.SEND_GRADIENT,), Code.BACKWARD, "its backward"),
        ((MOVES[0],), Code.FORWARD, "its forward"),
    ):
        users = np.flatnonzero(program.of(*needy))
        _require_own(program, users, tables[needed][key[users]], what)
    recomputes = np.flatnonzero(kind == Code.RECOMPUTE)
    late = recomputes[tables[Code.BACKWARD][key[recomputes]] < recomputes]
    if len(late):
        raise program.error(int(late[0]), f"{program.label(late[0])} comes after its backward", "recompute before it")
    weight_grads = np.flatnonzero(kind == Code.WEIGHT_GRAD)
    of_whole_backward = weight_grads[kind[tables[Code.BACKWARD][key[weight_grads]]] == Code.BACKWARD]
    if len(of_whole_backward):
        message = f"{program.label(of_whole_backward[0])} is a part of the whole backward of the same micro-batch"
        raise program.error(int(of_whole_backward[0]), message, "make that an input gradient, or leave this out")
    split = np.flatnonzero(kind == Code.INPUT_GRAD)
    _require(program, split, tables[Code.WEIGHT_GRAD][key[split]], "its weight gradient")
    forwards = np.flatnonzero(kind == Code.FORWARD)
    _require(program, forwards, tables[Code.BACKWARD][key[forwards]], "its backward")


def _check_causal(program: Program, tables: _Tables, key: np.ndarray) -> None:
    """Refuse causal sub-sequences that do not run in order forward and in reverse order backward on one lane."""
    forwards = np.flatnonzero((program.kind == Code.FORWARD) & (program.part > 0))
    _require_before(program, forwards, tables[Code.FORWARD][key[forwards] - 1], "the forward of the part before")
    backwards = np.flatnonzero(program.of(Code.BACKWARD, Code.INPUT_GRAD) & (program.part < program.work.parts - 1))
    _require_before(program, backwards, tables[Code.BACKWARD][key[backwards] + 1], "the backward of the part after")


def _link_limits(program: Program) -> None:
    """Make forwards beyond a stage's memory limit wait for the backward that frees their memory."""
    place = program.worker * program.stages + program.stage
    for stage, limit in enumerate(program.work.limits):
        for worker in np.unique(program.worker[program.stage == stage]).tolist():
            of_stage = place == worker * program.stages + stage
            forwards = np.flatnonzero(of_stage & (program.kind == Code.FORWARD))[limit:]
            backwards = np.flatnonzero(of_stage & program.of(Code.BACKWARD, Code.WEIGHT_GRAD))
            program.after[forwards] = backwards[: len(forwards)]


def _number_exchanges(program: Program) -> None:
    """Number the exchanges, one per stage and number; refuse a worker that joins one twice."""
    chosen = np.flatnonzero(program.of(Code.SYNC, Code.LAUNCH_SYNC))
    if not len(chosen):
        return
    names = np.stack([program.stage[chosen], program.micro_batch[chosen]])
    program.exchange[chosen] = np.unique(names, axis=1, return_inverse=True)[1].ravel()
    for code, does in ((Code.SYNC, "synchronises"), (Code.LAUNCH_SYNC, "launches the synchronisation of")):
        of_kind = chosen[program.kind[chosen] == code]
        pairs = program.exchange[of_kind] * program.workers + program.worker[of_kind]
        _, kept = np.unique(pairs, return_index=True)
        if len(kept) < len(pairs):
            repeated = int(np.delete(of_kind, kept)[0])
            hint = "one for each stage, worker and number"
            raise program.error(repeated, f"a worker {does} a stage more than once", hint)


def _require(program: Program, needs: np.ndarray, needed: np.ndarray, what: str) -> None:
    """Refuse actions whose needed action does not exist (-1)."""
    missing = needs[needed < 0]
    if len(missing):
        hint = "schedule every micro-batch forward and backward through every stage"
        raise program.error(int(missing[0]), f"{program.label(missing[0])} needs {what}, which no worker runs", hint)


def _require_own(program: Program, needs: np.ndarray, needed: np.ndarray, what: str) -> None:
    """Require the needed action on the same worker: earlier on the lane, or on another lane, which is then awaited."""
    _require(program, needs, needed, what)
    other = program.lane[needed] != program.lane[needs]
    _require_before(program, needs[~other], needed[~other], what)
    away = needs[program.worker[needed] != program.worker[needs]]
    if len(away):
        raise _not_before(program, away[0], what)
    program.after[needs[other]] = needed[other]


def _require_before(program: Program, needs: np.ndarray, needed: np.ndarray, what: str) -> None:
    """Require the needed action on the same lane, earlier in its order."""
    _require(program, needs, needed, what)
    wrong = needs[(program.lane[needed] != program.lane[needs]) | (needed > needs)]
    if len(wrong):
        raise _not_before(program, wrong[0], what)


def _not_before(program: Program, action: int, what: str) -> OrderError:
    """The error of an action that runs before what it needs, or on another worker."""
    hint = "what a forward keeps is used by the backward of the same worker, later in its order"
    return program.error(int(action), f"{program.label(action)} does not come after {what} on the same worker", hint)
