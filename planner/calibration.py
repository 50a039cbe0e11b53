"""Factors of a stack fitted to iterations that the user measured, with their uncertainty.

A few runs of one model on one cluster cannot tell many factors apart. Each factor is therefore taken to be near 1
unless the runs say otherwise (a normal prior on its logarithm), and only those that the runs are sensitive to are
fitted: least squares of the logarithms of measured over predicted seconds, by Gauss and Newton. How good the result is
on runs that had no part in it is said by leaving each one out in turn.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.costs import JobClass, error_of
from planner.errors import JobError, UsageError
from planner.escaping import quoted, yaml
from planner.files import LARGEST_FIGURE
from planner.foreign_files import Door
from planner.graph import Graph
from planner.hardware import reserve_bytes
from planner.hardware.types import Cluster, Stack
from planner.prediction import DEGREE_NAMES, predict_many, read_degrees
from planner.registry import did_you_mean
from planner.space.named import Degrees
from planner.space.types import Job

FEWEST, MOST = 3, 200
"""Runs that a fit takes at the least and at the most."""

NOISE = 0.02
"""Relative error of a measured iteration, at the least."""

_SPREAD = math.log(1.3)
"""Standard deviation of the logarithm of a factor before anything is measured."""

_EIGHTY = 1.2816
"""Standard deviations to either side between which 80 % of a normal distribution lie."""

_STEP = math.log(1.05)
_ROUNDS = 4
_SENSITIVE = 0.005
"""A factor is fitted if making it half as large again changes some run by more than this."""


@dataclass(frozen=True, slots=True)
class Run:
    """One measured configuration.

    Attributes:
        degrees: the configuration.
        global_batch: samples an iteration.
        seconds: what an iteration took.
        peak_bytes: what the fullest device's allocator held at the most; 0 where that is not known.
        line: line of the file.
    """

    degrees: Degrees
    global_batch: int
    seconds: float
    peak_bytes: float = 0.0
    line: int = 0


@dataclass(frozen=True, slots=True)
class FittedFactor:
    """A figure of the stack that was fitted.

    Attributes:
        name: the figure, by its name in a stack file.
        meaning: what it is.
        value: factor on what the stack had.
        low, high: where it lies with 80 %.
        bounded: whether the runs would have it further from 1 than a factor may be: something else is wrong.
        figure: the figure itself with the factor in it, as a stack file has it.
    """

    name: str
    meaning: str
    value: float
    low: float
    high: float
    bounded: bool
    figure: str


@dataclass(frozen=True, slots=True)
class FittedRun:
    """A run and what is predicted of it, in seconds.

    Attributes:
        run: the run.
        before_s: by the stack as it was.
        after_s: with the fitted factors.
        left_out_s: with factors that were fitted to the other runs (to first order).
        peak_bytes: predicted memory of the fullest worker without its reserve.
    """

    run: Run
    before_s: float
    after_s: float
    left_out_s: float
    peak_bytes: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """What runs say of a stack.

    Attributes:
        base: name of the stack that the factors are on.
        factors: those that were fitted.
        runs: in the order of the file.
        memory: measured over predicted peak memory, and what it lies between with 80 %; None where no peak is known.
    """

    base: str
    factors: tuple[FittedFactor, ...]
    runs: tuple[FittedRun, ...]
    memory: tuple[float, float, float] | None

    def error(self, which: str) -> float:
        """Mean absolute relative error: of `before_s`, `after_s` or `left_out_s`."""
        return float(np.mean([abs(getattr(each, which) / each.run.seconds - 1) for each in self.runs]))


@dataclass(frozen=True, slots=True)
class _StackFigure:
    """A figure of a stack that a factor may be on: a field of `Stack`, how its file writes it, bounds of the factor."""

    field: str
    key: str
    meaning: str
    most: float
    written: Callable[[float], str]

    def turned(self, stack: Stack, factor: float) -> Stack:
        """The stack with the factor on the figure."""
        return dataclasses.replace(stack, **{self.field: factor * getattr(stack, self.field)})


def _percent(value: float) -> str:
    return f"{100 * value:.4g}%"


def _microseconds(value: float) -> str:
    return f"{1e6 * value:.4g} us"


KNOBS = (
    _StackFigure("matrix_rate", "matrix_rate", "speed of matrix products", 2.0, _percent),
    _StackFigure("memory_rate", "memory_rate", "speed of what device memory limits", 2.0, _percent),
    _StackFigure("link_rate", "link_rate", "speed of links", 3.0, _percent),
    _StackFigure("launch_s", "launch", "host time of an operation", 5.0, _microseconds),
    _StackFigure("handover_s", "handover", "host time of passing a micro-batch on", 10.0, _microseconds),
    _StackFigure("stretch", "stretch", "what runs beside the work", 1.5, _percent),
)
"""What a fit may turn, most telling first."""


def calibrate(
    graph: Graph,
    cluster_of: Callable[[Stack], Cluster],
    base: Stack,
    job: Job,
    runs: Sequence[Run],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Fit two to six factors of a stack to measured iterations.

    Args:
        graph: the model that was run.
        cluster_of: the cluster under a stack.
        base: the stack to begin with.
        job: precision, optimizer and memory options of the runs; each run has a global batch of its own.
        runs: what was measured.
        progress: called with (clusters priced, clusters to price at the most).

    Raises:
        UsageError: too few runs, or too many.
        JobError: a run's configuration makes no sense on the cluster; says which line and why.
    """
    if not FEWEST <= len(runs) <= MOST:
        raise UsageError(f"{len(runs)} runs", hint=f"give {FEWEST} to {MOST}; 5 to 20 different ones serve best")
    fit = _Fit(graph, cluster_of, base, job, runs, progress)
    before_s, peaks = fit.predicted(np.zeros(len(KNOBS)))
    chosen = fit.sensitive(before_s)
    theta, seconds = fit.solve(chosen, before_s)
    columns = fit.columns(theta, seconds, chosen)
    residual = np.log(fit.measured_s / seconds)
    spread = fit.uncertainty(columns, residual)
    left_out = [fit.left_out(k, columns, residual, theta[chosen]) for k in range(len(runs))]
    factors = tuple(_factor(base, KNOBS[k], theta[k], s) for k, s in zip(chosen, spread, strict=True))
    fitted = (
        FittedRun(run, *map(float, figures))
        for run, *figures in zip(runs, before_s, seconds, seconds * np.exp(left_out), peaks, strict=True)
    )
    return Calibration(base.name, factors, tuple(fitted), _memory(runs, peaks))


def _factor(base: Stack, knob: _StackFigure, theta: float, spread: float) -> FittedFactor:
    low, high = (math.exp(theta + sign * _EIGHTY * spread) for sign in (-1, 1))
    value, bounded = math.exp(theta), bool(abs(theta) > 0.999 * math.log(knob.most))
    return FittedFactor(
        knob.key, knob.meaning, value, low, high, bounded, knob.written(value * getattr(base, knob.field))
    )


class _Fit:
    """The predictions of some runs as a function of the logarithms of factors, one for each of `KNOBS`."""

    def __init__(
        self,
        graph: Graph,
        cluster_of: Callable[[Stack], Cluster],
        base: Stack,
        job: Job,
        runs: Sequence[Run],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._graph, self._cluster_of, self._base, self._job, self._runs = graph, cluster_of, base, job, runs
        self._progress, self._done = progress, 0
        self._most = np.log([knob.most for knob in KNOBS])
        self.measured_s = np.array([run.seconds for run in runs])

    def predicted(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of all runs with some factors, and bytes of their tensors on the fullest device.

        Raises:
            JobError: a run makes no sense.
        """
        stack = self._base
        for knob, value in zip(KNOBS, theta, strict=True):
            stack = knob.turned(stack, math.exp(value))
        cluster = self._cluster_of(stack)
        seconds, peaks = np.zeros(len(self._runs)), np.zeros(len(self._runs))
        for batch in dict.fromkeys(run.global_batch for run in self._runs):
            at = [k for k, run in enumerate(self._runs) if run.global_batch == batch]
            job = dataclasses.replace(self._job, global_batch=batch)
            found = predict_many(self._graph, cluster, job, [self._runs[k].degrees for k in at])
            for k, reason in zip(at, found.reasons, strict=True):
                if reason:
                    raise JobError(f"line {self._runs[k].line}: {reason}", hint="correct the run, or leave it out")
            seconds[at], peaks[at] = found.iteration_s, found.peak_bytes
        self._done += 1
        if self._progress:
            self._progress(self._done, 1 + len(KNOBS) + (_ROUNDS + 1) * (len(KNOBS) + 1))
        return seconds, peaks - [self._reserve_bytes(cluster, run.degrees) for run in self._runs]

    def _reserve_bytes(self, cluster: Cluster, degrees: Degrees) -> float:
        """What the runtime takes of a device beside the tensors."""
        devices = self._job.devices_of(cluster)
        data = degrees.data or devices // (degrees.tensor * degrees.pipeline)
        return reserve_bytes(cluster.devices[0], degrees.tensor, data, degrees.pipeline > 1)

    def columns(self, theta: np.ndarray, seconds: np.ndarray, chosen: Iterable[int]) -> np.ndarray:
        """How the logarithms of seconds follow those of the chosen factors, [runs, chosen], by differences."""
        found = []
        for k in chosen:
            moved = theta.copy()
            moved[k] += _STEP if theta[k] <= 0 else -_STEP
            found.append(np.log(self.predicted(moved)[0] / seconds) / (moved[k] - theta[k]))
        return np.array(found).T

    def sensitive(self, before_s: np.ndarray) -> list[int]:
        """The factors that some run tells of: at least two, at most one for two runs, the most telling ones."""
        start = np.zeros(len(KNOBS))
        able = [k for k, knob in enumerate(KNOBS) if getattr(self._base, knob.field) > 0]
        effect = np.abs(self.columns(start, before_s, able)).max(axis=0) * math.log(1.5)
        order = sorted(range(len(able)), key=lambda i: -effect[i])[: max(2, len(self._runs) // 2)]
        telling = [i for i in order if effect[i] > _SENSITIVE] or order[:1]
        return sorted(able[i] for i in telling)

    def solve(self, chosen: Sequence[int], seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The factors that fit best, and the seconds predicted with them."""
        theta = np.zeros(len(KNOBS))
        for _ in range(_ROUNDS):
            columns = self.columns(theta, seconds, chosen)
            step = _ridge_step(columns, np.log(self.measured_s / seconds), theta[list(chosen)])
            moved = theta.copy()
            moved[list(chosen)] += step
            moved = np.clip(moved, -self._most, self._most)
            theta, last = moved, theta
            seconds = self.predicted(theta)[0]
            if np.abs(theta - last).max() < 1e-3:
                break
        return theta, seconds

    def uncertainty(self, columns: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """Standard deviations of the logarithms of the factors, from the prior and what the residuals scatter."""
        free = max(1, len(residual) - columns.shape[1])
        noise = max(NOISE, math.sqrt(float(residual @ residual) / free))
        precision = columns.T @ columns / noise**2 + np.eye(columns.shape[1]) / _SPREAD**2
        return np.asarray(np.sqrt(np.diag(np.linalg.inv(precision))))

    def left_out(self, k: int, columns: np.ndarray, residual: np.ndarray, theta: np.ndarray) -> float:
        """By how much the logarithm of run k changes if it has no part in the fit, to first order."""
        others = np.arange(len(residual)) != k
        return float(columns[k] @ _ridge_step(columns[others], residual[others], theta))


def _ridge_step(columns: np.ndarray, residual: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """The step of the factors that makes residuals and departures from 1 least likely to be chance."""
    inner = columns.T @ columns / NOISE**2 + np.eye(len(theta)) / _SPREAD**2
    return np.asarray(np.linalg.solve(inner, columns.T @ residual / NOISE**2 - theta / _SPREAD**2))


def _memory(runs: Sequence[Run], peaks: np.ndarray) -> tuple[float, float, float] | None:
    """Measured over predicted peak memory as a geometric mean, with its 80 % interval; None where none is known."""
    logs = np.array([math.log(run.peak_bytes / peak) for run, peak in zip(runs, peaks, strict=True) if run.peak_bytes])
    if not len(logs):
        return None
    spread = max(NOISE, float(logs.std(ddof=1)) if len(logs) > 1 else _SPREAD) / math.sqrt(len(logs))
    middle = float(logs.mean())
    return math.exp(middle), math.exp(middle - _EIGHTY * spread), math.exp(middle + _EIGHTY * spread)


def calibrated_stack(found: Calibration, name: str, model: str, hardware: str) -> str:
    """A stack file (YAML) with the fitted figures on the stack that they were fitted on."""
    source = f"calibration on {len(found.runs)} runs of {model} on {hardware}"
    lines = [
        f"stack: {yaml(name)}",
        f"about: {yaml(f'{found.base} with figures fitted to {len(found.runs)} measured runs')}",
        f"base: {yaml(found.base)}",
        "",
    ]
    said = error_of(JobClass(name, "", "", ""), [each.run.seconds / each.left_out_s for each in found.runs])
    if said.low is not None and said.high is not None:
        lines.append(f"compared: {{value: [{said.runs}, {said.low:.3f}, {said.high:.3f}], source: {quoted(source)}}}")
    rows = [(factor.name, factor.figure, factor.low, factor.value, factor.high) for factor in found.factors]
    if found.memory:
        value, low, high = found.memory
        rows.append(("allocator_cache", _percent(value), low, value, high))
    for key, figure, low, value, high in rows:
        note = f"{value:.3f} times what {found.base} has, 80%: {low:.3f} to {high:.3f}"
        lines.append(f"{key}: {{value: {figure}, source: {quoted(source)}, note: {quoted(note)}}}")
    return "\n".join(lines) + "\n"


# --- the file of runs --------------------------------------------------------------------------------------------

_COLUMNS = tuple(name.replace("-", "_") for name in DEGREE_NAMES)
"""Columns that say a configuration."""

_OTHERS = ("global_batch", "seconds", "memory_gib")


def parse_runs(text: str | bytes, name: str = "runs") -> tuple[Run, ...]:
    """Measured runs from CSV text with a header line.

    Columns are the options of `predict` (tp, cp, ep, pp, dp, interleave, micro_batch, schedule, zero, recompute) as far
    as they differ from its defaults, `global_batch` (samples), `seconds` (an iteration) and, where it is known,
    `memory_gib` (the allocator's peak on the fullest device).

    Raises:
        UsageError: a column is unknown or missing, or a value makes no sense; says the line.
    """
    header, rows = Door(name, UsageError, "a header line and a line for each run").table(text)
    known = (*_COLUMNS, *_OTHERS)
    if not set(header) & set(known):  # no file of runs: nothing of it is shown
        hint = f"columns: {', '.join(known)}"
        raise UsageError("the first line names no column of runs", where=f"{name}:1", hint=hint)
    for column in header:
        if column not in known:
            hint = did_you_mean(column, known)
            raise UsageError(f"unknown column {column!r}", where=f"{name}:1", hint=hint)
    for column in ("global_batch", "seconds"):
        if column not in header:
            raise UsageError(f"no column {column!r}", where=f"{name}:1", hint=f"columns are {', '.join(known)}")
    return tuple(_run(row, f"{name}:{line}", line) for line, row in rows)


def _run(row: Mapping[str, str], where: str, line: int) -> Run:
    """A line as a run."""
    given = {key: text for key, text in row.items() if text}
    if "seconds" not in given or "global_batch" not in given:
        raise UsageError("not as many values as columns", where=where, hint="give seconds and global_batch, at least")
    numbers = {name: _parse_number(name, given[name], where) for name in _OTHERS if name in given}
    if numbers["global_batch"] % 1:
        raise UsageError(f"global_batch is {given['global_batch']!r}", where=where, hint="write a whole number")
    degrees = read_degrees({c.replace("_", "-"): text for c, text in given.items() if c in _COLUMNS}, where)
    peak_bytes = numbers.get("memory_gib", 0.0) * 2**30
    return Run(degrees, int(numbers["global_batch"]), numbers["seconds"], peak_bytes, line)


def _parse_number(column: str, text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= LARGEST_FIGURE:
        raise UsageError(f"{column} is {text!r}", where=where, hint=f"write a number above 0, up to {LARGEST_FIGURE:g}")
    return value
