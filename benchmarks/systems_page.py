"""Rewrites what docs/systems.md takes from the package: `python -m benchmarks.systems_page` (about a minute).

In each system's section the paragraphs **Decides.**, **A backend must know.** and **Decided here.** come from the
system's data, and what stands under a `$ shardplan` line is what that command prints now (without the meaning of the
columns, which stands once at the top). The other paragraphs are written by hand and left alone. With a folder of
PipeDream's profiles as argument the table of headlines and those of their parts are written too.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from planner.report.comparison import MEANING
from planner.systems import SYSTEMS, System

PAGE = Path(__file__).parents[1] / "docs" / "systems.md"
PROMPT = "$ shardplan "


def command_output(line: str) -> str:
    """What a command of the page prints, without the meaning of the columns.

    Raises:
        RuntimeError: the command fails.
    """
    from click.testing import CliRunner

    from cli.main import app

    result = CliRunner().invoke(app, shlex.split(line.removeprefix(PROMPT)))
    if result.exit_code:
        raise RuntimeError(f"{line}: {result.output or result.exception}")
    return result.output.partition(f"\n{MEANING}\n")[0].rstrip()


def generated(system: System) -> dict[str, str]:
    """The paragraphs of a section that say what the system's data says."""
    semantics = "Synchronous" if system.semantics.value == "sync" else "Asynchronous"
    schedules = ", ".join(f"`{name}`" for name in system.schedules) or ("none" if system.limits else "as allowed")
    usual = "as layouts need" if system.layouts else "all-reduce of each stage"
    exchange = f"`{system.exchange}`" if system.exchange else usual
    decides = (
        f"{system.chooses}. Cut: {system.cut}. Sharding: {system.sharding}. Schedule: {schedules}; "
        f"exchange: {exchange}. {semantics}; staleness: {system.staleness}. Source: {system.source}."
    )
    backend = "; ".join(f"{topic.replace('_', ' ')}: {text}" for topic, text in system.backend.items())
    options = "; ".join(f"`{system.key}:{name}={value or '...'}`" for name, value in system.tunable.items())
    here = "; ".join(system.open) + "." if system.open else "nothing was left open."
    return {
        "Decides.": decides,
        "A backend must know.": backend + ".",
        "Decided here.": here + (f" Options, with their usual values: {options}." if options else ""),
    }


def examples(text: str) -> Iterator[tuple[str, str]]:
    """Every command of the page, and what stands under it."""
    for block in text.split("```")[1::2]:
        command, _, shown = block.strip("\n").partition("\n")
        if command.startswith(PROMPT):
            yield command, shown


def rewritten(text: str) -> str:
    """The page with generated paragraphs and outputs as they are now."""
    for key in SYSTEMS.names():
        system = SYSTEMS.get(key)
        mark = f"## {system.title} (`{key}`)"
        before, _, rest = text.partition(mark)
        section, heading, after = rest.partition("\n## ")
        for title, paragraph in generated(system).items():
            lines = section.split("\n")
            at = next(i for i, line in enumerate(lines) if line.startswith(f"**{title}**"))
            lines[at] = f"**{title}** {paragraph}"
            section = "\n".join(lines)
        text = before + mark + section + heading + after
    for command, shown in list(examples(text)):
        text = text.replace(f"{command}\n{shown}\n```", f"{command}\n{command_output(command)}\n```")
    return text


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


def main() -> None:
    """Rewrite the page."""
    text = rewritten(PAGE.read_text(encoding="utf-8"))
    if len(sys.argv) > 1:
        from benchmarks import headlines, headlines_parts

        folder = Path(sys.argv[1])
        for table in (headlines.table(folder), *headlines_parts.tables(folder).split("\n\n")):
            text = with_table(text, table)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
