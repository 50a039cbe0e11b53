"""Plan an instance: read it, build the problem, solve it, make the plan; check a partition plan, by itself and against
its instance, and compare two.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import InfeasibleError, JobError, PlanError, Problem, UsageError
from planner.hardware.types import Cluster
from planner.plans.diff import Change, changed_values
from planner.published.families import FAMILIES, Family, Instance, Objective, load_instance
from planner.published.options import (
    PartitionOptions,
    Quantity,
    bandwidths,
    from_cluster,
    from_recorded,
    machine_counts,
    memory_size,
    recorded,
    seconds,
)
from planner.published.plan_file import (
    FORMAT,
    SCHEMA_VERSION,
    InstanceSection,
    ObjectiveSection,
    PartitionPlan,
    TrivialPlan,
    digest_of,
    seal,
)
from planner.published.problems import PartitionProblem, PartitionVerdict
from planner.published.solvers import AUTO, Progress, Result, solve_partition


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
    options = PartitionOptions(
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
    instance: Instance, family: Family, objective: Objective, options: PartitionOptions, cluster: Cluster | None = None
) -> PartitionOptions:
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
    options: PartitionOptions,
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


def partition_changes(old: PartitionPlan, new: PartitionPlan, *, tolerance: float = 0.0) -> list[Change]:
    """Every value that differs between two plans, except the digest.

    Args:
        old: the plan before.
        new: the plan after.
        tolerance: numbers whose relative difference is at most this are equal.
    """
    changes: list[Change] = []
    for field in dataclasses.fields(PartitionPlan):
        if field.name != "digest":
            before, after = (dict(_values((field.name,), getattr(plan, field.name))) for plan in (old, new))
            changes += changed_values(field.name, before, after, tolerance)
    return changes


def _values(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:  # noqa: ANN401
    """The plain values of a plan and their paths."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _values((*path, field.name), getattr(value, field.name))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _values((*path, key), item)
    elif isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
        for number, item in enumerate(value):
            yield from _values((*path, str(number)), item)
    else:
        yield path, value


TOLERANCE = 1e-9
"""Values whose relative difference is at most this are equal."""


@dataclass(frozen=True, slots=True)
class PartitionFinding:
    """A fault of a plan.

    Attributes:
        fault: kind of fault: "digest", "claim", "family", "instance", "options", "parts", or a violation's kind.
        message: for people.
        part: part of the plan; -1 for the plan as a whole.
        needed: what the plan takes of a limited resource.
        available: the limit.
    """

    fault: str
    message: str
    part: int = -1
    needed: float = 0.0
    available: float = 0.0

    def problem(self, where: str) -> Problem:
        """The finding as a `Problem`, which errors are printed from."""
        return Problem(f"{self.fault}: {self.message}", where)


def check_partition(plan: PartitionPlan, instance: Instance | None = None) -> tuple[PartitionFinding, ...]:
    """All faults of a plan.

    Args:
        plan: as read from its file.
        instance: the instance that it is for; the plan is judged on it. None to check the file alone.
    """
    findings = [*_file_findings(plan)]
    if instance is not None:
        findings += _instance_findings(plan, instance)
    return tuple(findings)


def _file_findings(plan: PartitionPlan) -> list[PartitionFinding]:
    findings = []
    if digest_of(plan) != plan.digest:
        findings.append(PartitionFinding("digest", "the content is not what was written"))
    claim = plan.objective
    numbers = (claim.value, claim.bound, claim.gap)
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        findings.append(PartitionFinding("claim", "value, bound or gap is negative or not finite"))
        return findings
    if claim.bound > claim.value * (1 + TOLERANCE):
        findings.append(PartitionFinding("claim", f"the bound {claim.bound!r} is above the value {claim.value!r}"))
    gap = 1 - claim.bound / claim.value if claim.value > 0 else 0.0
    if abs(gap - claim.gap) > TOLERANCE:
        findings.append(PartitionFinding("claim", f"the gap is {gap:.3g}, not {claim.gap:.3g}"))
    if claim.proven_optimal != (claim.bound >= claim.value * (1 - TOLERANCE)):
        findings.append(PartitionFinding("claim", "proven_optimal does not agree with value and bound"))
    family = FAMILIES.find(plan.instance.family)
    if family is None:
        findings.append(PartitionFinding("family", f"there is no instance family {plan.instance.family!r}"))
    elif plan.objective.name not in [objective.name for objective in family.objectives]:
        findings.append(PartitionFinding("family", f"{plan.objective.name!r} is no objective of {family.title}"))
    return findings


def _instance_findings(plan: PartitionPlan, instance: Instance) -> list[PartitionFinding]:
    planned = plan.instance
    if (planned.family, planned.fingerprint) != (instance.family, instance.fingerprint):
        message = f"the plan is for {planned.name} ({planned.fingerprint[:12]}), this is {instance.name} "
        return [PartitionFinding("instance", message + f"({instance.fingerprint[:12]})")]
    try:
        verdict = judged(plan, instance)
    except (PlanError, UsageError, JobError) as error:
        return [PartitionFinding("parts" if isinstance(error, PlanError) else "options", error.problem.message)]
    findings = [PartitionFinding(v.kind, v.message, v.stage, v.needed, v.available) for v in verdict.violations]
    if not _same(verdict.objective, plan.objective.value):
        message = f"the value is {verdict.objective!r} {plan.objective.unit}, not {plan.objective.value!r}"
        findings.append(PartitionFinding("value", message))
    if len(verdict.parts) == len(plan.parts):
        for number, (part, value) in enumerate(zip(plan.parts, verdict.parts, strict=True)):
            if part.value is not None and not _same(part.value, value):
                findings.append(PartitionFinding("value", f"part {number} has {value!r}, not {part.value!r}", number))
    return findings


def judged(plan: PartitionPlan, instance: Instance) -> PartitionVerdict:
    """The judge's verdict on a plan's decision on its instance.

    Raises:
        PlanError: options or parts make no decision.
        UsageError: options do not make a problem.
    """
    family = FAMILIES.get(plan.instance.family)
    objective = family.objective(plan.objective.name)
    options = from_recorded(plan.options, instance.name)
    options.only(objective.options, objective.name)
    problem = objective.problem(instance, objective.settle(instance, options))
    return problem.judge(objective.decode(instance, problem, plan.parts))


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-300)
