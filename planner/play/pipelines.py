"""Schedules played out by name and numbers."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from planner import schedules
from planner.play.engine import StageTimes, Trace, Transfers, run
from planner.schedules.compiling import compile_orders
from planner.schedules.program import Program
from planner.schedules.types import Pipeline


def play(
    schedule: str,
    replicas: Sequence[int],
    micro_batches: int,
    times: StageTimes,
    *,
    transfers: Transfers = Transfers.BLOCKING,
) -> Trace:
    """Play one iteration of one copy of a pipeline.

    Args:
        schedule: name of the schedule.
        replicas: of each stage, in one copy.
        micro_batches: of one copy.
        times: seconds by stage; `sync_s` is what is not hidden behind backward work.
        transfers: what a transfer between stages occupies.

    Raises:
        UsageError: no schedule has that name.
        PlanError: replicas do not divide the micro-batches, or times are for fewer stages.

    O(actions): about 2 us an action, 1 us when the same pipeline was played before.
    """
    return run(_program(schedule, tuple(replicas), micro_batches), times, transfers=transfers)


def bubble_fraction(trace: Trace) -> float:
    """Share of all workers' time up to the end of the iteration in which nothing is computed."""
    whole = trace.program.workers * trace.makespan_s
    return float(1.0 - np.sum(trace.compute_s()) / whole) if whole > 0 else 0.0


@functools.lru_cache(maxsize=8)
def _program(schedule: str, replicas: tuple[int, ...], micro_batches: int) -> Program:
    return compile_orders(schedules.get(schedule).order(Pipeline(replicas, micro_batches)))
