"""Which of a user's limits exclude everything: each is lifted in turn, then two of them, until something fits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from planner.errors import InfeasibleError
from planner.space.types import Job

Attempt = Callable[[Job], float | None]
"""Seconds of some plan of a job, None where there is none."""

_FREE: dict[str, Any] = {
    "tensor_parallel": (),
    "meshes": (),
    "pipeline_stages": (),
    "data_parallel": (),
    "keep": (),
    "forbid": (),
    "uniform": False,
    "micro_batches": (),
    "max_stages": 0,
    "devices": 0,
    "recompute": "auto",
    "zero": (0, 1),
    "schedules": ("1f1b", "gpipe"),
}
"""Every limit of a job, and what it is where the user says nothing."""

_OWN = ("tensor_parallel", "meshes", "pipeline_stages", "data_parallel", "keep", "forbid", "uniform")
"""Limits that the diagnosis of memory knows nothing of."""


def limited(job: Job) -> bool:
    """Whether the user set one of the limits that a conflict is looked for in."""
    return any(getattr(job, name) != _FREE[name] for name in _OWN)


def _given(job: Job) -> list[str]:
    return [name for name in _FREE if getattr(job, name) != _FREE[name]]


def unlimited(job: Job) -> Job:
    """The job with all of the user's limits lifted."""
    return dataclasses.replace(job, **{name: _FREE[name] for name in _given(job)})


def in_words(job: Job) -> str:
    """The user's limits as they are written on the command line."""
    return ", ".join(_words(job, name) for name in _given(job))


def conflict(job: Job, attempt: Attempt) -> InfeasibleError | None:
    """The error to raise where a job with limits has no plan; None where lifting two of them does not help.

    Args:
        job: with the limits.
        attempt: looks for a plan of a job with fewer of them.
    """
    given, asked = _given(job), in_words(job)
    for count in (1, 2):
        lifted = []
        for names in itertools.combinations(given, count):
            seconds = attempt(dataclasses.replace(job, **{name: _FREE[name] for name in names}))
            if seconds is not None:
                words = " and ".join(_words(job, name) for name in names)
                lifted.append(f"without {words} ({seconds:.3g} s an iteration, say)")
        if lifted:
            return InfeasibleError(f"no plan has all of {asked}", hint=f"there are some {' or '.join(lifted)}")
    return None


def _words(job: Job, name: str) -> str:
    """A limit as a user writes it."""
    value = getattr(job, name)
    flags = {
        "tensor_parallel": "--tp",
        "pipeline_stages": "--pp",
        "data_parallel": "--dp",
        "micro_batches": "--micro-batch",
        "schedules": "--schedule",
        "meshes": "--mesh",
    }
    flag = flags.get(name, "--" + name.replace("_", "-"))
    if name == "keep":
        return " ".join(f'{flag} "{block} on stage {stage}"' for block, stage in value)
    if name == "meshes":
        return f"{flag} {','.join('x'.join(map(str, mesh)) for mesh in value)}"
    if value is True:
        return flag
    return f"{flag} {','.join(map(str, value)) if isinstance(value, tuple) else value}"
