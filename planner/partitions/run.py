"""Plan an instance: read it, build the problem, solve it, make the plan."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

from planner.errors import InfeasibleError, UsageError
from planner.hardware.types import Cluster
from planner.partitions.families import FAMILIES, Family, Instance, Objective, load_instance
from planner.partitions.options import (
    Options,
    Quantity,
    bandwidths,
    from_cluster,
    machine_counts,
    memory_size,
    recorded,
    seconds,
)
from planner.partitions.plan_file import (
    FORMAT,
    SCHEMA_VERSION,
    InstanceSection,
    ObjectiveSection,
    PartitionPlan,
    TrivialPlan,
    seal,
)
from planner.solvers.partition import AUTO, Progress, Result, solve_partition
from planner.space.partition import PartitionProblem


def partition(
    instance: str | Path | Instance,
    *,
    objective: str | None = None,
    solver: str = AUTO,
    time_limit: Quantity = 60.0,
    cluster: Cluster | None = None,
    contiguous: bool | None = None,
    devices: int | None = None,
    cpus: int | None = None,
    memory: Quantity | None = None,
    bandwidth: Quantity | Collection[Quantity] | None = None,
    machines: str | int | Collection[int] | None = None,
    cost: str | None = None,
    layout: str | None = None,
    transfers: bool | None = None,
    idle: bool | None = None,
    batch: int | None = None,
    progress: Progress | None = None,
) -> PartitionPlan:
    """Split an instance of a published partition problem over devices, and prove how good the split is.

    >>> import planner
    >>> plan = planner.partition("bert24_inference.json", memory="16 GiB")            # doctest: +SKIP
    >>> plan.objective.value, plan.objective.unit, plan.objective.proven_optimal      # doctest: +SKIP
    (17.78990625, 'ms', True)
    >>> planner.partition("vgg16.graph.txt", machines="4x2", bandwidth="10GB/s,1.25GB/s")  # doctest: +SKIP

    Args:
        instance: an instance file (operator graph, Piper instance, PipeDream profile), or a loaded instance.
        objective: what to minimise; the family's own by default.
        solver: a solver's name, or "auto" to run all solvers of the problem in turn.
        time_limit: how long to search; seconds, or text such as "60s".
        cluster: machines, bandwidth and memory of a cluster, for families whose files carry none.
        contiguous: operator graphs: whether devices must be stages of a pipeline (default: yes).
        devices: accelerators, or devices in all; the file's number by default.
        cpus: operator graphs: CPUs beside the accelerators; the file's number by default.
        memory: of one device: bytes, or text such as "16 GiB"; the file's by default, else no limit.
        bandwidth: of links: bytes a second or text such as "10 GB/s", one a level, innermost first.
        machines: PipeDream: units of each level, innermost first; "4x2" for two servers of four devices.
        cost: PipeDream: "released" (default) or "published".
        layout: PipeDream: "placed" (default on several levels) or "nested" (default on one).
        transfers: PipeDream: whether activations moved between stages cost time (default: yes).
        idle: PipeDream: whether devices may stay idle (default: yes when placed).
        batch: Piper: samples from one update to the next; the file's by default.
        progress: called with (solver, objective, bound) whenever one of the two improves.

    Raises:
        ModelError: the file cannot be read.
        UsageError: an option that does not apply, or no such objective or solver.
        InfeasibleError: no plan keeps all limits, or none was found within the time limit.
    """
    options = Options(
        contiguous=contiguous, devices=devices, cpus=cpus, memory_bytes=memory_size(memory),
        bandwidth_byte_per_s=bandwidths(bandwidth), machines=machine_counts(machines), cost=cost, layout=layout,
        transfers=transfers, idle=idle, batch=batch,
    )  # fmt: skip
    limit_s = seconds(time_limit)
    loaded = instance if isinstance(instance, Instance) else load_instance(instance)
    family = FAMILIES.get(loaded.family)
    chosen_objective = family.objective(objective)
    settled = settle(loaded, family, chosen_objective, options, cluster)
    problem = chosen_objective.problem(loaded, settled)
    try:
        result = solve_partition(problem, solver=solver, time_limit_s=limit_s, progress=progress)
    except InfeasibleError as error:
        raise InfeasibleError(error.problem.message, where=loaded.name, hint=error.problem.hint) from error
    return _plan(loaded, chosen_objective, settled, problem, result, limit_s)


def settle(
    instance: Instance, family: Family, objective: Objective, options: Options, cluster: Cluster | None = None
) -> Options:
    """The options with all defaults filled in; refuses options that do not apply.

    Raises:
        UsageError: an option does not apply to this objective, or a required one is missing.
    """
    what = f"the objective {objective.name} ({family.title})"
    options.only(objective.options, what)
    if cluster is not None:
        if not family.cluster:
            raise UsageError(f"--hardware does not apply to {what}", hint="the file carries its machine")
        options = from_cluster(options, cluster)
    return objective.settle(instance, options)


def _plan(
    instance: Instance,
    objective: Objective,
    options: Options,
    problem: PartitionProblem,
    result: Result,
    limit_s: float,
) -> PartitionPlan:
    """The plan of a result, judged once more.

    Raises:
        RuntimeError: it breaks a limit, or decoding its parts gives another objective; a bug.
    """
    verdict = problem.judge(result.decision)
    if not verdict.feasible:
        raise RuntimeError(f"{result.solver}: its plan breaks a limit: {verdict.violations[0].message}")
    parts = objective.encode(instance, problem, result.decision, verdict)
    if problem.judge(objective.decode(instance, problem, parts)).objective != verdict.objective:
        raise RuntimeError(f"{objective.name}: the plan does not read back as it was found")
    return seal(
        PartitionPlan(
            format=FORMAT,
            version=SCHEMA_VERSION,
            digest="",
            instance=InstanceSection(
                instance.name, instance.family, instance.fingerprint, len(instance.ids), instance.edges
            ),
            objective=ObjectiveSection(
                name=objective.name,
                unit=problem.unit,
                value=verdict.objective,
                bound=float(result.bound),
                gap=0.0 if result.proven else float(result.gap),
                proven_optimal=result.proven,
                space=result.space,
                stopped_after_s=None if result.proven else limit_s,
            ),
            options=recorded(options),
            solver=result.solver,
            parts=parts,
            trivial=trivial_plans(problem),
            statistics=dict(result.statistics),
            notes=instance.notes,
        )
    )


def trivial_plans(problem: PartitionProblem) -> tuple[TrivialPlan, ...]:
    """The problem's baseline plans with their objectives; of several with equal results, the first."""
    plans: dict[tuple[float | None, tuple[str, ...]], TrivialPlan] = {}
    for name, decision in problem.trivial():
        verdict = problem.judge(decision)
        value = float(verdict.objective) if math.isfinite(verdict.objective) else None
        breaks = tuple(sorted({v.kind for v in verdict.violations}))
        plans.setdefault((value, breaks), TrivialPlan(name, value, breaks))
    return tuple(plans.values())
