"""What the limits of training frameworks cost: the search again with each of them lifted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.errors import InfeasibleError
from planner.solvers import search
from planner.space.pricer import Pricer
from planner.space.timing import played_s
from planner.space.types import Job, Structure
from planner.systems.backends import Backend, within_limits
from planner.systems.setting import Setting

WORDS: Mapping[str, str] = {
    "equal_replicas": "unequal replicas",
    "alike": "stages unlike in sharing and recomputation",
    "whole_layers": "layers divided between stages",
    "axes": "any layout inside groups",
    "powers_of_two": "groups of any number of ranks",
    "head_groups": "ranks that do not divide the heads",
    "zero_in_pipelines": "any ZeRO stage in pipelines",
}
"""What the plans are allowed where a field of `Structure` is lifted."""


@dataclass(frozen=True, slots=True)
class Freedom:
    """A limit lifted, or all of them.

    Attributes:
        words: what plans are allowed then.
        iteration_s: of the fastest; None where none fits.
    """

    words: str
    iteration_s: float | None


def freedoms(setting: Setting, backends: Sequence[Backend]) -> tuple[Freedom, ...]:
    """The fastest plan within the limits of some frameworks, then with each limit lifted alone, then with all.

    A search each: limits that a structure does not have are left out.
    """
    job = within_limits(setting.job, backends)
    return tuple(Freedom(words, _fastest_s(setting, freer)) for words, freer in _lifted(job, setting.job))


def _lifted(job: Job, free: Job) -> Iterator[tuple[str, Job]]:
    """What is allowed in words, and the job with that."""
    yield "none lifted", job
    for field in dataclasses.fields(Structure):
        if getattr(job.structure, field.name) != field.default:
            lifted: dict[str, Any] = {field.name: field.default}
            yield WORDS[field.name], dataclasses.replace(job, structure=dataclasses.replace(job.structure, **lifted))
    yield "all lifted", free


def _fastest_s(setting: Setting, job: Job) -> float | None:
    prices = Pricer(setting.prices.graph, setting.cluster, job, like=setting.prices)
    try:
        found = search(setting.costs, setting.cluster, job, shardings=prices, simulated_s=played_s)
    except InfeasibleError:
        return None
    return found.best.simulated_s
