"""Is what a plan says about its orders what they do: versions of the weights, staleness, averages, weight policy?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planner.errors import PlanError
from planner.plans.findings import Fault, Finding
from planner.plans.order_text import rows
from planner.plans.types import Plan
from planner.plans.works import leaders, work_of
from planner.schedules.compiling import compile_orders
from planner.schedules.program import FORWARD, Program
from planner.schedules.types import ActionKind, WeightPolicy
from planner.schedules.versions import VersionUse, peak_versions, staleness, version_use

_AGAIN = "write what the orders do, or plan again"
_REPETITIONS = 2
"""How often what goes on for ever is played to see what it does."""


def check_claims(plan: Plan) -> list[Finding]:
    """Findings about a plan whose orders run; O(actions)."""
    if plan.schedule.weight_policy == WeightPolicy.SYNC:
        return list(_of_a_drained(plan))
    ranks, copies = leaders(plan)
    try:
        program = compile_orders(work_of(plan, ranks, _REPETITIONS, copies))
        if program.stages != len(plan.stages):
            return []
        return [*_versions(plan, program), *_policy(plan, program), *_averages(plan, ranks)]
    except PlanError as error:
        again = "what goes on for ever does not run twice: " if plan.schedule.continuous else ""
        return [Finding(Fault.ACTION_ORDER, f"{again}{error.problem.message}", error.problem.hint)]


def _of_a_drained(plan: Plan) -> Iterator[Finding]:
    """One version of the weights, nothing old, one update for all."""
    section = plan.schedule
    wrong = {
        "versions": max(section.versions, default=1) > 1,
        "staleness": max(section.staleness, default=0) > 0,
        "averaged": any(count != plan.micro_batches.count for count in section.averaged),
        "corrections": bool(section.corrections),
    }
    for name in (name for name, given in wrong.items() if given):
        message = f"{name} are given, but every update waits for the pipeline to drain"
        yield Finding(Fault.SCHEDULE_CLAIM, message, _AGAIN)


def _versions(plan: Plan, program: Program) -> Iterator[Finding]:
    """Versions that are held and how old they are."""
    section, none = plan.schedule, len(plan.stages) * (0,)
    held = section.versions or tuple(count + 1 for count in none)
    for stage, (most, said) in enumerate(zip(peak_versions(program).tolist(), held, strict=True)):
        if most > said:
            message = f"the orders need {most} versions of the weights of stage {stage}, the plan says {said}"
            yield Finding(Fault.SCHEDULE_CLAIM, message, _AGAIN, stage)
    oldest = staleness(program).forward_most
    for stage, (most, said) in enumerate(zip(oldest.tolist(), section.staleness or none, strict=True)):
        if int(most) != said:
            message = f"gradients of stage {stage} are up to {int(most)} updates old, the plan says {said}"
            yield Finding(Fault.SCHEDULE_CLAIM, message, _AGAIN, stage)
    if section.clock_distance is not None and section.weight_policy != WeightPolicy.VERTICAL:
        message = f"a clock distance is given, but the weight policy is {section.weight_policy!r}"
        yield Finding(Fault.SCHEDULE_CLAIM, message, _AGAIN)


def _policy(plan: Plan, program: Program) -> Iterator[Finding]:
    """The first action that does not do what the weight policy says."""
    policy, use = plan.schedule.weight_policy, version_use(program)
    if policy == WeightPolicy.DOUBLE_BUFFER and peak_versions(program).max() > 2:
        message = f"the orders need {peak_versions(program).max()} versions of the weights, weight policy '2bw' has 2"
        yield Finding(Fault.SCHEDULE_CLAIM, message, _AGAIN, int(np.argmax(peak_versions(program))))
    found, why = _unlike(program, use, policy)
    if len(found):
        at = int(found[0])
        message = f"{program.label(at)} reads version {use.read[at]}, {why}: that is not weight policy {policy!r}"
        yield Finding(Fault.SCHEDULE_CLAIM, message, _AGAIN, int(program.stage[at]))


def _unlike(program: Program, use: VersionUse, policy: str) -> tuple[np.ndarray, str]:
    """Actions that read another version than their policy has, and which that is."""
    reads = use.read >= 0
    if policy == WeightPolicy.NEWEST:
        return np.flatnonzero(reads & (use.read < use.newest)), "which is not the newest"
    width = max(int(program.unit.max()) + 1, 1)
    vertical = policy == WeightPolicy.VERTICAL
    key = program.unit if vertical else program.stage * width + program.unit
    forwards = (program.kind == FORWARD) & ((program.stage == 0) | (not vertical))
    first = np.full(program.stages * width, -1, np.int64)
    first[key[forwards]] = use.read[forwards]
    whose = "the first stage" if vertical else "its forward"
    return np.flatnonzero(reads & (use.read != first[key])), f"not that of {whose}"


def _averages(plan: Plan, ranks: list[int]) -> Iterator[Finding]:
    """How many micro-batches make an update."""
    section, whole = plan.schedule, plan.micro_batches.count
    said = section.averaged or (whole,) * len(plan.stages)
    for stage in plan.stages:
        rank = next((rank for rank in ranks if any(rank in group for group in stage.replicas)), -1)
        if rank < 0:
            continue
        counts = dict.fromkeys(ActionKind, 0)
        for times, sign in ((_REPETITIONS, 1), (1, -1)) if section.continuous else ((1, 1),):
            for order in plan.orders(rank):
                for row in rows(order.actions, times):
                    counts[row.kind] += sign * (row.stage == stage.index)
        together = 1 if counts[ActionKind.LAUNCH_SYNC] else len(stage.replicas)
        forwards, updates = counts[ActionKind.FORWARD] * together, counts[ActionKind.UPDATE] * section.parts
        if updates and forwards != said[stage.index] * updates:
            message = (
                f"{forwards / updates:g} micro-batches make an update of stage {stage.index}, the plan says "
                f"{said[stage.index]}: their gradients would be scaled wrongly"
            )
            yield Finding(Fault.SCHEDULE_CLAIM, message, _AGAIN, stage.index)
