"""Versions of the weights: which one each action reads, how many a worker holds, how old a gradient is when applied.

UPDATE number n of a stage on a worker makes version n + 1 of it there; version 0 is there from the start. An action
that names no version reads the newest.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from planner.schedules.program import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    RECOMPUTE,
    UPDATE,
    WEIGHT_GRAD,
    Program,
)
from planner.schedules.types import OrderError


@dataclass(frozen=True, slots=True, eq=False)
class VersionUse:
    """Versions by action; arrays are [actions], -1 where an action reads none.

    Attributes:
        newest: updates of the stage on the worker before the action.
        read: the version that is read.
        held: versions that must be held while the action runs: the newest, and all that it or a later action reads.
        applied: for an action that makes gradients, updates before the one that applies them; -1 when none does.
    """

    newest: np.ndarray
    read: np.ndarray
    held: np.ndarray
    applied: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Staleness:
    """Updates between the version read and the one the gradient is applied to, float64 [stages] each.

    The mean is over the micro-batches that are under way when the pipeline is full.
    """

    forward_most: np.ndarray
    forward_mean: np.ndarray
    backward_most: np.ndarray
    backward_mean: np.ndarray


def check_versions(program: Program) -> None:
    """Refuse orders that read a version which is not made yet or no longer held; O(actions log actions).

    Raises:
        PlanError: names the action, the version, and what the worker holds then.
    """
    if not (program.version >= 0).any():
        return
    use = version_use(program)
    early = np.flatnonzero((use.read >= 0) & (use.read > use.newest))
    if len(early):
        raise _unheld(program, use, int(early[0]), "is not made yet")
    if program.work.versions:
        limit = np.asarray(program.work.versions)[program.stage]
        late = np.flatnonzero((use.read >= 0) & (use.newest - use.read >= limit))
        if len(late):
            raise _unheld(program, use, int(late[0]), f"is dropped: the worker holds {limit[late[0]]}")


def _unheld(program: Program, use: VersionUse, action: int, why: str) -> OrderError:
    read, newest = int(use.read[action]), int(use.newest[action])
    return program.error(
        action,
        f"{program.label(action)} reads version {read} of the weights of stage {program.stage[action]}, which {why}; "
        f"{newest} updates have been made, the newest version is {newest}",
        "read another version, move the update, or hold more versions",
    )


@functools.lru_cache(maxsize=2)
def version_use(program: Program) -> VersionUse:
    """Versions read, held and applied, by action; O(actions log actions) once for a program."""
    rank = np.empty(len(program.kind), np.int64)
    rank[program.sequence] = np.arange(len(rank))
    place = program.worker * program.stages + program.stage
    by_place = np.lexsort((rank, place))
    starts = np.flatnonzero(np.diff(place[by_place], prepend=-1))
    updates = (program.kind == UPDATE).astype(np.int64)
    newest = np.empty(len(rank), np.int64)
    newest[by_place] = _running(updates[by_place], starts) - updates[by_place]
    computes = program.of(FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD, RECOMPUTE)
    read = np.where(computes, np.where(program.version >= 0, program.version, newest), -1)
    held = np.ones(len(rank), np.int64)
    applied = np.full(len(rank), -1, np.int64)
    for low, high in zip(starts, [*starts[1:], len(rank)], strict=True):
        mine = by_place[low:high]
        held[mine] = _held(newest[mine], read[mine])
        updating = np.flatnonzero(updates[mine])
        following = np.searchsorted(updating, np.arange(len(mine)))
        known = following < len(updating)
        applied[mine[known]] = newest[mine[updating[following[known]]]]
    applied[~program.of(BACKWARD, INPUT_GRAD, WEIGHT_GRAD)] = -1
    return VersionUse(newest, read, held, applied)


def _running(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Cumulative sums that begin anew at each start."""
    total = np.cumsum(values)
    before = np.concatenate([[0], total])[starts]
    return np.asarray(total - np.repeat(before, np.diff([*starts, len(values)])))


def _held(newest: np.ndarray, read: np.ndarray) -> np.ndarray:
    """Versions that must be there at each action: the newest, and those made before that are read now or later."""
    last_read = np.full(int(newest.max(initial=0)) + 2, -1, np.int64)
    readers = np.flatnonzero((read >= 0) & (read <= newest))
    np.maximum.at(last_read, read[readers], readers)
    change = np.zeros(len(newest) + 1, np.int64)
    replaced = np.searchsorted(newest, np.arange(len(last_read)), side="right")
    kept = np.flatnonzero(last_read >= replaced)
    np.add.at(change, replaced[kept], 1)
    np.add.at(change, last_read[kept] + 1, -1)
    return np.asarray(1 + np.cumsum(change)[:-1])


def peak_versions(program: Program) -> np.ndarray:
    """[stages] the most versions that a worker holds at the same time; 1 for synchronous orders."""
    peaks = np.ones(program.stages, np.int64)
    if (program.version >= 0).any():
        np.maximum.at(peaks, program.stage, version_use(program).held)
    return peaks


def staleness(program: Program, *, warm_up: int = 0, period: int = 1) -> Staleness:
    """Age of the weights behind each gradient when it is applied; O(actions log actions).

    Args:
        program: with UPDATE actions; gradients that no UPDATE applies are left out.
        warm_up: micro-batches that are left out of the mean at the start.
        period: the mean is over a whole number of so many micro-batches.
    """
    use = version_use(program)
    width = max(int(program.micro_batch.max()) + 1, 1) * program.work.parts
    key = program.stage * width + program.unit
    table = np.full(program.stages * width, -1, np.int64)
    forwards = np.flatnonzero(program.kind == FORWARD)
    table[key[forwards]] = use.read[forwards]
    chosen = np.flatnonzero(program.of(BACKWARD, INPUT_GRAD) & (use.applied >= 0))
    stage = program.stage[chosen]
    ages = [use.applied[chosen] - table[key[chosen]], use.applied[chosen] - use.read[chosen]]
    number = program.micro_batch[chosen]
    whole = warm_up + (width // program.work.parts - warm_up) // period * period
    steady = (number >= warm_up) & (number < whole)
    steady = steady if steady.any() else np.ones_like(steady)
    columns = []
    for age in ages:
        most = np.zeros(program.stages)
        np.maximum.at(most, stage, age)
        count = np.maximum(np.bincount(stage[steady], minlength=program.stages), 1)
        columns += [most, np.bincount(stage[steady], age[steady], program.stages) / count]
    return Staleness(*columns)
