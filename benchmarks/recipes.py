"""Hand-tuned training jobs against predictions of exactly their configurations: `python -m benchmarks.recipes FOLDER`.

FOLDER holds `recipes.json` and `models.json`. Each row is stated to the program (`recipe_rows`) and predicted through
`planner.predict_many`; nothing is searched, and nothing is fitted but one factor for each software (framework and
release) and device: predicted over measured seconds. A job is left out of its own factor.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import signal
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import planner
from benchmarks.classes import write_errors
from benchmarks.published import markdown
from benchmarks.recipe_rows import BACKENDS, MODELS, RECIPES, Recipe, Statement, read_recipes
from planner import schedules
from planner.costs import JobClass, MeasuredError, error_of
from planner.plans.sections import job_class

FEWEST_JOBS = 5
"""Jobs on which a factor has to rest before its error is stated."""
EAGER_LAUNCH_S = 60e-6
"""Host time of an operation that no graph captures: the figure of `megatron-2021`."""
FULLY_SHARDED = {"megatron": ("torchtitan",)}
"""Frameworks that may take a plan beside the one named where the experts shard weights, too (Megatron by its FSDP)."""
NOISE = 0.02
"""Measured times that are closer than this are not ranked."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the planner says of a row.

    Attributes:
        recipe: the row.
        seconds: an iteration; nan where the planner refuses the configuration.
        degrees: the configuration that was meant; None where there is no prediction.
        missing_bytes: of the fullest device; 0 where the configuration fits.
        refused: why there is no prediction.
    """

    recipe: Recipe
    seconds: float
    degrees: planner.Degrees | None = None
    missing_bytes: float = 0.0
    refused: str = ""

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.seconds / self.recipe.measured_s

    @property
    def configuration(self) -> str:
        """The configuration that was meant, in words."""
        return "" if self.degrees is None else _words(self.degrees)


def predict(recipe: Recipe) -> Prediction:
    """Price a row: the fastest that fits of what its source leaves open, else the fastest."""
    statement = recipe.statement
    if statement is None:
        return Prediction(recipe, math.nan, refused="; ".join(recipe.lacks))
    return Prediction(recipe, *_predicted(statement))


@functools.cache
def _predicted(statement: Statement) -> tuple[float, planner.Degrees | None, float, str]:
    """Seconds, configuration, bytes that are missing, and why it is refused; equal rows are priced once.

    Every matrix is cut over the ranks that share it, as frameworks do, in the fastest way that fits.
    """
    try:
        cluster, graph = _machine(statement), _graph(statement.model, statement.seq)
        found = planner.predict_many(graph, cluster, statement.job, statement.tried, fewest_weights=True)
    except planner.ShardplanError as error:
        return math.nan, None, 0.0, error.problem.message
    best = min(range(len(statement.tried)), key=lambda at: (not found.fits[at], found.iteration_s[at]))
    if not math.isfinite(found.iteration_s[best]):
        return math.nan, None, 0.0, found.reasons[best]
    missing = max(0.0, float(found.peak_bytes[best] - found.capacity_bytes[best]))
    return float(found.iteration_s[best]), statement.tried[best], missing, ""


def _usual_machine(statement: Statement) -> planner.Cluster:
    """The cluster under the stack by whose name the row goes."""
    return planner.load_cluster(statement.cluster, devices=statement.devices, stack=statement.stack)


def _machine(statement: Statement) -> planner.Cluster:
    """The cluster under the row's software."""
    software = planner.load_stack(statement.stack)
    launch_s = EAGER_LAUNCH_S if statement.eager else software.launch_s
    stack = dataclasses.replace(
        software,
        launch_s=launch_s,
        inner_overlap=dict(statement.inner_overlap),
        product_pieces=statement.product_pieces,
        rows_once=statement.rows_once,
        grouped_experts=software.grouped_experts or statement.grouped,
    )
    return planner.load_cluster(statement.cluster, devices=statement.devices, stack=stack)


@functools.lru_cache(maxsize=4)
def _graph(model: str, seq: int) -> planner.Graph:
    return planner.load_graph(model, dims={"seq": seq})


def _words(degrees: planner.Degrees) -> str:
    named = {
        "tp": degrees.tensor, "cp": degrees.context, "ep": degrees.expert, "pp": degrees.pipeline, "dp": degrees.data,
        "vp": degrees.chunks, "mb": degrees.micro_batch, "zero": degrees.zero,
    }  # fmt: skip
    over = f" over {degrees.shard_over}" if degrees.shard_over else ""
    words = " ".join(f"{name}{value}" for name, value in named.items()) + over + f" {degrees.layout}".rstrip()
    words += _recomputed({*degrees.repeats} | ({"all layers"} if degrees.recompute else set()))
    return words + (f", offloads {' '.join(degrees.offload)}" if degrees.offload else "")


def _recomputed(modules: Set[str]) -> str:
    """What is recomputed, behind a configuration in words."""
    return f", recomputes {' '.join(sorted(modules))}" if modules else ""


Named = Callable[[Recipe], Any]


def grouped(predictions: Iterable[Prediction], name: Named) -> dict[Any, list[Prediction]]:
    """Predictions by what their rows share, in order."""
    groups: dict[Any, list[Prediction]] = {}
    for one in predictions:
        groups.setdefault(name(one.recipe), []).append(one)
    return groups


def factor(predictions: Sequence[Prediction]) -> float:
    """Predicted over measured: the median over jobs of the median of each."""
    jobs = grouped(predictions, lambda recipe: recipe.job).values()
    return statistics.median(statistics.median(one.ratio for one in job) for job in jobs)


def left_out_errors(predictions: Sequence[Prediction], mixtures: bool | None = None) -> list[float]:
    """Absolute relative error of each job under the factor of the others: the median over its rows.

    With `mixtures`, errors of mixtures or of dense models alone, still under the factor of all others.
    """
    errors = []
    for name, job in grouped(predictions, lambda recipe: recipe.job).items():
        others = [one for one in predictions if one.recipe.job != name]
        if others and mixtures in (None, job[0].recipe.mixture):
            reached = factor(others)
            errors.append(statistics.median(abs(one.ratio / reached - 1) for one in job))
    return errors


def _factor_row(name: str, chosen: Sequence[Prediction]) -> list[str]:
    ratios, errors = [one.ratio for one in chosen], left_out_errors(chosen)
    enough = len(errors) >= FEWEST_JOBS
    by_kind = [left_out_errors(chosen, mixtures) for mixtures in (False, True)]
    return [
        name,
        str(len(chosen)),
        str(len(grouped(chosen, lambda recipe: recipe.job))),
        f"{factor(chosen):.2f}",
        f"{min(ratios):.2f} to {max(ratios):.2f}",
        f"{statistics.median(errors):.1%}" if enough else "-",
        f"{max(errors):.0%}" if enough else "-",
        *(f"{statistics.median(own):.1%} of {len(own)}" if enough and own else "-" for own in by_kind),
    ]


def pair_rows(predictions: Sequence[Prediction], pairs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Two configurations of one job, often of two releases: measured and predicted gain."""
    seconds = {one.recipe.key: one.seconds for one in predictions}
    rows = []
    for pair in pairs:
        slower, faster = seconds.get(pair["slower"]), seconds.get(pair["faster"])
        predicted = f"{slower / faster:.3f}" if slower and faster else "not both stated"
        release = "same" if pair["same_release"] else "others"
        differs = ", ".join(f"{key} {a} to {b}" for key, (a, b) in pair["differs"].items())
        rows.append([pair["faster"], differs, release, f"{pair['ratio']:.3f}", predicted])
    return rows


def ranking(predictions: Sequence[Prediction]) -> list[list[str]]:
    """Of configurations of one job under one software, the pairs that come out in the measured order."""
    rows = []
    for (stack, job), chosen in grouped(predictions, lambda recipe: (recipe.stack, recipe.job)).items():
        marks = [
            (a.seconds < b.seconds) == (a.recipe.measured_s < b.recipe.measured_s)
            for at, a in enumerate(chosen)
            for b in chosen[at + 1 :]
            if abs(a.recipe.measured_s / b.recipe.measured_s - 1) > NOISE and a.seconds != b.seconds
        ]
        if marks:
            rows.append([" ".join(stack), " ".join(map(str, job)), str(len(chosen)), f"{sum(marks)} of {len(marks)}"])
    return rows


def plan_rows(predictions: Sequence[Prediction], backend: str, limit_s: float) -> list[list[str]]:
    """Our plan of each job, within what a framework runs, against the experts' fastest configuration of it.

    Both are priced by one model, under the software of that configuration, and may fill all memory.

    Args:
        predictions: of all rows that are stated.
        backend: the framework; "row" for that of each row.
        limit_s: processor time that a search may take; jobs that take longer are listed as such.
    """
    rows = []
    for job, chosen in grouped(predictions, lambda recipe: recipe.job).items():
        best = min(chosen, key=lambda one: (one.missing_bytes > 0, one.seconds))
        name = BACKENDS.get(best.recipe.stack[0], "megatron") if backend == "row" else backend
        lacking = f", lacks {best.missing_bytes / 2**30:.1f} GiB" if best.missing_bytes else ""
        start = [" ".join(map(str, job[:-1])), name, best.configuration + lacking, f"{best.seconds:.3f} s"]
        try:
            with _processor_time(limit_s):
                plan = _own_plan(best, name)
        except (planner.ShardplanError, TimeoutError) as error:
            why = error.problem.message if isinstance(error, planner.ShardplanError) else str(error)
            rows.append([*start, "-", "-", why])
            continue
        own_s = plan.predictions.reached_s
        rows.append([*start, f"{own_s:.3f} s", f"{best.seconds / own_s:.3f}", _plan_words(plan.configuration)])
        print(start[0], file=sys.stderr, flush=True)
    return rows


def _own_plan(best: Prediction, backend: str) -> planner.Plan:
    """The plan of a row's job within a framework, under its software; the row's CP, which is looked at on demand only,
    is among those allowed."""
    statement = best.recipe.statement
    if statement is None:
        raise planner.UsageError(f"{best.recipe.key} is not stated", hint="plan rows that are")
    degrees = statement.tried[0]
    contexts = (1, degrees.context) if degrees.context > 1 else ()
    backends = (backend, *FULLY_SHARDED.get(backend, ())) if degrees.zero > 1 else (backend,)
    job = dataclasses.replace(statement.job, backends=backends, headroom=0.0, context_parallel=contexts)
    return planner.plan(_graph(statement.model, statement.seq), _machine(statement), job)


@contextlib.contextmanager
def _processor_time(limit_s: float) -> Iterator[None]:
    """Raise `TimeoutError` in what is done meanwhile when it has taken so many seconds of processor time."""

    def stop(signum: int, frame: object) -> None:
        raise TimeoutError(f"not planned within {limit_s:.0f} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def _plan_words(own: planner.Configuration) -> str:
    """A configuration that was found, in the words of `_words`."""
    first, chunks = own.stages[0], schedules.get(own.schedule).chunks_per_worker
    repeated = {name for stage in own.stages for name in stage.repeats}
    repeated |= {"all layers"} if any(stage.recompute for stage in own.stages) else set()
    named = {
        "tp": first.ranks // (first.context * first.expert), "cp": first.context, "ep": first.expert,
        "pp": len(own.stages) // chunks, "dp": own.copies * first.replicas * first.expert, "vp": chunks,
        "mb": own.micro_batch // first.expert, "zero": own.zero,
    }  # fmt: skip
    words = " ".join(f"{name}{value}" for name, value in named.items()) + f" {own.schedule}"
    offload = dict.fromkeys(name for stage in own.stages for name in stage.offload)
    return words + _recomputed(repeated) + (f", offloads {' '.join(offload)}" if offload else "")


def measured_errors(predictions: Iterable[Prediction]) -> list[tuple[JobClass, MeasuredError]]:
    """Errors by class of job, of configurations that are played under their stack as it is, as users predict them.

    A job counts once in a class, by the median of its rows: releases of a software are no runs that are independent.
    """
    ratios: dict[JobClass, dict[Any, list[float]]] = {}
    for one in predictions:
        statement, degrees = one.recipe.statement, one.degrees
        if statement is not None and degrees is not None:
            cluster, graph = _usual_machine(statement), _graph(statement.model, statement.seq)
            found = planner.predict(graph, cluster, statement.job, degrees, fewest_weights=True)
            job = job_class(cluster, found.plan.configuration)
            own = ratios.setdefault(job, {}).setdefault(one.recipe.job, [])
            own.append(one.recipe.measured_s / found.iteration_s)
    return [(job, error_of(job, list(map(statistics.median, own.values())))) for job, own in ratios.items()]


def tables(predictions: Sequence[Prediction], pairs: Sequence[Mapping[str, Any]], *, every_row: bool) -> str:
    """The report in Markdown."""
    stated = [one for one in predictions if not one.refused]
    head = ["rows", "jobs", "predicted / measured", "from to", "left out: error", "worst", "dense", "mixtures"]
    parts = [
        f"{len(stated)} of {len(predictions)} rows stated whole ({len(stated) / len(predictions):.0%}).",
        "By source:",
        markdown(
            ["source", "all rows", "stated", "predicted / measured", "from", "to", "do not fit"],
            [_source_row(name, rows) for name, rows in grouped(predictions, lambda recipe: recipe.source).items()],
        ),
        "One factor for each software and device, and the error of jobs left out one at a time:",
        markdown(["software and device", *head], _factors(stated, lambda recipe: (*recipe.stack, recipe.device))),
        "The same for each framework and device, all releases together:",
        markdown(["framework and device", *head], _factors(stated, lambda recipe: (recipe.stack[0], recipe.device))),
        "Configurations of one job under one software, pairs in the measured order:",
        markdown(["software", "job", "rows", "in order"], ranking(stated)),
        "Pairs of configurations of one job, slower / faster:",
        markdown(["faster row", "differs", "release", "measured", "predicted"], pair_rows(stated, pairs)),
        "Not stated:",
        markdown(["reason", "rows", "alone"], _obstacles(predictions)),
    ]
    if every_row:
        parts += ["Every row:", markdown(*_rows(predictions))]
    return "\n\n".join(parts) + "\n"


def _factors(stated: Sequence[Prediction], name: Named) -> list[list[str]]:
    return [_factor_row(" ".join(key), rows) for key, rows in sorted(grouped(stated, name).items())]


def _source_row(name: str, rows: Sequence[Prediction]) -> list[str]:
    ratios = [one.ratio for one in rows if not one.refused]
    figures = [f"{f(ratios):.2f}" if ratios else "-" for f in (statistics.median, min, max)]
    return [name, str(len(rows)), str(len(ratios)), *figures, str(sum(one.missing_bytes > 0 for one in rows))]


def _obstacles(predictions: Sequence[Prediction]) -> list[list[str]]:
    reasons = [one.recipe.lacks or (one.refused.partition(" (")[0],) for one in predictions if one.refused]
    counts, alone = Counter(r for own in reasons for r in own), Counter(own[0] for own in reasons if len(own) == 1)
    return [[reason, str(count), str(alone[reason])] for reason, count in counts.most_common()]


def _rows(predictions: Sequence[Prediction]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            one.recipe.key,
            f"{one.recipe.measured_s:.3f} s",
            f"{one.seconds:.3f} s",
            f"{one.ratio:.2f}",
            one.configuration,
            f"lacks {one.missing_bytes / 2**30:.1f} GiB" if one.missing_bytes else "fits",
            "; ".join(one.recipe.assumed),
        ]
        if not one.refused
        else [one.recipe.key, f"{one.recipe.measured_s:.3f} s", "-", "-", "-", "-", one.refused]
        for one in predictions
    ]
    return ["row", "measured", "predicted", "ratio", "configuration", "memory", "assumed, or what is lacking"], rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the rows, price them and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipes", description=__doc__)
    parser.add_argument("folder", type=Path, help=f"folder of {RECIPES} and {MODELS}")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows alone whose name contains this")
    parser.add_argument(
        "--plan", metavar="FRAMEWORK", help="plan each job within what this framework runs, too; row: that of its rows"
    )
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS", help="processor time of a plan")
    parser.add_argument(
        "--errors", type=Path, help="write the errors by class of job into this file of measured errors"
    )
    given = parser.parse_args(arguments)
    recipes, pairs = read_recipes(given.folder)
    predictions = [predict(recipe) for recipe in recipes if given.only in recipe.key]
    sys.stdout.write(tables(predictions, pairs, every_row=given.rows))
    if given.errors:
        write_errors(given.errors, measured_errors(predictions))
    if given.plan:
        head = ["job", "within", "experts' fastest", "predicted", "our plan", "times as fast", "our configuration"]
        rows = plan_rows([one for one in predictions if not one.refused], given.plan, given.limit)
        sys.stdout.write(f"\nOur plans for {given.plan}:\n\n{markdown(head, rows)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
