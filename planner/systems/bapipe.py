"""BaPipe: one balanced pipeline over all devices for each of its schedules, or data parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterator

from planner.play import Transfers
from planner.solvers.cluster_chains.chain_schedules import SYNCHRONOUS
from planner.solvers.cluster_chains.stages import balanced_stages
from planner.space import Configuration, Timed
from planner.space.cuts import stages_of
from planner.space.subspaces import Limits
from planner.systems import System, register
from planner.systems.proposals import data_parallel
from planner.systems.types import Proposal, SystemSetting


def propose(setting: SystemSetting, system: System) -> Iterator[Proposal]:
    """Propose data parallelism, then the balanced pipeline of each schedule and micro-batch size that may be faster."""
    replicated = list(data_parallel(setting, system.exchange))
    for configuration in replicated:
        yield Proposal((configuration,), notes=("explored: data parallelism is fastest",))
    evaluations = [setting.evaluate(configuration, Timed.CLOSED_FORM) for configuration in replicated]
    limit_s = min((e.iteration_s for e in evaluations if e.feasible), default=math.inf)
    for size in reversed(setting.sizes):
        for configuration in pipelines(setting, system.limits or Limits(), size, limit_s):
            yield Proposal((configuration,), notes=(f"explored: {configuration.schedule} is fastest",))


def pipelines(setting: SystemSetting, limits: Limits, size: int, limit_s: float = math.inf) -> Iterator[Configuration]:
    """The balanced pipeline of each schedule for one micro-batch size, unless it takes longer than a limit."""
    micro_batches, tables = setting.job.global_batch // size, setting.tables(size)
    for form, schedule in zip(SYNCHRONOUS, limits.schedules, strict=True):
        boundaries = balanced_stages(tables, setting.cluster, setting.devices, micro_batches, form, limit_s)
        if boundaries is not None:
            yield Configuration(stages_of(boundaries), 1, size, micro_batches, schedule, transfers=limits.transfers)


register(
    System(
        key="bapipe",
        title="BaPipe",
        solver=propose,
        source="Zhao et al., 2020",
        limits=Limits(schedules=("bapipe-sno", "bapipe-so"), transfers=Transfers.OVERLAPPED),
        exchange="all-reduce",
        backend={
            "weight_versions": "1",
            "update": "once per mini-batch",
        },
    ),
)
