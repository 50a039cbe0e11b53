"""Sweeps: plan every combination of values of devices, batch, sequence, options and hardware figures.

Points are planned in processes of this machine, or of several machines through dask. An SQLite file keeps the results,
so that a sweep that was stopped can continue.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from planner.api import load_graph, plan
from planner.documents import adapter
from planner.errors import ShardplanError, UsageError
from planner.foreign_files import Door
from planner.graph import Graph
from planner.hardware import load_cluster
from planner.plans.explain import plan_shape
from planner.plans.figures import Headline
from planner.processes import end, end_with_parent
from planner.registry import did_you_mean
from planner.space.types import Job

Point = tuple[tuple[str, str], ...]
"""Names and values of a point, `(("devices", "16"), ("tp", "4"))`."""

SAMPLES_A_DEVICE = 8
"""Samples per device of the default global batch."""
_PLACES = ("model", "hardware", "nodes", "devices", "stack", "seq")


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, _words(text)))


_FIELDS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "batch": ("global_batch", int), "precision": ("precision", str), "optimizer": ("optimizer", str),
    "recompute": ("recompute", str), "overlap": ("overlap", float), "headroom": ("headroom", float),
    "max-stages": ("max_stages", int), "tp": ("tensor_parallel", _numbers), "cp": ("context_parallel", _numbers),
    "ep": ("expert_parallel", _numbers), "pp": ("pipeline_stages", _numbers), "dp": ("data_parallel", _numbers),
    "micro-batch": ("micro_batches", _numbers), "zero": ("zero", _numbers), "schedule": ("schedules", _words),
    "for": ("backends", _words),
}  # fmt: skip
"""Fields of `Job` and how their values are read, by the names that users write."""
NAMES = (*_PLACES, *_FIELDS)
"""Names that can be swept, beside sizes of dimensions (`dim.NAME`) and hardware figures (`network.bandwidth`)."""
DIMENSION = "dim."


@dataclass(frozen=True, slots=True)
class SweepRow:
    """The result of one point.

    Attributes:
        point: names and values.
        headline: figures of the best plan; None if there is no plan.
        shape: the plan in a line.
        reason: why there is no plan.
        bound_s: lower bound on the step time.
        seconds: seconds that planning took.
        pareto: true if no other point is at least as good in throughput, price and memory, and better in one of them.
    """

    point: Point
    headline: Headline | None = None
    shape: str = ""
    reason: str = ""
    bound_s: float = 0.0
    seconds: float = 0.0
    pareto: bool = field(default=False, compare=False)


def read_axes(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Read texts like `devices=8,16` and `network.bandwidth=100Gbit/s,200Gbit/s` into values by name.

    Raises:
        UsageError: a name is unknown, repeated, or without values, or a value is no number where it must be one.
    """
    axes: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, _, values = (part.strip() for part in text.partition("="))
        if name not in NAMES and "." not in name:
            raise UsageError(f"nothing is called {name!r}", where=text, hint=did_you_mean(name, NAMES))
        pieces = tuple(dict.fromkeys(piece.strip() for piece in values.split(",")))
        if name in axes or not all(pieces):
            raise UsageError(f"{text!r} has no values, or {name} is given twice", hint="write devices=8,16,32")
        for piece in pieces:
            _read(name, piece, int if name in ("devices", "seq") else _FIELDS.get(name, ("", str))[1])
        axes[name] = pieces
    return axes


def points_of(axes: Mapping[str, Sequence[str]]) -> list[Point]:
    """All combinations of values; the last name changes fastest."""
    return [tuple(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def run_point(point: Point) -> SweepRow:
    """Plan one point, which names at least `model` and `hardware`; errors become the row's reason."""
    begin = time.monotonic()
    try:
        best_plan = _planned(dict(point))
    except ShardplanError as error:
        return SweepRow(point, reason=error.problem.message, seconds=time.monotonic() - begin)
    return SweepRow(
        point, best_plan.headline, plan_shape(best_plan), "", best_plan.predictions.bound_s, time.monotonic() - begin
    )


def _planned(values: Mapping[str, str]) -> Any:  # noqa: ANN401
    """The plan of a point."""
    places = {name: values.get(name, "") for name in _PLACES}
    dims = {
        name.removeprefix(DIMENSION): _read(name, values[name], int) for name in values if name.startswith(DIMENSION)
    }
    if places["seq"]:
        dims["seq"] = _read("seq", places["seq"], int)
    graph = _graph(places["model"], tuple(sorted(dims.items())))
    changes = [f"{n}={v}" for n, v in values.items() if "." in n and not n.startswith(DIMENSION)]
    where = {"nodes": places["nodes"] or None, "devices": _read("devices", places["devices"] or "0", int) or None}
    cluster = load_cluster(places["hardware"], stack=places["stack"], changes=changes, **where)  # type: ignore[arg-type]
    fields = {field: _read(name, values[name], read) for name, (field, read) in _FIELDS.items() if name in values}
    return plan(graph, cluster, Job(**{"global_batch": SAMPLES_A_DEVICE * cluster.device_count, **fields}))


@functools.lru_cache(maxsize=4)
def _graph(model: str, dims: tuple[tuple[str, int], ...]) -> Graph:
    return load_graph(model, dims=dict(dims))


def _read(name: str, text: str, read: Callable[[str], Any]) -> Any:  # noqa: ANN401
    try:
        return read(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is no number for {name}", hint="write devices=8,16,32") from error


class Store:
    """An SQLite file of rows by point, so that a sweep can continue.

    Args:
        path: the file; created if it is missing.
        patience_s: how long another process may keep the file locked.

    Raises:
        UsageError: the file is not an SQLite database of a sweep or cannot be opened.
    """

    def __init__(self, path: str | Path, *, patience_s: float = 60.0) -> None:
        self._door = Door(str(path), UsageError, "name another file for --store")
        with self._errors():
            self._file = sqlite3.connect(path, timeout=patience_s)
            self._file.execute("CREATE TABLE IF NOT EXISTS rows (key TEXT PRIMARY KEY, row TEXT NOT NULL)")
            self._file.commit()
        columns = [name for _, name, *_ in self._ask("PRAGMA table_info(rows)")]
        if columns != ["key", "row"]:
            self._door.refuse(f"no file of a sweep: its table has the columns {', '.join(map(str, columns))}")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of SQLite into those of the file: full, locked, damaged, or no database."""
        try:
            yield
        except (sqlite3.Error, ValueError) as error:  # a name with a null byte is a ValueError
            self._door.refuse(f"no file in which a sweep can be kept: {error}")

    def _ask(self, command: str, values: Sequence[str] = ()) -> list[Any]:
        with self._errors():
            return self._file.execute(command, values).fetchall()

    def get(self, point: Point) -> SweepRow | None:
        """The row of a point, if this version of the program has planned it; else None.

        Raises:
            UsageError: the file cannot be read, or holds something else.
        """
        record = self._ask("SELECT row FROM rows WHERE key = ?", (_key(point),))
        if not record:
            return None
        text = record[0][0]
        document = self._door.json_object(text if isinstance(text, str | bytes) else repr(text))
        try:
            row: SweepRow = adapter(SweepRow).validate_json(json.dumps(document))
        except ValueError as error:  # of the validator
            self._door.refuse(f"holds a row that is no result of a sweep: {str(error).splitlines()[0]}")
        return row

    def put(self, row: SweepRow) -> None:
        """Store a row.

        Raises:
            UsageError: the file is full, locked or cannot be written.
        """
        text = json.dumps(asdict(row), allow_nan=False)
        self._ask("INSERT OR REPLACE INTO rows VALUES (?, ?)", (_key(row.point), text))
        with self._errors():
            self._file.commit()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _key(point: Point) -> str:
    """Database key: the program's version, the point, and the hashes of files that it names."""
    files = [Path(value) for _, value in point if value.endswith((".onnx", ".yaml", ".json")) and Path(value).is_file()]
    content = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    return json.dumps([version("shardplan"), sorted(point), content])


def sweep(
    points: Sequence[Point],
    *,
    price: float | None = None,
    store: Store | None = None,
    workers: int = 0,
    on: str = "",
    progress: Callable[[int, int, float], None] | None = None,
) -> tuple[SweepRow, ...]:
    """Plan all points.

    Args:
        points: names and values.
        price: US dollars per device-hour, in place of the profile's price.
        store: file from which known rows are taken and in which new ones are kept.
        workers: processes; 0 for as many as the machine has cores, 1 for this process alone.
        on: address of a dask scheduler, `tcp://host:8786`, in place of processes here.
        progress: called with (points done, all points, estimated seconds left; 0 while unknown).

    Raises:
        UsageError: dask is asked for and not installed, or nobody answers there.
    """
    done = {point: row for point in points if store is not None and (row := store.get(point)) is not None}
    stored, begin = len(done), time.monotonic()
    todo = [point for point in dict.fromkeys(points) if point not in done]
    for row in _rows(todo, workers or os.cpu_count() or 1, on):
        done[row.point] = row
        if store is not None:
            store.put(row)
        if progress is not None:
            rate = (time.monotonic() - begin) / (len(done) - stored)
            progress(len(done), len(set(points)), rate * (stored + len(todo) - len(done)))
    rows = [done[point] for point in points]
    if price is not None:
        rows = [replace(row, headline=row.headline and row.headline.priced(price)) for row in rows]
    return with_pareto(rows)


def _rows(points: Sequence[Point], workers: int, on: str) -> Iterator[SweepRow]:
    """Rows in the order in which they are finished."""
    if not on and (workers == 1 or len(points) < 2):
        yield from map(run_point, points)
        return
    with _executor(min(workers, len(points) or 1), on) as executor:
        futures = [executor.submit(run_point, point) for point in points]
        try:
            for future in concurrent.futures.as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


@contextlib.contextmanager
def _executor(workers: int, on: str) -> Iterator[concurrent.futures.Executor]:
    """Processes of this machine, or those of a dask scheduler."""
    if not on:
        yield from _local_pool(workers)
        return
    try:
        from distributed import Client
    except ImportError as error:
        raise UsageError("--on needs dask", hint="pip install distributed (shardplan[sweep])") from error
    try:
        client = Client(on)
    except (OSError, ValueError) as error:
        raise UsageError(f"no dask scheduler answers: {error}", where=on, hint="start one: dask scheduler") from error
    with client, client.get_executor() as executor:
        yield executor


def _local_pool(workers: int) -> Iterator[concurrent.futures.Executor]:
    """Processes of this machine, which end with this one, and at once when it is interrupted."""
    start, others = multiprocessing.get_context("spawn"), multiprocessing.active_children()
    pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=start, initializer=end_with_parent)
    with pool:
        try:
            yield pool
        except BaseException:
            end([process for process in multiprocessing.active_children() if process not in others])
            raise


def with_pareto(rows: Sequence[SweepRow]) -> tuple[SweepRow, ...]:
    """The rows, with `pareto` set on those that no other row dominates in throughput, price and memory."""
    figures = {i: _figures(row.headline) for i, row in enumerate(rows) if row.headline is not None}
    best = {i for i, line in figures.items() if not any(_beats(other, line) for other in figures.values())}
    return tuple(replace(row, pareto=i in best) for i, row in enumerate(rows))


def _figures(line: Headline) -> tuple[float, float, float]:
    """(seconds per token or sample, price, memory): less is better in each."""
    unit_count = line.sequence or 1
    return (
        1 / (line.samples_per_s * unit_count),
        line.dollars_per_tera_tokens + line.dollars_per_mega_samples,
        line.memory_bytes,
    )


def _beats(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    """True if the first is at least as good in all figures and better in one."""
    return all(a <= b for a, b in zip(first, second, strict=True)) and first != second
