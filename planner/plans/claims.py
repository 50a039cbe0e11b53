"""Check what a plan says twice or beside its decision: the headline, which follows from the rest, the free choice, and
the memory that is left free.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator

from planner.graph import DType
from planner.plans.figures import Headline
from planner.plans.findings import RELATIVE, Difference, Fault, Finding
from planner.plans.model import OF_FILE
from planner.plans.records import DeviceRun
from planner.plans.types import Plan
from planner.units import format_seconds

WITH_HEADLINE = (0, 2)
"""The first version of this program whose plans have a headline, and say what they leave free."""


def check_claims_alone(plan: Plan) -> list[Finding]:
    """Findings about headline, free choice and headroom, from the file alone; O(ranks)."""
    findings = [Finding(Fault.FIGURES, words) for words in _free_choice(plan)]
    if version_of(plan) >= WITH_HEADLINE:
        findings += _said_twice(plan)
    if plan.headline is None:
        return findings
    right = headline_from(plan, plan.headline)
    for field in dataclasses.fields(right):  # exactly: the same few operations on the same figures
        said, derived = getattr(plan.headline, field.name), getattr(right, field.name)
        if said != derived:
            findings.append(Difference(("headline", field.name), said, derived).finding(plan, Fault.FIGURES))
    return findings


def _said_twice(plan: Plan) -> Iterator[Finding]:
    """Findings about what plans of before need not have, or say once."""
    if plan.headline is None:
        yield Finding(Fault.FIGURES, "headline: nothing in the file")
    if plan.options.headroom != plan.hardware.headroom:
        path = ("options", "headroom")
        yield Difference(path, plan.options.headroom, plan.hardware.headroom).finding(plan, Fault.OPTIONS)
    repeats = plan.options.whole_stages or any(stage.recompute for stage in plan.configuration.stages)
    if plan.configuration.whole_stages and not repeats:
        path = ("configuration", "whole_stages")
        yield Difference(path, said=True, right=False).finding(plan, Fault.OPTIONS)
    of_file = [name for name in OF_FILE if getattr(plan.model, name) and name != "separated"]
    if of_file and not plan.model.file_sha256:
        yield Finding(Fault.FIGURES, f"model.{of_file[0]} is said of a model file, and model.file_sha256 is not said")


def version_of(plan: Plan) -> tuple[int, ...]:
    """Major and minor version of the program that made a plan; (0,) where it cannot be read."""
    numbers = plan.provenance.version.split(".")[:2]
    return tuple(map(int, numbers)) if all(number.isdecimal() for number in numbers) else (0,)


def headline_from(plan: Plan, said: Headline) -> Headline:
    """The headline as it follows from the rest of the plan.

    Taken from the file are only work and peak rate, which model and hardware say, the price, which may be the user's,
    and whether the steps of the inputs are tokens.

    Args:
        plan: a plan whose stages are those of its configuration.
        said: its headline.
    """
    used, reached_s = _devices(plan), plan.predictions.reached_s
    batch = plan.micro_batches.global_batch
    if not used or reached_s <= 0 or batch < 1:
        return said  # these are found by other checks
    steps = max((spec.shape[1] for spec in plan.model.inputs if _are_indices(spec.dtype, spec.shape)), default=0)
    sequence = steps if said.sequence and steps > 1 else 0
    memory_bytes, device_bytes = _fullest(plan, said, [run for run, _ in used]) or (
        said.memory_bytes,
        said.device_bytes,
    )
    counts = Counter[str]()
    for run, count in used:
        counts[run.device] += count
    bare = dataclasses.replace(
        said,
        model=plan.model.name,
        devices=dict(counts),
        global_batch=batch,
        sequence=sequence,
        tokens_per_step=sequence * batch,
        memory_bytes=memory_bytes,
        device_bytes=device_bytes,
    )
    return bare.at(reached_s, plan.predictions.measured_error)


def _are_indices(dtype: str, shape: tuple[int, ...]) -> bool:
    """True for inputs whose steps may be tokens: `[batch, steps]` of integers."""
    return dtype in (DType.INT64, DType.INT32) and len(shape) == 2


def _devices(plan: Plan) -> list[tuple[DeviceRun, int]]:
    """Runs of devices that are at work, and how many of each."""
    ranks = {rank for stage in plan.stages for rank in stage.ranks}
    runs = plan.hardware.devices
    counts = [sum(run.first_rank <= rank < run.first_rank + run.count for rank in ranks) for run in runs]
    return [(run, count) for run, count in zip(runs, counts, strict=True) if count]


def _fullest(plan: Plan, said: Headline, runs: list[DeviceRun]) -> tuple[int, int] | None:
    """(bytes, all memory) of the device that is the fullest; None where a device has several stages."""
    if any(len(plan.stages_of(group[0])) > 1 for stage in plan.stages for group in stage.replicas):
        return None
    fullest = max(plan.predictions.stages, key=lambda terms: terms.memory.total_bytes / max(1, terms.capacity_bytes))
    total_bytes = fullest.memory.total_bytes
    if 0 <= total_bytes - said.memory_bytes < len(dataclasses.fields(fullest.memory)):  # each kind is rounded up
        total_bytes = said.memory_bytes
    filled = 1 - plan.hardware.headroom
    sizes = [run.memory_bytes for run in runs if math.floor(run.memory_bytes * filled) >= fullest.capacity_bytes]
    return total_bytes, min(sizes, default=fullest.capacity_bytes)


def _free_choice(plan: Plan) -> Iterator[str]:
    """What contradicts the rest of the plan in its free choice, a sentence each."""
    free = plan.free_choice
    if free is None:
        if plan.runs_on:
            yield f"free_choice: nothing in the file, which is for {' and '.join(plan.runs_on)}"
        return
    stated = [name for name in ("summary", "iteration_s", "bound_s") if getattr(free, name) not in ("", None)]
    if not plan.runs_on and (stated or free.needs or not free.reason):
        yield "free_choice: a plan that is for no framework is the free choice itself, and says only why"
    elif len(stated) not in (0, 3) or bool(stated) == bool(free.reason) or (free.needs and not stated):
        listed = " and ".join(stated) or "nothing"
        yield f"free_choice: it has {listed} of a plan; expected summary, iteration_s and bound_s, or a reason"
    if free.iteration_s is None or free.bound_s is None:
        return
    if free.bound_s > free.iteration_s * (1 + RELATIVE):
        bound, taken = format_seconds(free.bound_s), format_seconds(free.iteration_s)
        yield f"free_choice: its bound of {bound} is above its iteration time of {taken}"
    if free.iteration_s > plan.predictions.reached_s * (1 + RELATIVE):
        taken, own = format_seconds(free.iteration_s), format_seconds(plan.predictions.reached_s)
        yield f"free_choice: it takes {taken}, longer than this plan, which it may be, with {own}"
