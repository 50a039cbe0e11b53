"""Facts about schedules as short expressions, which are evaluated, printed and tested."""

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
"""Values of the names in an expression."""

_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "ceil": math.ceil, "floor": math.floor}
_NAMES = {"__builtins__": {}, **_FUNCTIONS}
_READ = (
    ast.Expression, ast.Constant, ast.Name, ast.Load, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Mod,
    ast.Compare, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.BoolOp, ast.And, ast.Or, ast.IfExp, ast.Call,
)  # fmt: skip
"""Syntax nodes that an expression may have; only `_FUNCTIONS` may be called."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a schedule with p workers, m micro-batches and equal stages.

    Expressions may use p, m, the worker or stage i = 0..p-1, and the options of the schedule. `idle` may also use F, B
    and W: seconds of the forward, the whole backward and its weight gradient of one stage for one micro-batch.

    Attributes:
        decides: what the schedule decides, in a few words, and its options.
        source: its publication.
        kept: most activation units that worker i keeps.
        kept_note: remark on `kept` for the documentation.
        kept_bound: `kept` is an upper bound that some worker may stay below.
        idle: idle seconds of the busiest worker in an iteration; the bubble is idle / (work + idle).
        idle_holds: condition on times and micro-batches under which `idle` is exact; empty for always.
        idle_note: remark on `idle`.
        versions: weight versions that stage i keeps.
        staleness: updates between reading the weights in a forward and applying the gradient, at stage i.
        staleness_note: remark on `versions` and `staleness`.
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
    """Evaluate an expression.

    Args:
        text: numbers, names, + - * / %, comparisons, min, max, ceil, floor, `a or b`, `a and b`, `a if b else c`.
        terms: the value of each name.

    Raises:
        PlanError: the text has other syntax, or a name without a value.
    """
    try:
        return eval(_compiled(text), _NAMES, terms)  # Safe: `_compiled` admits only the nodes in `_READ`.
    except NameError as error:
        raise PlanError(f"{error.name!r} has no value in {text!r}", hint=f"use {', '.join(terms)}") from error


def printed(text: str) -> str:
    """Format an expression for print: `2*(p-i)` as 2(p-i), `p % 2` as p mod 2."""
    text = text.replace(" == ", "=").replace(" <= ", "<=").replace(" >= ", ">=").replace(" and ", ", ")
    spaced = re.sub(r"(?<=[a-z]{2})\*|\*(?=[a-z]{2})", " ", text.replace(" % ", " mod "))
    return spaced.replace("*", "")


@lru_cache(maxsize=256)
def _compiled(text: str) -> CodeType:
    """Parse, check and compile an expression."""
    tree = ast.parse(text, mode="eval")
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        is_integer = not isinstance(node, ast.Constant) or isinstance(node.value, int)
        is_allowed_call = id(node) not in called or (isinstance(node, ast.Name) and node.id in _FUNCTIONS)
        if not isinstance(node, _READ) or not is_integer or not is_allowed_call:
            message = f"cannot read {ast.unparse(node) or text!r} in {text!r}"
            hint = "use numbers, names, + - * / %, comparisons, min, max, ceil, floor, and, or, if"
            raise PlanError(message, hint=hint)
    return compile(tree, text, "eval")
