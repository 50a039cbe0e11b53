"""Many plans at once: every combination of some values of devices, batch, sequence, options and figures of hardware.

Points are planned in processes of this machine, or of several through dask, and kept in an SQLite file, so that a sweep
that was stopped goes on where it was.
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
from planner.errors import ShardplanError, UsageError
from planner.graph import Graph
from planner.hardware import load_cluster
from planner.plans.explain import plan_shape
from planner.plans.figures import Headline
from planner.registry import did_you_mean
from planner.space.types import Job

Point = tuple[tuple[str, str], ...]
"""Names and values, `(("devices", "16"), ("tp", "4"))`."""

SAMPLES_A_DEVICE = 8
"""Global batch where none is given, a device."""
_PLACES = ("model", "hardware", "nodes", "devices", "stack", "seq")
_TEXTS = {"precision": "precision", "optimizer": "optimizer", "recompute": "recompute"}
_NUMBERS = {"overlap": float, "headroom": float, "max-stages": int}
_LISTS = {
    "tp": "tensor_parallel", "cp": "context_parallel", "ep": "expert_parallel", "pp": "pipeline_stages",
    "dp": "data_parallel", "micro-batch": "micro_batches", "zero": "zero",
}  # fmt: skip
_WORDS = {"schedule": "schedules", "for": "backends"}
NAMES = ("batch", *_PLACES, *_TEXTS, *_NUMBERS, *_LISTS, *_WORDS)
"""What can be swept, beside sizes of dimensions (`dim.NAME`) and figures of hardware (`network.bandwidth`)."""
DIMENSION = "dim."


@dataclass(frozen=True, slots=True)
class Row:
    """What one point came to.

    Attributes:
        point: the values.
        headline: figures of its best plan; None where there is none.
        shape: the plan in a line.
        reason: why there is none.
        bound_s: no plan is faster.
        seconds: that planning took.
        pareto: no other point is at least as good in throughput, price and memory, and better in one of them.
    """

    point: Point
    headline: Headline | None = None
    shape: str = ""
    reason: str = ""
    bound_s: float = 0.0
    seconds: float = 0.0
    pareto: bool = field(default=False, compare=False)


def read_axes(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """`devices=8,16` and `network.bandwidth=100Gbit/s,200Gbit/s` as values by name, in the order given.

    Raises:
        UsageError: a name that is none, given twice, or without values.
    """
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, _, values = (part.strip() for part in text.partition("="))
        if name not in NAMES and "." not in name:
            raise UsageError(f"nothing is called {name!r}", where=text, hint=did_you_mean(name, NAMES))
        pieces = tuple(dict.fromkeys(piece.strip() for piece in values.split(",")))
        if name in found or not all(pieces):
            raise UsageError(f"{text!r} has no values, or {name} is given twice", hint="write devices=8,16,32")
        found[name] = pieces
    return found


def points_of(axes: Mapping[str, Sequence[str]]) -> list[Point]:
    """All combinations, the last name changing fastest."""
    return [tuple(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def run_point(point: Point) -> Row:
    """Plan one point, `model` and `hardware` among its names; what cannot be planned says why."""
    begin = time.monotonic()
    try:
        found = _planned(dict(point))
    except ShardplanError as error:
        return Row(point, reason=error.problem.message, seconds=time.monotonic() - begin)
    return Row(point, found.headline, plan_shape(found), "", found.predictions.bound_s, time.monotonic() - begin)


def _planned(values: Mapping[str, str]) -> Any:  # noqa: ANN401
    """The plan of a point."""
    places = {name: values.get(name, "") for name in _PLACES}
    dims = {name.removeprefix(DIMENSION): _whole(name, values[name]) for name in values if name.startswith(DIMENSION)}
    if places["seq"]:
        dims["seq"] = _whole("seq", places["seq"])
    graph = _graph(places["model"], tuple(sorted(dims.items())))
    changes = [f"{n}={v}" for n, v in values.items() if "." in n and not n.startswith(DIMENSION)]
    where = {"nodes": places["nodes"] or None, "devices": _whole("devices", places["devices"] or "0") or None}
    cluster = load_cluster(places["hardware"], stack=places["stack"], changes=changes, **where)  # type: ignore[arg-type]
    batch = _whole("batch", values["batch"]) if "batch" in values else SAMPLES_A_DEVICE * cluster.device_count
    fields: dict[str, Any] = {name: values[key] for key, name in _TEXTS.items() if key in values}
    fields |= {
        key.replace("-", "_"): _number(key, values[key], kind) for key, kind in _NUMBERS.items() if key in values
    }
    lists = {key: tuple(part.strip() for part in values[key].split(",")) for key in (*_LISTS, *_WORDS) if key in values}
    fields |= {name: tuple(_whole(key, part) for part in lists[key]) for key, name in _LISTS.items() if key in lists}
    fields |= {name: lists[key] for key, name in _WORDS.items() if key in lists}
    return plan(graph, cluster, Job(batch, **fields))


@functools.lru_cache(maxsize=4)
def _graph(model: str, dims: tuple[tuple[str, int], ...]) -> Graph:
    return load_graph(model, dims=dict(dims))


def _whole(name: str, text: str) -> int:
    return int(_number(name, text, int))


def _number(name: str, text: str, kind: Callable[[str], float]) -> float:
    try:
        return kind(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is no number for {name}", hint="write devices=8,16,32") from error


class Store:
    """Rows in an SQLite file by point, so that a sweep goes on where it was.

    Args:
        path: the file; made where it is not there.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self._file = sqlite3.connect(path)
            self._file.execute("CREATE TABLE IF NOT EXISTS rows (key TEXT PRIMARY KEY, row TEXT NOT NULL)")
            self._file.commit()
        except sqlite3.Error as error:
            raise UsageError(f"no file of a sweep: {error}", where=str(path), hint="name another file") from error

    def get(self, point: Point) -> Row | None:
        """The row of a point that this version of the program has planned; None where there is none."""
        found = self._file.execute("SELECT row FROM rows WHERE key = ?", (_key(point),)).fetchone()
        return None if found is None else _row(json.loads(found[0]))

    def put(self, row: Row) -> None:
        """Keep a row."""
        text = json.dumps(asdict(row), allow_nan=False)
        self._file.execute("INSERT OR REPLACE INTO rows VALUES (?, ?)", (_key(row.point), text))
        self._file.commit()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _key(point: Point) -> str:
    """Point, program and content of the files that a point names."""
    files = [Path(value) for _, value in point if value.endswith((".onnx", ".yaml", ".json")) and Path(value).is_file()]
    content = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    return json.dumps([version("shardplan"), sorted(point), content])


def _row(data: dict[str, Any]) -> Row:
    line = data["headline"]
    point = tuple((name, value) for name, value in data["point"])
    return Row(**{**data, "point": point, "headline": None if line is None else Headline(**line)})


def sweep(
    points: Sequence[Point],
    *,
    price: float | None = None,
    store: Store | None = None,
    workers: int = 0,
    on: str = "",
    progress: Callable[[int, int, float], None] | None = None,
) -> tuple[Row, ...]:
    """Plan all points.

    Args:
        points: names and values.
        price: of a device and hour in US dollars, in place of the profile's.
        store: where rows are kept, and looked for first.
        workers: processes; 0 for as many as the machine has cores, 1 for this process alone.
        on: address of a dask scheduler, `tcp://host:8786`, in place of processes here.
        progress: called with (points done, all points, seconds that the rest may take; 0 while that is not known).

    Raises:
        UsageError: dask is asked for and not installed, or nobody answers there.
    """
    done = {point: row for point in points if store is not None and (row := store.get(point)) is not None}
    known, begin = len(done), time.monotonic()
    todo = [point for point in dict.fromkeys(points) if point not in done]
    for row in _rows(todo, workers or os.cpu_count() or 1, on):
        done[row.point] = row
        if store is not None:
            store.put(row)
        if progress is not None:
            rate = (time.monotonic() - begin) / (len(done) - known)
            progress(len(done), len(set(points)), rate * (known + len(todo) - len(done)))
    rows = [done[point] for point in points]
    if price is not None:
        rows = [replace(row, headline=row.headline and row.headline.priced(price)) for row in rows]
    return with_pareto(rows)


def _rows(points: Sequence[Point], workers: int, on: str) -> Iterator[Row]:
    """Rows as they are done."""
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
        start = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(workers, mp_context=start) as pool:
            yield pool
        return
    try:
        from distributed import Client
    except ImportError as error:
        raise UsageError("--on needs dask", hint="pip install 'shardplan[sweep]'") from error
    try:
        client = Client(on)
    except (OSError, ValueError) as error:
        raise UsageError(f"no dask scheduler answers: {error}", where=on, hint="start one: dask scheduler") from error
    with client, client.get_executor() as executor:
        yield executor


def with_pareto(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows, with those marked that no other beats in throughput, price and memory at once."""
    figures = {i: _figures(row.headline) for i, row in enumerate(rows) if row.headline is not None}
    best = {i for i, own in figures.items() if not any(_beats(other, own) for other in figures.values())}
    return tuple(replace(row, pareto=i in best) for i, row in enumerate(rows))


def _figures(line: Headline) -> tuple[float, float, float]:
    """Seconds of a token or sample, its price, and memory: less is better."""
    each = line.sequence or 1
    return (
        1 / (line.samples_per_s * each),
        line.dollars_per_tera_tokens + line.dollars_per_mega_samples,
        line.memory_bytes,
    )


def _beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True)) and one != other
