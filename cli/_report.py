"""Print reports: styled on a terminal, plain into pipes, as Markdown, CSV or JSON for tools; a line of progress."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click

import planner

FOUND = 7
"""Exit code if a plan has findings."""
PIPED_WIDTH = 200
"""Line width of tables if the output is no terminal."""
STYLES = {
    "title": "bold",
    "heading": "bold cyan",
    "header": "bold",
    "forward": "black on bright_blue",
    "recompute": "black on yellow",
    "backward": "black on green",
    "weight gradient": "black on cyan",
    "communication inside a group": "black on bright_yellow",
    "communication": "black on bright_red",
    "synchronisation": "black on magenta",
    "update": "black on white",
    "idle": "bright_black",
}
"""Looks on a terminal by the name of a style."""


def terminal_width() -> int | None:
    """Columns of the terminal; None if the output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def show(report: Any, data: Any = None, form: str = "text", output: str | None = None) -> None:  # noqa: ANN401
    """Print a report or write it to a file; in JSON form `data` instead, by default the report's rows for tools."""
    width = terminal_width()
    if output:
        planner.files.write_whole(output, written(report, data, form))
    elif form in ("text", "table") and width:
        _show_styled(report, width)
    else:
        say_document(written(report, data, form), form)


def say(line: str, *, err: bool = False) -> None:
    """Print a line that may hold names; what cannot be seen of them is printed as its code."""
    click.echo(planner.escaping.terminal_line(line), err=err)


def say_document(text: str, form: str = "json") -> None:
    """Print a document in its format, JSON by default."""
    click.echo(planner.escaping.json_text(text) if form == "json" else text, nl=False)


def written(report: Any, data: Any = None, form: str = "text") -> str:  # noqa: ANN401
    """A report as text, Markdown or CSV, or its data as JSON."""
    if form == "json":
        data = planner.report_to_rows(report) if data is None else data
        return json.dumps(data, indent=2, ensure_ascii=False, default=_plain) + "\n"
    if form in ("text", "table"):
        return planner.report_to_text(report, table_width=PIPED_WIDTH)
    return planner.report_to_markdown(report) if form == "markdown" else planner.report_to_csv(report)


def say_where(output: str | None) -> None:
    """Print where the plan was written, or that it was not."""
    click.echo()
    say(f"plan written to {output}" if output else "nothing written; add -o FILE to keep the plan")


def say_checked(
    form: str,
    names: Mapping[str, str | None],
    findings: Sequence[Any],
    ok: str,
    remarks: Sequence[str],
    **further: Any,  # noqa: ANN401
) -> int:
    """Print the findings of a check, and return the exit code.

    Args:
        form: text or json.
        names: names of the plan file and of what it was checked against.
        findings: the findings.
        ok: the verdict if there are none.
        remarks: lines after the verdict.
        further: further keys of the JSON document.
    """
    if form == "json":
        document = {**names, "ok": not findings, "findings": findings, **further}
        say_document(written(None, document, "json"))
    else:
        for finding in findings:
            say(str(finding.problem(names["plan"])))
        say(f"{names['plan']}: {planner.units.plural(len(findings), 'finding') if findings else ok}")
        for remark in remarks:
            say(remark)
    return FOUND if findings else 0


def _plain(value: Any) -> Any:  # noqa: ANN401
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"cannot write {type(value).__name__} as JSON")


def _show_styled(report: Any, width: int) -> None:  # noqa: ANN401
    from rich.console import Console
    from rich.text import Text

    console = Console(width=width, highlight=False, soft_wrap=True)
    for line in planner.report.report_to_lines(report, width, width):
        console.print(Text.assemble(*((text, STYLES.get(style, "")) for text, style in line)))


SHOW_AFTER_S = 0.7
_FIELDS = ("doing", "solver", "found")
"""Texts of the progress line."""

Draw = Callable[..., None]
"""Updates fields of the progress line, given by name."""


@contextlib.contextmanager
def progress_line(silent: bool, *, counted: bool, doing: str = "searching") -> Iterator[Draw | None]:
    """Gives a function that updates the progress line; None if there is no line.

    Args:
        silent: true for no line.
        counted: true to show a count (fields `completed` and `total`), false to show the solver (`solver`). The field
            `found` is shown with both.
        doing: the first activity; the field `doing` changes it.
    """
    if silent or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    words, solver, found = (TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in _FIELDS)
    columns = (words, BarColumn(), MofNCompleteColumn()) if counted else (SpinnerColumn(), words, solver)
    bar = Progress(*columns, found, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
    task = bar.add_task("search", total=None, solver="", found="", doing=doing)
    later = threading.Timer(SHOW_AFTER_S, bar.start)
    later.daemon = True
    later.start()

    def draw(**fields: Any) -> None:  # noqa: ANN401
        shown: dict[str, Any] = {
            name: planner.escaping.visible(value) if isinstance(value, str) else value for name, value in fields.items()
        }
        bar.update(task, **shown)

    try:
        yield draw
    finally:
        later.cancel()
        later.join()
        bar.stop()


def best_so_far(incumbent: float, bound: float, unit: str) -> str:
    """The best value, the bound and the gap as text; the bound alone if nothing was found."""
    text = f"bound {bound:.6g} {unit}"
    if incumbent == float("inf"):
        return text
    gap = max(0.0, 1 - bound / incumbent) if incumbent > 0 else 0.0
    return f"best {incumbent:.6g} {unit}, {text}, gap {gap:.2%}"


def say_progress(done: int, total: int, what: str) -> None:
    """Show on a terminal what is being measured."""
    if sys.stderr.isatty():
        end = "\r" if done + 1 < total else "\r\x1b[K"
        line = planner.escaping.visible(f"measuring {done + 1}/{total} {what:<24}")
        click.echo(line, nl=False, err=True)
        click.echo(end, nl=False, err=True)
