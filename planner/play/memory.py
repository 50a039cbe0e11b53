"""Memory of workers over time, from the start and end times of their actions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from planner.play.times import Trace
from planner.schedules.evictions import MOVES, moves_of
from planner.schedules.program import Code, Program, version_use

_NONE = np.zeros(0)


@dataclass(frozen=True, slots=True, eq=False)
class StageBytes:
    """Memory of one device of each stage; float64 [stages] each.

    Attributes:
        fixed_bytes: held all the time: weights, gradients, optimizer state.
        unit_bytes: kept for one micro-batch from the start of its forward to the end of its backward.
        working_bytes: held on top while a backward runs.
        reserve_bytes: reserved by the runtime, once per device however many stages run there.
        checkpoint_bytes: kept for one micro-batch from its forward on if the order recomputes the rest; empty: none.
        version_bytes: one further version of the weights; empty: none.
        turning_bytes: kept at most for one micro-batch while its backward runs, or the first half of a split one;
            empty: `unit_bytes`.
        waiting_bytes: kept for one micro-batch between the halves of a split backward; empty: `unit_bytes`.
    """

    fixed_bytes: np.ndarray
    unit_bytes: np.ndarray
    working_bytes: np.ndarray
    reserve_bytes: np.ndarray
    checkpoint_bytes: np.ndarray = field(default_factory=lambda: _NONE)
    version_bytes: np.ndarray = field(default_factory=lambda: _NONE)
    turning_bytes: np.ndarray = field(default_factory=lambda: _NONE)
    waiting_bytes: np.ndarray = field(default_factory=lambda: _NONE)

    @property
    def turning(self) -> np.ndarray:
        """`turning_bytes`, or what stands for it."""
        return self.turning_bytes if len(self.turning_bytes) else self.unit_bytes

    @property
    def waiting(self) -> np.ndarray:
        """`waiting_bytes`, or what stands for it."""
        return self.waiting_bytes if len(self.waiting_bytes) else self.unit_bytes


@dataclass(frozen=True, slots=True, eq=False)
class MemoryCurve:
    """A step function: `held_bytes[i]` from `time_s[i]` until the next time, one step per change.

    `action[i]` is the action that makes the change, -1 for the start.
    """

    time_s: np.ndarray
    held_bytes: np.ndarray
    action: np.ndarray = field(default_factory=lambda: _NONE)

    @property
    def peak_bytes(self) -> float:
        """Peak memory in bytes."""
        return float(self.held_bytes.max())


class _Changes(NamedTuple):
    """Changes of the memory that workers hold, in bytes or units; columns of equal length in any order."""

    worker: np.ndarray
    stage: np.ndarray
    time_s: np.ndarray
    amount: np.ndarray
    action: np.ndarray

    def at(self, chosen: np.ndarray) -> _Changes:
        """The chosen changes: a mask, or positions in their order."""
        return _Changes(*(column[chosen] for column in self))

    def sorted(self) -> _Changes:
        """Sorted by worker and time; at the same moment releases first, then by action."""
        return self.at(np.lexsort((self.action, self.amount > 0, self.time_s, self.worker)))


def memory_curve(trace: Trace, worker: int, sizes: StageBytes) -> MemoryCurve:
    """Memory of one worker over the iteration; O(actions).

    A forward's activations count from the moment it occupies the worker (its input is then received).
    """
    program = trace.program
    mine = program.worker == worker
    changes = _activations(trace, sizes)
    parts = [changes.at(changes.worker == worker)]
    gradients = np.flatnonzero(mine & program.of(Code.BACKWARD, Code.INPUT_GRAD))
    stage, halved = program.stage[gradients], program.kind[gradients] == Code.INPUT_GRAD
    working = (sizes.working_bytes + sizes.turning - sizes.unit_bytes)[stage]
    waits = np.where(halved, (sizes.waiting - sizes.unit_bytes)[stage], 0.0)
    parts += [
        _changes_by(program, gradients, trace.start_s[gradients], working),
        _changes_by(program, gradients, trace.compute_end_s[gradients], waits - working),
    ]
    if len(sizes.version_bytes):
        parts.append(_versions(trace, worker, sizes.version_bytes))
    changes_in_order = _joined(parts)
    changes_in_order = changes_in_order.sorted() if _runs_concurrently(program) else _in_order(changes_in_order)
    stages = np.unique(program.stage[mine])
    fixed = float(sizes.fixed_bytes[stages].sum() + sizes.reserve_bytes[stages].max())
    changes_in_order = _merged(changes_in_order.at(changes_in_order.amount != 0))
    return MemoryCurve(
        np.concatenate([[0.0], changes_in_order.time_s]),
        np.concatenate([[fixed], fixed + np.cumsum(changes_in_order.amount)]),
        np.concatenate([[-1], changes_in_order.action]),
    )


def held_units(trace: Trace) -> np.ndarray:
    """int64 [workers], most units (micro-batches, chunks, parts) that a worker keeps at the same time; O(actions)."""
    count = trace.program.stages
    ones, none = np.ones(count), np.zeros(count)
    changes = _activations(trace, StageBytes(none, ones, none, none), whole=True)
    changes = changes.sorted()
    return np.asarray(np.rint(_peaks(changes.worker, changes.amount, trace.program.workers)), np.int64)


def peak_in_flight(program: Program) -> np.ndarray:
    """int64 [workers, stages], most units of a stage that a worker keeps along its order; O(actions log actions)."""
    away, back = MOVES
    taken, given = program.of(Code.FORWARD, back), program.of(Code.BACKWARD, Code.WEIGHT_GRAD, away)
    place = program.worker * program.stages + program.stage
    order = np.argsort(place, kind="stable")
    peaks = _peaks(place[order], (taken.astype(np.int64) - given)[order], program.workers * program.stages)
    return peaks.reshape(program.workers, program.stages)


def _peaks(place: np.ndarray, change: np.ndarray, count: int) -> np.ndarray:
    """[count] highest sum of the changes so far at each place, at least 0; the changes are sorted by place."""
    total = np.cumsum(change)
    before = np.concatenate([np.zeros(1, total.dtype), total])[np.searchsorted(place, np.arange(count))]
    peaks = np.zeros(count, total.dtype)
    np.maximum.at(peaks, place, total - before[place])
    return peaks


def _activations(trace: Trace, sizes: StageBytes, *, whole: bool = False) -> _Changes:
    """Changes by activations: taken by forwards, released by backwards, moved between workers.

    Args:
        trace: the simulated trace.
        sizes: memory by stage.
        whole: count a part of a micro-batch as a full unit, and ignore checkpoints of recomputed activations.
    """
    program, stage = trace.program, trace.program.stage
    unit = sizes.unit_bytes[stage] * (1.0 if whole else 1.0 / program.work.parts)
    recomputed = np.zeros(len(stage), bool) if whole else _recomputed(program)
    checkpoint_bytes = sizes.checkpoint_bytes if len(sizes.checkpoint_bytes) else np.zeros_like(sizes.unit_bytes)
    taken_bytes = np.where(recomputed, checkpoint_bytes[stage], unit)
    taken = program.kind == Code.FORWARD
    parts = [_changes_by(program, np.flatnonzero(taken), trace.start_s[taken], taken_bytes[taken])]
    if recomputed.any():
        redo = program.kind == Code.RECOMPUTE
        parts.append(_changes_by(program, np.flatnonzero(redo), trace.start_s[redo], unit[redo]))
    freed = program.of(Code.BACKWARD, Code.WEIGHT_GRAD)
    released = np.where(recomputed, unit + checkpoint_bytes[stage], unit)
    if not whole:
        released = np.where(
            program.kind == Code.WEIGHT_GRAD, released + (sizes.waiting - sizes.unit_bytes)[stage], released
        )
    parts.append(_changes_by(program, np.flatnonzero(freed), trace.compute_end_s[freed], -released[freed]))
    for moved, sign, hosts in moves_of(program):
        first_s, last_s = trace.transfer_start_s[moved], trace.transfer_end_s[moved]
        local_s, remote_s = (last_s, first_s) if sign > 0 else (first_s, last_s)
        parts.append(_changes_by(program, moved, local_s, -sign * unit[moved]))
        guest = _changes_by(program, moved, remote_s, sign * unit[moved])
        parts.append(guest._replace(worker=hosts))
    changes = _joined(parts)
    return changes.at(changes.worker >= 0)


def _recomputed(program: Program) -> np.ndarray:
    """bool [actions], True if the order recomputes the activations of the action's stage and micro-batch."""
    redo = program.kind == Code.RECOMPUTE
    if not redo.any():
        return np.zeros(len(redo), bool)
    width = int(program.unit.max()) + 1
    key = program.stage * width + program.unit
    return np.asarray(np.isin(key, key[redo]) & (program.micro_batch >= 0))


def _versions(trace: Trace, worker: int, version_bytes: np.ndarray) -> _Changes:
    """Changes by weight versions beyond the first, made before the first action that needs them, then dropped."""
    program = trace.program
    use = version_use(program)
    parts = []
    for stage in np.unique(program.stage[program.worker == worker]).tolist():
        of_stage = np.flatnonzero((program.worker == worker) & (program.stage == stage))
        change = np.diff(use.held[of_stage], prepend=1)
        grown, dropped = np.flatnonzero(change > 0), np.flatnonzero(change < 0)
        size = float(version_bytes[stage])
        parts.append(_changes_by(program, of_stage[grown], trace.start_s[of_stage[grown]], size * change[grown]))
        parts.append(
            _changes_by(program, of_stage[dropped], trace.end_s[of_stage[dropped - 1]], size * change[dropped])
        )
    return _joined(parts)


def _changes_by(program: Program, actions: np.ndarray, time_s: np.ndarray, amount: np.ndarray) -> _Changes:
    """Changes by some actions on their own workers."""
    return _Changes(program.worker[actions], program.stage[actions], time_s, amount, actions)


def _joined(parts: list[_Changes]) -> _Changes:
    """All changes of several lists."""
    return _Changes(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _in_order(changes: _Changes) -> _Changes:
    """Sorted by action; what an action takes precedes what it releases."""
    return changes.at(np.lexsort((changes.amount < 0, changes.action)))


def _merged(changes: _Changes) -> _Changes:
    """Merge adjacent changes of one action at one moment in one direction."""
    if not len(changes.action):
        return changes
    signs = changes.amount > 0
    new = (np.diff(changes.action) != 0) | (np.diff(changes.time_s) != 0) | (signs[1:] != signs[:-1])
    first = np.concatenate([[0], 1 + np.flatnonzero(new)])
    return changes.at(first)._replace(amount=np.add.reduceat(changes.amount, first))


def _runs_concurrently(program: Program) -> bool:
    """True if a worker may run several actions at a time, so that memory does not change in the order of actions."""
    lanes = program.work.lane_workers
    return len(set(lanes)) < len(lanes) or bool(program.of(*MOVES).any() or (program.version >= 0).any())
