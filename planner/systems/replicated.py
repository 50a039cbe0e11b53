"""PipeDream: stages with replicas of their own, an update after every minibatch, data parallelism beside them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from planner import schedules
from planner.errors import InfeasibleError
from planner.plans.words import words_of
from planner.schedules.types import Pipeline
from planner.solvers.partition.pipedream_stages import Stages, least_straight_bytes, replicated_stages
from planner.space import Configuration
from planner.space.subspaces import Limits
from planner.systems.exchanged import data_parallel
from planner.systems.proposal import SOLVERS, Proposal
from planner.systems.setting import Setting
from planner.systems.types import System
from planner.units import format_bytes


def propose(setting: Setting, system: System) -> Iterator[Proposal]:
    """Replicated stages level by level; the minibatch is a device's share of the global batch, or less to fit."""
    whole = list(data_parallel(setting, system.exchange))
    for configuration in whole:
        yield Proposal((configuration,), notes=("data parallelism, one of its plans, is fastest",))
    found = any(setting.fits(configuration) for configuration in whole)
    share = max(1, setting.job.global_batch // setting.devices)
    for size in reversed([b for b in setting.sizes if b <= share] or [setting.sizes[0]]):
        where, count = (setting.cluster, setting.devices), setting.job.global_batch // size
        for stages in replicated_stages(setting.tables(size), *where, count, setting.room_bytes):
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
        words=words_of(replace(configuration, micro_batches=count)),
        notes=(f"updates after every minibatch of {size} sample(s) a replica",),
        tells={"delays": "updates by stage: " + ", ".join(map(str, delays))},
        beats=count / rounds,
        unwritten=f"replicas {shape} do not share {count} minibatches evenly, as a plan file's do" if uneven else "",
    )


def _least(setting: Setting) -> str:
    """What the fullest device needs at the least."""
    size, device = setting.sizes[0], max(setting.cluster.devices, key=lambda d: d.usable_bytes)
    least, depth = least_straight_bytes(setting.tables(size), setting.devices)
    need, have = format_bytes(least + device.reserve_bytes), format_bytes(device.memory_bytes)
    return f"the fullest device needs {need} of {have} at the least ({depth} stages, micro-batch {size})"


SOLVERS.register("pipedream", propose)
