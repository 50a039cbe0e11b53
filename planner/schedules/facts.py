"""What a schedule says of itself in numbers: short expressions that are evaluated, printed and tested."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

from planner.errors import PlanError

Terms = Mapping[str, Any]
"""Numbers by the names that expressions use."""

_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "ceil": math.ceil, "floor": math.floor}
_NAMES = {"__builtins__": {}, **_FUNCTIONS}
_READ = (
    ast.Expression, ast.Constant, ast.Name, ast.Load, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Mod,
    ast.Compare, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.BoolOp, ast.And, ast.Or, ast.IfExp, ast.Call,
)  # fmt: skip
"""What an expression may consist of; calls are of `_FUNCTIONS` alone."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a schedule decides and costs, for p workers, m micro-batches and equal stages.

    Expressions may name p, m, the worker or stage i = 0..p-1, the options of the schedule, and in `idle` F, B and W:
    seconds of the forward, the whole backward and its weight gradient, of one stage for one micro-batch.

    Attributes:
        decides: what it decides, in a few words, and its options.
        source: where it was published.
        kept: activation units that worker i keeps at the most.
        kept_note: where it keeps fewer, or by which options more.
        kept_bound: whether some worker may keep less than that.
        idle: seconds that the busiest worker waits in an iteration; the bubble is idle / (work + idle).
        idle_holds: for which times and micro-batches `idle` is exact; empty where it is for all.
        idle_note: what else is to be said of it.
        versions: versions of its weights that stage i keeps.
        staleness: updates between reading the weights in a forward and applying the gradient, at stage i.
        staleness_note: what else is to be said of both.
    """

    decides: str
    source: str
    kept: str
    kept_note: str = ""
    kept_bound: bool = False
    idle: str = "(p-1)*(F+B)"
    idle_holds: str = ""
    idle_note: str = ""
    versions: str = "1"
    staleness: str = "0"
    staleness_note: str = ""


def evaluate(text: str, terms: Terms) -> Any:  # noqa: ANN401
    """The number that an expression gives.

    Args:
        text: numbers, names, + - * / %, comparisons, min, max, ceil, floor, `a or b`, `a and b`, `a if b else c`.
        terms: the value of each name.

    Raises:
        PlanError: the text has something else in it, or a name without a value.
    """
    try:
        return eval(_compiled(text), _NAMES, terms)  # of nothing but what `_READ` lists
    except NameError as error:
        raise PlanError(f"{error.name!r} has no value in {text!r}", hint=f"use {', '.join(terms)}") from error


def printed(text: str) -> str:
    """An expression as it is read on paper: `2*(p-i)` as 2(p-i), `p % 2` as p mod 2."""
    text = text.replace(" == ", "=").replace(" <= ", "<=").replace(" >= ", ">=").replace(" and ", ", ")
    spaced = re.sub(r"(?<=[a-z]{2})\*|\*(?=[a-z]{2})", " ", text.replace(" % ", " mod "))
    return spaced.replace("*", "")


@lru_cache(maxsize=256)
def _compiled(text: str) -> CodeType:
    tree = ast.parse(text, mode="eval")
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        whole = not isinstance(node, ast.Constant) or isinstance(node.value, int)
        known = id(node) not in called or (isinstance(node, ast.Name) and node.id in _FUNCTIONS)
        if not isinstance(node, _READ) or not whole or not known:
            message = f"cannot read {ast.unparse(node) or text!r} in {text!r}"
            hint = "use numbers, names, + - * / %, comparisons, min, max, ceil, floor, and, or, if"
            raise PlanError(message, hint=hint)
    return compile(tree, text, "eval")
