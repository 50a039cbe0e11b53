"""What a little more of something is worth: the job planned again with more memory, faster links, one more node, or
without one of the user's limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from planner.api import plan as plan_job
from planner.errors import InfeasibleError, JobError, ShardplanError, UsageError
from planner.graph import Graph
from planner.hardware.types import Cluster, Level
from planner.plans import Plan
from planner.plans.explain import plan_shape
from planner.space.asked import LIMITS, as_written, given, without
from planner.space.types import Job
from planner.systems.backends import ANY

MORE_BYTES = 1 << 30
"""Memory that is added to each device."""
TIMES = 2.0
"""By which a link is made faster."""


@dataclass(frozen=True, slots=True)
class Worth:
    """What one change is worth.

    Attributes:
        words: the change.
        iteration_s: step of the best plan with it; None where there is none.
        gain: the part of a step that it saves, negative where it costs some; None where there is no plan.
        bound_s: no plan with the change is faster; None where there is no plan.
        shape: that plan in a line, or why there is none.
    """

    words: str
    iteration_s: float | None
    gain: float | None
    bound_s: float | None
    shape: str


def find_worth(
    plan: Plan, graph: Graph, cluster: Cluster, larger: Callable[[], Cluster] | None = None
) -> tuple[Worth, ...]:
    """What changes of the hardware and of the user's limits are worth, each planned anew; the best first.

    Args:
        plan: of a search; its own step is what gains are counted from.
        graph: its model.
        cluster: its hardware.
        larger: the same with one node more, where there is such.

    Raises:
        UsageError: no search found the plan, so that nothing better need be due to a change.
    """
    if plan.system is not None or plan.schedule.given:
        raise UsageError("the plan is not of a search", hint="plan the job with `shardplan plan`")
    job = plan.options if plan.runs_on or plan.free_choice else dataclasses.replace(plan.options, backends=(ANY,))
    base_s = plan.predictions.reached_s
    found = [_planned(words, graph, other, job, base_s) for words, other in _clusters(cluster)]
    if larger is not None:
        found += _with_node(graph, larger, job, base_s)
    limits = [name for name in given(plan.options, LIMITS) if name not in ("devices", "backends")]
    found += [
        _planned(f"without {as_written(plan.options, name)}", graph, cluster, without(job, [name]), base_s)
        for name in limits
    ]
    return tuple(sorted(found, key=lambda each: -(each.gain if each.gain is not None else -1.0)))


def _clusters(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """The cluster with more memory, and with each tier of links faster."""
    more = tuple(dataclasses.replace(d, memory_bytes=d.memory_bytes + MORE_BYTES) for d in cluster.devices)
    yield "1 GiB more on each device", dataclasses.replace(cluster, devices=more)
    for at, level in enumerate(cluster.levels):
        faster = (*cluster.levels[:at], _faster(level), *cluster.levels[at + 1 :])
        unlike = tuple((*own[:at], _faster(own[at]), *own[at + 1 :]) for own in cluster.unlike)
        yield f"twice the bandwidth of {level.name}", dataclasses.replace(cluster, levels=faster, unlike=unlike)


def _faster(level: Level) -> Level:
    """The tier with more bandwidth; collectives that were measured on the slower one are left out."""
    return dataclasses.replace(
        level,
        byte_per_s=TIMES * level.byte_per_s,
        device_byte_per_s=TIMES * level.device_byte_per_s,
        peer_byte_per_s=None if level.peer_byte_per_s is None else TIMES * level.peer_byte_per_s,
        fits=(),
    )


def _with_node(graph: Graph, larger: Callable[[], Cluster], job: Job, base_s: float) -> list[Worth]:
    """One node more, where the profile has one more."""
    try:
        cluster = larger()
    except ShardplanError as error:
        return [Worth("one more node", None, None, None, error.problem.message)]
    return [_planned("one more node", graph, cluster, dataclasses.replace(job, devices=0), base_s)]


def _planned(words: str, graph: Graph, cluster: Cluster, job: Job, base_s: float) -> Worth:
    """The job planned with a change."""
    try:
        found = plan_job(graph, cluster, job)
    except (InfeasibleError, JobError) as error:
        return Worth(words, None, None, None, error.problem.message)
    step_s = found.predictions.reached_s
    return Worth(words, step_s, 1 - step_s / base_s, found.predictions.bound_s, plan_shape(found))
