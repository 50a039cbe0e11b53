"""Predictions by class of job: the table of errors that ships with the program, ranking inside a job, composed cells.

What had a part in a figure of a stack or a device is listed here by row (`FITTED`), so that every table can show the
rows apart that had none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import planner
from planner.costs import JobClass, MeasuredError, error_of, read_errors
from planner.sums import float_sum

if TYPE_CHECKING:
    from benchmarks.published import Prediction
    from benchmarks.runs import Run

COMPOSED = "vTrain single node"
"""Source whose times were composed from kernel traces in cells, not measured as wholes."""
NOISE = 0.06
"""Logarithm of the ratio up to which two times have no order, of sources that ran no configuration twice."""
SURE = 1.96
"""Deviations within which 95 % of differences lie."""
FITTED = frozenset(
    (
        "r0142", "r0144", "r0146", "r0189", "r0002", "r0003",  # megatron-2021: rates, launch, stretch
        "r1030", "r1034", "r1049", "r1046", "r1083", "r1087", "r1125", "r1126",
        "r0010", "r0011", "r0012",  # deepspeed-2021: ports and overlap
        "r0255", "r0260", "r0268", "r0269", "r0271", "r0273",  # fsdp-2023-h100, seen whole
        "r0287", "r0291", "r0300", "r0303", "r0318", "r0320",
        "r0810", "r0816", "r0823", "r0829", "r0843", "r0851", "r0855", "r0866", "r0871",  # bigscience-2022: stretch
        "r0876", "r0882", "r0884", "r0888", "r0892", "r0898", "r0918", "r0927",
        "r0887", "r0972",  # Jean Zay: network among many nodes (with r0892), all-reduce of two V100
    )
)  # fmt: skip
"""Rows of real runs that had a part in a figure that is fitted."""


def class_of(prediction: Prediction) -> JobClass:
    """The class of a run, as a plan of it would have it."""
    run = prediction.run
    if run.machine is None:
        raise ValueError(f"{run.key} has no machine")
    device = planner.load_cluster(run.machine.profile).devices[0].name
    return JobClass.of(run.stack, device, ranks=run.ranks, zero=run.zero, stages=run.stages, schedule=run.schedule)


def measured_errors(predictions: Iterable[Prediction]) -> list[tuple[JobClass, MeasuredError]]:
    """Errors of all classes of runs that were measured as wholes, sorted."""
    real = [p for p in predictions if p.run.source != COMPOSED]
    classes = sorted({class_of(p) for p in real}, key=str)
    return [(job, error_of(job, [1 / p.ratio for p in real if class_of(p) == job])) for job in classes]


def write_errors(path: Path, found: Iterable[tuple[JobClass, MeasuredError]]) -> None:
    """Write the errors of these classes into the file that the program reads; other classes there stay."""
    known = {**read_errors(path), **dict(found)}
    lines = [
        "# How far predictions were off, by class of job: `python -m benchmarks.published FOLDER --errors FILE` and"
    ]
    lines.append(
        "# `python -m benchmarks.recipes FOLDER --errors FILE`, each of which writes the classes that it measures."
    )
    lines.append("# Measured over predicted time lies between low and high with 80 % probability.")
    for job, error in sorted(known.items(), key=lambda each: str(each[0])):
        names = f"stack: {job.stack}, device: {job.device}, shared: {job.shared}, schedule: {job.schedule}"
        range_ = "" if error.low is None else f", low: {error.low:.3f}, high: {error.high:.3f}"
        lines.append(f"- {{{names}, runs: {error.runs}{range_}}}")
    path.write_text("\n".join(lines) + "\n")


def class_rows(predictions: Sequence[Prediction]) -> list[list[str]]:
    """By class: runs and error of all, and of those that had no part in a fit; the interval."""
    rows = []
    for job, error in measured_errors(predictions):
        own = [p for p in predictions if p.run.source != COMPOSED and class_of(p) == job]
        unseen = [p for p in own if p.run.key not in FITTED]
        interval = "-" if error.low is None else f"{error.low:.2f} to {error.high:.2f}"
        rows.append([str(job), str(len(own)), _error(own), str(len(unseen)), _error(unseen), interval])
    return rows


def _error(predictions: Sequence[Prediction]) -> str:
    return f"{np.mean([abs(p.ratio - 1) for p in predictions]):.1%}" if predictions else "-"


def cell_rows(predictions: Sequence[Prediction]) -> list[list[str]]:
    """Composed runs by the cell that they were composed in: ranks, width and micro-batch."""
    own = [p for p in predictions if p.run.source == COMPOSED]
    cells = sorted({(p.run.ranks, p.run.hidden, p.run.micro_batch) for p in own})
    rows = []
    for cell in cells:
        ratios = [p.ratio for p in own if (p.run.ranks, p.run.hidden, p.run.micro_batch) == cell]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append([*map(str, cell), str(len(ratios)), f"{np.mean(np.abs(np.array(ratios) - 1)):.1%}", spread])
    return rows


def ranking_rows(predictions: Sequence[Prediction]) -> list[list[str]]:
    """By source: jobs that ran in several ways, how much slower the way predicted fastest was, and Kendall's tau of the
    pairs of ways whose measured times differ by more than noise."""
    rows = []
    for source in dict.fromkeys(p.run.source for p in predictions):
        jobs: dict[tuple[object, ...], list[Prediction]] = {}
        for p in predictions:
            r = p.run
            if r.source == source:
                job = (r.hidden, r.layers, r.seq, r.global_batch, r.devices, r.machine)
                jobs.setdefault(job, []).append(p)
        tried = [own for own in jobs.values() if len(own) > 1]
        if not tried:
            continue
        losses = [min(own, key=lambda p: p.seconds).run.seconds / min(p.run.seconds for p in own) - 1 for own in tried]
        noise = noise_of([p.run for own in jobs.values() for p in own])
        pairs = [pair for own in tried for pair in itertools.combinations(own, 2)]
        signs = [sign for a, b in pairs if (sign := _order(a, b, noise)) is not None]
        tau = f"{np.mean(signs):.2f}" if signs else "-"
        loss = f"{np.mean(losses):.1%}", f"{max(losses):.0%}"
        rows.append([source, str(len(tried)), *loss, f"{noise:.1%}", str(len(signs)), tau])
    return rows


def noise_of(runs: Iterable[Run]) -> float:
    """Logarithm of the ratio within which 95 % of two runs of one configuration lie, from configurations that ran more
    than once: their pooled variance; `NOISE` where there are none."""
    times: dict[tuple[object, ...], list[float]] = {}
    for r in runs:
        way = (r.shape, r.heads, r.devices, r.machine, r.precision, r.zero)
        times.setdefault(way, []).append(math.log(r.seconds))
    repeated = [own for own in times.values() if len(own) > 1]
    if not repeated:
        return NOISE
    squares = float_sum(float(np.var(own)) * len(own) for own in repeated)
    return SURE * math.sqrt(2 * squares / sum(len(own) - 1 for own in repeated))


def _order(a: Prediction, b: Prediction, noise: float) -> float | None:
    """1 where two ways are predicted in the order that was measured, -1 in the other; None where the measured times are
    as good as equal, or the two are one way that ran twice."""
    if abs(math.log(a.run.seconds / b.run.seconds)) <= noise or a.seconds == b.seconds:
        return None
    return float(np.sign(a.seconds - b.seconds) * np.sign(a.run.seconds - b.run.seconds))
