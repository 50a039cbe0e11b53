"""A line on standard error that says how far a search is; shown only on a terminal, and only when it takes a while."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

Progress = Callable[[int, int, float, float], None]
SHOW_AFTER_S = 0.7


@contextlib.contextmanager
def progress_line(silent: bool) -> Iterator[Progress | None]:
    """A callback `(done, total, incumbent_s, bound_s)` that draws the search; None when it should stay silent."""
    if silent or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    start = time.monotonic()
    bar = Bar(
        TextColumn("searching"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[found]}"),
        TimeElapsedColumn(), console=Console(stderr=True), transient=True,
    )  # fmt: skip
    task = bar.add_task("search", total=None, found="")

    def update(done: int, total: int, incumbent_s: float, bound_s: float) -> None:
        if not bar.live.is_started and time.monotonic() - start > SHOW_AFTER_S:
            bar.start()
        found = ""
        if incumbent_s < float("inf"):
            found = (
                f"best {incumbent_s * 1e3:.1f} ms, bound {bound_s * 1e3:.1f} ms, gap {1 - bound_s / incumbent_s:.1%}"
            )
        bar.update(task, completed=done, total=total, found=found)

    try:
        yield update
    finally:
        bar.stop()
