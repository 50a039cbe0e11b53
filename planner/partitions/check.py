"""Judge a partition plan's file: is it whole, and does the instance give the value it claims? What differs in two."""

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
    """What differs between two plans, digest left aside; by the comparison that plans of models have, too.

    Args:
        old: the one.
        new: the other.
        tolerance: relative difference of two numbers that counts as none.
    """
    found: list[Change] = []
    for field in dataclasses.fields(PartitionPlan):
        if field.name != "digest":
            before, after = (dict(_values((field.name,), getattr(plan, field.name))) for plan in (old, new))
            found += changed_values(field.name, before, after, tolerance)
    return found


def _values(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:  # noqa: ANN401
    """The plain values of a plan by their paths."""
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
"""Relative difference of two values that counts as none."""


@dataclass(frozen=True, slots=True)
class PartitionFinding:
    """What is wrong with a plan.

    Attributes:
        fault: kind of fault: "digest", "claim", "family", "instance", "options", "parts", or a violation's kind.
        message: in words.
        part: part of the plan it is about; -1 for the whole.
        needed: what the plan takes, where it is about a limit.
        available: what there is.
    """

    fault: str
    message: str
    part: int = -1
    needed: float = 0.0
    available: float = 0.0

    def problem(self, where: str) -> Problem:
        """The finding as errors are printed."""
        return Problem(f"{self.fault}: {self.message}", where)


def check_partition(plan: PartitionPlan, instance: Instance | None = None) -> tuple[PartitionFinding, ...]:
    """Everything that is wrong with a plan.

    Args:
        plan: as read from its file.
        instance: what it is for; with it the plan is judged afresh. Without it only the file itself is looked at.
    """
    findings = [*_itself(plan)]
    if instance is not None:
        findings += _against(plan, instance)
    return tuple(findings)


def _itself(plan: PartitionPlan) -> list[PartitionFinding]:
    found = []
    if digest_of(plan) != plan.digest:
        found.append(PartitionFinding("digest", "the content is not what was written"))
    claim = plan.objective
    numbers = (claim.value, claim.bound, claim.gap)
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        found.append(PartitionFinding("claim", "value, bound or gap is negative or not finite"))
        return found
    if claim.bound > claim.value * (1 + TOLERANCE):
        found.append(PartitionFinding("claim", f"the bound {claim.bound!r} is above the value {claim.value!r}"))
    gap = 1 - claim.bound / claim.value if claim.value > 0 else 0.0
    if abs(gap - claim.gap) > TOLERANCE:
        found.append(PartitionFinding("claim", f"the gap is {gap:.3g}, not {claim.gap:.3g}"))
    if claim.proven_optimal != (claim.bound >= claim.value * (1 - TOLERANCE)):
        found.append(PartitionFinding("claim", "proven_optimal does not agree with value and bound"))
    family = FAMILIES.find(plan.instance.family)
    if family is None:
        found.append(PartitionFinding("family", f"there is no instance family {plan.instance.family!r}"))
    elif plan.objective.name not in [objective.name for objective in family.objectives]:
        found.append(PartitionFinding("family", f"{plan.objective.name!r} is no objective of {family.title}"))
    return found


def _against(plan: PartitionPlan, instance: Instance) -> list[PartitionFinding]:
    mine, theirs = plan.instance, instance
    if (mine.family, mine.fingerprint) != (theirs.family, theirs.fingerprint):
        message = f"the plan is for {mine.name} ({mine.fingerprint[:12]}), this is {theirs.name} "
        return [PartitionFinding("instance", message + f"({theirs.fingerprint[:12]})")]
    try:
        verdict = judged(plan, instance)
    except (PlanError, UsageError, JobError) as error:
        return [PartitionFinding("parts" if isinstance(error, PlanError) else "options", error.problem.message)]
    found = [PartitionFinding(v.kind, v.message, v.stage, v.needed, v.available) for v in verdict.violations]
    if not _same(verdict.objective, plan.objective.value):
        message = f"the value is {verdict.objective!r} {plan.objective.unit}, not {plan.objective.value!r}"
        found.append(PartitionFinding("value", message))
    if len(verdict.parts) == len(plan.parts):
        for number, (part, value) in enumerate(zip(plan.parts, verdict.parts, strict=True)):
            if part.value is not None and not _same(part.value, value):
                found.append(PartitionFinding("value", f"part {number} has {value!r}, not {part.value!r}", number))
    return found


def judged(plan: PartitionPlan, instance: Instance) -> Verdict:
    """What the judge says of a plan's decision on its instance.

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
