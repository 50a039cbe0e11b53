"""Check a partition plan, by itself and against its instance, and compare two plans."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from planner.errors import JobError, PlanError, Problem, UsageError
from planner.partitions.families import FAMILIES, Instance
from planner.partitions.options import from_recorded
from planner.partitions.plan_file import PartitionPlan, digest_of
from planner.plans.diff import Change, changed_values
from planner.space.partition import Verdict


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


def judged(plan: PartitionPlan, instance: Instance) -> Verdict:
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
