"""Chains of a job's blocks on a cluster, cut as published systems would: as BaPipe, as PipeDream's publications and
released programs, and as HetPipe, with its virtual workers: which devices belong to which, the cut of each kind, and
its devices in order.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from planner.hardware.collectives import send_terms
from planner.hardware.tiers import moved_bytes
from planner.hardware.types import Cluster, Collective
from planner.memory import fits
from planner.solvers.partition import search_partition
from planner.space.cuts import StageTables, balanced, least_need, stages_of
from planner.space.partition import (
    BaPipeSchedule,
    Layers,
    Memory,
    PipeDreamProblem,
    ReplicatedStage,
    StageCost,
    bapipe,
    chain_layers,
    hetpipe,
)
from planner.space.types import BlockCosts, StageChoice

TIME_LIMIT_S = 4.0
"""For one partition problem."""


def levels_of(cluster: Cluster, devices: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Units and bandwidths in bytes a second of the levels that so many devices span, innermost first."""
    sizes, speeds, left = [], [], devices
    for level in cluster.levels:
        size = min(level.size, left)
        if size > 1:
            sizes.append(size)
            speeds.append(level.device_byte_per_s * level.efficiency)
        left = max(1, left // level.size)
    return (tuple(sizes) or (1,)), (tuple(speeds) or (math.inf,))


def carried(cluster: Cluster, devices: int) -> list[float]:
    """Bytes a second that the ports of so many neighbours, 1 up to all, carry together one way, to devices of all other
    groups."""
    found = []
    for count in range(1, devices + 1):
        below, least = 1, math.inf
        for level in cluster.levels:
            if below < devices and level.size > 1:
                groups = -(-count // below)
                rate = min(groups * level.byte_per_s, count * level.device_byte_per_s) * level.efficiency
                least = min(least, rate)
            below *= level.size
        found.append(least)
    return found


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
    problem = bapipe(
        (costs.micro_batch,),
        costs.forward_s[types][None],
        costs.backward_s[types][None],
        np.diagonal(costs.saved_bytes)[None].copy(),
        costs.boundary_bytes[None],
        costs.parameter_elements * (chosen.held_weight_bytes + chosen.held_gradient_bytes + tables.state_bytes) / 2,
        np.array([float(cluster.devices[t].usable_bytes) for t in types]),
        min(speeds),
        micro_batches * costs.micro_batch,
        schedules=(form,),
        exact_features=True,
    )
    decision = search_partition(problem, time_limit_s=TIME_LIMIT_S).decision
    return None if decision is None else decision.boundaries


def _may_fit(tables: StageTables, cluster: Cluster, count: int, micro_batches: int) -> bool:
    """Whether some cut into so many stages leaves room for the features of 1F1B."""
    needs = [tables.needed_bytes(min(micro_batches, count - s)) for s in range(count)]
    return fits(least_need(needs, tables.real), max(d.usable_bytes for d in cluster.devices))


def beside_the_work(
    stage_s: np.ndarray,
    weight_bytes: np.ndarray,
    cut_bytes: np.ndarray,
    ring_byte_per_s: float,
    carried_byte_per_s: Sequence[float],
    *,
    fits: Sequence[np.ndarray] = (),
    minibatches: int = 0,
) -> tuple[StageChoice, ...] | None:
    """The stages whose slowest is fastest in steady state.

    A stage of m replicas takes max(F + B, 2 (m-1)/m w / ring) / m a minibatch: while one round of m minibatches is
    exchanged by a ring, the next is worked on. What enters and leaves it passes its ports both ways: (a_in + a_out) /
    carried(m).

    Args:
        stage_s: [n + 1, n + 1] forward and backward of blocks i..j-1 on one device, infinite where that is no stage.
        weight_bytes: [n + 1, n + 1] gradients of blocks i..j-1.
        cut_bytes: [n + 1] what passes the cut in front of each block, one way; 0 at both ends.
        ring_byte_per_s: of the narrowest link of a ring.
        carried_byte_per_s: by number of replicas, from 1 up to all devices: what their ports carry together.
        fits: by minibatches in flight, from 1 up to all devices, bool [n + 1, n + 1], whether blocks i..j-1 fit then.
            A stage of r replicas with b devices behind it has ceil(b/r) + 1 in flight. Empty: memory does not matter.
        minibatches: that the replicas of every stage share evenly; 0 for any number of replicas.

    Ties go to the fewest devices. O(n^2 devices^2). None when there are no such stages.
    """
    devices = len(carried_byte_per_s)
    n = len(stage_s) - 1
    best = np.full((devices + 1, n + 1), np.inf)
    best[0, 0] = 0.0
    came: dict[tuple[int, int], tuple[int, int]] = {}
    by_replicas = [
        np.maximum(
            np.maximum(stage_s, moved_bytes(Collective.ALL_REDUCE, weight_bytes, m) / ring_byte_per_s) / m,
            (cut_bytes[:, None] + cut_bytes[None, :]) / carried,
        )
        for m, carried in enumerate(carried_byte_per_s, start=1)
    ]
    empty = np.tri(n + 1, k=0, dtype=bool)
    for used in range(1, devices + 1):
        for replicas, taken in enumerate(by_replicas[:used], start=1):
            if minibatches % replicas:
                continue
            in_flight = -(-(devices - used) // replicas) + 1
            out = empty | ~fits[in_flight - 1] if fits else empty
            options = np.maximum(best[used - replicas][:, None], np.where(out, np.inf, taken))
            source = options.argmin(axis=0)
            reached = options[source, np.arange(n + 1)]
            for j in np.nonzero(reached < best[used])[0].tolist():
                came[used, j] = (replicas, int(source[j]))
            best[used] = np.minimum(best[used], reached)
    used = int(best[:, n].argmin())
    if not math.isfinite(best[used, n]):
        return None
    stages, j = [], n
    while j:
        replicas, start = came[used, j]
        stages.append(StageChoice(start, j, replicas))
        used, j = used - replicas, start
    return tuple(reversed(stages))


MOST_DEVICES = 32
"""Above this the recurrence over replicas takes too long, and all stages get the same number."""

MOST_LEVELLED = 16
"""Above this the recurrence level by level takes too long: all devices stand on one level of the narrowest links."""

LONGEST_ROUND = 4096
"""Minibatches after which all replicas have had the same number of turns, at the most."""

Stages = tuple[StageChoice, ...]


def replicated_stages(
    tables: StageTables, cluster: Cluster, devices: int, minibatches: int, room_bytes: float
) -> list[Stages]:
    """The partitions worth judging within the memory, or without that limit where there are none within it.

    Args:
        tables: of the chain, for a device's minibatch.
        cluster: the machine.
        devices: that are used, in line.
        minibatches: of an iteration.
        room_bytes: usable memory of a device.
    """
    if devices > MOST_DEVICES:
        return list(_equal_replicas(tables, devices, room_bytes))
    chosen = tables.precision
    more = (chosen.copy_bytes + chosen.held_gradient_bytes + tables.state_bytes) / chosen.weight_bytes
    for memory in (Memory(room_bytes, optimizer_per_weight=more), Memory()):
        found = dict.fromkeys(_partitions(tables, cluster, devices, minibatches, memory))
        if found:
            return [s for s in found if math.lcm(*(stage.replicas for stage in s)) <= LONGEST_ROUND]
    return []


def least_straight_bytes(tables: StageTables, devices: int) -> tuple[float, int]:
    """What the fullest device needs at the least, over straight pipelines with as many replicas of every stage, and the
    stages of that one; the runtime's reserve left out."""
    least, depth = math.inf, 1
    for tried in _depths(tables, devices):
        needs = [tables.needed_bytes(tried - s, tried - s) for s in range(tried)]
        least, depth = min((least, depth), (least_need(needs, tables.real), tried))
    return least, depth


def _layers(tables: StageTables) -> Layers:
    """The blocks as PipeDream's profiler would see them; what a block keeps of its input is counted as received."""
    costs = tables.costs
    return chain_layers(
        (costs.forward_s + costs.backward_s).mean(axis=0).tolist(),
        (costs.parameter_elements * tables.precision.weight_bytes).tolist(),
        costs.boundary_bytes[1:].tolist(),
        np.maximum(np.diff(costs.saved_bytes[0], prepend=0.0), 0.0).tolist(),
    )


def _flat(stages: Sequence[ReplicatedStage], copies: int = 1) -> Iterator[StageChoice]:
    """The innermost stages, replicas of all levels multiplied."""
    for stage in stages:
        if stage.inner:
            yield from _flat(stage.inner, copies * stage.replicas)
        else:
            yield StageChoice(min(stage.layers), max(stage.layers) + 1, copies * stage.replicas)


def _partitions(
    tables: StageTables, cluster: Cluster, devices: int, minibatches: int, memory: Memory
) -> Iterator[Stages]:
    """The best partitions by a ring beside the work, and by the published costs.

    The released cost counts 4 (m-1)/m w a worker and update, a parameter server's bytes; a ring moves half of them, so
    it is tried with those as well, level by level and with all devices on one. The paper's counts 2 (m-1) w for a
    stage of m replicas, m times a ring's. What is judged is a ring beside the work, by which 15-1, the plan that was
    measured, is the fastest for VGG-16.

    Where servers hold several stages the recurrence over levels splits all servers of a stage alike, so that it cannot
    say 15-1 on four servers of four; one flat level over the narrowest links can. The limit of memory slows the
    recurrence down and enters where the partition without it does not fit.
    """
    layers, (sizes, speeds) = _layers(tables), levels_of(cluster, devices)
    for evenly, within in itertools.product((0, minibatches), (False, True)):
        ports = min(speeds), carried(cluster, devices)
        found = _beside(tables, evenly, ports, memory if within else Memory())
        if found:
            yield found
    shapes = [((devices,), (min(speeds),))] + ([(sizes, speeds)] if devices <= MOST_LEVELLED else [])
    ring = replace(layers, weight_bytes=layers.weight_bytes / 2)
    priced = ((layers, StageCost.PAPER), (layers, StageCost.RELEASED), (ring, StageCost.RELEASED))
    for (machines, links), (network, cost) in itertools.product(dict.fromkeys(shapes), priced):
        problem = PipeDreamProblem(network, machines, links, cost=cost, memory=memory)
        decision = search_partition(replace(problem, memory=Memory()), time_limit_s=TIME_LIMIT_S).decision
        if decision is not None and problem.judge(decision).violations:
            decision = search_partition(problem, time_limit_s=TIME_LIMIT_S).decision
        if decision is not None:
            yield tuple(_flat(decision))


def _beside(tables: StageTables, evenly: int, ports: tuple[float, list[float]], memory: Memory) -> Stages | None:
    """The best partition by a ring beside the work, within a limit of memory; rates of a ring and of ports in B/s."""
    limited = range(1, len(ports[1]) + 1) if math.isfinite(memory.device_bytes) else ()
    return beside_the_work(
        tables.stage_s,
        tables.elements * tables.precision.gradient_bytes,
        tables.costs.boundary_bytes,
        *ports,
        fits=[fits(tables.needed_bytes(y, y), memory.device_bytes) for y in limited],
        minibatches=evenly,
    )


def _depths(tables: StageTables, devices: int) -> list[int]:
    """Depths of which the devices are a multiple."""
    blocks = len(tables.costs.parameter_elements)
    return [d for d in range(1, min(devices, blocks) + 1) if devices % d == 0]


def _equal_replicas(tables: StageTables, devices: int, room_bytes: float) -> Iterator[Stages]:
    """Straight pipelines with as many replicas of every stage, for clusters beyond the recurrence."""
    for depth in _depths(tables, devices):
        needs = [tables.needed_bytes(depth - s, depth - s) for s in range(depth)]
        marks = balanced(tables.stage_s, [fits(need, room_bytes) for need in needs])
        if marks is not None:
            yield stages_of(marks, devices // depth)


CUT_TIME_LIMIT_S = 3.0
"""For the cut of one kind of virtual worker."""

PROBE_BYTES = 1e8
"""Size of the transfer whose rate stands for a link."""

Workers = list[list[int]]
"""Ranks of each virtual worker."""

Cut = tuple[tuple[int, ...], list[int]]
"""Boundaries, and the device type of each stage."""


def allocations(cluster: Cluster, devices: int, work_s: Sequence[float]) -> dict[str, Workers]:
    """Ranks of each virtual worker by policy: one node each (NP), the same share of every type (ED), or hybrid (HD).

    Where a node is used in part, virtual workers are equal parts of nodes; where none come out, it is left idle.
    HD joins the fastest type with the slowest, the second fastest with the second slowest, and so on, half of a virtual
    worker from each; a type left in the middle keeps to itself. It stands where virtual workers of a node's size come
    out whole.

    Args:
        cluster: the machine.
        devices: that are used, in line.
        work_s: by device type, forward and backward of the whole model.
    """
    ranks = list(range(devices))
    found: dict[str, Workers] = {}
    size = cluster.node_size or devices
    part = math.gcd(size, devices) if devices > size else devices
    part = part if part > 1 else size
    if part > 1:
        found["NP"] = [ranks[i : i + part] for i in range(0, devices - part + 1, part)]
    by_type: dict[int, list[int]] = {}
    for rank in ranks:
        by_type.setdefault(int(cluster.device_types[rank]), []).append(rank)
    count = math.gcd(*(len(own) for own in by_type.values()))
    if len(by_type) > 1:
        shares = [len(own) // count for own in by_type.values()]
        found["ED"] = [
            [r for own, k in zip(by_type.values(), shares, strict=True) for r in own[v * k : (v + 1) * k]]
            for v in range(count)
        ]
        hybrid = _hybrid(work_s, by_type, size)
        if hybrid is not None and len(by_type) > 2:
            found["HD"] = hybrid
    return found


def _hybrid(work_s: Sequence[float], by_type: dict[int, list[int]], size: int) -> Workers | None:
    """Virtual workers of `size` devices, half of one type and half of its partner; None where they do not come out."""
    fastest_first = sorted(by_type, key=work_s.__getitem__)
    found: Workers = []
    while fastest_first:
        pair = {fastest_first.pop(0), fastest_first.pop() if fastest_first else -1} - {-1}
        part = size // len(pair)
        counts = {len(by_type[t]) for t in pair}
        if part < 1 or size % len(pair) or len(counts) > 1 or (count := counts.pop()) % part:
            return None
        found += [
            [r for t in sorted(pair) for r in by_type[t][v * part : (v + 1) * part]] for v in range(count // part)
        ]
    return found


def kinds(cluster: Cluster, workers: Workers) -> list[Workers]:
    """Virtual workers with the same devices together."""
    found: dict[tuple[int, ...], Workers] = {}
    for ranks in workers:
        found.setdefault(tuple(sorted(cluster.device_types[ranks].tolist())), []).append(ranks)
    return list(found.values())


def own_cut(tables: StageTables, cluster: Cluster, ranks: Sequence[int], concurrent: int) -> Cut | None:
    """A virtual worker's cut by the exact search; None where nothing fits.

    Args:
        tables: of the chain, for a mini-batch.
        cluster: the machine.
        ranks: its devices.
        concurrent: mini-batches in its pipeline.
    """
    costs, chosen = tables.costs, tables.precision
    counts = Counter(int(t) for t in cluster.device_types[list(ranks)])
    types = sorted(counts)
    problem = hetpipe(
        (costs.forward_s + costs.backward_s)[types],
        costs.parameter_elements * chosen.weight_bytes,
        np.diagonal(costs.saved_bytes).copy(),
        costs.boundary_bytes,
        tuple(counts[t] for t in types),
        np.array([float(cluster.devices[t].usable_bytes) for t in types]),
        _speeds(cluster, ranks, types),
        concurrent=concurrent,
        optimizer_per_weight=(chosen.copy_bytes + chosen.held_gradient_bytes + tables.state_bytes)
        / chosen.weight_bytes,
        use_all=len(ranks) <= len(costs.parameter_elements),
    )
    decision = search_partition(problem, time_limit_s=CUT_TIME_LIMIT_S).decision
    return None if decision is None else (decision.boundaries, [types[kind] for kind in decision.types])


def _speeds(cluster: Cluster, ranks: Sequence[int], types: Sequence[int]) -> np.ndarray:
    """[t, t] bytes a second between a device of one type and another of the virtual worker."""
    found = np.full((len(types), len(types)), np.inf)
    of_type = cluster.device_types
    for i, a in enumerate(types):
        for j, b in enumerate(types):
            pairs = [(r, s) for r in ranks for s in ranks if r != s and of_type[r] == a and of_type[s] == b]
            if pairs:
                seconds = send_terms(cluster, *np.asarray(pairs).T).seconds(PROBE_BYTES)
                found[i, j] = PROBE_BYTES / float(seconds.max())
    return found


def dealt(costs: BlockCosts, cluster: Cluster, workers: Workers, cut: Cut) -> tuple[int, ...]:
    """Devices of the stages of a cut, one virtual worker after the other: in its order of types, or matched to it."""
    boundaries, types = cut
    found: list[int] = []
    for ranks in workers:
        own = sorted(cluster.device_types[ranks].tolist()) == sorted(types)
        found += _in_order(cluster, ranks, types) if own else _matched(costs, cluster, ranks, boundaries)
    return tuple(found)


def _in_order(cluster: Cluster, ranks: Sequence[int], types: Sequence[int]) -> list[int]:
    """A virtual worker's devices in the order of their types."""
    free = {t: [r for r in ranks if int(cluster.device_types[r]) == t] for t in types}
    return [free[t].pop(0) for t in types]


def _matched(costs: BlockCosts, cluster: Cluster, ranks: Sequence[int], boundaries: Sequence[int]) -> list[int]:
    """A virtual worker's devices for stages that are given: the most work to the fastest device, and so on."""
    work_s = (costs.forward_s + costs.backward_s).sum(axis=1)
    fastest = sorted(ranks, key=lambda r: (float(work_s[cluster.device_types[r]]), r))
    mean = (costs.forward_s + costs.backward_s).mean(axis=0)
    stages = range(len(boundaries) - 1)
    heaviest = sorted(stages, key=lambda s: (-float(mean[boundaries[s] : boundaries[s + 1]].sum()), s))
    places = dict(zip(heaviest, fastest, strict=False))
    return [places[stage] for stage in stages]
