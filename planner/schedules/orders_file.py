"""User-written orders as files: one action per row (CSV), or one text of actions per lane (JSON).

CSV has the columns `worker`, `action` and, where wanted, `lane`; rows of a worker stand in its order:

    worker,action
    0,F0.0
    1,F1.0
    1,B1.0
    0,B0.0

JSON has `lanes`, each a text or a list of actions, and optionally the other fields of `Work`:

    {"lanes": ["F0.0 B0.0", "F1.0 B1.0"], "workers": [0, 1], "parts": 1, "versions": [1, 1]}

An action is written as kind and stage, `.` micro-batch, `/` part, `@` version read, `>` peer, with `+` in front if it
runs together with the one before it: `F2.5`, `F0.3/1`, `B1.4@3`, `E0.2>3`, `+B1.4`, `S0`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import planner.documents as documents
from planner.errors import PlanError
from planner.foreign_files import Door
from planner.json_text import MOST_DIGITS, nearest, positions
from planner.registry import did_you_mean
from planner.schedules.compiling import compile_orders
from planner.schedules.custom_orders import COUNTED, check_numbers, check_whole
from planner.schedules.types import Action, ActionKind, OrderError, Work

_WORD = re.compile(r"(\+?)([A-Z]+)([0-9]+)(?:\.([0-9]+))?(?:/([0-9]+))?(?:@([0-9]+))?(?:>([0-9]+))?")
_COLUMNS = ("worker", "lane", "action")
_SETTINGS = tuple(f.name for f in fields(Work) if f.name != "lanes")
_LANES = 'write {"lanes": ["F0.0 B0.0", ...]}'
_HINT = "write kind, stage and micro-batch, like F2.5"
_LEAST = {"workers": 0, "parts": 1, "versions": 1, "limits": 1}
"""Smallest numbers of settings."""


def read_orders(path: str | Path) -> Work:
    """Read orders from a CSV or JSON file and check that they can run; O(actions).

    Args:
        path: the file; a name that does not end in `.csv` is read as JSON.

    Raises:
        PlanError: the file cannot be read, or the orders cannot run; `where` names the line.
    """
    path = Path(path)
    door = Door(str(path), PlanError, "name a CSV or JSON file of orders")
    text = door.text(door.content(path))
    work, lines = (_read_csv if path.suffix.lower() == ".csv" else _read_json)(text, path)
    try:
        check_numbers(work)
        check_whole(compile_orders(work))
    except OrderError as error:
        where = f"{path}:{lines[error.lane][error.index]}"
        raise PlanError(error.problem.message, where=where, hint=error.problem.hint) from error
    return work


def parse_action(word: str) -> Action:
    """An action from its text, the inverse of `str`.

    Raises:
        PlanError: the text is no action.
    """
    match = _WORD.fullmatch(word)
    if match is None or match[2] not in set(ActionKind):
        raise PlanError(f"cannot read action {word!r}", hint=_HINT)
    kind, (stage, micro_batch, part, version, peer) = ActionKind(match[2]), (int(g or -1) for g in match.groups()[2:])
    if micro_batch < 0 and kind not in COUNTED:
        raise PlanError(f"{kind} needs a micro-batch", hint=_HINT)
    return Action(kind, stage, micro_batch, part, version, peer, bool(match[1]))


def _read_csv(text: str, path: Path) -> tuple[Work, list[list[int]]]:
    """The orders of a file, and the line of each action by lane."""
    names, rows = Door(str(path), PlanError, "give one action a row").table(text)
    if not set(names) & set(_COLUMNS):  # no file of orders: nothing of it is shown
        hint = f"columns: {', '.join(_COLUMNS)}"
        raise PlanError("the first line names no column of orders", where=f"{path}:1", hint=hint)
    unknown = [name for name in names if name not in _COLUMNS]
    if unknown:
        raise PlanError(f"unknown column {unknown[0]!r}", where=f"{path}:1", hint=did_you_mean(unknown[0], _COLUMNS))
    if not {"worker", "action"} <= set(names):
        raise PlanError("columns are missing", where=f"{path}:1", hint="give worker and action")
    if not rows:
        raise PlanError("there are no actions", where=f"{path}:1", hint="write a row for each action, such as 0,F0.0")
    lanes: dict[tuple[int, int], list[Action]] = {}
    lines: dict[tuple[int, int], list[int]] = {}
    for line, cells in rows:
        try:
            if not cells["action"]:
                raise PlanError("the action is missing", hint=_HINT)
            key = _number("worker", cells["worker"], len(rows)), _number("lane", cells.get("lane") or "0", len(rows))
            action = parse_action(cells["action"])
        except PlanError as error:
            raise PlanError(error.problem.message, where=f"{path}:{line}", hint=error.problem.hint) from error
        lanes.setdefault(key, []).append(action)
        lines.setdefault(key, []).append(line)
    keys = sorted(lanes)
    _refuse_missing_workers([worker for worker, _ in keys], path)
    parts = max((a.part for lane in lanes.values() for a in lane), default=-1) + 1
    work = Work(
        tuple(tuple(lanes[key]) for key in keys), workers=tuple(worker for worker, _ in keys), parts=max(parts, 1)
    )
    return work, [lines[key] for key in keys]


def _number(name: str, text: str, count: int) -> int:
    """A cell as a number from 0, below the number of actions: each worker and lane has one at least."""
    if not (text.isascii() and text.isdecimal()) or len(text) > MOST_DIGITS:
        raise PlanError(f"cannot read {name} {text!r}", hint="use a number from 0")
    if int(text) >= count:
        raise PlanError(f"{name} {text} of {count} actions", hint=f"number {name}s from 0 on, without gaps")
    return int(text)


def _refuse_missing_workers(workers: Sequence[int], path: Path) -> None:
    """Refuse numbers of workers with gaps. O(lanes): numbers may be large."""
    known = set(workers)
    missing = next(number for number in range(len(known) + 1) if number not in known)
    if known and missing < max(known):
        raise PlanError(f"worker {missing} has no actions", where=str(path), hint="number workers from 0 on")


@dataclass(frozen=True)
class OrdersFile:
    """Orders as JSON: the fields of `Work`, each lane as texts of actions; in the file one text will do."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    lanes: tuple[tuple[str, ...], ...]
    workers: tuple[int, ...] = ()
    parts: int = 1
    causal: bool = False
    shared: bool = False
    streaming: bool = False
    versions: tuple[int, ...] = ()
    limits: tuple[int, ...] = ()


def _read_json(text: str, path: Path) -> tuple[Work, list[list[int]]]:
    """The orders of a file, and the line of each action by lane."""
    content, document = documents.document(text, str(path), "file of orders", "mend it")
    places, listed = positions(content), document.get("lanes")

    def where(*place: str | int) -> str:
        return f"{path}:{nearest(place, places)[0]}"

    if not listed:
        raise PlanError("there are no lanes", where=where("lanes"), hint=_LANES)
    if isinstance(listed, list):
        document["lanes"] = [[lane] if isinstance(lane, str) else lane for lane in listed]
    read = documents.validated(json.dumps(document), OrdersFile, name=str(path), shown=content)
    lanes, lines = [], []
    for number, texts in enumerate(read.lanes):
        places_of_words = [("lanes", number, part) for part, text in enumerate(texts) for _ in text.split()]
        words = [word for text in texts for word in text.split()]
        if not words:
            raise PlanError(f"lane {number} has no actions", where=where("lanes", number), hint="leave it out")
        lanes.append(tuple(_parsed(word, where(*at)) for word, at in zip(words, places_of_words, strict=True)))
        lines.append([nearest(at, places)[0] for at in places_of_words])
    work = Work(tuple(lanes), **{name: getattr(read, name) for name in _SETTINGS})
    _check_settings(work, where)
    _refuse_missing_workers(work.lane_workers, path)
    return work, lines


def _parsed(word: str, where: str) -> Action:
    """An action from its text at a place in a file."""
    try:
        return parse_action(word)
    except PlanError as error:
        raise PlanError(error.problem.message, where=where, hint=error.problem.hint) from error


def _check_settings(work: Work, where: Callable[[str], str]) -> None:
    """Refuse settings that do not fit the lanes or each other."""
    stages = max((action.stage for lane in work.lanes for action in lane), default=-1) + 1
    for name, count, what in (
        ("workers", len(work.lanes), "lane"),
        ("versions", stages, "stage"),
        ("limits", stages, "stage"),
    ):
        values = getattr(work, name)
        if values and len(values) != count:
            message = f"{count} {what}s, but {name} for {len(values)}"
            raise PlanError(message, where=where(name), hint=f"give one for each {what}")
    for name, least in _LEAST.items():
        values = getattr(work, name)
        if min(values if isinstance(values, tuple) else (values,), default=least) < least:
            raise PlanError(f"{name} below {least}: {values}", where=where(name), hint=f"use numbers from {least}")
    if work.streaming and not work.shared:
        hint = "say `shared`, too: lanes that share their worker"
        raise PlanError("streaming is only for shared workers", where=where("streaming"), hint=hint)
