"""PipeDream's partition problems: stages with replicas of their own, an update after every minibatch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from planner import schedules
from planner.errors import InfeasibleError
from planner.memory import fits
from planner.schedules.types import Pipeline
from planner.solvers.partition.hierarchical_dp import solve_pipedream
from planner.solvers.partition.replicated_stages import beside_the_work, carried, levels_of
from planner.space import Configuration, StageChoice
from planner.space.cuts import balanced, least_need
from planner.space.partition.pipedream import PipeDreamProblem, ReplicatedStage
from planner.space.partition.pipedream_layers import Layers, chain_layers
from planner.space.partition.pipedream_terms import Memory, StageCost
from planner.systems.exchanged import data_parallel
from planner.systems.proposal import SOLVERS, Proposal
from planner.systems.setting import Setting
from planner.systems.stages import StageTables, stages_of
from planner.systems.types import Limits, System
from planner.units import format_bytes

TIME_LIMIT_S = 4.0
"""For one partition problem."""

MOST_DEVICES = 32
"""Above this the recurrence over replicas takes too long, and all stages get the same number."""

MOST_LEVELLED = 16
"""Above this the recurrence level by level takes too long: all devices stand on one level of the narrowest links."""

LONGEST_ROUND = 4096
"""Minibatches after which all replicas have had the same number of turns, at the most."""

Stages = tuple[StageChoice, ...]


def propose(setting: Setting, system: System) -> Iterator[Proposal]:
    """Replicated stages level by level; the minibatch is a device's share of the global batch, or less to fit."""
    whole = list(data_parallel(setting, system.exchange))
    for configuration in whole:
        yield Proposal((configuration,), notes=("data parallelism, one of its plans, is fastest",))
    found = any(setting.fits(configuration) for configuration in whole)
    share = max(1, setting.job.global_batch // setting.devices)
    for size in reversed([b for b in setting.sizes if b <= share] or [setting.sizes[0]]):
        for stages in _worth_playing(setting, size):
            for schedule in schedules_of(system):
                proposal = dealt(setting, system, stages, size, schedule)
                found |= setting.fits(proposal.parts[0])
                yield proposal
        if found:
            return
    raise InfeasibleError(f"a weight version for each of the minibatches in flight does not fit: {_least(setting)}")


def schedules_of(system: System) -> tuple[str, str]:
    """The published warm-up, and one as long as stages that feed wider ones need."""
    (name,) = system.schedules
    return name, f"{name}:paced=true"


def dealt(setting: Setting, system: System, stages: Stages, size: int, schedule: str) -> Proposal:
    """Stages whose replicas take an iteration's minibatches in turn; one round of turns where they do not come out."""
    count, turns = setting.job.global_batch // size, math.lcm(*(stage.replicas for stage in stages))
    uneven = count % turns > 0
    rounds = turns if uneven else count
    configuration = Configuration(stages, 1, size, rounds, schedule, transfers=(system.limits or Limits()).transfers)
    delays = schedules.get(schedule).staleness(Pipeline(tuple(s.replicas for s in stages), rounds))
    shape = "-".join(str(stage.replicas) for stage in stages)
    return Proposal(
        (configuration,),
        notes=(f"updates after every minibatch of {size} sample(s) a replica",),
        tells={"delays": "updates by stage: " + ", ".join(map(str, delays))},
        beats=count / rounds,
        unwritten=f"replicas {shape} do not share {count} minibatches evenly, as a plan file's do" if uneven else "",
    )


def _worth_playing(setting: Setting, size: int) -> list[Stages]:
    """The partitions at one size within the memory, or without that limit where there are none within it."""
    if setting.devices > MOST_DEVICES:
        return list(_equal_replicas(setting, size))
    more = (setting.precision.gradient_bytes + setting.state_bytes) / setting.precision.weight_bytes
    for memory in (Memory(setting.room_bytes, optimizer_per_weight=more), Memory()):
        found = dict.fromkeys(_partitions(setting, size, memory))
        if found:
            return [s for s in found if math.lcm(*(stage.replicas for stage in s)) <= LONGEST_ROUND]
    return []


def _layers(setting: Setting, size: int) -> Layers:
    """The blocks as PipeDream's profiler would see them; what a block keeps of its input is counted as received."""
    costs = setting.costs(size)
    return chain_layers(
        (costs.forward_s + costs.backward_s).mean(axis=0).tolist(),
        (costs.parameter_elements * setting.precision.weight_bytes).tolist(),
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


def _partitions(setting: Setting, size: int, memory: Memory) -> Iterator[Stages]:
    """The best partitions by a ring beside the work, and by the published costs.

    The released cost counts 4 (m-1)/m w a worker and update, a parameter server's bytes; a ring moves half of them, so
    it is tried with those as well, level by level and with all devices on one. The paper's counts 2 (m-1) w for a
    stage of m replicas, m times a ring's. What is judged is a ring beside the work, by which 15-1, the plan that was
    measured, is the fastest for VGG-16.

    Where servers hold several stages the recurrence over levels splits all servers of a stage alike, so that it cannot
    say 15-1 on four servers of four; one flat level over the narrowest links can. The limit of memory slows the
    recurrence down and enters where the partition without it does not fit.
    """
    layers, (sizes, speeds) = _layers(setting, size), levels_of(setting.cluster, setting.devices)
    for evenly, within in itertools.product((0, setting.job.global_batch // size), (False, True)):
        found = _beside(setting, size, evenly, min(speeds), memory if within else Memory())
        if found:
            yield found
    shapes = [((setting.devices,), (min(speeds),))] + ([(sizes, speeds)] if setting.devices <= MOST_LEVELLED else [])
    ring = replace(layers, weight_bytes=layers.weight_bytes / 2)
    priced = ((layers, StageCost.PAPER), (layers, StageCost.RELEASED), (ring, StageCost.RELEASED))
    for (machines, links), (network, cost) in itertools.product(dict.fromkeys(shapes), priced):
        problem = PipeDreamProblem(network, machines, links, cost=cost, memory=memory)
        decision = solve_pipedream(replace(problem, memory=Memory()), time_limit_s=TIME_LIMIT_S).decision
        if decision is not None and problem.judge(decision).violations:
            decision = solve_pipedream(problem, time_limit_s=TIME_LIMIT_S).decision
        if decision is not None:
            yield tuple(_flat(decision))


def _beside(setting: Setting, size: int, evenly: int, byte_per_s: float, memory: Memory) -> Stages | None:
    """The best partition by a ring beside the work, within a limit of memory."""
    tables, devices = StageTables(setting, size), setting.devices
    limited = range(1, devices + 1) if math.isfinite(memory.device_bytes) else ()
    return beside_the_work(
        tables.stage_s,
        tables.elements * setting.precision.gradient_bytes,
        setting.costs(size).boundary_bytes,
        byte_per_s,
        carried(setting.cluster, devices),
        fits=[fits(tables.needed_bytes(y, y), memory.device_bytes) for y in limited],
        minibatches=evenly,
    )


def _depths(setting: Setting) -> list[int]:
    """Depths of which the devices are a multiple."""
    return [d for d in range(1, min(setting.devices, setting.blocks) + 1) if setting.devices % d == 0]


def _equal_replicas(setting: Setting, size: int) -> Iterator[Stages]:
    """Straight pipelines with as many replicas of every stage, for clusters beyond the recurrence."""
    tables = StageTables(setting, size)
    for depth in _depths(setting):
        needs = [tables.needed_bytes(depth - s, depth - s) for s in range(depth)]
        marks = balanced(tables.stage_s, [fits(need, setting.room_bytes) for need in needs])
        if marks is not None:
            yield stages_of(marks, setting.devices // depth)


def _least(setting: Setting) -> str:
    """What the fullest device needs at the least, over straight pipelines with as many replicas of every stage."""
    size = setting.sizes[0]
    tables, device = StageTables(setting, size), max(setting.cluster.devices, key=lambda d: d.usable_bytes)
    least, depth = math.inf, 1
    for tried in _depths(setting):
        needs = [tables.needed_bytes(tried - s, tried - s) for s in range(tried)]
        least, depth = min((least, depth), (least_need(needs, tables.real), tried))
    need, have = format_bytes(least + device.reserve_bytes), format_bytes(device.memory_bytes)
    return f"the fullest device needs {need} of {have} at the least ({depth} stages, micro-batch {size})"


SOLVERS.register("pipedream", propose)
