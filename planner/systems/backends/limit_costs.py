"""What the limits of training frameworks cost: the fastest plan with each limit lifted.

One search for each limit that the frameworks have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.errors import InfeasibleError
from planner.hardware.types import Cluster
from planner.solvers import search
from planner.space.pricer import Pricer
from planner.space.timing import played_s
from planner.space.types import Job, Structure
from planner.systems.backends import Backend, within_limits

WORDS: Mapping[str, str] = {
    "equal_replicas": "unequal replicas",
    "alike": "stages unlike in sharing and recomputation",
    "whole_layers": "layers divided between stages",
    "axes": "any layout inside groups",
    "powers_of_two": "groups of any number of ranks",
    "head_groups": "ranks that do not divide the heads",
    "zero_in_pipelines": "any ZeRO stage in pipelines",
    "between_layers": "tensors between layers whole or cut by the sequence",
}
"""By field of `Structure`: what plans may have once that limit is lifted."""


@dataclass(frozen=True, slots=True)
class LiftedLimit:
    """The fastest plan with one limit of the training frameworks lifted, or all of them.

    Attributes:
        words: what plans may have then.
        iteration_s: time of the fastest plan; None if none fits.
    """

    words: str
    iteration_s: float | None


def lifted_limits(prices: Pricer, cluster: Cluster, job: Job, backends: Sequence[Backend]) -> tuple[LiftedLimit, ...]:
    """Search within the limits of some frameworks, then with each limit lifted alone, then with all lifted."""
    results = []
    for words, lifted_job in _lifted_jobs(within_limits(job, backends), job):
        shardings = Pricer(prices.graph, cluster, lifted_job, like=prices)
        try:
            answer = search(prices.costs, cluster, lifted_job, shardings=shardings, simulated_s=played_s)
            results.append(LiftedLimit(words, answer.best.simulated_s))
        except InfeasibleError:
            results.append(LiftedLimit(words, None))
    return tuple(results)


def _lifted_jobs(limited: Job, unlimited: Job) -> Iterator[tuple[str, Job]]:
    """The job with no limit lifted, with each lifted alone and with all lifted, each with its description."""
    yield "none lifted", limited
    for limit in dataclasses.fields(Structure):
        if getattr(limited.structure, limit.name) != limit.default:
            default: dict[str, Any] = {limit.name: limit.default}
            structure = dataclasses.replace(limited.structure, **default)
            yield WORDS[limit.name], dataclasses.replace(limited, structure=structure)
    yield "all lifted", unlimited
