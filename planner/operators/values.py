"""Results of operators on small known operands: what exporters write to find out shapes at run time, and constants.

An evaluator takes the inputs (None where absent), the attributes and the operator set version, and returns the outputs.
Only small tensors get here, so plain numpy is enough.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from planner.operators.site import Array, Attributes, Evaluator, rule_of


def evaluate(
    op: str,
    inputs: Sequence[Array | None],
    attributes: Attributes,
    opset: int,
    dtype: Any,  # noqa: ANN401
) -> list[Array] | None:
    """Outputs of an operator on known values; None when its entry has no evaluator, or that does not apply.

    Args:
        op: the operator.
        inputs: its operands.
        attributes: by name.
        opset: version of the operator set.
        dtype: numpy type of the first output, used by casts.
    """
    compute = rule_of(op).compute
    if compute is None or (compute is converted and dtype is None):
        return None
    try:
        with np.errstate(all="ignore"):
            found = compute(inputs, attributes, opset)
            return [found[0].astype(dtype)] if compute is converted else found
    except (ValueError, IndexError, TypeError, KeyError, OverflowError, ZeroDivisionError):
        return None


def converted(x: Sequence[Any], a: Attributes, v: int) -> list[Array]:
    """The first operand, to be given the type of the result."""
    return [np.asarray(x[0])]


def integers(value: Any) -> list[int]:  # noqa: ANN401
    """The entries of an operand."""
    return [int(v) for v in np.asarray(value).reshape(-1)]


def axes_of(inputs: Sequence[Any], attributes: Attributes, position: int = 1) -> list[int] | None:
    """Axes by operand or attribute; None where not given."""
    if len(inputs) > position and inputs[position] is not None:
        return integers(inputs[position])
    return list(attributes["axes"]) if "axes" in attributes else None


def plain(function: Callable[..., Any]) -> Evaluator:
    """One result, of the type that numpy gives it."""
    return lambda x, a, v: [np.asarray(function(*x))]


def typed(function: Callable[..., Any]) -> Evaluator:
    """One result of the first operand's type."""
    return lambda x, a, v: [np.asarray(function(*x), dtype=x[0].dtype)]


def folded(function: Callable[[Any, Any], Any]) -> Evaluator:
    """Any number of operands, from left to right."""
    return typed(lambda *x: functools.reduce(function, x))
