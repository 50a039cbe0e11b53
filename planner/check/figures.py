"""Do a plan's figures agree with each other? What can be told without the model and the hardware."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from planner.check.compare import ROUNDED
from planner.plans import Fault, Finding, Plan
from planner.plans.figures import Alternative, StagePrediction, gap_to
from planner.plans.files import to_document
from planner.plans.locate import Path, readable
from planner.plans.records import Stage
from planner.plans.words import summary
from planner.space.types import Configuration, StageChoice
from planner.units import format_bytes, format_seconds, plural

TOLERANCE = 1e-6

_AGAIN = "plan again instead of editing the file"
_MAY_BE_NEGATIVE = (("options", "keep"), ("predictions", "bubble_fraction"))


def check_figures(plan: Plan) -> list[Finding]:
    """Findings about figures that contradict each other; O(size of the file)."""
    found = [*_negative((), to_document(plan)), *_hardware(plan)]
    for stage, terms in zip(plan.stages, plan.predictions.stages, strict=True):
        found += [*_device(plan, stage, terms), *_terms(stage, terms)]
    return [*found, *_whole(plan), *_alternatives(plan)]


def _negative(path: Path, value: object) -> Iterator[Finding]:
    """Numbers below zero that count, measure or number something."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _negative((*path, key), item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _negative((*path, index), item)
    elif isinstance(value, (int, float)) and value < 0 and path[:2] not in _MAY_BE_NEGATIVE:
        yield Finding(Fault.NEGATIVE, f"{readable(path)} is {value}", _AGAIN, stage_in(path))


def stage_in(path: Path) -> int:
    """The stage that a path of the file is about, -1 for none."""
    places = (b for a, b in itertools.pairwise(path) if a == "stages" and isinstance(b, int))
    return next(places, -1)


def _hardware(plan: Plan) -> Iterator[Finding]:
    """Devices stand in line, and as many as the levels of links join."""
    hardware = plan.hardware
    starts = [run.first_rank for run in hardware.devices]
    ends = list(itertools.accumulate((run.count for run in hardware.devices), initial=0))
    if starts != ends[:-1]:
        yield Finding(Fault.HARDWARE, f"device types begin at ranks {starts}, expected {ends[:-1]}", _AGAIN)
    joined = math.prod(level.size for level in hardware.levels)
    for count, what in ((ends[-1], "listed"), (joined, "joined by the levels of links")):
        if count != hardware.device_count:
            message = f"{plural(count, 'device')} are {what}, the cluster has {hardware.device_count}"
            yield Finding(Fault.HARDWARE, message, _AGAIN)
    if plan.world_size > hardware.device_count:
        message = f"the world has {plan.world_size} ranks, the cluster {plural(hardware.device_count, 'device')}"
        yield Finding(Fault.RANK_RANGE, message, _AGAIN)


def _device(plan: Plan, stage: Stage, terms: StagePrediction) -> Iterator[Finding]:
    """What a stage says of its devices is what the hardware section says of them."""
    runs = [
        run
        for run in plan.hardware.devices
        if any(run.first_rank <= rank < run.first_rank + run.count for rank in stage.ranks)
    ]
    for what, said, known in (
        ("capacity_bytes", terms.capacity_bytes, {run.memory_bytes for run in runs}),
        ("memory.reserve_bytes", terms.memory.reserve_bytes, {run.reserve_bytes for run in runs}),
    ):
        if known and said not in known:
            devices = ", ".join(format_bytes(size) for size in sorted(known))
            message = f"{what} of stage {stage.index} is {format_bytes(said)}, its devices have {devices}"
            yield Finding(Fault.HARDWARE, message, _AGAIN, stage.index)


def _terms(stage: Stage, terms: StagePrediction) -> Iterator[Finding]:
    """Parts of a stage's times and memory do not exceed the whole."""
    memory = terms.memory
    parts = [
        ("recompute_s", terms.recompute_s, "backward_s", terms.backward_s),
        ("tied_sync_s", terms.tied_sync_s, "exposed_sync_s", terms.exposed_sync_s),
        ("exposed_sync_s", terms.exposed_sync_s, "sync_s + tied_sync_s", terms.sync_s + terms.tied_sync_s),
    ]
    for part, own, whole, total in parts:
        if own > total * (1 + TOLERANCE):
            message = f"stage {stage.index}: {part} is {format_seconds(own)}, {whole} {format_seconds(total)}"
            yield Finding(Fault.PREDICTIONS, message, _AGAIN, stage.index)
    if stage.recompute != (terms.recompute_s > 0) and stage.kept_blocks != tuple(range(*stage.blocks)):
        said = "recomputes" if stage.recompute else "does not recompute"
        message = f"stage {stage.index} {said}, but its backward repeats {format_seconds(terms.recompute_s)} of forward"
        yield Finding(Fault.PREDICTIONS, message, _AGAIN, stage.index)
    kept = terms.in_flight * terms.unit_bytes
    if not stage.recompute and not kept <= memory.activations_bytes <= kept + terms.in_flight + 1:
        message = (
            f"stage {stage.index} keeps {terms.in_flight} x {terms.unit_bytes} bytes of activations, "
            f"but says {memory.activations_bytes} in all"
        )
        yield Finding(Fault.MEMORY, message, _AGAIN, stage.index)


def _slowest(plan: Plan, pace: Sequence[float]) -> int:
    """The slowest stage of the rank whose stages take most time together."""
    hosted: dict[int, list[int]] = {}
    for stage in plan.stages:
        for replica in stage.replicas:
            hosted.setdefault(replica[0], []).append(stage.index)
    busiest = max(hosted.values(), key=lambda own: sum(pace[index] for index in own))
    return max(busiest, key=lambda index: (pace[index], -index))


def _whole(plan: Plan) -> Iterator[Finding]:
    """Bubble, bottleneck, gap and proof follow from the other figures."""
    said = plan.predictions
    pace = [
        (t.forward_s + t.backward_s + t.receive_s + t.return_s) / max(1, len(stage.replicas))
        for t, stage in zip(said.stages, plan.stages, strict=True)
    ]
    slowest = _slowest(plan, pace)
    if pace[said.bottleneck] < pace[slowest] * (1 - TOLERANCE):
        message = f"stage {said.bottleneck} is called the bottleneck, stage {slowest} is slower"
        yield Finding(Fault.PREDICTIONS, message, _AGAIN, said.bottleneck)
    bubble = _bubble(plan)
    if not math.isclose(bubble, said.bubble_fraction, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
        message = f"the stages' times make a bubble of {bubble:.6g}, the plan says {said.bubble_fraction:.6g}"
        yield Finding(Fault.PREDICTIONS, message, _AGAIN)
    gap = gap_to(said.bound_s, said.reached_s)
    if not math.isclose(gap, said.gap, rel_tol=TOLERANCE, abs_tol=ROUNDED):
        message = f"the gap is {said.gap:.6g}, bound and iteration time make {gap:.6g}"
        yield Finding(Fault.BOUND, message, _AGAIN)
    if said.tried_bound_s is not None and not said.bound_s <= said.tried_bound_s <= said.reached_s * (1 + TOLERANCE):
        message = f"the bound of what was tried, {said.tried_bound_s} s, does not lie between bound and iteration time"
        yield Finding(Fault.BOUND, message, _AGAIN)
    if said.line_bound_s is not None and said.line_bound_s < said.bound_s:
        message = f"the bound of one stage a worker, {said.line_bound_s} s, is below that of all, {said.bound_s} s"
        yield Finding(Fault.BOUND, message, _AGAIN)
    if said.proven_optimal and gap > ROUNDED:
        message = f"the plan is called proven optimal at {format_seconds(gap * said.reached_s)} above its bound"
        yield Finding(Fault.BOUND, message, _AGAIN)


def _bubble(plan: Plan) -> float:
    """By the plan's own convention, ranks without work left out."""
    busy_s = sum(
        ((t.forward_s + t.backward_s) * plan.micro_batches.count + t.update_s * len(stage.replicas)) * stage.group_ranks
        for t, stage in zip(plan.predictions.stages, plan.stages, strict=True)
    )
    ranks = plan.world_size - len(plan.idle_ranks)
    return 1.0 - busy_s / (ranks * plan.predictions.iteration_s)


def _alternatives(plan: Plan) -> Iterator[Finding]:
    """Other plans do the same job in the way that their line says, and none is faster than the bound."""
    for number, other in enumerate(plan.alternatives):
        for problem in _problems(plan, other):
            yield Finding(Fault.ALTERNATIVES, f"alternatives[{number}] ({other.label}): {problem}", _AGAIN)


def _problems(plan: Plan, other: Alternative) -> Iterator[str]:
    stages = len(other.starts)
    lengths = (len(other.replicas), len(other.ranks) or stages)
    if not stages or any(length != stages for length in lengths) or other.starts[0] != 0:
        yield f"{stages} starts, {lengths[0]} replicas and {lengths[1]} ranks of stages that begin at block 0"
        return
    batch = other.copies * other.micro_batch * other.micro_batches
    if batch != plan.micro_batches.global_batch:
        yield f"its micro-batches are {plural(batch, 'sample')}, not {plan.micro_batches.global_batch}"
    if other.summary != summary(_decision(other, len(plan.block_table))):
        yield f"it is not {other.summary!r}"
    seconds = other.simulated_iteration_s
    if seconds is not None and not other.infeasible and seconds < plan.predictions.bound_s * (1 - TOLERANCE):
        yield f"it takes {format_seconds(seconds)}, less than the bound for all plans"


def _decision(other: Alternative, blocks: int) -> Configuration:
    ranks: Sequence[int] = other.ranks or (1,) * len(other.starts)
    ends = (*other.starts[1:], blocks)
    stages = tuple(
        StageChoice(start, stop, replicas, index in other.recompute, ranks[index])
        for index, (start, stop, replicas) in enumerate(zip(other.starts, ends, other.replicas, strict=True))
    )
    return Configuration(stages, other.copies, other.micro_batch, other.micro_batches, other.schedule, other.zero)
