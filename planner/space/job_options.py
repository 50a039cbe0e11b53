"""The options of a job that the user set: by name, as command line text, and which of them an engine supports."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

from planner.errors import UsageError
from planner.space.configuration import Configuration
from planner.space.types import Job

LIMITS = {
    "tensor_parallel": "--tp",
    "context_parallel": "--cp",
    "expert_parallel": "--ep",
    "meshes": "--mesh",
    "pipeline_stages": "--pp",
    "data_parallel": "--dp",
    "keep": "--keep",
    "forbid": "--forbid",
    "uniform": "--uniform",
    "micro_batches": "--micro-batch",
    "max_stages": "--max-stages",
    "devices": "--devices",
    "recompute": "--recompute",
    "zero": "--zero",
    "schedules": "--schedule",
    "backends": "--for",
}
"""Fields of a job that exclude plans, and the options that set them."""

WIDTHS = ("tensor_parallel", "context_parallel", "expert_parallel", "meshes")
"""Those that say how many ranks share operators."""

ASSUMPTIONS = {
    "precision": "--precision",
    "optimizer": "--optimizer",
    "fused_attention": "--attention eager",
    "dropout": "--no-dropout",
    "assume_dropout": "--assume-dropout",
    "overlap": "--overlap",
    "headroom": "--headroom",
}
"""Fields of a job that change what plans cost."""

PRICED = frozenset({"devices", "micro_batches", *ASSUMPTIONS}) - {"overlap"}
"""Fields that every engine supports which only needs prices by micro-batch size."""

_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Job)}
_REPEATED = ("micro_batches", "zero", "schedules", "forbid")


def given(job: Job, names: Collection[str] = LIMITS) -> list[str]:
    """The fields that the user set."""
    return [name for name in names if getattr(job, name) != _DEFAULTS[name]]


def without(job: Job, names: Collection[str]) -> Job:
    """The job as if the user had not set these fields."""
    lifted = {*names, "structure"} if "backends" in names else names
    return dataclasses.replace(job, **{name: _DEFAULTS[name] for name in lifted})


def allowing(job: Job, configuration: Configuration) -> Job:
    """The job, allowing what a configuration decides."""
    overlap = job.overlap if configuration.overlap is None else configuration.overlap
    return dataclasses.replace(
        job, schedules=(configuration.schedule,), zero=(configuration.zero,),
        whole_stages=configuration.whole_stages, transfers=configuration.transfers,
        precision=configuration.precision or job.precision, overlap=overlap,
    )  # fmt: skip


def in_words(job: Job, names: Collection[str] = LIMITS) -> str:
    """What the user set of these fields, as on the command line; empty when nothing."""
    return ", ".join(as_written(job, name) for name in given(job, names))


def as_written(job: Job, name: str) -> str:
    """A field as a user writes it."""
    value, flag = getattr(job, name), {**LIMITS, **ASSUMPTIONS}[name]
    if name == "keep":
        return " ".join(f'{flag} "{block} on stage {stage}"' for block, stage in value)
    if name == "meshes":
        return f"{flag} {','.join('x'.join(map(str, mesh)) for mesh in value)}"
    if name == "backends":
        return f"{flag} {' or '.join(value)}"
    if name in _REPEATED:
        return " ".join(f"{flag} {each}" for each in value)
    if isinstance(value, bool):
        return flag
    return f"{flag} {','.join(map(str, value)) if isinstance(value, (tuple, list)) else value}"


def allowed_ranks(job: Job) -> tuple[int, ...]:
    """Numbers of ranks that may share every operator: those of the meshes, unless said otherwise; empty means any."""
    return job.tensor_parallel or tuple(sorted({math.prod(mesh) for mesh in job.meshes}))


def allows_single_devices(job: Job) -> bool:
    """Whether a replica may be a single device."""
    widths = allowed_ranks(job), job.context_parallel, job.expert_parallel
    return all(1 in (allowed or (1,)) for allowed in widths)


def refuse_others(job: Job, takes: Collection[str], engine: str, hint: str) -> None:
    """Refuse options that an engine does not support, instead of ignoring them.

    Args:
        job: what is asked.
        takes: names of the fields that the engine's plans follow.
        engine: whose plans they are, in words.
        hint: what to do instead.

    Raises:
        UsageError: names everything that would have no effect.
    """
    stray = [name for name in given(job, {**LIMITS, **ASSUMPTIONS}) if name not in takes]
    if stray:
        words = ", ".join(as_written(job, name) for name in stray)
        raise UsageError(f"{engine} cannot follow {words}", hint=hint)
