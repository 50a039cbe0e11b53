"""A job is checked field by field before anything is worked out from it."""

from __future__ import annotations

from collections.abc import Callable

from planner.errors import JobError
from planner.exchange import recipes
from planner.space.types import Job

_RECOMPUTE = ("auto", "never", "always")

_COUNTS = {"global_batch": 1, "devices": 0, "max_stages": 0}
"""Whole numbers, and the least that they may be."""

_LISTS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "micro_batches": ("whole numbers of at least 1, such as (1, 2)", lambda v: _whole(v, 1)),
    "tensor_parallel": ("whole numbers of at least 1, such as (1, 2)", lambda v: _whole(v, 1)),
    "pipeline_stages": ("whole numbers of at least 1, such as (2, 4)", lambda v: _whole(v, 1)),
    "data_parallel": ("whole numbers of at least 1, such as (2, 4)", lambda v: _whole(v, 1)),
    "zero": ("ZeRO stages from 0 to 3, such as (0, 1)", lambda v: _whole(v, 0) and v in recipes()),
    "schedules": ("names of schedules, such as ('1f1b',)", lambda v: isinstance(v, str)),
    "forbid": ("texts such as ('MatMul:k',)", lambda v: isinstance(v, str)),
    "meshes": ("ranks by axis, such as ((8,), (2, 4))", lambda v: _mesh(v)),
    "keep": ("blocks with a stage each, such as (('layer0', 0),)", lambda v: _pin(v)),
}
"""Lists: what they hold in words, and whether an entry is such."""


def check_job(job: Job) -> None:
    """Refuse a job with a field that makes no sense by itself.

    Raises:
        JobError: names the field, its value and what it should be.
    """
    for name, least in _COUNTS.items():
        value = getattr(job, name)
        if not _whole(value, least):
            raise JobError(f"{name} is {value!r}", hint=f"give a whole number of at least {least}")
    for name, (words, fits) in _LISTS.items():
        value = getattr(job, name)
        if not isinstance(value, (tuple, list)) or not all(fits(entry) for entry in value):
            raise JobError(f"{name} is {value!r}", hint=f"give a tuple of {words}")
    for name in ("schedules", "zero"):
        if not getattr(job, name):
            raise JobError(
                f"{name} is empty: there is nothing to choose from", hint=f"give a tuple of {_LISTS[name][0]}"
            )
    if job.recompute not in _RECOMPUTE:
        raise JobError(f"recompute is {job.recompute!r}", hint=f"use {', '.join(_RECOMPUTE)}")
    if not isinstance(job.overlap, (int, float)) or not 0 <= job.overlap <= 1:
        raise JobError(f"overlap is {job.overlap!r}", hint="give a fraction from 0 to 1")


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _mesh(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) > 0 and all(_whole(size, 1) for size in value)


def _pin(value: object) -> bool:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return False
    return isinstance(value[0], str) and isinstance(value[1], int)
