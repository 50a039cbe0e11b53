"""Bytes that an iteration sends over the links of every level: of an exchange, and of a pipeline that was played."""

from __future__ import annotations

import math

import numpy as np

from planner.sync import Phase, fabric_of, recipe_of, step_traffic
from planner.sync.fabric import Fabric
from planner.sync.traffic import Traffic, nothing, rank_traffic
from planner.systems._bench import Bench
from planner.systems._price import holders_of, rank_table
from planner.systems.types import LinkBytes, Point


def links_of(traffic: Traffic) -> tuple[LinkBytes, ...]:
    """Traffic by level, innermost first; levels over which nothing goes are left out."""
    return tuple(
        LinkBytes(level.level, level.out_bytes, level.in_bytes, level.total_bytes)
        for level in traffic.by_level()
        if level.total_bytes
    )


def sent_of(traffic: Traffic) -> float:
    """What all devices (and servers) send: each byte counted where it leaves a device, or a machine for another one."""
    fabric = traffic.fabric
    inside = {p.level for p in fabric.ports if not p.network}
    outside = {p.level for p in fabric.ports if p.network}
    first = {min(levels) for levels in (inside, outside) if levels}
    counted = np.array([p.level in first or p.child < 0 for p in fabric.ports], dtype=bool)
    return float(traffic.out_bytes[counted].sum()) if len(counted) else 0.0


def point_traffic(bench: Bench, point: Point, exchanges: np.ndarray) -> Traffic:
    """Bytes of a point's transfers between stages, and of its exchanges as rings in the order of ranks.

    Args:
        bench: model, cluster and job.
        point: what was decided.
        exchanges: by stage, how often its gradients are exchanged in an iteration.
    """
    table, holders = rank_table(point), holders_of(point)
    fabric = fabric_of(bench.cluster, np.unique(table).tolist())
    place = {rank: i for i, rank in enumerate(fabric.ranks)}
    positions = np.vectorize(place.__getitem__, otypes=[np.int64])(table)
    total = nothing(fabric)
    for stage in range(len(point.stages)):
        own = positions[:, list(holders[stage])]
        if stage:
            before = positions[:, list(holders[stage - 1])]
            total = total + _passed(fabric, bench, point, stage, (before, own))
        total = total + _exchanged(fabric, bench, point, stage, np.unique(own), float(exchanges[stage]))
    return total


def _passed(fabric: Fabric, bench: Bench, point: Point, stage: int, ends: tuple[np.ndarray, np.ndarray]) -> Traffic:
    """Activations one way and their gradients the other, dealt to the replicas in turn."""
    costs, start = bench.costs(point.micro_batch), point.stages[stage].start
    before, own = ends
    turns = np.arange(math.lcm(before.shape[1], own.shape[1]))
    source = before[:, turns % before.shape[1]].ravel()
    target = own[:, turns % own.shape[1]].ravel()
    each = point.micro_batches / len(turns)
    forth = rank_traffic(fabric, source, target, each * float(costs.boundary_bytes[start]))
    return forth + rank_traffic(fabric, target, source, each * float(costs.gradient_boundary_bytes[start]))


def _exchanged(fabric: Fabric, bench: Bench, point: Point, stage: int, group: np.ndarray, times: float) -> Traffic:
    """What replicas exchange around rings of them: once an iteration, or in every pass."""
    total, choice = nothing(fabric), point.stages[stage]
    elements = float(bench.tables(point.micro_batch).elements[choice.start, choice.stop])
    for step in recipe_of(point.zero).steps if len(group) > 1 else ():
        runs = times if step.phase is Phase.END else point.micro_batches * point.copies / len(group)
        total = total + step_traffic(fabric, step, members=group) * (runs * elements * step.payload(bench.precision))
    return total
