"""Check that the figures of a plan agree with each other and with the job, without model and hardware."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from planner import schedules
from planner.documents import KeyPath, readable
from planner.errors import UsageError
from planner.hardware.types import neighbours
from planner.plans.derive import with_figures
from planner.plans.figures import Alternative, StagePrediction, gap_to
from planner.plans.files import to_document
from planner.plans.findings import PLAN_AGAIN, RELATIVE, ROUNDED, Fault, Finding, differences, stage_in
from planner.plans.readings import is_searched, schedule_of
from planner.plans.rebuild import alternative_configuration
from planner.plans.records import Stage
from planner.plans.types import Plan
from planner.plans.words import summary
from planner.space.limits import forbidden_choices
from planner.space.workers import lay_workers
from planner.units import format_bytes, format_seconds, plural

_MAY_BE_NEGATIVE = (("options", "keep"), ("predictions", "bubble_fraction"), ("model", "rebatch"))


def check_figures(plan: Plan) -> list[Finding]:
    """Findings about figures that contradict each other or the job; O(size of the file).

    Args:
        plan: a plan without findings that keep its orders from running.
    """
    findings = [*_negative((), to_document(plan))]
    findings += [Finding(Fault.FIGURES, words) for words in (*_hardware(plan), *_bounds(plan), *_alternatives(plan))]
    for stage, terms in zip(plan.stages, plan.predictions.stages, strict=True):
        wrong = (*_device(plan, stage, terms), *_terms(stage, terms))
        findings += [Finding(Fault.FIGURES, words, stage=stage.index) for words in wrong]
    names = tuple(block.name for block in plan.block_table)
    try:
        schedule = schedule_of(plan)
        for name in plan.options.schedules if plan.schedule.given != "orders" else ():
            schedules.get(name)
        workers = lay_workers(plan.configuration, schedule)
        right = with_figures(plan, schedule.weight_buffers)
        broken_limits = forbidden_choices(plan.options, plan.configuration, names, workers) if is_searched(plan) else []
    except UsageError as error:
        return [*findings, Finding(Fault.OPTIONS, error.problem.message, error.problem.hint)]
    findings += [difference.finding(plan, Fault.FIGURES) for difference in differences(plan, right)]
    return [*findings, *(Finding(Fault.OPTIONS, limit.message, PLAN_AGAIN, limit.stage) for limit in broken_limits)]


def _negative(path: KeyPath, value: object) -> Iterator[Finding]:
    """Findings about negative numbers, where the schema allows none."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _negative((*path, key), item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _negative((*path, index), item)
    elif isinstance(value, (int, float)) and value < 0 and path[:2] not in _MAY_BE_NEGATIVE:
        yield Finding(Fault.FIGURES, f"{readable(path)} is {value}", stage=stage_in(path))


def _hardware(plan: Plan) -> Iterator[str]:
    """Device types cover ranks without gaps, and their number is what the levels of links connect."""
    hardware = plan.hardware
    starts = [run.first_rank for run in hardware.devices]
    ends = list(itertools.accumulate((run.count for run in hardware.devices), initial=0))
    if starts != ends[:-1]:
        yield f"device types begin at ranks {starts}, expected {ends[:-1]}"
    joined = math.prod(level.size for level in hardware.levels)
    for count, what in ((ends[-1], "listed"), (joined, "joined by the levels of links")):
        if count != hardware.device_count:
            yield f"{plural(count, 'device')} are {what}, the cluster has {hardware.device_count}"
    if plan.world_size > hardware.device_count:
        yield f"the world has {plan.world_size} ranks, the cluster {plural(hardware.device_count, 'device')}"


def _device(plan: Plan, stage: Stage, terms: StagePrediction) -> Iterator[str]:
    """Capacity and reserve of a stage are those of its devices in the hardware section."""
    runs = [
        run
        for run in plan.hardware.devices
        if any(run.first_rank <= rank < run.first_rank + run.count for rank in stage.ranks)
    ]
    filled = 1 - plan.hardware.headroom
    peers = neighbours(stage.group_ranks, len(stage.replicas), len(plan.stages) > 1)
    for what, said, known in (
        ("capacity_bytes", terms.capacity_bytes, {math.floor(run.memory_bytes * filled) for run in runs}),
        ("memory.reserve_bytes", terms.memory.reserve_bytes,
         {run.reserve_bytes + peers * run.neighbour_bytes for run in runs}),
    ):  # fmt: skip
        if known and said not in known:
            devices = ", ".join(format_bytes(size) for size in sorted(known))
            yield f"{what} of stage {stage.index} is {format_bytes(said)}, its devices have {devices}"


def _terms(stage: Stage, terms: StagePrediction) -> Iterator[str]:
    """Parts of a stage's times do not exceed the total that they are part of."""
    parts = [
        ("recompute_s", terms.recompute_s, "backward_s", terms.backward_s),
        (
            "recompute_s + weight_grad_s",
            terms.recompute_s + (terms.weight_grad_s or 0.0),
            "backward_s",
            terms.backward_s,
        ),
        ("tied_sync_s", terms.tied_sync_s, "exposed_sync_s", terms.exposed_sync_s),
        ("exposed_sync_s", terms.exposed_sync_s, "sync_s + tied_sync_s", terms.sync_s + terms.tied_sync_s),
    ]
    for part, part_s, total_name, total_s in parts:
        if part_s > total_s * (1 + RELATIVE):
            yield f"stage {stage.index}: {part} is {format_seconds(part_s)}, {total_name} {format_seconds(total_s)}"


def _bounds(plan: Plan) -> Iterator[str]:
    """Bounds are in order, and a proof has no gap."""
    predictions = plan.predictions
    gap = gap_to(predictions.bound_s, predictions.reached_s)
    if predictions.bound_s > predictions.reached_s * (1 + RELATIVE):
        yield f"the bound {predictions.bound_s} s is above the iteration time {predictions.reached_s} s"
    tried_s, longest_s = predictions.tried_bound_s, predictions.reached_s * (1 + RELATIVE)
    if tried_s is not None and not predictions.bound_s <= tried_s <= longest_s:
        yield f"the bound of what was tried, {tried_s} s, does not lie between bound and iteration time"
    line_s = predictions.line_bound_s
    if line_s is not None and line_s < predictions.bound_s:
        yield f"the bound of one stage a worker, {line_s} s, is below that of all, {predictions.bound_s} s"
    if predictions.proven_optimal and gap > ROUNDED:
        yield f"the plan is called proven optimal at {format_seconds(gap * predictions.reached_s)} above its bound"


def _alternatives(plan: Plan) -> Iterator[str]:
    """Alternatives have the plan's global batch and match their summary, and none is faster than the bound."""
    for number, other in enumerate(plan.alternatives):
        for problem in _problems(plan, other):
            yield f"alternatives[{number}] ({other.label}): {problem}"


def _problems(plan: Plan, other: Alternative) -> Iterator[str]:
    """What is wrong with one alternative, a sentence each."""
    stages = len(other.starts)
    named = len(other.repeats) or stages, len(other.offload) or stages
    lengths = (len(other.replicas), len(other.ranks) or stages, len(other.layers) or stages, *named)
    if not stages or any(length != stages for length in lengths) or other.starts[0] != 0:
        counts = f"{lengths[0]} replicas, {lengths[1]} ranks and {lengths[2]} numbers of layers"
        yield f"{stages} starts, {counts} of stages that begin at block 0"
        return
    batch = other.copies * other.micro_batch * other.micro_batches
    if batch != plan.micro_batches.global_batch:
        yield f"its micro-batches are {plural(batch, 'sample')}, not {plan.micro_batches.global_batch}"
    if other.summary != summary(alternative_configuration(other, len(plan.block_table))):
        yield f"it is not {other.summary!r}"
    seconds = other.simulated_iteration_s
    if seconds is not None and not other.infeasible and seconds < plan.predictions.bound_s * (1 - RELATIVE):
        yield f"it takes {format_seconds(seconds)}, less than the bound for all plans"
