"""A progress line on standard error, shown only on a terminal and only after a short delay."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

SHOW_AFTER_S = 0.7

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

    ours = (TextColumn("{task.fields[doing]}"), BarColumn(), MofNCompleteColumn())
    columns = ours if counted else (SpinnerColumn(), ours[0], TextColumn("{task.fields[solver]}"))
    found = TextColumn("{task.fields[found]}")
    bar = Progress(*columns, found, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
    task = bar.add_task("search", total=None, solver="", found="", doing=doing)
    later = threading.Timer(SHOW_AFTER_S, bar.start)
    later.daemon = True
    later.start()

    def draw(**fields: Any) -> None:  # noqa: ANN401
        bar.update(task, **fields)

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
    import click

    if sys.stderr.isatty():
        end = "\r" if done + 1 < total else "\r\x1b[K"
        click.echo(f"measuring {done + 1}/{total} {what:<24}", nl=False, err=True)
        click.echo(end, nl=False, err=True)
