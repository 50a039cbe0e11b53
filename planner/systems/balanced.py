"""BaPipe's balanced partition and exploration of schedules, data parallelism beside them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from planner.memory import fits
from planner.solvers.partition.bapipe_dp import solve_bapipe
from planner.solvers.partition.replicated_stages import levels_of
from planner.space import Configuration, Timed
from planner.space.cuts import least_need
from planner.space.partition.bapipe import SYNCHRONOUS, BaPipeProblem
from planner.space.stage_tables import stages_of
from planner.systems.exchanged import data_parallel
from planner.systems.proposal import SOLVERS, Proposal
from planner.systems.setting import Setting
from planner.systems.types import Limits, System

TIME_LIMIT_S = 4.0
"""For one partition problem."""


def propose(setting: Setting, system: System) -> Iterator[Proposal]:
    """Each schedule's balanced stages for each micro-batch size, and data parallelism."""
    whole = list(data_parallel(setting, system.exchange))
    for configuration in whole:
        yield Proposal((configuration,), notes=("explored: data parallelism is fastest",))
    verdicts = [setting.evaluate(configuration, Timed.CLOSED_FORM) for configuration in whole]
    limit_s = min((v.iteration_s for v in verdicts if v.feasible), default=math.inf)
    for size in reversed(setting.sizes):
        for configuration in pipelines(setting, system.limits or Limits(), size, limit_s):
            yield Proposal((configuration,), notes=(f"explored: {configuration.schedule} is fastest",))


def pipelines(setting: Setting, limits: Limits, size: int, limit_s: float = math.inf) -> Iterator[Configuration]:
    """The balanced pipeline of each synchronous schedule at one micro-batch size, where it may be below a limit."""
    costs, count = setting.costs(size), min(setting.devices, setting.blocks)
    fastest_s = float((costs.forward_s + costs.backward_s).min(axis=0).sum()) / count
    parts = setting.job.global_batch // size
    if count < 2 or parts * fastest_s >= limit_s or not _may_fit(setting, size, count):
        return
    types, (_, speeds) = setting.cluster.device_types[:count], levels_of(setting.cluster, count)
    for form, schedule in zip(SYNCHRONOUS, limits.schedules, strict=True):
        problem = BaPipeProblem(
            (size,),
            costs.forward_s[types][None],
            costs.backward_s[types][None],
            np.diagonal(costs.saved_bytes)[None].copy(),
            costs.boundary_bytes[None],
            costs.parameter_elements * setting.element_bytes / 2,
            np.array([float(setting.cluster.devices[t].usable_bytes) for t in types]),
            min(speeds),
            setting.job.global_batch,
            schedules=(form,),
            exact_features=True,
        )
        decision = solve_bapipe(problem, time_limit_s=TIME_LIMIT_S).decision
        if decision is not None:
            stages = stages_of(decision.boundaries)
            yield Configuration(stages, 1, size, parts, schedule, transfers=limits.transfers)


def _may_fit(setting: Setting, size: int, count: int) -> bool:
    """Whether some cut into as many stages as possible leaves room for the features of 1F1B."""
    tables, parts = setting.tables(size), setting.job.global_batch // size
    needs = [tables.needed_bytes(min(parts, count - s)) for s in range(count)]
    return fits(least_need(needs, tables.real), max(d.usable_bytes for d in setting.cluster.devices))


SOLVERS.register("bapipe", propose)
