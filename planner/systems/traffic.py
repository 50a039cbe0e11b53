"""Bytes that an iteration of a configuration sends over the links of every level."""

from __future__ import annotations

import math

import numpy as np

from planner import schedules
from planner.space import Configuration, lay_workers
from planner.space.terms import elements_of
from planner.space.types import BlockCosts
from planner.space.workers import pipeline_of
from planner.sync import Fabric, Phase, Traffic, fabric_of, recipe_of, step_traffic
from planner.sync.traffic import nothing, rank_traffic
from planner.systems.setting import Setting
from planner.systems.types import LinkBytes


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


def traffic_of(setting: Setting, configuration: Configuration, *, exchanged: bool = True) -> Traffic:
    """Bytes of a configuration: between stages, among the ranks of a group, and of gradients and weights.

    Every rank of a stage sends its part to its like in the next stage. What ranks of a group send each other goes round
    them in line: its amount is exact, which of several links of a level carries it is not. Replicas exchange as rings.

    Args:
        setting: prices and cluster.
        configuration: what is run.
        exchanged: with the exchange of gradients and weights.
    """
    shelf = setting.shelf(configuration)
    if configuration.exchange:
        return setting.exchange(configuration).exchange.traffic
    schedule, pipeline = schedules.get(configuration.schedule), pipeline_of(configuration)
    workers, times = lay_workers(configuration, schedule), schedule.exchanges(pipeline)
    fabric = fabric_of(setting.cluster, np.unique(np.concatenate([r.ravel() for r in workers.ranks])).tolist())
    places = {rank: place for place, rank in enumerate(fabric.ranks)}
    at = np.vectorize(places.__getitem__, otypes=[np.int64])
    groups = [at(workers.groups(stage)) for stage in range(len(configuration.stages))]
    total = nothing(fabric)
    for stage, choice in enumerate(configuration.stages):
        costs, own = shelf[choice.sharding], groups[stage]
        if stage and workers.holders[stage - 1] != workers.holders[stage]:
            total = total + _passed(fabric, costs, configuration, stage, (groups[stage - 1], own))
        if choice.ranks > 1:
            total = total + _inside(fabric, setting, configuration, stage, own)
        if exchanged:
            total = total + _exchanged(fabric, setting, configuration, stage, own, times[stage])
    return total


def _passed(
    fabric: Fabric, costs: BlockCosts, configuration: Configuration, stage: int, ends: tuple[np.ndarray, np.ndarray]
) -> Traffic:
    """Activations one way and their gradients the other, dealt to the replicas in turn."""
    (before, own), boundary = ends, configuration.stages[stage].start
    turns = np.arange(math.lcm(before.shape[1], own.shape[1]))
    source = before[:, turns % before.shape[1]].ravel()
    target = own[:, turns % own.shape[1]].ravel()
    each = configuration.micro_batches / len(turns)
    forth = rank_traffic(fabric, source, target, each * float(costs.boundary_bytes[boundary]))
    return forth + rank_traffic(fabric, target, source, each * float(costs.gradient_boundary_bytes[boundary]))


def _inside(fabric: Fabric, setting: Setting, configuration: Configuration, stage: int, own: np.ndarray) -> Traffic:
    """What the ranks of each group send each other, in every pass."""
    choice = configuration.stages[stage]
    sharded = setting.shardings(configuration)[choice.sharding].sharded
    each = configuration.micro_batches / own.shape[1] * float(sharded.sent_bytes[choice.start : choice.stop].sum())
    return rank_traffic(fabric, own.ravel(), np.roll(own, -1, axis=2).ravel(), each)


def _exchanged(
    fabric: Fabric, setting: Setting, configuration: Configuration, stage: int, own: np.ndarray, times: float
) -> Traffic:
    """What equal ranks of a stage's replicas exchange: so many times an iteration, or in every pass."""
    total, choice = nothing(fabric), configuration.stages[stage]
    elements, _ = elements_of(setting.shelf(configuration)[choice.sharding], range(choice.start, choice.stop))
    passes = configuration.micro_batches / own.shape[1]
    for rank in range(choice.ranks):
        members = np.unique(own[..., rank])
        for step in recipe_of(configuration.zero).steps if len(members) > 1 else ():
            runs = times if step.phase is Phase.END else passes
            payload = runs * elements * step.payload(setting.precision)
            total = total + step_traffic(fabric, step, members=members) * payload
    return total
