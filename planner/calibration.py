"""Fitting a stack to measured iterations of one's own: a few bounded factors, with their uncertainty.

With l the logarithms of measured over predicted times and J their derivatives by the logarithms of the factors, a step
solves (J'J / s^2 + P) x = J'l / s^2 (Gauss and Newton, with a prior that factors are one): s is the scatter of runs
of one configuration, P the inverse variances of the prior. A factor that no run depends on keeps its value.
Leave-one-out errors come from the same equations, linear around the result, without the row that is predicted.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.costs import JobClass, error_of
from planner.errors import UsageError
from planner.graph import Graph
from planner.hardware import load_cluster
from planner.hardware.types import Cluster, Stack
from planner.prediction import predict_many
from planner.registry import did_you_mean
from planner.space.named import Degrees
from planner.space.types import Job
from planner.units import Dimension, render

FACTORS: Mapping[str, tuple[str, float, float]] = {
    "matrix_rate": ("matrix_rate", 0.5, 1.6),
    "memory_rate": ("memory_rate", 0.4, 1.6),
    "launch": ("launch_s", 0.1, 5.0),
    "handover": ("handover_s", 0.1, 10.0),
    "link_rate": ("link_rate", 0.3, 1.3),
    "stretch": ("stretch", 0.9, 1.5),
}
"""Figures of a stack that are fitted: key of its file, field of `Stack`, least and greatest factor."""
LEAST_RUNS = 3
_SCATTER = 0.03
"""Standard deviation of runs of one configuration, in logarithms (docs/accuracy.md: 2 to 6 %)."""
_PRIOR = 0.3
"""Standard deviation that factors are thought to have beforehand, in logarithms."""
_STEPS = 3
_PROBE = 0.05
_SEEN = 0.02
"""Least derivative of some run's time by a factor that is fitted."""

_COLUMNS = {
    "tp": "tensor", "pp": "pipeline", "dp": "data", "interleave": "chunks", "micro_batch": "micro_batch", "zero": "zero"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One measured iteration.

    Attributes:
        global_batch: samples.
        degrees: the configuration.
        seconds: measured.
        peak_bytes: measured memory of the fullest device; 0 where not known.
    """

    global_batch: int
    degrees: Degrees
    seconds: float
    peak_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class FittedFactor:
    """A factor on a figure of a stack.

    Attributes:
        key: of the stack's file.
        factor: fitted.
        deviation: its standard deviation, relative.
        before: the figure.
        after: the figure times the factor.
    """

    key: str
    factor: float
    deviation: float
    before: float
    after: float

    @property
    def bounded(self) -> bool:
        """The factor is as far from one as it may be: something else is wrong."""
        return any(math.isclose(self.factor, bound) for bound in FACTORS[self.key][1:])


@dataclass(frozen=True, slots=True)
class Calibration:
    """A stack fitted to measured runs.

    Attributes:
        stack: the fitted stack.
        factors: what was fitted; figures that no run depends on are left out.
        before: measured over predicted of each run under the stack that was started from.
        after: the same under the fitted stack.
        left_out: the same of each run, with factors fitted to the others.
        memory: measured over predicted memory, of the runs that say it.
    """

    stack: Stack
    factors: tuple[FittedFactor, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    left_out: tuple[float, ...]
    memory: tuple[float, ...]


def read_measured_runs(text: str, name: str = "runs") -> tuple[MeasuredRun, ...]:
    """Runs from CSV with a header: `global_batch`, `seconds`, and as in `predict` `tp`, `pp`, `dp`, `interleave`,
    `micro_batch`, `zero`, `recompute`, `schedule`; `peak_gb` (10^9 bytes) where it is known.

    Raises:
        UsageError: an unknown or missing column, or a value that is not a number, with its line.
    """
    rows = list(csv.DictReader(io.StringIO(text)))
    known = {*_COLUMNS, "global_batch", "seconds", "peak_gb", "recompute", "schedule"}
    for column in rows[0] if rows else ():
        if column not in known:
            raise UsageError(f"unknown column {column!r}", where=name, hint=did_you_mean(str(column), sorted(known)))
    runs = []
    for line, row in enumerate(rows, 2):
        try:
            sizes: dict[str, Any] = {field: int(row[column]) for column, field in _COLUMNS.items() if row.get(column)}
            words: dict[str, Any] = {
                "schedule": row.get("schedule") or "",
                "recompute": row.get("recompute") == "always",
            }
            degrees = Degrees(**sizes, **words)
            seconds, batch = float(row["seconds"]), int(row["global_batch"])
            runs.append(MeasuredRun(batch, degrees, seconds, 1e9 * float(row.get("peak_gb") or 0.0)))
        except (KeyError, TypeError, ValueError) as error:
            hint = "give global_batch and seconds in every line, and whole numbers for the configuration"
            raise UsageError(f"cannot read the run: {error}", where=f"{name}:{line}", hint=hint) from error
        if not seconds > 0:
            raise UsageError(f"a run takes {seconds:g} seconds", where=f"{name}:{line}", hint="give seconds above 0")
    if len(runs) < LEAST_RUNS:
        message = f"{len(runs)} measured runs are too few to fit anything"
        raise UsageError(message, where=name, hint=f"give at least {LEAST_RUNS}, better 5 to 20 of different shapes")
    return tuple(runs)


def calibrate(
    graph: Graph, hardware: str, job: Job, runs: Sequence[MeasuredRun], *, nodes: int | None = None, stack: Stack
) -> Calibration:
    """Fit a stack to measured iterations.

    Args:
        graph: the model.
        hardware: name or file of the cluster.
        job: precision, optimizer and memory options; each run has its own global batch.
        runs: measured; at least three.
        nodes: as in `load_cluster`.
        stack: what is started from.

    Raises:
        UsageError: a configuration makes no sense (the first is named), or no factor changes any run.
    """
    trial = _Trial(graph, hardware, nodes, job, runs, stack)
    fields = {key: field for key, (field, _, _) in FACTORS.items() if getattr(stack, field) > 0}
    logs = dict.fromkeys(fields, 0.0)
    start = residuals = trial.residuals(logs)
    slopes = np.zeros((len(runs), 0))
    for step in range(_STEPS):
        slopes = np.stack([trial.slope(logs, key, residuals) for key in logs], axis=1)
        if not step:
            logs = {key: 0.0 for key, slope in zip(logs, slopes.T, strict=True) if np.abs(slope).max() >= _SEEN}
            slopes = slopes[:, [list(fields).index(key) for key in logs]]
        if not logs:
            raise UsageError("no factor changes the time of any run", hint="measure iterations of more work")
        change, _ = _solved(slopes, residuals, np.array(list(logs.values())))
        moved = _held(logs, np.array(list(logs.values())) + change)
        logs = dict(zip(logs, moved.tolist(), strict=True))
        residuals = trial.residuals(logs)
    values = np.array(list(logs.values()))
    deviations = np.sqrt(np.diag(_solved(slopes, residuals, values)[1]))
    factors = tuple(
        FittedFactor(key, math.exp(log), float(own), before := getattr(stack, fields[key]), before * math.exp(log))
        for (key, log), own in zip(logs.items(), deviations, strict=True)
    )
    fitted = trial.stack(logs)
    return Calibration(
        dataclasses.replace(fitted, name=f"{stack.name}-calibrated"),
        factors,
        tuple(np.exp(start)),
        tuple(np.exp(residuals)),
        tuple(np.exp(_left_out(logs, slopes, residuals))),
        trial.memory(fitted),
    )


def _held(keys: Iterable[str], values: np.ndarray) -> np.ndarray:
    """Logarithms of factors within their bounds."""
    bounds = np.log([FACTORS[key][1:] for key in keys])
    return np.asarray(np.clip(values, bounds[:, 0], bounds[:, 1]))


def _solved(slopes: np.ndarray, residuals: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The change of the factors' logarithms, and their covariance."""
    precision = slopes.T @ slopes / _SCATTER**2 + np.eye(len(values)) / _PRIOR**2
    covariance = np.linalg.inv(precision)
    return covariance @ (slopes.T @ residuals / _SCATTER**2 - values / _PRIOR**2), covariance


def _left_out(logs: Mapping[str, float], slopes: np.ndarray, residuals: np.ndarray) -> np.ndarray:
    """Each run's residual with factors fitted to the other runs."""
    found, values = np.zeros(len(residuals)), np.array(list(logs.values()))
    for row in range(len(residuals)):
        others = np.arange(len(residuals)) != row
        change, _ = _solved(slopes[others], residuals[others], values)
        found[row] = residuals[row] - slopes[row] @ (_held(logs, values + change) - values)
    return found


class _Trial:
    """Predictions of the runs under variants of a stack."""

    def __init__(
        self, graph: Graph, hardware: str, nodes: int | None, job: Job, runs: Sequence[MeasuredRun], stack: Stack
    ) -> None:
        self._graph, self._hardware, self._nodes, self._job, self._runs = graph, hardware, nodes, job, runs
        self._stack = stack
        self._measured_s = np.array([run.seconds for run in runs])

    def stack(self, logs: Mapping[str, float]) -> Stack:
        """The stack with its figures times the factors."""
        changed = {FACTORS[key][0]: getattr(self._stack, FACTORS[key][0]) * math.exp(log) for key, log in logs.items()}
        return dataclasses.replace(self._stack, **changed)

    def residuals(self, logs: Mapping[str, float]) -> np.ndarray:
        """Logarithms of measured over predicted times."""
        seconds, _ = self._predicted(self.stack(logs))
        return np.asarray(np.log(self._measured_s / seconds))

    def slope(self, logs: Mapping[str, float], key: str, residuals: np.ndarray) -> np.ndarray:
        """Derivatives of the logarithms of predicted times by that of a factor."""
        return np.asarray((residuals - self.residuals({**logs, key: logs[key] + _PROBE})) / _PROBE)

    def memory(self, stack: Stack) -> tuple[float, ...]:
        """Measured over predicted memory of the runs that say it."""
        if not any(run.peak_bytes for run in self._runs):
            return ()
        _, peaks = self._predicted(stack)
        return tuple(run.peak_bytes / peak for run, peak in zip(self._runs, peaks, strict=True) if run.peak_bytes)

    def _predicted(self, stack: Stack) -> tuple[np.ndarray, np.ndarray]:
        """Seconds and peak bytes of all runs."""
        cluster: Cluster = load_cluster(self._hardware, nodes=self._nodes, stack=stack)
        seconds, peaks = np.zeros((2, len(self._runs)))
        for batch in dict.fromkeys(run.global_batch for run in self._runs):
            at = [i for i, run in enumerate(self._runs) if run.global_batch == batch]
            job = dataclasses.replace(self._job, global_batch=batch)
            found = predict_many(self._graph, cluster, job, [self._runs[i].degrees for i in at])
            for i, reason in zip(at, found.reasons, strict=True):
                if reason:
                    raise UsageError(f"run {i + 1} cannot be predicted: {reason}", hint="correct its configuration")
            seconds[at], peaks[at] = found.iteration_s, found.peak_bytes
        return seconds, peaks


def calibrated_yaml(found: Calibration, base: str, source: str) -> str:
    """The fitted figures as a stack file over the stack that was started from."""
    units = {"launch": Dimension.SECONDS, "handover": Dimension.SECONDS}
    error = np.mean(np.abs(np.array(found.left_out) - 1))
    lines = [
        f"stack: {found.stack.name}",
        f"about: {base} fitted to {len(found.before)} measured runs",
        f"base: {base}",
    ]
    lines.append("")
    for each in found.factors:
        value = render(float(f"{each.after:.4g}"), units.get(each.key, Dimension.FRACTION))
        note = f"factor {each.factor:.3f} +- {each.deviation:.3f}; mean error left out {error:.1%}"
        lines.append(f'{each.key}: {{value: {value}, source: "{source}", note: "{note}"}}')
    said = error_of(JobClass(found.stack.name, "", "", ""), found.left_out)
    if said.low is not None and said.high is not None:
        lines.append(f'compared: {{value: [{said.runs}, {said.low:.3f}, {said.high:.3f}], source: "{source}"}}')
    if found.memory:
        cache = render(float(f"{math.exp(np.mean(np.log(found.memory))):.4g}"), Dimension.FRACTION)
        lines.append(f'allocator_cache: {{value: {cache}, source: "{source}", note: "measured over predicted peak"}}')
    return "\n".join(lines) + "\n"
