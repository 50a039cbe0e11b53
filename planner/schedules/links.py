"""What each action waits for, and what can never run."""

from __future__ import annotations

import numpy as np

from planner.schedules.program import (
    BACKWARD,
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
)
from planner.schedules.types import OrderError

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
    _exchanges(program)
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


def _exchanges(program: Program) -> None:
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
