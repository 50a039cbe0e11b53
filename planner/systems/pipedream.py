"""PipeDream: replicated stages by a hierarchical DP, 1F1B without a flush, stashed weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from planner import schedules
from planner.errors import InfeasibleError
from planner.plans.words import words_of
from planner.play import Transfers
from planner.schedules import Pipeline
from planner.solvers.cluster_chains.stages import Stages, least_straight_bytes, replicated_stages
from planner.space import Configuration
from planner.space.subspaces import Limits
from planner.systems import System, register
from planner.systems.proposals import data_parallel
from planner.systems.types import Proposal, SystemSetting
from planner.units import format_bytes


def propose(setting: SystemSetting, system: System) -> Iterator[Proposal]:
    """Propose data parallelism, then replicated stages for the largest minibatch size with which one fits.

    The largest minibatch is a device's share of the global batch. Stages come with the published warm-up, and with the
    longer one that keeps a stage busy if it feeds a wider one.
    """
    (published,), replicated = system.schedules, list(data_parallel(setting, system.exchange))
    for configuration in replicated:
        yield Proposal((configuration,), notes=("data parallelism, one of its plans, is fastest",))
    any_fits = any(setting.fits(configuration) for configuration in replicated)
    share = max(1, setting.job.global_batch // setting.devices)
    for size in reversed([b for b in setting.sizes if b <= share] or [setting.sizes[0]]):
        tables, count = setting.tables(size), setting.job.global_batch // size
        memory_bytes = setting.smallest_device_bytes
        for stages in replicated_stages(tables, setting.cluster, setting.devices, count, memory_bytes):
            for schedule in (published, f"{published}:paced=true"):
                proposal = dealt(setting, system, stages, size, schedule)
                any_fits |= setting.fits(proposal.parts[0])
                yield proposal
        if any_fits:
            return
    raise InfeasibleError(
        f"a weight version for each of the minibatches in flight does not fit: {_least_memory(setting)}"
    )


def dealt(setting: SystemSetting, system: System, stages: Stages, size: int, schedule: str) -> Proposal:
    """Propose stages whose replicas take minibatches in turn.

    If the replicas do not divide the minibatches of a global batch, one round of turns is evaluated in its place.
    """
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


def _least_memory(setting: SystemSetting) -> str:
    """Words on the memory that the fullest device needs in the pipeline that needs least."""
    size, device = setting.sizes[0], max(setting.cluster.devices, key=lambda d: d.usable_bytes)
    least_bytes, depth = least_straight_bytes(setting.tables(size), setting.devices)
    need, have = format_bytes(least_bytes + device.reserve_bytes), format_bytes(device.capacity_bytes)
    return f"the fullest device needs {need} of {have} at the least ({depth} stages, micro-batch {size})"


register(
    System(
        key="pipedream",
        title="PipeDream",
        solver=propose,
        source="Narayanan et al., SOSP 2019",
        limits=Limits(schedules=("pipedream",), transfers=Transfers.OVERLAPPED),
        exchange="all-reduce",
        backend={
            "weight_versions": (
                "stash one version per minibatch in flight; its backward uses the version of its forward"
            ),
            "update": "after every minibatch; the replicas of a stage average first",
            "replicas": "round-robin; a backward runs on the replica that ran the forward",
            "learning_rate": "as for data parallelism with the same minibatch; no correction",
        },
    ),
)
