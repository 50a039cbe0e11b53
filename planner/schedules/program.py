"""Orders of work as arrays: who waits for whom, and in what sequence all can run, or the cycle that prevents it.

Dependencies: FORWARD of (stage, micro-batch) needs FORWARD of the stage before; BACKWARD (or INPUT_GRAD) needs its
own FORWARD and the BACKWARD (or INPUT_GRAD) of the stage after; WEIGHT_GRAD needs its own INPUT_GRAD; RECOMPUTE its
own FORWARD. Where an order has SENDs and RECEIVEs, what needs a tensor follows its RECEIVE, which needs the SEND.
SYNC of a stage is a collective of all workers that have one; it begins when all have come to their SYNC, or to their
LAUNCH_SYNC where they have one. What was evicted must be loaded before its backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.schedules.types import Action, ActionKind, OrderError, Work

KINDS = tuple(ActionKind)
"""Kinds by code: `Program.kind` holds indices into this."""

(
    FORWARD,
    BACKWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    SYNC,
    UPDATE,
    RECOMPUTE,
    SEND_ACTIVATION,
    RECEIVE_ACTIVATION,
    SEND_GRADIENT,
    RECEIVE_GRADIENT,
    EVICT,
    LOAD,
    LAUNCH_SYNC,
) = range(len(KINDS))
CODES = {kind: code for code, kind in enumerate(KINDS)}


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """All actions of all lanes, lane by lane, and what each waits for.

    Attributes:
        kind: int8 [actions], index into `KINDS`.
        stage: int64 [actions].
        micro_batch: int64 [actions], -1 for SYNC and UPDATE without a number.
        worker: int64 [actions].
        offsets: int64 [lanes + 1]; lane k owns actions `offsets[k]:offsets[k + 1]`, in its order.
        source: int64 [actions]; the action of a neighbouring stage whose tensor this one needs, -1 when none.
        sequence: int64 [actions]; all actions in an order in which they can run.
        lane: int64 [actions], ascending; equal to `worker` when each worker has one lane.
        part: int64 [actions], sub-sequence, -1 when whole.
        peer: int64 [actions], worker that keeps what is evicted.
        version: int64 [actions], version of the weights that is read, -1 for the newest.
        paired: bool [actions], runs as one with the action before it.
        after: int64 [actions]; the action of the same worker that this one needs although its lane does not make sure
            of it (it runs on another lane, or goes on after its lane has passed it), -1 when none.
        exchange: int64 [actions]; the collective that a SYNC waits for or a LAUNCH_SYNC begins, -1 for others.
        work: what it was compiled from.
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
        """int64 [actions], number of the micro-batch's sub-sequence among all of them; below 0 without micro-batch."""
        return np.asarray(self.micro_batch * self.work.parts + np.maximum(self.part, 0))

    def of(self, *kinds: int) -> np.ndarray:
        """bool [actions], whether the kind is one of these."""
        return np.asarray(np.isin(self.kind, kinds))

    def label(self, action: int) -> str:
        """How an action is written in messages: `B2.5` is the backward of stage 2 for micro-batch 5."""
        kind = KINDS[self.kind[action]]
        return str(Action(kind, int(self.stage[action]), int(self.micro_batch[action]), int(self.part[action])))

    def error(self, action: int, message: str, hint: str = "") -> OrderError:
        """The error that this action is at fault."""
        lane = int(self.lane[action])
        where = f"worker {self.worker[action]}"
        return OrderError(message, lane=lane, index=int(action - self.offsets[lane]), where=where, hint=hint)
