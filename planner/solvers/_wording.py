"""What a certificate speaks of, in words."""

from __future__ import annotations

from collections.abc import Sequence

from planner.solvers.shapes import LONGEST
from planner.space.formulate import ALL_DIVISORS_UP_TO
from planner.space.repeats import lists_of
from planner.space.types import BlockCosts, Job


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
