"""Hand-tuned training jobs against predictions of exactly their configurations: `python -m benchmarks.recipes FOLDER`.

FOLDER holds `recipes.json` and `models.json`. Each row is stated to the program (`recipe_rows`) and predicted through
`planner.predict`; nothing is searched, and nothing is fitted but one factor for each software (framework and release)
and device: predicted over measured seconds. A job is left out of its own factor.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import planner
from benchmarks.recipe_rows import MODELS, RECIPES, Recipe, Statement, read_recipes

FEWEST_JOBS = 5
"""Jobs on which a factor has to rest before its error is stated."""
NOISE = 0.02
"""Measured times that are closer than this are not ranked."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the planner says of a row.

    Attributes:
        recipe: the row.
        seconds: an iteration as it is played; nan where the planner refuses the configuration.
        configuration: the one that was meant, in words.
        missing_bytes: of the fullest device; 0 where the configuration fits.
        refused: why there is no prediction.
    """

    recipe: Recipe
    seconds: float
    configuration: str = ""
    missing_bytes: float = 0.0
    refused: str = ""

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.seconds / self.recipe.measured_s


def predict(recipe: Recipe) -> Prediction:
    """Price a row: the fastest that fits of what its source leaves open, else the fastest."""
    statement = recipe.statement
    if statement is None:
        return Prediction(recipe, math.nan, refused="; ".join(recipe.lacks))
    seconds, configuration, missing, refused = _predicted(statement)
    return Prediction(recipe, seconds, configuration, missing, refused)


@functools.cache
def _predicted(statement: Statement) -> tuple[float, str, float, str]:
    """Seconds, configuration, bytes that are missing, and why it is refused; equal rows are priced once."""
    found, refused = [], ""
    cluster = planner.load_cluster(statement.cluster, nodes=statement.nodes, stack=statement.stack)
    for degrees in statement.tried:
        try:
            own = planner.predict(
                _graph(statement.model, statement.seq), cluster, statement.job, degrees, fewest_weights=True
            )
        except planner.ShardplanError as error:
            refused = refused or str(error)
            continue
        missing = max(0.0, own.fullest.memory.total - own.fullest.capacity_bytes)
        found.append((missing, own.iteration_s, _words(degrees, own.configuration.schedule)))
    if not found:
        return math.nan, "", 0.0, refused
    missing, seconds, words = min(found, key=lambda one: (one[0] > 0, one[1]))
    return seconds, words, missing, ""


@functools.lru_cache(maxsize=4)
def _graph(model: str, seq: int) -> planner.Graph:
    return planner.load_graph(model, dims={"seq": seq})


def _words(degrees: planner.Degrees, schedule: str) -> str:
    named = {"tp": degrees.tensor, "pp": degrees.pipeline, "dp": degrees.data, "mb": degrees.micro_batch}
    return " ".join(f"{name}{value}" for name, value in named.items()) + f" zero{degrees.zero} {schedule}"


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


def left_out_errors(predictions: Sequence[Prediction]) -> list[float]:
    """Absolute relative error of each job under the factor of the others: the median over its rows."""
    errors = []
    for name, job in grouped(predictions, lambda recipe: recipe.job).items():
        others = [one for one in predictions if one.recipe.job != name]
        if others:
            reached = factor(others)
            errors.append(statistics.median(abs(one.ratio / reached - 1) for one in job))
    return errors


def _factor_row(name: str, chosen: Sequence[Prediction]) -> list[str]:
    ratios, errors = [one.ratio for one in chosen], left_out_errors(chosen)
    enough = len(errors) >= FEWEST_JOBS
    return [
        name,
        str(len(chosen)),
        str(len(grouped(chosen, lambda recipe: recipe.job))),
        f"{factor(chosen):.2f}",
        f"{min(ratios):.2f} to {max(ratios):.2f}",
        f"{statistics.median(errors):.1%}" if enough else "-",
        f"{max(errors):.0%}" if enough else "-",
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


def tables(predictions: Sequence[Prediction], pairs: Sequence[Mapping[str, Any]], *, every_row: bool) -> str:
    """The report in Markdown."""
    stated = [one for one in predictions if not one.refused]
    head = ["rows", "jobs", "predicted / measured", "from to", "left out: error", "worst"]
    parts = [
        f"{len(stated)} of {len(predictions)} rows stated whole ({len(stated) / len(predictions):.0%}).",
        "By source:",
        _table(
            ["source", "all rows", "stated", "predicted / measured", "from", "to", "do not fit"],
            [_source_row(name, rows) for name, rows in grouped(predictions, lambda recipe: recipe.source).items()],
        ),
        "One factor for each software and device, and the error of jobs left out one at a time:",
        _table(["software and device", *head], _factors(stated, lambda recipe: (*recipe.stack, recipe.device))),
        "The same for each framework and device, all releases together:",
        _table(["framework and device", *head], _factors(stated, lambda recipe: (recipe.stack[0], recipe.device))),
        "Configurations of one job under one software, pairs in the measured order:",
        _table(["software", "job", "rows", "in order"], ranking(stated)),
        "Pairs of configurations of one job, slower / faster:",
        _table(["faster row", "differs", "release", "measured", "predicted"], pair_rows(stated, pairs)),
        "Not stated:",
        _table(["reason", "rows", "alone"], _obstacles(predictions)),
    ]
    if every_row:
        parts += ["Every row:", _table(*_rows(predictions))]
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


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the rows, price them and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipes", description=__doc__)
    parser.add_argument("folder", type=Path, help=f"folder of {RECIPES} and {MODELS}")
    parser.add_argument("--rows", action="store_true", help="print every row")
    given = parser.parse_args(arguments)
    recipes, pairs = read_recipes(given.folder)
    sys.stdout.write(tables([predict(recipe) for recipe in recipes], pairs, every_row=given.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
