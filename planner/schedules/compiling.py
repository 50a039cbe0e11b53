"""From orders of work to a program: arrays of actions, what each waits for, an order in which all of them can run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.errors import PlanError
from planner.schedules._links import link
from planner.schedules._sequence import find_sequence
from planner.schedules.program import CODES, Program
from planner.schedules.types import Action, Work
from planner.schedules.versions import check_versions


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
    program.sequence[:] = find_sequence(program)
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
