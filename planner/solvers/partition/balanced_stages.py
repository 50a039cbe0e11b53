"""One pipeline over all devices, balanced as BaPipe would cut a chain."""

from __future__ import annotations

import numpy as np

from planner.hardware.types import Cluster
from planner.memory import fits
from planner.solvers.partition.bapipe_dp import solve_bapipe
from planner.solvers.partition.replicated_stages import levels_of
from planner.space.cuts import least_need
from planner.space.partition.bapipe import BaPipeProblem, BaPipeSchedule
from planner.space.stage_tables import StageTables

TIME_LIMIT_S = 4.0
"""For one partition problem."""


def balanced_stages(
    tables: StageTables, cluster: Cluster, devices: int, micro_batches: int, form: BaPipeSchedule, limit_s: float
) -> tuple[int, ...] | None:
    """Boundaries of the stages, one a device; None where none fit, or where none can be below the limit.

    Args:
        tables: of the chain.
        cluster: the machine.
        devices: that are used, in line.
        micro_batches: of an iteration.
        form: the order of work.
        limit_s: slower pipelines do not matter.
    """
    costs, chosen = tables.costs, tables.precision
    count = min(devices, len(costs.parameter_elements))
    fastest_s = float((costs.forward_s + costs.backward_s).min(axis=0).sum()) / count
    if count < 2 or micro_batches * fastest_s >= limit_s or not _may_fit(tables, cluster, count, micro_batches):
        return None
    types, (_, speeds) = cluster.device_types[:count], levels_of(cluster, count)
    problem = BaPipeProblem(
        (costs.micro_batch,),
        costs.forward_s[types][None],
        costs.backward_s[types][None],
        np.diagonal(costs.saved_bytes)[None].copy(),
        costs.boundary_bytes[None],
        costs.parameter_elements * (chosen.weight_bytes + chosen.gradient_bytes + tables.state_bytes) / 2,
        np.array([float(cluster.devices[t].usable_bytes) for t in types]),
        min(speeds),
        micro_batches * costs.micro_batch,
        schedules=(form,),
        exact_features=True,
    )
    decision = solve_bapipe(problem, time_limit_s=TIME_LIMIT_S).decision
    return None if decision is None else decision.boundaries


def _may_fit(tables: StageTables, cluster: Cluster, count: int, micro_batches: int) -> bool:
    """Whether some cut into so many stages leaves room for the features of 1F1B."""
    needs = [tables.needed_bytes(min(micro_batches, count - s)) for s in range(count)]
    return fits(least_need(needs, tables.real), max(d.usable_bytes for d in cluster.devices))
