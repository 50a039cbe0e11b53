"""Are orders of one's own whole: numbers without gaps, sends with receives, every gradient applied by an update?

What cannot run at all is found when they are compiled; this is what would run and train something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from planner.schedules.program import (
    BACKWARD,
    INPUT_GRAD,
    LAUNCH_SYNC,
    SYNC,
    UPDATE,
    WEIGHT_GRAD,
    Program,
)
from planner.schedules.types import Action, ActionKind, OrderError, WeightPolicy, Work
from planner.schedules.versions import version_use

COUNTED = (ActionKind.SYNC, ActionKind.LAUNCH_SYNC, ActionKind.UPDATE)
"""Kinds whose number is that of an exchange or update, not of a micro-batch."""

_ENDS = (ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)
_SPARSE = 64
"""Times as many pairs of stage and micro-batch as actions: such orders cannot be whole."""


def check_numbers(work: Work) -> None:
    """Refuse orders whose stages or micro-batches leave a number out, or that evict to nobody; O(actions).

    Raises:
        OrderError: names the action that shows it.
    """
    stages = {action.stage for action in _actions(work)}
    numbers = {action.micro_batch for action in _actions(work) if action.kind not in COUNTED}
    _without_gap(work, stages, "stage", lambda action: action.stage)
    _without_gap(work, numbers, "micro-batch", lambda action: -1 if action.kind in COUNTED else action.micro_batch)
    forwards = [action for action in _actions(work) if action.kind is ActionKind.FORWARD]
    wanted = len(stages) * len(numbers) * work.parts
    if wanted > _SPARSE * max(1, len(forwards)):
        message = f"{len(forwards)} forwards for {len(stages)} stages and {len(numbers)} micro-batches"
        raise _fault(work, lambda _: True, message, "run every micro-batch through every stage")
    workers = max(work.lane_workers, default=-1) + 1
    for lane, worker in enumerate(work.lane_workers):
        for index, action in enumerate(work.lanes[lane]):
            if action.kind is ActionKind.EVICT and (action.peer >= workers or action.peer == worker):
                whom = "the worker itself" if action.peer == worker else f"worker {action.peer} of {workers}"
                message = f"{replace(action, peer=-1)} evicts to {whom}"
                hint = "name another worker, or none for the host"
                raise OrderError(message, lane=lane, index=index, where=f"worker {worker}", hint=hint)


def check_whole(program: Program) -> None:
    """Refuse orders in which a worker exchanges or updates what it does not compute, or drops gradients; O(actions).

    Raises:
        OrderError: names the action.
    """
    place = program.worker * program.stages + program.stage
    ends = program.of(BACKWARD, INPUT_GRAD, WEIGHT_GRAD)
    foreign = np.flatnonzero(program.of(SYNC, LAUNCH_SYNC, UPDATE) & ~np.isin(place, place[ends]))
    if len(foreign):
        at = int(foreign[0])
        message = f"{program.label(at)} is of a stage of which worker {program.worker[at]} computes nothing"
        raise program.error(at, message, "leave it to the workers that have the stage")
    if policy_of(program.work).synchronous:
        _exchanged_last(program, place, ends)
        return
    lost = np.flatnonzero(ends & (version_use(program).applied < 0))
    if len(lost):
        at = int(lost[-1])
        message = f"no update of stage {program.stage[at]} comes after {program.label(at)}: its gradient is dropped"
        raise program.error(at, message, f"put U{program.stage[at]} after it")


def _exchanged_last(program: Program, place: np.ndarray, ends: np.ndarray) -> None:
    """Where the pipeline drains, a stage's exchange comes after all of its gradients, its update after the exchange."""
    for code, before, what in (
        (SYNC, ends, "is exchanged"),
        (LAUNCH_SYNC, ends, "is exchanged"),
        (UPDATE, program.kind == SYNC, "updates the weights"),
    ):
        last = np.full(program.workers * program.stages * program.lanes, -1, np.int64)
        key = place * program.lanes + program.lane
        chosen = np.flatnonzero(before)
        np.maximum.at(last, key[chosen], chosen)
        early = np.flatnonzero((program.kind == code) & (last[key] > np.arange(len(key))))
        if len(early):
            at = int(early[0])
            message = f"{program.label(at)} {what} before {program.label(last[key[at]])} on the same worker"
            raise program.error(at, message, "put it after")


def policy_of(work: Work) -> WeightPolicy:
    """What orders do with their weights: without updates, or with each after all gradients of its stage, `sync`."""
    if not any(action.kind is ActionKind.UPDATE for action in _actions(work)):
        return WeightPolicy.SYNC
    if any(action.version >= 0 for action in _actions(work)):
        return WeightPolicy.STASH
    for lane in by_worker(work):
        ended: dict[int, int] = {a.stage: at for at, a in enumerate(lane) if a.kind in _ENDS}
        places: dict[int, list[int]] = {}
        for at, action in enumerate(lane):
            if action.kind is ActionKind.UPDATE:
                places.setdefault(action.stage, []).append(at)
        if any(len(own) > 1 or own[0] < ended.get(stage, -1) for stage, own in places.items()):
            return WeightPolicy.NEWEST
    return WeightPolicy.SYNC


def by_worker(work: Work) -> list[list[Action]]:
    """The lanes of each worker one after the other."""
    found: list[list[Action]] = [[] for _ in range(max(work.lane_workers, default=-1) + 1)]
    for worker, lane in zip(work.lane_workers, work.lanes, strict=True):
        found[worker] += lane
    return found


def _actions(work: Work) -> Iterator[Action]:
    return (action for lane in work.lanes for action in lane)


def _without_gap(work: Work, found: Iterable[int], what: str, number: Callable[[Action], int]) -> None:
    known = set(found)
    missing = next((k for k in range(max(known, default=-1) + 1) if k not in known), -1)
    if missing >= 0 or not known:
        gap = f"{what} {max(missing, 0)} has no actions"
        hint = f"number {what}es from 0 without gaps" if what.endswith("h") else f"number {what}s from 0 without gaps"
        raise _fault(work, lambda action: number(action) > missing, gap, hint)


def _fault(work: Work, shows: Callable[[Action], bool], message: str, hint: str) -> OrderError:
    """The error at the first action that shows it."""
    for lane, actions in enumerate(work.lanes):
        for index, action in enumerate(actions):
            if shows(action):
                where = f"worker {work.lane_workers[lane]}"
                return OrderError(f"{message}, but {action} is there", lane=lane, index=index, where=where, hint=hint)
    return OrderError(message, lane=0, index=0, hint=hint)
