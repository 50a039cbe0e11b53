"""PipeDream's and BaPipe's own partition problems, solved exactly and then played."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from planner.hardware.types import Cluster
from planner.memory import fits
from planner.play import Transfers
from planner.solvers.partition.bapipe_dp import solve_bapipe
from planner.solvers.partition.hierarchical_dp import solve_pipedream
from planner.space.cuts import balanced, least_need
from planner.space.partition.bapipe import SYNCHRONOUS, BaPipeProblem
from planner.space.partition.pipedream import PipeDreamProblem, ReplicatedStage
from planner.space.partition.pipedream_layers import Layers, chain_layers
from planner.space.partition.pipedream_terms import Memory, StageCost
from planner.space.types import StageChoice
from planner.systems import SYSTEMS
from planner.systems._bench import Bench, StageRule
from planner.systems._exchanged import by_exchange
from planner.systems._found import Found, Played
from planner.systems._play import delays, play
from planner.systems._replicas import beside_the_work
from planner.systems._search import best_of, found_of, search, stages_of
from planner.systems.types import Point, System
from planner.units import format_bytes

TIME_LIMIT_S = 4.0
"""For one partition problem."""

MOST_DEVICES = 32
"""Above this the recurrence over replicas takes too long, and all stages get the same number."""

MOST_LEVELLED = 16
"""Above this the recurrence level by level takes too long: all devices stand on one level of the narrowest links."""

LONGEST_ROUND = 4096
"""Micro-batches after which all replicas have had the same number of turns, at the most."""


def levels_of(cluster: Cluster, devices: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Units and bandwidths of the levels that so many devices span, innermost first."""
    sizes, speeds, left = [], [], devices
    for level in cluster.levels:
        size = min(level.size, left)
        if size > 1:
            sizes.append(size)
            speeds.append(level.device_byte_per_s * level.efficiency)
        left = max(1, left // level.size)
    return (tuple(sizes) or (1,)), (tuple(speeds) or (math.inf,))


def carried(cluster: Cluster, devices: int) -> list[float]:
    """What the ports of so many neighbours, 1 up to all, carry together one way, to devices of all other groups."""
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


def layers_at(bench: Bench, micro_batch: int) -> Layers:
    """The blocks as PipeDream's profiler would see them; what a block keeps of its input is counted as received."""
    costs = bench.costs(micro_batch)
    compute = (costs.forward_s + costs.backward_s).mean(axis=0)
    return chain_layers(
        compute.tolist(),
        (costs.parameter_elements * bench.precision.weight_bytes).tolist(),
        costs.boundary_bytes[1:].tolist(),
        np.maximum(np.diff(bench.tables(micro_batch).saved[0]), 0.0).tolist(),
    )


def flat(stages: Sequence[ReplicatedStage], copies: int = 1) -> list[tuple[int, int, int]]:
    """(first block, block behind the last, replicas) of the innermost stages."""
    found = []
    for stage in stages:
        if stage.inner:
            found += flat(stage.inner, copies * stage.replicas)
        else:
            found.append((min(stage.layers), max(stage.layers) + 1, copies * stage.replicas))
    return found


def _pipedream_at(bench: Bench, system: System, size: int, limit_s: float) -> list[Played]:
    """The partitions when played; those that cannot be faster than the limit are not.

    Of partitions whose replicas share an iteration's minibatches unevenly, and of the others, those that cannot be
    faster than one of the same kind are left out. Empty when no partition is found, or none is worth playing.
    """
    room = float(min(d.usable_bytes for d in bench.cluster.devices))
    more = (bench.precision.gradient_bytes + bench.state_bytes) / bench.precision.weight_bytes
    count = bench.job.global_batch // size
    for memory in (Memory(room, optimizer_per_weight=more), Memory()):
        every: list[Played] = []
        partitions = [p for p in dict.fromkeys(_partitions(bench, size, memory)) if _round(p) <= LONGEST_ROUND]
        for stages in partitions:
            turn, slowest_s = _round(stages), _slowest_s(bench, size, stages)
            for schedule in (system.schedule, f"{system.schedule}:paced=true"):
                rivals = [p for p in every if count % turn or not count % _round(p.point.stages)]
                best = best_of(rivals)
                reached = best.iteration_s if best is not None and best.feasible else math.inf
                if count * slowest_s >= min(limit_s, reached) * (1 - 1e-6):
                    break
                point = Point(stages, 1, size, count, schedule, played=turn * -(-4 * len(stages) // turn))
                every.append(play(bench, point, system.transfers))
        if partitions:
            return every
    return []


def _round(stages: Sequence[StageChoice]) -> int:
    """Micro-batches after which all replicas have had as many turns."""
    return math.lcm(*(stage.replicas for stage in stages))


def _slowest_s(bench: Bench, size: int, stages: Sequence[StageChoice]) -> float:
    """No steady pace is faster: the work of the slowest stage on the fastest type, shared by its replicas."""
    costs = bench.costs(size)
    work = (costs.forward_s + costs.backward_s).min(axis=0)
    return max(float(work[s.start : s.stop].sum()) / s.replicas for s in stages)


def _partitions(bench: Bench, size: int, memory: Memory) -> Iterator[tuple[StageChoice, ...]]:
    """The best partitions by a ring beside the work, and by the published costs.

    The released cost counts 4 (m-1)/m w a worker and update, a parameter server's bytes; a ring moves half of them, so
    it is tried with those as well, level by level and with all devices on one. The paper's counts 2 (m-1) w for a
    stage of m replicas, m times a ring's. What is played is a ring beside the work, by which 15-1, the plan that was
    measured, is the fastest for VGG-16.

    Where servers hold several stages the recurrence over levels splits all servers of a stage alike, so that it cannot
    say 15-1 on four servers of four; one flat level over the narrowest links can. The limit of memory slows the
    recurrence down and enters where the partition without it does not fit.
    """
    layers, (sizes, speeds) = layers_at(bench, size), levels_of(bench.cluster, bench.devices)
    for evenly, within in itertools.product((0, bench.job.global_batch // size), (False, True)):
        found = _beside(bench, size, evenly, min(speeds), memory if within else Memory())
        if found:
            yield found
    shapes = [((bench.devices,), (min(speeds),))] + ([(sizes, speeds)] if bench.devices <= MOST_LEVELLED else [])
    ring = replace(layers, weight_bytes=layers.weight_bytes / 2)
    priced = ((layers, StageCost.PAPER), (layers, StageCost.RELEASED), (ring, StageCost.RELEASED))
    for (machines, links), (network, cost) in itertools.product(dict.fromkeys(shapes), priced):
        problem = PipeDreamProblem(network, machines, links, cost=cost, memory=memory)
        decision = solve_pipedream(replace(problem, memory=Memory()), time_limit_s=TIME_LIMIT_S).decision
        if decision is not None and problem.judge(decision).violations:
            decision = solve_pipedream(problem, time_limit_s=TIME_LIMIT_S).decision
        if decision is not None:
            yield tuple(StageChoice(a, b, r) for a, b, r in flat(decision))


def _beside(bench: Bench, size: int, evenly: int, byte_per_s: float, memory: Memory) -> tuple[StageChoice, ...] | None:
    """The best partition by a ring beside the work, within a limit of memory."""
    tables, devices = bench.tables(size), bench.devices
    rules = [StageRule(y, y) for y in range(1, devices + 1)] if math.isfinite(memory.device_bytes) else []
    return beside_the_work(
        tables.stage_s(recompute=False),
        tables.elements * bench.precision.gradient_bytes,
        bench.costs(size).boundary_bytes,
        byte_per_s,
        carried(bench.cluster, devices),
        fits=[fits(tables.needed(rule, recompute=False), memory.device_bytes) for rule in rules],
        minibatches=evenly,
    )


def _equal_replicas(bench: Bench, system: System, size: int, limit_s: float) -> list[Played]:
    """Straight pipelines with as many replicas of every stage, for clusters beyond the recurrence."""
    tables, every = bench.tables(size), []
    room = min(d.usable_bytes for d in bench.cluster.devices)
    for depth in [d for d in range(1, min(bench.devices, bench.blocks) + 1) if bench.devices % d == 0]:
        needs = [tables.needed(StageRule(depth - s, depth - s), recompute=False) for s in range(depth)]
        marks = balanced(tables.stage_s(recompute=False), [fits(need, room) for need in needs])
        if marks is None:
            continue
        replicas, count = bench.devices // depth, bench.job.global_batch // size
        stages = tuple(StageChoice(a, b, replicas) for a, b in itertools.pairwise(marks))
        every.append(play(bench, Point(stages, 1, size, count, system.schedule, played=4 * replicas), system.transfers))
    return [p for p in every if p.feasible]


@search("pipedream")
def by_pipedream(bench: Bench, system: System) -> Found:
    """Replicated stages level by level; the minibatch is a device's share of the global batch, or less to fit."""
    share = max(1, bench.job.global_batch // bench.devices)
    sizes = [b for b in bench.sizes if b <= share] or [bench.sizes[0]]
    last: Played | None = None
    data = by_exchange(bench, SYSTEMS.get("data-parallel"))
    for size in reversed(sizes):
        solve = _pipedream_at if bench.devices <= MOST_DEVICES else _equal_replicas
        every = solve(bench, system, size, data.iteration_s)
        played = best_of(every)
        if not data.reason and (played is None or data.iteration_s < played.iteration_s):
            return replace(data, notes=("data parallelism, one of its plans, is fastest", *data.notes))
        if played is None:
            continue
        if played.feasible:
            notes = (f"updates after every minibatch of {size} sample(s) a replica",)
            found = found_of(played, tells={"delays": delays(played)}, notes=notes)
            faster = [p for p in every if p.feasible and p.iteration_s < data.iteration_s]
            even = [p for p in faster if not p.point.micro_batches % _round(p.point.stages)]
            return found if played in even else replace(found, alike=best_of(even))
        last = played
    stash = "a weight version for each of the minibatches in flight does not fit"
    return Found(reason=f"{stash}: {last.reason if last else _least_stash(bench)}")


def _least_stash(bench: Bench) -> str:
    """What the fullest device needs at the least, over straight pipelines with as many replicas of every stage."""
    size = bench.sizes[0]
    tables, device = bench.tables(size), max(bench.cluster.devices, key=lambda d: d.usable_bytes)
    least, depth = math.inf, 1
    for tried in [d for d in range(1, min(bench.devices, bench.blocks) + 1) if bench.devices % d == 0]:
        needs = [tables.needed(StageRule(tried - s, tried - s), recompute=False) for s in range(tried)]
        least, depth = min((least, depth), (least_need(needs, tables.real), tried))
    need, have = format_bytes(least + device.reserve_bytes), format_bytes(device.memory_bytes)
    return f"the fullest device needs {need} of {have} at the least ({depth} stages, micro-batch {size})"


@search("bapipe")
def by_bapipe(bench: Bench, system: System) -> Found:
    """Schedule exploration and balanced partition for each micro-batch size, compared with data parallelism."""
    data = by_exchange(bench, SYSTEMS.get("data-parallel"))
    best: Played | None = None
    candidates: list[Played] = []
    for size in reversed(bench.sizes):
        limit = min(data.iteration_s, best.iteration_s if best else math.inf)
        candidates += _bapipe_at(bench, size, limit)
        best = best_of([p for p in candidates if p.feasible])
    if best is not None and best.iteration_s < data.iteration_s:
        return found_of(best, notes=(f"explored: {best.point.schedule} is fastest",))
    if not data.reason:
        return replace(data, notes=("explored: data parallelism is fastest", *data.notes))
    return Found(reason=f"no balanced stages fit, and data parallelism neither: {data.reason}")


def _bapipe_at(bench: Bench, size: int, limit_s: float) -> list[Played]:
    """The two synchronous schedules at one micro-batch size, where they may be faster than the limit."""
    costs, count = bench.costs(size), min(bench.devices, bench.blocks)
    fastest = float((costs.forward_s + costs.backward_s).min(axis=0).sum()) / count
    parts = bench.job.global_batch // size
    if count < 2 or parts * fastest >= limit_s or not _may_fit(bench, size, count):
        return []
    types = bench.cluster.device_types[:count]
    state = bench.precision.weight_bytes + bench.precision.gradient_bytes + bench.state_bytes
    narrow = min(_neighbour_byte_per_s(bench.cluster, count))
    found = []
    for schedule in SYNCHRONOUS:
        problem = BaPipeProblem(
            (size,),
            costs.forward_s[types][None],
            costs.backward_s[types][None],
            np.diagonal(costs.saved_bytes)[None].copy(),
            costs.boundary_bytes[None],
            costs.parameter_elements * state / 2,
            np.array([float(bench.cluster.devices[t].usable_bytes) for t in types]),
            narrow,
            bench.job.global_batch,
            schedules=(schedule,),
            exact_features=True,
        )
        result = solve_bapipe(problem, time_limit_s=TIME_LIMIT_S)
        if result.decision is None:
            continue
        key = {"1f1b-sno": "bapipe-sno", "1f1b-so": "bapipe-so"}[str(schedule)]
        point = Point(stages_of(result.decision.boundaries), 1, size, bench.job.global_batch // size, key)
        found.append(play(bench, point, Transfers.OVERLAPPED))
    return found


def _may_fit(bench: Bench, size: int, count: int) -> bool:
    """Whether some cut into as many stages as possible leaves room for the features of 1F1B."""
    tables, parts = bench.tables(size), bench.job.global_batch // size
    needs = [tables.needed(StageRule(min(parts, count - s)), recompute=False) for s in range(count)]
    return fits(least_need(needs, tables.real), max(d.usable_bytes for d in bench.cluster.devices))


def _neighbour_byte_per_s(cluster: Cluster, count: int) -> list[float]:
    """Bandwidth of each level that `count` neighbours span."""
    sizes, speeds = levels_of(cluster, count)
    return list(speeds) if sizes else [math.inf]
