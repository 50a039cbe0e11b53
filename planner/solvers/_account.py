"""The account of a search: what none of the decisions of its problems is faster than, and what that speaks of in
words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.solvers._candidates import SAME
from planner.solvers._frontier import Looked
from planner.solvers.shapes import LONGEST
from planner.space.formulate import ALL_DIVISORS_UP_TO
from planner.space.repeats import lists_of
from planner.space.types import BlockCosts, Certificate, Job


class Account:
    """What is known of all that was looked at.

    Attributes:
        settled: number of problems that need not be looked at again.
        open: problems that were looked at and bound others; they are solved when the bound of all depends on them.
        bound_s: no decision of the problems that were settled is faster.
    """

    def __init__(self) -> None:
        self.settled = 0
        self.open: list[Looked] = []
        self.bound_s = self._tried_s = self._line_s = math.inf

    @property
    def lowest_s(self) -> float:
        """No decision of the problems that were settled, or are open, is faster."""
        return min([self.bound_s, *(entry.bound_s for entry in self.open)])

    def lower(self, bound_s: float, *, only_bounds: bool = False) -> None:
        """Some decisions may be as fast as this; `only_bounds`: some that are never made."""
        self.lower_beside(bound_s, only_bounds=only_bounds)
        self._line_s = min(self._line_s, bound_s)

    def lower_beside(self, bound_s: float, *, only_bounds: bool = False) -> None:
        """The same of decisions with other schedules than pipelines with one stage on each worker."""
        self.bound_s = min(self.bound_s, bound_s)
        self._tried_s = self._tried_s if only_bounds else min(self._tried_s, bound_s)

    def settle(self, count: int, bound_s: float, *, only_bounds: bool = False) -> None:
        """Keep account of so many problems none of whose decisions is faster than a bound."""
        self.settled += count
        self.lower(bound_s, only_bounds=only_bounds)

    def certificate(self, best_s: float, space: str) -> Certificate:
        """What is proven of an answer.

        Closer prices of memory, which are tried for the best alone, may go below what the others are bounded by.

        Args:
            best_s: its time.
            space: what was searched, in words.
        """
        bound_s = min(best_s, self.bound_s)
        gap = (best_s - bound_s) / best_s if best_s else 0.0
        tried_s = min(self._tried_s, best_s) if self._tried_s <= best_s * (1 + SAME) else None
        known_s = tried_s if tried_s is not None and tried_s > bound_s * (1 + SAME) else None
        line_s = min(self._line_s, best_s) if bound_s * (1 + SAME) < self._line_s < math.inf else None
        return Certificate(bound_s, gap, space, gap <= SAME, known_s, line_s)


def either(values: Sequence[object]) -> str:
    """`1, 2 or 4`."""
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
    """The decisions among which none is faster than the bound.

    Args:
        job: what is to be trained.
        devices: how many are used at the most.
        costs: of any micro-batch size.
        sizes: micro-batch sizes that were looked at.
        skipped: allowed ones that were not.
        placed: schedules whose stages are not in a paced line.
    """
    blocks = len(costs.parameter_elements)
    parts = [
        f"all cuts of {blocks} blocks into stages" + _counted(job),
        f"on at most {devices} devices in line, dealt to copies of the pipeline in equal slices",
        f"{_replicas(job, devices, blocks)} for each stage",
        f"recompute {_recomputed(job, costs)}, ZeRO {either(job.zero)}, schedule {either(job.schedules)}",
        f"micro-batch size {either(sizes)}",
    ]
    if placed:
        parts.append(
            f"of {either(placed)} one replica of a stage in each copy, copies one after another or those of each "
            f"worker together, at most {LONGEST:,} forwards and backwards in a copy"
        )
    parts += [f"{name!r} on stage {stage}" for name, stage in job.keep]
    if any(tie.blocks != (0, blocks - 1) for tie in costs.ties):
        parts.append(
            "the bound leaves out summing gradients of weights that other blocks than the first and last share"
        )
    if skipped:
        parts.append(f"sizes from {skipped[0]} on left out (a block does not fit, or one alone takes longer)")
    return "; ".join(parts)


def _recomputed(job: Job, costs: BlockCosts) -> str:
    """What stages may recompute, with the lists of modules that are tried."""
    lists = [each for each in lists_of(job.recompute, costs) if ",".join(each) != job.recompute]
    return job.recompute + (f" (also {either(['+'.join(each) for each in lists])})" if lists else "")


def _counted(job: Job) -> str:
    if job.pipeline_stages:
        return f" ({either(job.pipeline_stages)} of them)"
    return f" (at most {job.max_stages})" if job.max_stages else ""


def _replicas(job: Job, devices: int, blocks: int) -> str:
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
