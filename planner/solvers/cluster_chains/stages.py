"""Stages of a job's blocks on a cluster as published systems cut them: BaPipe, PipeDream, HetPipe.

For HetPipe also the virtual workers: the devices of each, the cut of each kind, and its devices in the cut's order.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from planner.errors import UsageError, divides
from planner.hardware.collectives import send_terms
from planner.hardware.tiers import moved_bytes
from planner.hardware.types import Cluster, Collective
from planner.memory import fits
from planner.solvers.cluster_chains.chain_dp import FastestLine, solve_chain
from planner.solvers.cluster_chains.chain_schedules import BaPipeSchedule, bapipe, hetpipe
from planner.solvers.cluster_chains.hierarchical_dp import solve_nested
from planner.solvers.cluster_chains.pipedream import PipeDreamProblem, ReplicatedStage
from planner.solvers.cluster_chains.pipedream_terms import LayerDag, Memory, Released, chain_layers
from planner.solvers.cluster_chains.search import best_decision
from planner.space.cuts import StageTables, balanced, least_need, stages_of
from planner.space.types import BlockCosts, StageChoice

T = TypeVar("T")

TIME_LIMIT_S = 4.0
"""Seconds for one partition problem."""


def levels_of(cluster: Cluster, devices: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Units and bandwidths (bytes per second) of the levels that so many devices span, innermost first."""
    sizes, speeds, devices_left = [], [], devices
    for level in cluster.levels:
        size = min(level.size, devices_left)
        if size > 1:
            sizes.append(size)
            speeds.append(level.device_byte_per_s * level.efficiency)
        devices_left = max(1, devices_left // level.size)
    return (tuple(sizes) or (1,)), (tuple(speeds) or (math.inf,))


def carried(cluster: Cluster, devices: int) -> list[float]:
    """By number of neighbouring devices, from 1 to all: bytes per second that their ports send to the others."""
    rates = []
    for count in range(1, devices + 1):
        group_devices, least_rate = 1, math.inf
        for level in cluster.levels:
            if group_devices < devices and level.size > 1:
                groups = -(-count // group_devices)
                rate = min(groups * level.byte_per_s, count * level.device_byte_per_s) * level.efficiency
                least_rate = min(least_rate, rate)
            group_devices *= level.size
        rates.append(least_rate)
    return rates


def balanced_stages(
    tables: StageTables, cluster: Cluster, devices: int, micro_batches: int, schedule: BaPipeSchedule, limit_s: float
) -> tuple[int, ...] | None:
    """Boundaries of BaPipe's stages, one per device; None if none fit or none can be below the time limit.

    Args:
        tables: stage tables of the chain.
        cluster: the cluster.
        devices: number of devices, in line.
        micro_batches: of an iteration.
        schedule: the order of work.
        limit_s: iteration time from which on pipelines are not searched for, seconds.
    """
    costs, precision = tables.costs, tables.precision
    count = min(devices, len(costs.parameter_elements))
    fastest_s = float((costs.forward_s + costs.backward_s).min(axis=0).sum()) / count
    if count < 2 or micro_batches * fastest_s >= limit_s or not _may_fit(tables, cluster, count, micro_batches):
        return None
    types, (_, speeds) = cluster.device_types[:count], levels_of(cluster, count)
    held_bytes = precision.held_weight_bytes + precision.held_gradient_bytes + tables.state_bytes
    problem = bapipe(
        (costs.forward_s + costs.backward_s)[types],
        np.diagonal(costs.saved_bytes).copy(),
        costs.boundary_bytes,
        costs.parameter_elements * held_bytes / 2,
        np.array([float(cluster.devices[t].usable_bytes) for t in types]),
        min(speeds),
        micro_batches,
        schedule,
    )
    decision = best_decision(problem, solve_chain, TIME_LIMIT_S)
    return None if decision is None else decision.boundaries


def _may_fit(tables: StageTables, cluster: Cluster, count: int, micro_batches: int) -> bool:
    """True if some cut into `count` stages fits with the activations of 1F1B."""
    needs = [tables.needed_bytes(min(micro_batches, count - s)) for s in range(count)]
    return fits(least_need(needs, tables.real), cluster.largest_bytes)


def overlapped_exchange_stages(
    stage_s: np.ndarray,
    weight_bytes: np.ndarray,
    cut_bytes: np.ndarray,
    ring_byte_per_s: float,
    carried_byte_per_s: Sequence[float],
    *,
    fits: Sequence[np.ndarray] = (),
    minibatches: int = 0,
) -> tuple[StageChoice, ...] | None:
    """The stages with the fastest slowest stage in steady state, if the gradient exchange overlaps the work.

    A stage of m replicas takes max(F + B, 2 (m-1)/m w / ring) / m per minibatch: a ring exchanges the gradients of one
    round of m minibatches while the next round is computed. Its transfers take (a_in + a_out) / carried(m).

    Args:
        stage_s: [n + 1, n + 1] forward and backward of blocks i..j-1 on one device; infinite where that is no stage.
        weight_bytes: [n + 1, n + 1] gradients of blocks i..j-1.
        cut_bytes: [n + 1] bytes across the cut before each block, one way; 0 at both ends.
        ring_byte_per_s: of the narrowest link of a ring.
        carried_byte_per_s: by number of replicas, from 1 to all devices: bandwidth of their ports together.
        fits: by minibatches in flight, from 1 to all devices, bool [n + 1, n + 1] whether blocks i..j-1 fit. A stage of
            r replicas with b devices on later stages has ceil(b/r) + 1 in flight. Empty for no memory limit.
        minibatches: the replicas of each stage must divide it; 0 for any number of replicas.

    Of equal plans the one with the fewest devices. None if no stages fit. O(n^2 devices^2).
    """
    devices, count = len(carried_byte_per_s), len(stage_s)
    real = ~np.tri(count, dtype=bool)
    by_replicas = [
        np.maximum(
            np.maximum(stage_s, moved_bytes(Collective.ALL_REDUCE, weight_bytes, m) / ring_byte_per_s) / m,
            (cut_bytes[:, None] + cut_bytes[None, :]) / carried,
        )
        for m, carried in enumerate(carried_byte_per_s, start=1)
    ]

    def leading(used: int) -> Iterator[tuple[int, np.ndarray]]:
        for replicas in range(1, used + 1):
            if minibatches % replicas == 0:
                in_flight = -(-(devices - used) // replicas) + 1
                allowed = real & fits[in_flight - 1] if fits else real
                yield used - replicas, np.where(allowed, by_replicas[replicas - 1], np.inf)

    first = np.where(np.arange(count)[None] == 0, 0.0, np.inf)
    line = FastestLine(0, first, range(1, devices + 1), leading)
    slowest_s, used = min((float(times[0, -1]), used) for used, times in line.best.items())
    if not math.isfinite(slowest_s):
        return None
    path = line.path(used, 0, count - 1)
    return tuple(StageChoice(start, stop, after - before) for before, after, start, stop in path)


MOST_DEVICES = 32
"""With more devices the recurrence over replicas takes too long, and all stages get the same number of replicas."""

MOST_LEVELLED = 16
"""With more devices the recurrence over levels takes too long: all devices are put on one level of slow links."""

LONGEST_ROUND = 4096
"""Largest number of minibatches after which all replicas have processed equally many."""

Stages = tuple[StageChoice, ...]


def replicated_stages(
    tables: StageTables, cluster: Cluster, devices: int, minibatches: int, room_bytes: float
) -> list[Stages]:
    """Candidate partitions of PipeDream under the memory, or without that limit if none fits.

    Args:
        tables: stage tables of the chain, for a device's minibatch.
        cluster: the cluster.
        devices: number of devices, in line.
        minibatches: of an iteration.
        room_bytes: usable memory of a device.
    """
    if devices > MOST_DEVICES:
        return list(_equal_replicas(tables, devices, room_bytes))
    for memory in (Memory(room_bytes, optimizer_per_weight=_optimizer_per_weight(tables)), Memory()):
        partitions = dict.fromkeys(_partitions(tables, cluster, devices, minibatches, memory))
        if partitions:
            return [stages for stages in partitions if math.lcm(*(stage.replicas for stage in stages)) <= LONGEST_ROUND]
    return []


def _optimizer_per_weight(tables: StageTables) -> float:
    """Bytes of gradients, optimizer state and master copies per byte of weights."""
    precision = tables.precision
    return (precision.copy_bytes + precision.held_gradient_bytes + tables.state_bytes) / precision.weight_bytes


def least_straight_bytes(tables: StageTables, devices: int) -> tuple[float, int]:
    """The least peak bytes of a device over pipelines with equally many replicas of every stage, and that one's depth.

    The runtime's reserve is not counted.
    """
    least_bytes, depth = math.inf, 1
    for depth_tried in _depths(tables, devices):
        needs = [tables.needed_bytes(depth_tried - s, depth_tried - s) for s in range(depth_tried)]
        least_bytes, depth = min((least_bytes, depth), (least_need(needs, tables.real), depth_tried))
    return least_bytes, depth


def _layers(tables: StageTables) -> LayerDag:
    """The blocks as PipeDream's profiler records them; a block's kept input counts as received, not as saved."""
    costs = tables.costs
    return chain_layers(
        (costs.forward_s + costs.backward_s).mean(axis=0).tolist(),
        (costs.parameter_elements * tables.precision.weight_bytes).tolist(),
        costs.boundary_bytes[1:].tolist(),
        np.maximum(np.diff(costs.saved_bytes[0], prepend=0.0), 0.0).tolist(),
    )


def _flat(stages: Sequence[ReplicatedStage], copies: int = 1) -> Iterator[StageChoice]:
    """The innermost stages, with the product of the replicas of all levels."""
    for stage in stages:
        if stage.inner:
            yield from _flat(stage.inner, copies * stage.replicas)
        else:
            yield StageChoice(min(stage.layers), max(stage.layers) + 1, copies * stage.replicas)


def _partitions(
    tables: StageTables, cluster: Cluster, devices: int, minibatches: int, memory: Memory
) -> Iterator[Stages]:
    """The best partitions by an overlapped ring exchange, and by the published costs.

    The released cost counts the bytes of a parameter server, 4 (m-1)/m w per worker and update; a ring moves half of
    them, so that cost is tried with halved weights as well. The paper's cost counts 2 (m-1) w for a stage of m
    replicas, m times a ring's. The caller prices the results with an overlapped ring exchange, by which 15-1, the plan
    that was measured, is the fastest for VGG-16.

    Each cost is tried level by level and with all devices on one level of the slowest links: the recurrence over levels
    splits all servers of a stage alike, so that it cannot state 15-1 on four servers of four. The memory limit slows
    the recurrence down, so it is used only if the partition without it does not fit.
    """
    layers, (sizes, speeds) = _layers(tables), levels_of(cluster, devices)
    for evenly, limited in itertools.product((0, minibatches), (False, True)):
        ports = min(speeds), carried(cluster, devices)
        stages = _beside(tables, evenly, ports, memory if limited else Memory())
        if stages:
            yield stages
    shapes = [((devices,), (min(speeds),))] + ([(sizes, speeds)] if devices <= MOST_LEVELLED else [])
    ring = replace(layers, weight_bytes=layers.weight_bytes / 2)
    priced = ((layers, Released.NOTHING), (layers, Released.COST), (ring, Released.COST))
    for (machines, links), (network, released) in itertools.product(dict.fromkeys(shapes), priced):
        problem = PipeDreamProblem(network, machines, links, released, memory=memory)
        decision = best_decision(replace(problem, memory=Memory()), solve_nested, TIME_LIMIT_S)
        if decision is not None and problem.judge(decision).violations:
            decision = best_decision(problem, solve_nested, TIME_LIMIT_S)
        if decision is not None:
            yield tuple(_flat(decision))


def _beside(tables: StageTables, minibatches: int, ports: tuple[float, list[float]], memory: Memory) -> Stages | None:
    """The best partition by an overlapped ring exchange under a memory limit; `ports`: B/s of ring and of ports."""
    in_flight_counts = range(1, len(ports[1]) + 1) if math.isfinite(memory.device_bytes) else ()
    return overlapped_exchange_stages(
        tables.stage_s,
        tables.elements * tables.precision.gradient_bytes,
        tables.costs.boundary_bytes,
        *ports,
        fits=[fits(tables.needed_bytes(y, y), memory.device_bytes) for y in in_flight_counts],
        minibatches=minibatches,
    )


def _depths(tables: StageTables, devices: int) -> list[int]:
    """Pipeline depths that divide the devices, at most one stage per block."""
    blocks = len(tables.costs.parameter_elements)
    return [d for d in range(1, min(devices, blocks) + 1) if devices % d == 0]


def _equal_replicas(tables: StageTables, devices: int, room_bytes: float) -> Iterator[Stages]:
    """The best pipeline of each depth with equally many replicas of every stage."""
    for depth in _depths(tables, devices):
        needs = [tables.needed_bytes(depth - s, depth - s) for s in range(depth)]
        marks = balanced(tables.stage_s, [fits(need, room_bytes) for need in needs])
        if marks is not None:
            yield stages_of(marks, devices // depth)


CUT_TIME_LIMIT_S = 3.0
"""Seconds for the cut of one kind of virtual worker."""

PROBE_BYTES = 1e8
"""Size of the transfer by which links are rated, bytes."""

Workers = list[list[int]]
"""Ranks of each virtual worker."""

Cut = tuple[tuple[int, ...], list[int]]
"""Boundaries, and the device type of each stage."""


def allocations(cluster: Cluster, devices: int, work_s: Sequence[float]) -> dict[str, Workers]:
    """Ranks of each virtual worker by policy: one node each (NP), the same share of every type (ED), or hybrid (HD).

    If a node is used in part, virtual workers are equal parts of nodes; without equal parts, that node is left idle.
    HD pairs the fastest type with the slowest, the second fastest with the second slowest, and so on; half of a virtual
    worker comes from each. A type left in the middle forms virtual workers of its own. HD exists only if all virtual
    workers get a node's size of devices.

    Args:
        cluster: the cluster.
        devices: number of devices, in line.
        work_s: by device type, forward and backward of the whole model.
    """
    ranks = list(range(devices))
    policies: dict[str, Workers] = {}
    size = cluster.node_size or devices
    worker_size = math.gcd(size, devices) if devices > size else devices
    worker_size = worker_size if worker_size > 1 else size
    if worker_size > 1:
        policies["NP"] = [ranks[i : i + worker_size] for i in range(0, devices - worker_size + 1, worker_size)]
    by_type: dict[int, list[int]] = {}
    for rank in ranks:
        by_type.setdefault(int(cluster.device_types[rank]), []).append(rank)
    if len(by_type) > 1:
        policies["ED"] = equal_shares(list(by_type.values()))
    if len(by_type) > 2:
        fastest_first = {cluster.devices[t].name: by_type[t] for t in sorted(by_type, key=work_s.__getitem__)}
        with contextlib.suppress(UsageError):
            policies["HD"] = [
                sorted(worker, key=lambda rank: (int(cluster.device_types[rank]), rank))
                for worker in paired_types(fastest_first, size)
            ]
    return policies


def equal_shares(types: Sequence[Sequence[T]]) -> list[list[T]]:
    """As many virtual workers as can have the same share of every type (ED), from the devices of each type."""
    count = math.gcd(*map(len, types))
    shares = [len(devices) // count for devices in types]
    return [
        [device for devices, k in zip(types, shares, strict=True) for device in devices[v * k : (v + 1) * k]]
        for v in range(count)
    ]


def paired_types(types: Mapping[str, Sequence[T]], size: int) -> list[list[T]]:
    """Virtual workers of `size` devices, half of a fast type and half of a slow one (HD).

    The fastest type is paired with the slowest, and so on; a type left in the middle forms virtual workers of its own.

    Args:
        types: devices of each type by its name, the fastest type first.
        size: devices of a virtual worker.

    Raises:
        UsageError: the devices do not divide into such virtual workers; says which.
    """
    names, half = list(types), len(types) // 2
    groups = [(names[i], names[-1 - i]) for i in range(half)] + [(name,) for name in names[half : len(names) - half]]
    workers: list[list[T]] = []
    for group in groups:
        divides("devices of a virtual worker", size, "types", len(group))
        share = size // len(group)
        for name in group:
            divides(f"devices of type {name}", len(types[name]), "in a virtual worker", share)
        counts = {len(types[name]) // share for name in group}
        if len(counts) > 1:
            raise UsageError(f"there are not as many {' as '.join(group)}", hint="use another policy")
        workers += [
            [device for name in group for device in types[name][v * share : (v + 1) * share]]
            for v in range(counts.pop())
        ]
    return workers


def kinds(cluster: Cluster, workers: Workers) -> list[Workers]:
    """Virtual workers grouped by the types of their devices."""
    by_types: dict[tuple[int, ...], Workers] = {}
    for ranks in workers:
        by_types.setdefault(tuple(sorted(cluster.device_types[ranks].tolist())), []).append(ranks)
    return list(by_types.values())


def virtual_worker_cut(tables: StageTables, cluster: Cluster, ranks: Sequence[int], concurrent: int) -> Cut | None:
    """A virtual worker's best cut; None if nothing fits.

    Args:
        tables: stage tables of the chain, for a mini-batch.
        cluster: the cluster.
        ranks: its devices.
        concurrent: mini-batches in its pipeline.
    """
    costs = tables.costs
    counts = Counter(int(t) for t in cluster.device_types[list(ranks)])
    types = sorted(counts)
    problem = hetpipe(
        (costs.forward_s + costs.backward_s)[types],
        costs.parameter_elements * tables.precision.weight_bytes,
        np.diagonal(costs.saved_bytes).copy(),
        costs.boundary_bytes,
        tuple(counts[t] for t in types),
        np.array([float(cluster.devices[t].usable_bytes) for t in types]),
        _speeds(cluster, ranks, types),
        concurrent=concurrent,
        optimizer_per_weight=_optimizer_per_weight(tables),
        use_all=len(ranks) <= len(costs.parameter_elements),
    )
    decision = best_decision(problem, solve_chain, CUT_TIME_LIMIT_S)
    return None if decision is None else (decision.boundaries, [types[kind] for kind in decision.types])


def _speeds(cluster: Cluster, ranks: Sequence[int], types: Sequence[int]) -> np.ndarray:
    """[t, t] bytes per second between devices of two types within the virtual worker."""
    speeds = np.full((len(types), len(types)), np.inf)
    of_type = cluster.device_types
    for i, a in enumerate(types):
        for j, b in enumerate(types):
            pairs = [(r, s) for r in ranks for s in ranks if r != s and of_type[r] == a and of_type[s] == b]
            if pairs:
                seconds = send_terms(cluster, *np.asarray(pairs).T).seconds(PROBE_BYTES)
                speeds[i, j] = PROBE_BYTES / float(seconds.max())
    return speeds


def dealt(costs: BlockCosts, cluster: Cluster, workers: Workers, cut: Cut) -> tuple[int, ...]:
    """Ranks of the stages of a cut, virtual worker by virtual worker: by type, or by speed if the types differ."""
    boundaries, types = cut
    order: list[int] = []
    for ranks in workers:
        same_types = sorted(cluster.device_types[ranks].tolist()) == sorted(types)
        order += _in_order(cluster, ranks, types) if same_types else _matched(costs, cluster, ranks, boundaries)
    return tuple(order)


def _in_order(cluster: Cluster, ranks: Sequence[int], types: Sequence[int]) -> list[int]:
    """A virtual worker's devices in the order of their types."""
    free = {t: [r for r in ranks if int(cluster.device_types[r]) == t] for t in types}
    return [free[t].pop(0) for t in types]


def _matched(costs: BlockCosts, cluster: Cluster, ranks: Sequence[int], boundaries: Sequence[int]) -> list[int]:
    """A virtual worker's devices by stage: the heaviest stage gets the fastest device, and so on."""
    work_s = (costs.forward_s + costs.backward_s).sum(axis=1)
    fastest = sorted(ranks, key=lambda r: (float(work_s[cluster.device_types[r]]), r))
    mean = (costs.forward_s + costs.backward_s).mean(axis=0)
    stages = range(len(boundaries) - 1)
    heaviest = sorted(stages, key=lambda s: (-float(mean[boundaries[s] : boundaries[s + 1]].sum()), s))
    places = dict(zip(heaviest, fastest, strict=False))
    return [places[stage] for stage in stages]
