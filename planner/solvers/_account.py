"""What a search spends on what, the lower bound that it has proven, and the space that this holds for."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.solvers._candidates import SAME
from planner.solvers._frontier import OpenProblem
from planner.solvers.shapes import MAX_ACTIONS
from planner.space.formulate import ALL_DIVISORS_UP_TO
from planner.space.recompute_choices import lists_of
from planner.space.types import BlockCosts, Certificate, Job

THOROUGH_UP_TO = 64
"""Most devices for the thorough search, which solves every problem that may hold the best decision by critical path.

On more devices the closed form ranks the problems, and only `MAX_BOUNDED` of those that the bound depends on are
bounded more closely."""

MAX_BOUNDED = 4
"""Problems that are bounded more closely on many devices."""

MAX_PRICED_BESIDE = 32
"""Families of shardings that a search beside known plans prices, lowest bound first."""

MAX_RAISED = 6
"""Problems with unpriced shardings that are solved only to raise the overall bound, lowest bound first."""

NEAR = 1.2
"""A first plan is good enough to start with within this factor of perfectly balanced compute."""

MAX_RETRIED = 4
"""Shardings with which plans are searched again that recompute some layers of a stage."""

MAX_OFFLOADED = 3
"""Shardings with which plans are searched again that keep activations in the host's memory."""

MAX_SIZES_TRIED = 2
"""Micro-batch sizes for which a first tensor parallel plan is tried."""

MAX_RUNNERS_UP = 8
"""Most runners-up of an answer."""

SLACK = 0.02
"""Decisions are still searched if their closed form exceeds the best by up to this fraction."""


class Account:
    """Running account of the bounds of all closed problems.

    Attributes:
        closed: number of closed problems.
        open: problems that only bound unpriced shardings; they are solved if the overall bound depends on them.
        bound_s: lower bound on the time of any decision of the closed problems.
    """

    def __init__(self) -> None:
        self.closed = 0
        self.open: list[OpenProblem] = []
        self.bound_s = self._reachable_s = self._one_stage_s = math.inf

    @property
    def lowest_s(self) -> float:
        """Lower bound on the time of any decision of the closed and open problems, in seconds."""
        return min([self.bound_s, *(entry.bound_s for entry in self.open)])

    def lower(self, bound_s: float, *, only_bounds: bool = False) -> None:
        """Lower the bound: some decisions may be as fast as this; `only_bounds` if these are never built."""
        self.lower_other(bound_s, only_bounds=only_bounds)
        self._one_stage_s = min(self._one_stage_s, bound_s)

    def lower_other(self, bound_s: float, *, only_bounds: bool = False) -> None:
        """Lower the bound for decisions whose schedule does not have one stage on each worker."""
        self.bound_s = min(self.bound_s, bound_s)
        self._reachable_s = self._reachable_s if only_bounds else min(self._reachable_s, bound_s)

    def close(self, count: int, bound_s: float, *, only_bounds: bool = False) -> None:
        """Close so many problems whose decisions are no faster than a bound."""
        self.closed += count
        self.lower(bound_s, only_bounds=only_bounds)

    def certificate(self, best_s: float, space: str) -> Certificate:
        """The certificate of an answer.

        The best may be faster than the bound, since closer memory prices are tried for the best alone; the bound is
        then lowered to it.

        Args:
            best_s: time of the answer, in seconds.
            space: description of the searched space.
        """
        bound_s = min(best_s, self.bound_s)
        gap = (best_s - bound_s) / best_s if best_s else 0.0
        reachable_s = min(self._reachable_s, best_s) if self._reachable_s <= best_s * (1 + SAME) else None
        known_s = reachable_s if reachable_s is not None and reachable_s > bound_s * (1 + SAME) else None
        one_stage_s = min(self._one_stage_s, best_s) if bound_s * (1 + SAME) < self._one_stage_s < math.inf else None
        return Certificate(bound_s, gap, space, gap <= SAME, known_s, one_stage_s)


def either(values: Sequence[object]) -> str:
    """Join values in words: `1, 2 or 4`."""
    texts = [str(v) for v in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def space_in_words(
    job: Job,
    devices: int,
    costs: BlockCosts,
    sizes: Sequence[int],
    skipped: Sequence[int],
    placed: Sequence[str] = (),
) -> str:
    """Describe the space that the bound holds for.

    Args:
        job: the job.
        devices: most devices used.
        costs: costs of any micro-batch size.
        sizes: micro-batch sizes that were searched.
        skipped: allowed sizes that were not searched.
        placed: schedules that were searched by shape (`ShapeSearch`).
    """
    blocks = len(costs.parameter_elements)
    parts = [
        f"all cuts of {blocks} blocks into stages" + _stage_limit(job),
        f"on at most {devices} devices in line, dealt to copies of the pipeline in equal slices",
        f"{_replica_words(job, devices, blocks)} for each stage",
        f"recompute {_recompute_words(job, costs)}, ZeRO {either(job.zero)}, schedule {either(job.schedules)}",
        f"micro-batch size {either(sizes)}",
    ]
    if placed:
        parts.append(
            f"of {either(placed)} one replica of a stage in each copy, copies one after another or those of each "
            f"worker together, at most {MAX_ACTIONS:,} forwards and backwards in a copy"
        )
    parts += [f"{name!r} on stage {stage}" for name, stage in job.keep]
    if any(tie.blocks != (0, blocks - 1) for tie in costs.ties):
        parts.append(
            "the bound leaves out summing gradients of weights that other blocks than the first and last share"
        )
    if skipped:
        parts.append(f"sizes from {skipped[0]} on left out (a block does not fit, or one alone takes longer)")
    return "; ".join(parts)


def _recompute_words(job: Job, costs: BlockCosts) -> str:
    """What stages may recompute, with the lists of modules that are tried."""
    lists = [modules for modules in lists_of(job.recompute, costs) if ",".join(modules) != job.recompute]
    return job.recompute + (f" (also {either(['+'.join(modules) for modules in lists])})" if lists else "")


def _stage_limit(job: Job) -> str:
    """The job's limit on the number of stages, in words."""
    if job.pipeline_stages:
        return f" ({either(job.pipeline_stages)} of them)"
    return f" (at most {job.max_stages})" if job.max_stages else ""


def _replica_words(job: Job, devices: int, blocks: int) -> str:
    """The numbers of replicas that are searched, in words."""
    words = "any number of replicas that divides the micro-batches"
    if job.data_parallel:
        words = f"{either(job.data_parallel)} replicas in all"
    if job.uniform:
        words += ", the same"
    if devices > ALL_DIVISORS_UP_TO:
        words += (
            f" (in slices of more than {ALL_DIVISORS_UP_TO} devices: powers of two and the largest; slices of at most "
            f"{max(ALL_DIVISORS_UP_TO, blocks)} where the batch can be dealt to more copies)"
        )
    return words
