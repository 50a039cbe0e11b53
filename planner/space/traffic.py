"""Bytes that an iteration of a configuration sends over the links of every level."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from planner import schedules
from planner.costs.precision import Precision
from planner.exchange import Fabric, Phase, PortTraffic, fabric_of, recipe_of
from planner.exchange.collective_schemes import step_traffic
from planner.exchange.fabric import nothing, rank_traffic
from planner.hardware import moved_bytes
from planner.hardware.types import Cluster
from planner.space.configuration import Configuration
from planner.space.terms import shard_elements_of
from planner.space.types import BlockCosts
from planner.space.workers import in_turn, lay_workers, pipeline_of


def traffic_of(
    configuration: Configuration,
    cluster: Cluster,
    shelf: Mapping[int, BlockCosts],
    inside_bytes: Mapping[int, np.ndarray],
    precision: Precision | None,
) -> PortTraffic:
    """Bytes that an iteration sends between stages, inside replicas, and for gradients and weights.

    Every rank of a stage sends its part to the equal rank of the next stage. Bytes inside a replica are counted as a
    ring over its ranks: their number is exact, but not which of several links of a level carries them. Replicas
    exchange as rings.

    Args:
        configuration: what is run, without an exchange scheme (whose exchange counts its own bytes).
        cluster: the machine.
        shelf: costs of the blocks by number of the sharding.
        inside_bytes: by number of the sharding, float64 [n] bytes that a rank sends inside its replica, by block and
            micro-batch.
        precision: number formats in which gradients and weights are exchanged; None without their exchange.
    """
    schedule, pipeline = schedules.get(configuration.schedule), pipeline_of(configuration)
    workers, exchange_counts = lay_workers(configuration, schedule), schedule.exchanges(pipeline)
    fabric = fabric_of(cluster, np.unique(np.concatenate([r.ravel() for r in workers.ranks])).tolist())
    places = {rank: place for place, rank in enumerate(fabric.ranks)}
    places_of = np.vectorize(places.__getitem__, otypes=[np.int64])
    groups = [places_of(workers.groups(stage)) for stage in range(len(configuration.stages))]
    total = nothing(fabric)
    for stage, choice in enumerate(configuration.stages):
        stage_ranks = groups[stage]
        if stage and workers.holders[stage - 1] != workers.holders[stage]:
            ends = groups[stage - 1], stage_ranks
            total = total + _passed(fabric, shelf[choice.sharding], configuration, stage, ends)
        if choice.ranks > 1:
            sent_bytes = float(inside_bytes[choice.sharding][choice.start : choice.stop].sum())
            next_ranks = np.roll(stage_ranks, -1, axis=2)
            passes = configuration.micro_batches / stage_ranks.shape[1]
            total = total + rank_traffic(fabric, stage_ranks.ravel(), next_ranks.ravel(), passes * sent_bytes)
        if precision is not None:
            own = stage, stage_ranks, exchange_counts[stage]
            total = total + _exchanged(fabric, shelf[choice.sharding], precision, configuration, own)
    return total


def _passed(
    fabric: Fabric, costs: BlockCosts, configuration: Configuration, stage: int, ends: tuple[np.ndarray, np.ndarray]
) -> PortTraffic:
    """Bytes of activations to a stage and of their gradients back; replicas take micro-batches in turn."""
    sides, boundary = in_turn(*ends), configuration.stages[stage].start
    source, target = (side.ravel() for side in sides)
    each = configuration.micro_batches / sides[0].shape[1]
    forth = rank_traffic(fabric, source, target, each * float(costs.boundary_bytes[boundary]))
    return forth + rank_traffic(fabric, target, source, each * float(costs.gradient_boundary_bytes[boundary]))


def _exchanged(
    fabric: Fabric,
    costs: BlockCosts,
    precision: Precision,
    configuration: Configuration,
    place: tuple[int, np.ndarray, float],
) -> PortTraffic:
    """Bytes that a stage exchanges among ranks of a replica that hold the same elements, then among replicas.

    `place` has the stage, its ranks and the exchanges of an iteration: so often run steps at the end, those of a pass
    once a micro-batch.
    """
    stage, own, times = place
    total, choice = nothing(fabric), configuration.stages[stage]
    elements = shard_elements_of(costs, range(choice.start, choice.stop))
    passes = configuration.micro_batches / own.shape[1]
    for inner in costs.inner_replicas:
        held, turned = float(inner.elements[choice.start : choice.stop].sum()), np.roll(own, -1, axis=2)
        for step in recipe_of(configuration.zero, configuration.shard_over).among_inner:
            runs = times if step.phase is Phase.END else passes
            each = runs * moved_bytes(step.collective, held * step.payload(precision), inner.ranks)
            total = total + rank_traffic(fabric, own.ravel(), turned.ravel(), each)
    for rank in range(choice.ranks):
        members = np.unique(own[..., rank])
        for step in recipe_of(configuration.zero, configuration.shard_over).steps if len(members) > 1 else ():
            runs = times if step.phase is Phase.END else passes
            payload = runs * elements * step.payload(precision)
            total = total + step_traffic(fabric, step, members=members) * payload
    return total
