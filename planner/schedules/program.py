"""Orders of work as arrays, with the dependencies of all actions and the weight versions that they read.

Dependencies: FORWARD of (stage, micro-batch) needs FORWARD of the stage before; BACKWARD (or INPUT_GRAD) needs its
own FORWARD and the BACKWARD (or INPUT_GRAD) of the stage after; WEIGHT_GRAD needs its own INPUT_GRAD; RECOMPUTE its
own FORWARD. Where an order has SENDs and RECEIVEs, an action that needs a tensor follows its RECEIVE, which needs the
SEND.
SYNC of a stage is a collective of all workers that have one; it begins when all have reached their SYNC, or their
LAUNCH_SYNC if they have one. What was evicted must be loaded before its backward.

Versions of the weights: UPDATE number n of a stage on a worker makes version n + 1 of it there; version 0 is there from
the start. An action that names no version reads the newest.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from planner.schedules.types import Action, ActionKind, OrderError, Work

KINDS = tuple(ActionKind)
"""Kinds by code: `Program.kind` holds indices into this."""


class Code(IntEnum):
    """Kinds of actions as numbers, in the order of `ActionKind`."""

    FORWARD = 0
    BACKWARD = 1
    INPUT_GRAD = 2
    WEIGHT_GRAD = 3
    SYNC = 4
    UPDATE = 5
    RECOMPUTE = 6
    SEND_ACTIVATION = 7
    RECEIVE_ACTIVATION = 8
    SEND_GRADIENT = 9
    RECEIVE_GRADIENT = 10
    EVICT = 11
    LOAD = 12
    LAUNCH_SYNC = 13


CODES = {kind: code for code, kind in enumerate(KINDS)}


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """All actions of all lanes, lane by lane, with their dependencies.

    Attributes:
        kind: int8 [actions], index into `KINDS`.
        stage: int64 [actions].
        micro_batch: int64 [actions], -1 for SYNC and UPDATE without a number.
        worker: int64 [actions].
        offsets: int64 [lanes + 1]; lane k owns actions `offsets[k]:offsets[k + 1]`, in its order.
        source: int64 [actions]; the action of a neighbouring stage whose tensor this one needs, -1 for none.
        sequence: int64 [actions]; all actions in an order in which they can run.
        lane: int64 [actions], ascending; equal to `worker` when each worker has one lane.
        part: int64 [actions], sub-sequence, -1 for the whole micro-batch.
        peer: int64 [actions], worker that receives what is evicted, -1 for the host.
        version: int64 [actions], version of the weights that is read, -1 for the newest.
        paired: bool [actions], runs as one with the action before it.
        after: int64 [actions]; a needed action of the same worker that the order of the lane does not guarantee, since
            it runs on another lane or continues after its lane has passed it; -1 for none.
        exchange: int64 [actions]; the collective that a SYNC waits for or a LAUNCH_SYNC begins, -1 for others.
        work: the orders that it was compiled from.
    """

    kind: np.ndarray
    stage: np.ndarray
    micro_batch: np.ndarray
    worker: np.ndarray
    offsets: np.ndarray
    source: np.ndarray
    sequence: np.ndarray
    lane: np.ndarray
    part: np.ndarray
    peer: np.ndarray
    version: np.ndarray
    paired: np.ndarray
    after: np.ndarray
    exchange: np.ndarray
    work: Work

    @property
    def stages(self) -> int:
        """Number of stages."""
        return int(self.stage.max()) + 1

    @property
    def workers(self) -> int:
        """Number of workers."""
        return max(self.work.lane_workers) + 1

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return len(self.offsets) - 1

    @property
    def unit(self) -> np.ndarray:
        """int64 [actions], number of the sub-sequence over all micro-batches; below 0 without a micro-batch."""
        return np.asarray(self.micro_batch * self.work.parts + np.maximum(self.part, 0))

    def of(self, *kinds: int) -> np.ndarray:
        """bool [actions], True for actions of these kinds."""
        return np.asarray(np.isin(self.kind, kinds))

    def label(self, action: int) -> str:
        """An action in messages: `B2.5` is the backward of stage 2 for micro-batch 5."""
        kind = KINDS[self.kind[action]]
        return str(Action(kind, int(self.stage[action]), int(self.micro_batch[action]), int(self.part[action])))

    def error(self, action: int, message: str, hint: str = "") -> OrderError:
        """An error that names this action."""
        lane = int(self.lane[action])
        where = f"worker {self.worker[action]}"
        return OrderError(message, lane=lane, index=int(action - self.offsets[lane]), where=where, hint=hint)


@dataclass(frozen=True, slots=True, eq=False)
class VersionUse:
    """Weight versions by action, int64 [actions]; -1 if an action reads none.

    Attributes:
        newest: updates of the stage on the worker before the action.
        read: the version that the action reads.
        held: number of versions held while the action runs: the newest, and all that it or a later action reads.
        applied: for an action that makes gradients, updates before the one that applies them; -1 if none does.
    """

    newest: np.ndarray
    read: np.ndarray
    held: np.ndarray
    applied: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class WeightAges:
    """Updates between the version that a pass reads and the version its gradient is applied to, float64 [stages].

    Most and mean, for forwards and backwards; the mean is over the micro-batches of a full pipeline.
    """

    forward_most: np.ndarray
    forward_mean: np.ndarray
    backward_most: np.ndarray
    backward_mean: np.ndarray


def check_versions(program: Program) -> None:
    """Refuse orders that read a weight version before it is made or after it is dropped; O(actions log actions).

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
    """The error of an action that reads a version which its worker does not hold."""
    read, newest = int(use.read[action]), int(use.newest[action])
    return program.error(
        action,
        f"{program.label(action)} reads version {read} of the weights of stage {program.stage[action]}, which {why}; "
        f"{newest} updates have been made, the newest version is {newest}",
        "read another version, move the update, or hold more versions",
    )


@functools.lru_cache(maxsize=2)
def version_use(program: Program) -> VersionUse:
    """Versions read, held and applied, by action; O(actions log actions), cached."""
    rank = np.empty(len(program.kind), np.int64)
    rank[program.sequence] = np.arange(len(rank))
    place = program.worker * program.stages + program.stage
    by_place = np.lexsort((rank, place))
    starts = np.flatnonzero(np.diff(place[by_place], prepend=-1))
    updates = (program.kind == Code.UPDATE).astype(np.int64)
    newest = np.empty(len(rank), np.int64)
    newest[by_place] = _running(updates[by_place], starts) - updates[by_place]
    computes = program.of(Code.FORWARD, Code.BACKWARD, Code.INPUT_GRAD, Code.WEIGHT_GRAD, Code.RECOMPUTE)
    read = np.where(computes, np.where(program.version >= 0, program.version, newest), -1)
    held = np.ones(len(rank), np.int64)
    applied = np.full(len(rank), -1, np.int64)
    for low, high in zip(starts, [*starts[1:], len(rank)], strict=True):
        of_place = by_place[low:high]
        held[of_place] = _held(newest[of_place], read[of_place])
        updating = np.flatnonzero(updates[of_place])
        following = np.searchsorted(updating, np.arange(len(of_place)))
        has_update = following < len(updating)
        applied[of_place[has_update]] = newest[of_place[updating[following[has_update]]]]
    applied[~program.of(Code.BACKWARD, Code.INPUT_GRAD, Code.WEIGHT_GRAD)] = -1
    return VersionUse(newest, read, held, applied)


def _running(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Cumulative sums that restart at each of `starts`."""
    total = np.cumsum(values)
    before = np.concatenate([[0], total])[starts]
    return np.asarray(total - np.repeat(before, np.diff([*starts, len(values)])))


def _held(newest: np.ndarray, read: np.ndarray) -> np.ndarray:
    """Number of versions held at each action: the newest, and older ones that are read now or later."""
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
    """int64 [stages], most versions that a worker holds at the same time; 1 for synchronous orders."""
    peaks = np.ones(program.stages, np.int64)
    if (program.version >= 0).any():
        np.maximum.at(peaks, program.stage, version_use(program).held)
    return peaks


def staleness(program: Program, *, warm_up: int = 0, period: int = 1) -> WeightAges:
    """Age of the weights that each gradient was computed with when it is applied; O(actions log actions).

    Args:
        program: the program; gradients that no UPDATE applies are left out.
        warm_up: first micro-batches that are left out of the mean.
        period: the mean is over a multiple of this number of micro-batches.
    """
    use = version_use(program)
    width = max(int(program.micro_batch.max()) + 1, 1) * program.work.parts
    key = program.stage * width + program.unit
    table = np.full(program.stages * width, -1, np.int64)
    forwards = np.flatnonzero(program.kind == Code.FORWARD)
    table[key[forwards]] = use.read[forwards]
    chosen = np.flatnonzero(program.of(Code.BACKWARD, Code.INPUT_GRAD) & (use.applied >= 0))
    stage = program.stage[chosen]
    ages = [use.applied[chosen] - table[key[chosen]], use.applied[chosen] - use.read[chosen]]
    number = program.micro_batch[chosen]
    end_of_mean = warm_up + (width // program.work.parts - warm_up) // period * period
    steady = (number >= warm_up) & (number < end_of_mean)
    steady = steady if steady.any() else np.ones_like(steady)
    columns = []
    for age in ages:
        largest = np.zeros(program.stages)
        np.maximum.at(largest, stage, age)
        count = np.maximum(np.bincount(stage[steady], minlength=program.stages), 1)
        columns += [largest, np.bincount(stage[steady], age[steady], program.stages) / count]
    return WeightAges(*columns)
