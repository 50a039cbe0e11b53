"""Findings of plan checks, and the comparison of a plan with what it should be, field by field."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from planner.errors import Problem
from planner.json_text import KeyPath, readable
from planner.plans.files import UNHASHED, left_out, plain
from planner.plans.types import Plan
from planner.units import format_bytes, format_seconds

PLAN_AGAIN = "plan again instead of editing the file"
"""Hint of findings about values that were edited."""


class Fault(StrEnum):
    """Kinds of findings: what is wrong decides what can still be checked, and whether the plan can be executed."""

    DIGEST = "digest"
    """The file was changed after it was written."""
    STRUCTURE = "structure"
    """Parts of the plan refer to what is not there, or stages, ranks and batches are not the configuration's."""
    DIFFERS = "differs"
    """A value is not what the same code works out anew."""
    ORDERS = "orders"
    """Actions are not those of the schedule, or cannot run."""
    SHARDINGS = "shardings"
    """Splits and layouts of a group of ranks cannot be read, or are not legal."""
    FIGURES = "figures"
    """Predictions contradict each other."""
    MEMORY = "memory"
    """A rank needs more memory than its device has."""
    OPTIONS = "options"
    """The job does not allow the plan, or cannot be read."""
    MODEL = "model"
    """The plan is for another model."""
    HARDWARE = "hardware"
    """The plan is for another cluster."""
    UNPRICED = "unpriced"
    """The configuration cannot be priced."""
    REPRICED = "repriced"
    """Another version of the program or profile of the cluster gives other figures."""
    BACKEND = "backend"
    """A training framework cannot run the plan as it is."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a plan.

    Attributes:
        fault: its kind.
        message: what is wrong, one line, with the names it is about.
        hint: what to do about it.
        stage: the stage it is about, -1 for none.
        rank: the rank it is about, -1 for none.
        tensor: the tensor, operator or parameter it is about, "" for none.
    """

    fault: Fault
    message: str
    hint: str = PLAN_AGAIN
    stage: int = -1
    rank: int = -1
    tensor: str = ""

    def problem(self, where: str = "") -> Problem:
        """The finding as the command line reports it."""
        return Problem(f"{self.fault}: {self.message}", where, self.hint)


MAX_OF_A_KIND = 20


def limited(findings: Sequence[Finding]) -> list[Finding]:
    """At most `MAX_OF_A_KIND` findings of a kind, and one that says how many more there are."""
    kept: list[Finding] = []
    counts: dict[Fault, int] = {}
    for finding in findings:
        counts[finding.fault] = counts.get(finding.fault, 0) + 1
        if counts[finding.fault] <= MAX_OF_A_KIND:
            kept.append(finding)
    for fault, count in counts.items():
        if count > MAX_OF_A_KIND:
            kept.append(Finding(fault, f"and {count - MAX_OF_A_KIND} more of this kind", ""))
    return kept


RELATIVE = 1e-6
"""Figures have nine digits; sums may differ in the last ones between machines."""

ROUNDED = 1e-8
"""Tolerance of fractions that are computed from rounded figures."""

_LEFT_OVER = ("gap", "bubble_fraction")
"""Fractions that are what one rounded figure leaves of another."""

_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Difference:
    """A value of the file that is not as expected; `...` stands for a key that one side lacks.

    Attributes:
        path: place in the file; a part of a list of unequal length by its name.
        said: the value in the file.
        right: the expected value, worked out anew.
    """

    path: KeyPath
    said: Any
    right: Any

    def __str__(self) -> str:
        said, right = _excerpts(self.said, self.right) if _texts(self.said, self.right) else (self.said, self.right)
        key = next((str(part) for part in reversed(self.path) if isinstance(part, str)), "")
        return f"{readable(self.path)}: {_words(key, said)} in the file, {_words(key, right)} worked out anew"

    def finding(self, plan: Plan, fault: Fault, hint: str = PLAN_AGAIN) -> Finding:
        """The finding, with the stage or the tensor between stages that the path leads to."""
        tensor, stage = "", stage_in(self.path)
        if self.path[0] in ("boundaries", "shared_parameters") and len(self.path) > 1:
            at = self.path[1]
            tensor = at if isinstance(at, str) else _name(getattr(plan, str(self.path[0]))[at])
            stage = next((b.from_stage for b in plan.boundaries if b.tensor == tensor), -1)
        return Finding(fault, f"{f'{tensor!r}: ' if tensor else ''}{self}", hint, stage, tensor=tensor)


def stage_in(path: KeyPath) -> int:
    """The number of the stage that a path points into, -1 for none."""
    places = (b for a, b in itertools.pairwise(path) if a == "stages" and isinstance(b, int))
    return next(places, -1)


def differences(said: Any, right: Any, path: KeyPath = ()) -> Iterator[Difference]:  # noqa: ANN401
    """The values in which two plans, or parts of them at a path, differ, apart from digest and provenance.

    Items of lists of unequal length belong together by their names. O(size of what is not the same object).
    """
    if said is right:
        return
    if dataclasses.is_dataclass(said) and type(said) is type(right):
        for field in dataclasses.fields(said):
            if path or field.name not in UNHASHED:
                a, b = (... if left_out(value, field) else getattr(value, field.name) for value in (said, right))
                yield from differences(a, b, (*path, field.name))
    elif isinstance(said, dict) and isinstance(right, dict):
        for key in dict.fromkeys((*said, *right)):
            yield from differences(said.get(key, ...), right.get(key, ...), (*path, key))
    elif isinstance(said, tuple) and isinstance(right, tuple):
        yield from _of_lists(said, right, path)
    elif not _same(path, said, right):
        yield Difference(path, plain(said), plain(right))


def _of_lists(said: tuple[Any, ...], right: tuple[Any, ...], path: KeyPath) -> Iterator[Difference]:
    """The differences between two lists: by place, or where their lengths differ by name."""
    if len(said) == len(right):
        for index, pair in enumerate(zip(said, right, strict=True)):
            yield from differences(*pair, (*path, index))
        return
    by_name, right_by_name = (dict(zip(map(_name, values), values, strict=True)) for values in (said, right))
    if "" in (*by_name, *right_by_name) or (len(by_name), len(right_by_name)) != (len(said), len(right)):
        yield Difference(path, plain(said), plain(right))
    elif all(isinstance(value, str) for value in (*said, *right)):
        only, only_right = ([str(v) for v in a if v not in b] for a, b in ((said, right), (right, said)))
        yield Difference(path, only or ..., only_right or ...)
    else:
        yield from differences(by_name, right_by_name, path)


def _name(value: object) -> str:
    """A text itself, or the first field of a dataclass if that is a text; else ""."""
    if dataclasses.is_dataclass(value):
        value = getattr(value, dataclasses.fields(value)[0].name)
    return str(value) if isinstance(value, str) else ""


def _same(path: KeyPath, said: Any, right: Any) -> bool:  # noqa: ANN401
    """True if two values are equal, or floats that differ in their last digits."""
    key = str(path[-1])
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (said, right))
    if not numbers or said == right:
        return bool(said == right) and (type(said) is type(right) or _texts(said, right))
    if isinstance(said, int) and isinstance(right, int):
        return False
    return math.isclose(said, right, rel_tol=RELATIVE, abs_tol=ROUNDED if key in _LEFT_OVER else 0.0)


def _texts(said: Any, right: Any) -> bool:  # noqa: ANN401
    return isinstance(said, str) and isinstance(right, str)


def _excerpts(said: str, right: str) -> tuple[str, str]:
    """Excerpts of both texts around the first character that differs."""
    if max(len(said), len(right)) <= _SHOWN:
        return said, right
    same = next((i for i, (a, b) in enumerate(zip(said, right, strict=False)) if a != b), min(len(said), len(right)))
    start = max(0, same - _SHOWN // 3)
    return tuple(("... " if start else "") + text[start : start + _SHOWN] for text in (said, right))  # type: ignore[return-value]


def _words(key: str, value: Any) -> str:  # noqa: ANN401
    """A value as messages show it."""
    if value is ...:
        return "nothing"
    if isinstance(value, list):
        return f"{len(value)} entries" if len(str(value)) > _SHOWN else json.dumps(value, ensure_ascii=False)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value:
        if key.endswith("bytes"):
            return f"{format_bytes(value)} ({value})" if value >= 0 else f"{value} bytes"
        if key.endswith("_s") and value > 0 and not key.endswith("per_s"):
            return f"{format_seconds(value)} ({value:.9g} s)"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 2 * _SHOWN else f"{text[: 2 * _SHOWN]} ..."
