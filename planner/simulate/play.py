"""Schedules played out by name and numbers: how the best few decisions are ranked before one becomes a plan."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from planner import schedules
from planner.schedules.compiling import compile_orders
from planner.schedules.program import Program
from planner.schedules.types import Pipeline
from planner.simulate.engine import StageTimes, Trace, Transfers, run
from planner.space.types import Decision, Evaluation


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


def simulate_decision(
    decision: Decision, evaluation: Evaluation, *, transfers: Transfers = Transfers.BLOCKING
) -> Trace:
    """Play a judged decision; its copies are alike, so one is played.

    Raises:
        PlanError: the evaluation has no terms (the decision is malformed).
    """
    terms = evaluation.stages
    times = StageTimes.of(
        [t.forward_s for t in terms],
        [t.backward_s for t in terms],
        [t.receive_s for t in terms],
        [t.exposed_sync_s for t in terms],
        [t.update_s for t in terms],
        return_s=[t.return_s for t in terms],
    )
    replicas = [stage.replicas for stage in decision.stages]
    return play(decision.schedule, replicas, decision.micro_batches, times, transfers=transfers)


def bubble_fraction(trace: Trace) -> float:
    """Share of all workers' time up to the end of the iteration in which nothing is computed."""
    whole = trace.program.workers * trace.makespan_s
    return float(1.0 - np.sum(trace.compute_s()) / whole) if whole > 0 else 0.0


@functools.lru_cache(maxsize=8)
def _program(schedule: str, replicas: tuple[int, ...], micro_batches: int) -> Program:
    return compile_orders(schedules.get(schedule).order(Pipeline(replicas, micro_batches)))
