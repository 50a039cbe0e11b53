"""A line on standard error that says how far a search is; shown only on a terminal, and only when it takes a while."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

SHOW_AFTER_S = 0.7

Draw = Callable[..., None]
"""Takes fields of the line by name."""


@contextlib.contextmanager
def progress_line(silent: bool, *, counted: bool, doing: str = "searching") -> Iterator[Draw | None]:
    """A function that draws the search; None when it should stay silent.

    Args:
        silent: whether it should.
        counted: whether problems are counted (fields `completed` and `total`), or the solver is named (`solver`).
            `found` says what was found.
        doing: what is done first; the field `doing` says what is done next.
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
    """The best value, the bound and the gap between them; the bound alone where nothing was found."""
    text = f"bound {bound:.6g} {unit}"
    if incumbent == float("inf"):
        return text
    gap = max(0.0, 1 - bound / incumbent) if incumbent > 0 else 0.0
    return f"best {incumbent:.6g} {unit}, {text}, gap {gap:.2%}"


def say_progress(done: int, total: int, what: str) -> None:
    """Say on a terminal what is being measured."""
    import click

    if sys.stderr.isatty():
        end = "\r" if done + 1 < total else "\r\x1b[K"
        click.echo(f"measuring {done + 1}/{total} {what:<24}", nl=False, err=True)
        click.echo(end, nl=False, err=True)
