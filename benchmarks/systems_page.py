"""docs/systems.md: what a backend must know of each system, and what the commands of the page print.

In each system's section the paragraph **A backend must know.** comes from the system's data; a system without a section
gets one, in the order of names. Under a `$ shardplan` line stands what that
command prints (without the meaning of the columns, which stands once at the top). The other paragraphs are written
by hand and left alone.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from planner.report.comparison import MEANING
from planner.systems import SYSTEMS, System

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
    backend = "; ".join(f"{topic.replace('_', ' ')}: {text}" for topic, text in system.backend.items())
    return {"A backend must know.": backend + "."}


def examples(text: str) -> Iterator[tuple[str, str]]:
    """Every command of the page, and what stands under it."""
    for block in text.split("```")[1::2]:
        command, _, shown = block.strip("\n").partition("\n")
        if command.startswith(PROMPT):
            yield command, shown


def with_sections(text: str) -> str:
    """The page with the paragraphs of every system's data as they are now."""
    parts = re.split(r"(?m)^(?=## )", text)
    places = {match[1]: at for at, part in enumerate(parts) if (match := re.match(r"## .*\(`([a-z0-9-]+)`\)\n", part))}
    for key, system in SYSTEMS.items():
        paragraphs = {f"**{title}**": text for title, text in generated(system).items()}
        if key in places:
            lines = parts[places[key]].split("\n")
            begins = [line[: line.find("**", 2) + 2] for line in lines]
            for begin, paragraph in paragraphs.items():
                lines[begins.index(begin)] = f"{begin} {paragraph}"
            parts[places[key]] = "\n".join(lines)
        else:
            before = max((at for name, at in places.items() if name < key), default=min(places.values()))
            body = "\n\n".join(f"{begin} {paragraph}" for begin, paragraph in paragraphs.items())
            parts[before] += f"## {system.title} (`{key}`)\n\n{body}\n\n"
    return "".join(parts)


def with_outputs(text: str) -> str:
    """The page with what its commands print now."""
    for command, shown in list(examples(text)):
        text = text.replace(f"{command}\n{shown}\n```", f"{command}\n{command_output(command)}\n```")
    return text
