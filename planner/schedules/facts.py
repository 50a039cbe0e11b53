"""What a schedule says of itself in numbers: short expressions that are evaluated, printed and tested."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from planner.errors import PlanError

Terms = Mapping[str, Any]
"""Numbers by the names that expressions use."""

_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "ceil": math.ceil, "floor": math.floor}
_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
}


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
        return _compiled(text)(terms)
    except KeyError as error:
        raise PlanError(f"{error.args[0]!r} has no value in {text!r}", hint=f"use {', '.join(terms)}") from error


def printed(text: str) -> str:
    """An expression as it is read on paper: `2*(p-i)` as 2(p-i), `p % 2` as p mod 2."""
    text = text.replace(" == ", "=").replace(" <= ", "<=").replace(" >= ", ">=").replace(" and ", ", ")
    spaced = re.sub(r"(?<=[a-z]{2})\*|\*(?=[a-z]{2})", " ", text.replace(" % ", " mod "))
    return spaced.replace("*", "")


@lru_cache(maxsize=256)
def _compiled(text: str) -> Callable[[Terms], Any]:
    return _function(ast.parse(text, mode="eval").body, text)


def _function(node: ast.AST, text: str) -> Callable[[Terms], Any]:
    """A node of the expression as a function of its terms."""

    def part(child: ast.AST) -> Callable[[Terms], Any]:
        return _function(child, text)

    match node:
        case ast.Constant(value=int() as number):
            return lambda _: number
        case ast.Name(id=name):
            return operator.itemgetter(name)
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
            combine, one, other = _OPERATORS.get(type(op)), part(left), part(right)
            if combine is not None:
                return lambda terms: combine(one(terms), other(terms))
        case ast.BoolOp(op=ast.And(), values=members):
            conditions = [part(member) for member in members]
            return lambda terms: all(condition(terms) for condition in conditions)
        case ast.BoolOp(op=ast.Or(), values=[left, right]):
            one, other = part(left), part(right)
            return lambda terms: one(terms) or other(terms)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            asked, one, other = part(test), part(body), part(orelse)
            return lambda terms: one(terms) if asked(terms) else other(terms)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            call, values = _FUNCTIONS[name], [part(argument) for argument in arguments]
            return lambda terms: call(*(value(terms) for value in values))
    message = f"cannot read {ast.unparse(node)!r} in {text!r}"
    raise PlanError(message, hint="use numbers, names, + - * / %, comparisons, min, max, ceil, floor, and, or, if")
