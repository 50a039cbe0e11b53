"""Findings of plan checks, and the comparison of a plan file's values with expected ones."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from planner.errors import Problem
from planner.plans.documents import KeyPath, readable
from planner.plans.files import UNHASHED, plain, to_document
from planner.plans.types import Plan
from planner.units import format_bytes, format_seconds

PLAN_AGAIN = "plan again instead of editing the file"
"""Hint of findings about values that were edited."""


class Fault(StrEnum):
    """Kinds of findings, by name."""

    DIGEST = "digest"
    OPTIONS = "options"
    CONFIGURATION = "configuration"
    STAGE_RANGE = "stage_range"
    OPERATOR_TWICE = "operator_twice"
    OPERATOR_MISSING = "operator_missing"
    OPERATOR_UNKNOWN = "operator_unknown"
    OPERATOR_ORDER = "operator_order"
    OPERATOR_COUNT = "operator_count"
    BACKWARD_EDGE = "backward_edge"
    DUPLICATED_PARAMETER = "duplicated_parameter"
    DUPLICATED_INCOMPLETE = "duplicated_incomplete"
    BOUNDARY_MISSING = "boundary_missing"
    BOUNDARY_UNKNOWN = "boundary_unknown"
    BOUNDARY_STAGES = "boundary_stages"
    BOUNDARY_SHAPE = "boundary_shape"
    BOUNDARY_GRADIENT = "boundary_gradient"
    UNDECLARED_TIE = "undeclared_tie"
    WRONG_TIE = "wrong_tie"
    PARAMETERS = "parameters"
    STAGE_TENSORS = "stage_tensors"
    MODEL = "model"
    MODEL_FINGERPRINT = "model_fingerprint"
    HARDWARE_FINGERPRINT = "hardware_fingerprint"
    MICRO_BATCH = "micro_batch"
    DIVISIBILITY = "divisibility"
    RANK_RANGE = "rank_range"
    RANK_TWICE = "rank_twice"
    REPLICAS = "replicas"
    REQUIRES = "requires"
    MEMORY = "memory"
    PREDICTIONS = "predictions"
    PREDICTION_STAGES = "prediction_stages"
    ACTIONS_UNREADABLE = "actions_unreadable"
    ACTION_MISSING = "action_missing"
    ACTION_TWICE = "action_twice"
    ACTION_ROUTE = "action_route"
    ACTION_UNKNOWN = "action_unknown"
    ACTION_ORDER = "action_order"
    WEIGHT_VERSION = "weight_version"
    SCHEDULE_CLAIM = "schedule_claim"
    DEADLOCK = "deadlock"
    SHARDING = "sharding"
    MESH = "mesh"
    SHARDING_BLOCKS = "sharding_blocks"
    SHARDING_NAMES = "sharding_names"
    LAYOUT = "layout"
    LAYOUT_MISSING = "layout_missing"
    SPLIT = "split"
    SPLIT_MISSING = "split_missing"
    COLLECTIVE = "collective"
    COLLECTIVE_MISSING = "collective_missing"
    COLLECTIVE_UNKNOWN = "collective_unknown"
    LINK_LEVEL = "link_level"
    HOLDING = "holding"
    BOUNDARY_LAYOUT = "boundary_layout"
    SHARDING_MEMORY = "sharding_memory"
    SHARDED_STAGE = "sharded_stage"
    NEGATIVE = "negative"
    HARDWARE = "hardware"
    ALTERNATIVES = "alternatives"
    BOUND = "bound"
    UNPRICED = "unpriced"
    DIFFERS = "differs"
    BACKEND = "backend"
    REPRICED = "repriced"


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
    hint: str = ""
    stage: int = -1
    rank: int = -1
    tensor: str = ""

    def problem(self, where: str = "") -> Problem:
        """The finding as the command line reports it."""
        return Problem(f"{self.fault}: {self.message}", where, self.hint)


MAX_OF_A_KIND = 20


def limited(findings: list[Finding]) -> list[Finding]:
    """At most `MAX_OF_A_KIND` findings of a kind, and one that says how many more there are."""
    kept: list[Finding] = []
    counts: dict[Fault, int] = {}
    for finding in findings:
        counts[finding.fault] = counts.get(finding.fault, 0) + 1
        if counts[finding.fault] <= MAX_OF_A_KIND:
            kept.append(finding)
    for fault, count in counts.items():
        if count > MAX_OF_A_KIND:
            kept.append(Finding(fault, f"and {count - MAX_OF_A_KIND} more of this kind"))
    return kept


RELATIVE = 1e-6
"""Figures have nine digits; sums may differ in the last ones between machines."""

ROUNDED = 1e-8
"""Tolerance of fractions that are computed from rounded figures."""

_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Difference:
    """A value of the file that is not as expected; `...` stands for a key that one side lacks.

    Attributes:
        path: place in the file.
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


Expected = tuple[Fault, KeyPath, object]
"""A fault, a path of the file, and the value expected there."""


def mismatches(plan: Plan, expected: Iterable[Expected], hint: str = PLAN_AGAIN) -> Iterator[Finding]:
    """Findings about values of a plan's file that are not as expected."""
    for fault, path, right in expected:
        said = functools.reduce(_item, path, plan)
        boundary = plan.boundaries[path[1]] if path[0] == "boundaries" and isinstance(path[1], int) else None
        stage, tensor = (boundary.from_stage, boundary.tensor) if boundary else (stage_in(path), "")
        for difference in compared(path, plain(said), plain(right)):
            of = f"{tensor!r}: " if tensor else ""
            yield Finding(fault, f"{of}{difference}", hint, stage, tensor=tensor)


def _item(value: Any, key: str | int) -> Any:  # noqa: ANN401
    return value[key] if isinstance(key, int) else getattr(value, key)


def stage_in(path: KeyPath) -> int:
    """The number of the stage that a path points into, -1 for none."""
    places = (b for a, b in itertools.pairwise(path) if a == "stages" and isinstance(b, int))
    return next(places, -1)


def differences(plan: Plan, right: Plan) -> list[Difference]:
    """Values in which two plan files differ, apart from digest and provenance; O(size of the file)."""
    right = dataclasses.replace(right, model=right.model.comparable(plan.model))
    said, document = to_document(plan), to_document(right)
    keys = [key for key in dict.fromkeys((*said, *document)) if key not in UNHASHED]
    return [each for key in keys for each in compared((key,), said.get(key, ...), document.get(key, ...))]


def compared(path: KeyPath, said: Any, right: Any) -> Iterator[Difference]:  # noqa: ANN401
    """The differences between two documents at and below a path."""
    if isinstance(said, dict) and isinstance(right, dict):
        for key in dict.fromkeys((*said, *right)):
            yield from compared((*path, key), said.get(key, ...), right.get(key, ...))
    elif isinstance(said, (list, tuple)) and isinstance(right, (list, tuple)) and len(said) == len(right):
        for index, pair in enumerate(zip(said, right, strict=True)):
            yield from compared((*path, index), *pair)
    elif not _same(str(path[-1]), said, right):
        yield Difference(path, said, right)


def _same(key: str, said: Any, right: Any) -> bool:  # noqa: ANN401
    """True if two values differ by rounding at most.

    Whole bytes may differ by one byte unless one of them is 0, floats in their last digits; all else must be equal.
    """
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (said, right))
    if not numbers or said == right:
        return bool(said == right) and type(said) is type(right)
    if key.endswith("bytes"):
        if isinstance(said, float) or isinstance(right, float):
            return math.isclose(said, right, rel_tol=RELATIVE)
        return bool(said and right) and math.isclose(said, right, rel_tol=RELATIVE * 1e-3, abs_tol=1.0)
    if isinstance(said, int) and isinstance(right, int):
        return False
    return math.isclose(said, right, rel_tol=RELATIVE, abs_tol=0.0 if key.endswith("_s") else ROUNDED)


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
