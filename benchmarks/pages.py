"""Rewrites what the pages of docs/ take from the package: `python -m benchmarks.pages` (`make docs`, some seconds).

A new schedule, system, exchange scheme, collective algorithm, training framework or formula shows up on its page
without another edit. `--outputs` also runs the commands of docs/systems.md (about a minute), and
`--headlines FOLDER` writes its tables of published headlines from a folder of PipeDream's profiles.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.backends_page import with_backends
from benchmarks.formulas_page import formulas_page
from benchmarks.plan_page import key_rows
from benchmarks.schedules_page import measured_rows, schedule_rows
from benchmarks.systems_page import with_outputs, with_sections
from planner.hardware.collectives import ALGORITHMS
from planner.plans import RULES, plan_schema

DOCS = Path(__file__).parents[1] / "docs"


def with_table(text: str, table: str) -> str:
    """The page with the table that has the same first line replaced.

    Raises:
        ValueError: the page has no such table.
    """
    before, mark, rest = text.partition(table[: table.index("\n")])
    if not mark:
        raise ValueError(f"the page has no table {table[: table.index(chr(10))]}")
    end = rest.find("\n\n")
    return before + table.rstrip() + (rest[end:] if end >= 0 else "\n")


def algorithm_rows() -> str:
    """What each algorithm of collectives does, as the first line of its function says it."""
    rows = [
        f"| `{name}` | {(inspect.getdoc(algorithm.affine) or '').splitlines()[0]} |"
        for name, algorithm in ALGORITHMS.items()
    ]
    return "\n".join(["| algorithm of a collective | what it does |", "|---|---|", *rows]) + "\n"


def _schedules(text: str) -> str:
    return with_table(with_table(text, schedule_rows(text)), measured_rows())


def rule_rows() -> str:
    """What each rule of `shardplan diff` says, with its severity."""
    rows = [f"| `{rule}` | {severity} | {meaning} |" for rule, (severity, meaning) in RULES.items()]
    return "\n".join(["| rule | severity | says that |", "|---|---|---|", *rows]) + "\n"


PAGES: dict[str, Callable[[str], str]] = {
    "backends.md": with_backends,
    "diff.md": lambda text: with_table(text, rule_rows()),
    "formulas.md": lambda _: formulas_page(),
    "hardware.md": lambda text: with_table(text, algorithm_rows()),
    "plan.md": lambda text: with_table(text, key_rows()),
    "plan.schema.json": lambda _: json.dumps(plan_schema(), indent=1, ensure_ascii=False) + "\n",
    "schedules.md": _schedules,
    "systems.md": with_sections,
}
"""By file of docs/: its text now to the text that the package gives."""


def rewritten(page: str) -> str:
    """A page of docs/ with all that it takes from the package as it is now."""
    return PAGES[page](page_text(page))


def page_text(page: str) -> str:
    """A page of docs/ as it stands."""
    return (DOCS / page).read_text(encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Rewrite the pages."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pages", description="Rewrite what docs/ takes from the package."
    )
    parser.add_argument("--outputs", action="store_true", help="run the commands of docs/systems.md, too")
    parser.add_argument("--headlines", type=Path, help="folder of PipeDream's profiles, for the tables of headlines")
    options = parser.parse_args(arguments)
    for page in PAGES:
        text = rewritten(page)
        if page == "systems.md" and options.outputs:
            text = with_outputs(text)
        if page == "systems.md" and options.headlines:
            from benchmarks import headlines, headlines_parts

            for table in (headlines.table(options.headlines), *headlines_parts.tables(options.headlines).split("\n\n")):
                text = with_table(text, table)
        (DOCS / page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
