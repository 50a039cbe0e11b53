"""Orders of work as arrays: who waits for whom, and in what sequence all can run, or the cycle that prevents it.

Dependencies: FORWARD of (stage, micro-batch) needs FORWARD of the stage before; BACKWARD (or INPUT_GRAD) needs its
own FORWARD and the BACKWARD (or INPUT_GRAD) of the stage after; WEIGHT_GRAD needs its own INPUT_GRAD; SYNC of a stage
is a collective of all workers that have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.errors import PlanError
from planner.schedules.types import Action, ActionKind

KINDS = tuple(ActionKind)
"""Kinds by code: `Program.kind` holds indices into this."""

FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD, SYNC, UPDATE = range(len(KINDS))
_CODE = {kind: code for code, kind in enumerate(KINDS)}
_SHOWN_CYCLE = 12


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """All actions of all workers, worker by worker, and what each waits for.

    Attributes:
        kind: int8 [actions], index into `KINDS`.
        stage: int64 [actions].
        micro_batch: int64 [actions], -1 for SYNC and UPDATE.
        worker: int64 [actions], ascending.
        offsets: int64 [workers + 1]; worker w owns actions `offsets[w]:offsets[w + 1]`, in its order.
        source: int64 [actions]; the action of a neighbouring stage whose tensor this one needs, -1 when none.
        sequence: int64 [actions]; all actions in an order in which they can run.
    """

    kind: np.ndarray
    stage: np.ndarray
    micro_batch: np.ndarray
    worker: np.ndarray
    offsets: np.ndarray
    source: np.ndarray
    sequence: np.ndarray

    @property
    def stages(self) -> int:
        """Number of stages."""
        return int(self.stage.max()) + 1

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.offsets) - 1

    def label(self, action: int) -> str:
        """How an action is written in messages: `B2.5` is the backward of stage 2 for micro-batch 5."""
        return str(Action(KINDS[self.kind[action]], int(self.stage[action]), int(self.micro_batch[action])))


def compile_orders(orders: Sequence[Sequence[Action]]) -> Program:
    """Turn the orders of all workers into arrays and find an order in which all actions can run; O(actions).

    Raises:
        PlanError: an action appears twice, lacks the one it needs, runs a backward away from its forward, or the
            workers wait for each other in a cycle (the message shows it).
    """
    flat = [action for order in orders for action in order]
    if not flat:
        raise PlanError("the schedule has no actions", hint="give each worker at least one forward and backward")
    lengths = [len(order) for order in orders]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    program = Program(
        kind=np.fromiter((_CODE[a.kind] for a in flat), np.int8, len(flat)),
        stage=np.fromiter((a.stage for a in flat), np.int64, len(flat)),
        micro_batch=np.fromiter((a.micro_batch for a in flat), np.int64, len(flat)),
        worker=np.repeat(np.arange(len(lengths)), lengths),
        offsets=offsets,
        source=np.full(len(flat), -1, np.int64),
        sequence=np.empty(len(flat), np.int64),
    )
    _link(program)
    program.sequence[:] = _sequence(program)
    return program


def _link(program: Program) -> None:
    """Fill `program.source` and refuse what can never run."""
    kind, stage, micro_batch = program.kind, program.stage, program.micro_batch
    compute = (kind != SYNC) & (kind != UPDATE)
    if stage.min() < 0 or (micro_batch[compute] < 0).any():
        raise PlanError("an action names a stage or micro-batch below 0", hint="number both from 0")
    width = int(micro_batch.max()) + 1
    key = stage * max(width, 1) + micro_batch
    size = program.stages * max(width, 1)

    forward = _table(program, kind == FORWARD, key, size)
    gradient = _table(program, (kind == BACKWARD) | (kind == INPUT_GRAD), key, size)
    weight = _table(program, kind == WEIGHT_GRAD, key, size)

    needs = np.flatnonzero((kind == FORWARD) & (stage > 0))
    program.source[needs] = forward[key[needs] - width]
    _require(program, needs, program.source[needs], "the forward of the stage before")
    backward = np.flatnonzero((kind == BACKWARD) | (kind == INPUT_GRAD))
    needs = backward[stage[backward] < program.stages - 1]
    program.source[needs] = gradient[key[needs] + width]
    _require(program, needs, program.source[needs], "the backward of the stage after")

    _require_here(program, backward, forward[key[backward]], "its forward")
    grads = np.flatnonzero(kind == WEIGHT_GRAD)
    _require_here(program, grads, gradient[key[grads]], "its input gradient")
    split = np.flatnonzero(kind == INPUT_GRAD)
    _require(program, split, weight[key[split]], "its weight gradient")
    forwards = np.flatnonzero(kind == FORWARD)
    _require(program, forwards, gradient[key[forwards]], "its backward")


def _table(program: Program, chosen: np.ndarray, key: np.ndarray, size: int) -> np.ndarray:
    """Action by key for the chosen actions, -1 where there is none; each key at most once."""
    indices = np.flatnonzero(chosen)
    counts = np.bincount(key[indices], minlength=size)
    if len(indices) and counts.max() > 1:
        twice = indices[np.flatnonzero(counts[key[indices]] > 1)[-1]]
        raise PlanError(
            f"{program.label(twice)} is scheduled more than once",
            where=f"worker {program.worker[twice]}",
            hint="each micro-batch runs once through each stage",
        )
    table = np.full(size, -1, np.int64)
    table[key[indices]] = indices
    return table


def _require(program: Program, needs: np.ndarray, found: np.ndarray, what: str) -> None:
    missing = needs[found < 0]
    if len(missing):
        raise PlanError(
            f"{program.label(missing[0])} needs {what}, which no worker runs",
            where=f"worker {program.worker[missing[0]]}",
            hint="schedule every micro-batch forward and backward through every stage",
        )


def _require_here(program: Program, needs: np.ndarray, found: np.ndarray, what: str) -> None:
    """The action found must exist, on the same worker, earlier in its order."""
    _require(program, needs, found, what)
    wrong = needs[(program.worker[found] != program.worker[needs]) | (found > needs)]
    if len(wrong):
        raise PlanError(
            f"{program.label(wrong[0])} does not come after {what} on the same worker",
            where=f"worker {program.worker[wrong[0]]}",
            hint="what a forward keeps is used by the backward of the same worker, later in its order",
        )


def _sequence(program: Program) -> list[int]:
    """A topological order by a worklist over workers; O(actions)."""
    source, offsets = program.source.tolist(), program.offsets.tolist()
    consumer = np.full(len(source), -1, np.int64)
    fed = np.flatnonzero(program.source >= 0)
    consumer[program.source[fed]] = program.worker[fed]
    wakes = consumer.tolist()
    collective, members = _collectives(program)
    position = offsets[:-1]
    done = bytearray(len(source))
    arrived: dict[int, list[int]] = {}
    sequence: list[int] = []
    ready = list(range(program.workers - 1, -1, -1))
    while ready:
        worker = ready.pop()
        at, end = position[worker], offsets[worker + 1]
        while at < end:
            needed = source[at]
            if needed >= 0 and not done[needed]:
                break
            if collective[at] >= 0 and not done[at]:
                waiting = arrived.setdefault(collective[at], [])
                if worker not in waiting:
                    waiting.append(worker)
                if len(waiting) < members[collective[at]]:
                    break
                for other in waiting:
                    done[at if other == worker else position[other]] = 1
                ready += [other for other in waiting if other != worker]
            done[at] = 1
            sequence.append(at)
            if wakes[at] >= 0 and wakes[at] != worker:
                ready.append(wakes[at])
            at += 1
        position[worker] = at
    if len(sequence) < len(source):
        raise _deadlock(program, position)
    return sequence


def _collectives(program: Program) -> tuple[list[int], list[int]]:
    """For each action the stage whose SYNC it is part of (-1 when none), and the members of each stage's SYNC."""
    is_sync = program.kind == SYNC
    stage_of = np.where(is_sync, program.stage, -1)
    pairs = np.unique(np.stack([program.stage[is_sync], program.worker[is_sync]]), axis=1)
    if pairs.shape[1] < int(is_sync.sum()):
        raise PlanError("a worker synchronises a stage more than once", hint="one SYNC for each stage and worker")
    return stage_of.tolist(), np.bincount(pairs[0], minlength=program.stages).tolist()


def _deadlock(program: Program, position: list[int]) -> PlanError:
    """The error that names a cycle of waiting workers."""
    worker = next(w for w in range(program.workers) if position[w] < program.offsets[w + 1])
    seen: dict[int, int] = {}
    steps: list[str] = []
    while worker not in seen:
        seen[worker] = len(steps)
        action = position[worker]
        awaited = int(program.source[action])
        if awaited < 0:
            awaited = _missing_member(program, action, position)
        steps.append(f"worker {worker} at {program.label(action)} waits for {program.label(awaited)}")
        worker = int(program.worker[awaited])
    cycle = steps[seen[worker] :]
    shown = "; ".join(cycle[:_SHOWN_CYCLE]) + (
        f"; and {len(cycle) - _SHOWN_CYCLE} more" if len(cycle) > _SHOWN_CYCLE else ""
    )
    return PlanError(
        f"the schedule deadlocks: {shown}, which never runs",
        where=f"worker {worker}",
        hint="reorder the actions of one of these workers",
    )


def _missing_member(program: Program, action: int, position: list[int]) -> int:
    """The SYNC of a worker that has not come to it yet."""
    members = np.flatnonzero((program.kind == SYNC) & (program.stage == program.stage[action]))
    return int(next(m for m in members if position[program.worker[m]] < m))
