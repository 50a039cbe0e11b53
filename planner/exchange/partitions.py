"""How many partitions a sparse variable should have: Parallax's search by samples of the iteration time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from planner.errors import UsageError


@dataclass(frozen=True, slots=True)
class PartitionFit:
    """`t(P) = c + b/P + a(P - 1)`: fixed time, work that partitions share, and what each further partition costs.

    Attributes:
        fixed_s: c.
        shared_s: b.
        overhead_s: a.
        best: the partition count to use.
        best_s: its time, fitted (or the sample's own where there was no fit).
    """

    fixed_s: float
    shared_s: float
    overhead_s: float
    best: int
    best_s: float

    def seconds(self, partitions: int) -> float:
        """The fitted time of a partition count."""
        return self.fixed_s + self.shared_s / partitions + self.overhead_s * (partitions - 1)


def fit_partitions(samples: Mapping[int, float]) -> PartitionFit:
    """Least squares through samples of the iteration time, and the best integer within the sampled range.

    With fewer than three samples the best of them is taken. O(samples + range). After Parallax (Kim et al., EuroSys
    2019, section 3.2).

    >>> formulas.fit_partitions({p: 1 + 64 / p + 0.25 * (p - 1) for p in (2, 4, 8, 16, 32)}).best
    16

    Args:
        samples: seconds by partition count, at least one.

    Raises:
        UsageError: no sample, a count below 1, or a time that is not finite.
    """
    if not samples or min(samples) < 1 or not all(math.isfinite(t) for t in samples.values()):
        raise UsageError("partition counts need samples of finite seconds", hint="measure at one count or more")
    counts = np.asarray(sorted(samples), dtype=np.float64)
    times = np.asarray([samples[int(p)] for p in counts])
    if len(counts) < 3:
        best = int(np.argmin(times))
        return PartitionFit(float(times[best]), 0.0, 0.0, int(counts[best]), float(times[best]))
    terms = np.stack([np.ones_like(counts), 1 / counts, counts - 1], axis=1)
    fixed, shared, overhead = (float(x) for x in np.linalg.lstsq(terms, times, rcond=None)[0])
    candidates = np.arange(int(counts[0]), int(counts[-1]) + 1)
    fitted = fixed + shared / candidates + overhead * (candidates - 1)
    best = int(np.argmin(fitted))
    return PartitionFit(fixed, shared, overhead, int(candidates[best]), float(fitted[best]))


def best_partitions(shared_s: float, overhead_s: float) -> float:
    """The real-valued optimum of the fitted time, sqrt(b/a); inf when partitions cost nothing.

    >>> formulas.best_partitions(64, 0.25)
    16.0
    """
    if shared_s < 0 or overhead_s < 0:
        raise UsageError("partition times must not be negative", hint="use the terms of a fit that has an optimum")
    return math.sqrt(shared_s / overhead_s) if overhead_s > 0 else math.inf


def whole_partitions(shared_s: float, overhead_s: float, most: int = 1 << 20) -> int:
    """The partition count of the least time among 1..most: a neighbour of sqrt(b/a); the fewer of two equal ones.

    >>> formulas.whole_partitions(64, 0.25), formulas.whole_partitions(30, 0.3), formulas.whole_partitions(64, 0.25, 8)
    (16, 10, 8)

    Raises:
        UsageError: a negative term, or no partition allowed.
    """
    if most < 1:
        raise UsageError(f"at most {most} partitions", hint="allow 1 or more")
    ideal = min(best_partitions(shared_s, overhead_s), float(most))
    near = {min(most, max(1, math.floor(ideal) + step)) for step in (0, 1)}
    return min(near, key=lambda count: (shared_s / count + overhead_s * count, count))


def search_partitions(measure: Callable[[int], float], start: int, most: int = 1 << 20) -> PartitionFit:
    """Sample P, 2P, 4P, ... while the time falls, then P/2, P/4, ... while it falls, and fit.

    >>> formulas.search_partitions(lambda p: 2 + 30 / p + 0.3 * (p - 1), start=4).best
    10

    Args:
        measure: seconds of an iteration with that many partitions; called once a count.
        start: first count, usually the number of machines.
        most: largest count to try.

    Raises:
        UsageError: a start below 1.
    """
    if start < 1:
        raise UsageError(f"a search that starts at {start} partitions", hint="start at 1 or more")
    samples = {start: measure(start)}
    last, count = samples[start], start * 2
    while count <= most:
        samples[count] = measure(count)
        if samples[count] >= last:
            break
        last, count = samples[count], count * 2
    last, count = samples[start], start // 2
    while count >= 1:
        samples[count] = measure(count)
        if samples[count] >= last:
            break
        last, count = samples[count], count // 2
    return fit_partitions(samples)
