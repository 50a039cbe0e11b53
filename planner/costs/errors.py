"""How far predictions were off for jobs that were measured, by class of the job, and the interval that follows.

The table is data: `hardware_profiles/errors.yaml`, written by the benchmarks that predict published runs
(docs/accuracy.md) and hand-tuned jobs (docs/recipes.md). A class is what predictions of one kind have in common: the
stack, the device, what ranks share and the order of work. Of a class of n runs with logarithms l of measured /
predicted, of mean m and deviation s, the next run lies with 80 % probability within m +- t s sqrt(1 + 1/n), t being
Student's quantile of n - 1 degrees of freedom. The interval stated is that and the prediction itself: where all runs of
a class were faster than predicted, it ends at the predicted time, and holds more than 80 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from planner.hardware.document import profile_folder
from planner.sums import float_sum
from planner.units import format_seconds, plural

ERRORS_FILE = "errors.yaml"
LEAST_RUNS = 3
"""Fewest measured runs of a class that give an error interval."""
_NORMAL_QUANTILE = 1.2815515655446004
"""90 % of a normal distribution lie below it: 80 % between its negative and itself."""


@dataclass(frozen=True, slots=True)
class JobClass:
    """A class of jobs whose prediction errors are pooled.

    Attributes:
        stack: name of the software.
        device: name of the slowest device type.
        shared: what ranks share beyond gradients: "nothing", "operators", "weights", or "operators and weights".
        schedule: the order of work; "one stage" where there is no pipeline.
    """

    stack: str
    device: str
    shared: str
    schedule: str

    @classmethod
    def of(cls, stack: str, device: str, *, ranks: int, zero: int, stages: int, schedule: str) -> JobClass:
        """The class of a job of so many ranks a replica, at a ZeRO stage, with so many stages; the schedule's options
        do not count."""
        names = [name for name, so in (("operators", ranks > 1), ("weights", zero > 1)) if so]
        return cls(
            stack, device, " and ".join(names) or "nothing", schedule.partition(":")[0] if stages > 1 else "one stage"
        )

    def __str__(self) -> str:
        return f"{self.stack} on {self.device}, {self.shared} shared, {self.schedule}"


@dataclass(frozen=True, slots=True)
class MeasuredError:
    """How predictions of a job's class compared with measured runs.

    Attributes:
        job_class: the class in words.
        runs: runs of the class that were measured and predicted; 0 where none ever was.
        low: with 80 % probability, or more, the measured time is above this times the predicted one, at most 1; null
            below three runs.
        high: and below this times the predicted one, at least 1.
    """

    job_class: str
    runs: int = 0
    low: float | None = None
    high: float | None = None

    def in_words(self, seconds: float) -> str:
        """The interval around a predicted time: `80 %: 7.1 s to 8.3 s; fsdp-2023 on ..: 104 runs`."""
        if not self.runs:
            return f"no run of this class was ever compared: {self.job_class}"
        compared = f"{self.job_class}: {plural(self.runs, 'run')}"
        if self.low is None or self.high is None:
            return f"too few runs for an interval; {compared}"
        return f"80 %: {format_seconds(self.low * seconds)} to {format_seconds(self.high * seconds)}; {compared}"


def measured_error(job: JobClass, own: tuple[int, float, float] | None = None) -> MeasuredError:
    """How predictions of a class compared with measured runs; with the user's own where a stack was fitted to them."""
    if own is not None:
        return MeasuredError(f"runs of your own under {job.stack}, each predicted from the others", *own)
    return _table().get(job, MeasuredError(str(job)))


def error_of(job: JobClass, ratios: Sequence[float]) -> MeasuredError:
    """Error interval of a class, the prediction among it, from the ratios of measured to predicted time; at least one.

    >>> found = error_of(JobClass("s", "d", "nothing", "one stage"), [0.9, 1.0, 1.1, 1.0])
    >>> found.runs, round(found.low, 2), round(found.high, 2)
    (4, 0.86, 1.16)
    >>> found = error_of(JobClass("s", "d", "nothing", "one stage"), [0.8, 0.8, 0.8])
    >>> round(found.low, 2), found.high
    (0.8, 1.0)
    """
    count = len(ratios)
    if count < LEAST_RUNS:
        return MeasuredError(str(job), count)
    logs = [math.log(ratio) for ratio in ratios]
    mean = float_sum(logs) / count
    deviation = math.sqrt(float_sum((value - mean) ** 2 for value in logs) / (count - 1))
    reach = _student_quantile(count - 1) * deviation * math.sqrt(1 + 1 / count)
    return MeasuredError(str(job), count, math.exp(min(0.0, mean - reach)), math.exp(max(0.0, mean + reach)))


def _student_quantile(freedom: int) -> float:
    """The 90 % quantile of Student's distribution by its expansion around the normal one (Fisher and Cornish 1960);
    within 2 % from two degrees of freedom on."""
    z = _NORMAL_QUANTILE
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


@cache
def _table() -> dict[JobClass, MeasuredError]:
    return read_errors(profile_folder() / ERRORS_FILE)


def read_errors(path: Path) -> dict[JobClass, MeasuredError]:
    """The classes of a file of measured errors, empty where there is no file."""
    from planner.hardware.document import read_document

    found = {}
    for row in (read_document(path).data or ()) if path.exists() else ():
        job = JobClass(*(str(row[key]) for key in ("stack", "device", "shared", "schedule")))
        low, high = row.get("low"), row.get("high")
        found[job] = MeasuredError(
            str(job), int(row["runs"]), None if low is None else float(low), None if high is None else float(high)
        )
    return found
