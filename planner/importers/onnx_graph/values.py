"""Compute small known values: what exporters write to find out shapes at run time, and constants.

Each evaluator takes the inputs (None where absent), the attributes and the operator set version, and returns the
outputs. Only small tensors get here, so plain numpy is enough.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from planner.importers.onnx_graph.work import Array

Attributes = Mapping[str, Any]
Evaluator = Callable[[Sequence[Any], Attributes, int], list[Array]]


def evaluate(
    op: str,
    inputs: Sequence[Array | None],
    attributes: Attributes,
    opset: int,
    dtype: Any,  # noqa: ANN401
) -> list[Array] | None:
    """Outputs of an operator on known values; None when it is not one of those computed here, or does not apply.

    Args:
        dtype: numpy type of the first output, used by Cast.
    """
    found = _EVALUATORS.get(op)
    if found is None:
        return None
    try:
        with np.errstate(all="ignore"):
            if op in ("Cast", "CastLike"):
                return None if dtype is None else [np.asarray(inputs[0]).astype(dtype)]
            return found(inputs, attributes, opset)
    except (ValueError, IndexError, TypeError, KeyError, OverflowError, ZeroDivisionError):
        return None


def _ints(value: Any) -> list[int]:  # noqa: ANN401
    return [int(v) for v in np.asarray(value).reshape(-1)]


def _axes(inputs: Sequence[Any], attributes: Attributes, position: int = 1) -> list[int] | None:
    if len(inputs) > position and inputs[position] is not None:
        return _ints(inputs[position])
    return list(attributes["axes"]) if "axes" in attributes else None


def _of(function: Callable[..., Any]) -> Evaluator:
    """One result, of the type that numpy gives it."""
    return lambda x, a, v: [np.asarray(function(*x))]


def _typed(function: Callable[..., Any]) -> Evaluator:
    """One result of the first operand's type."""
    return lambda x, a, v: [np.asarray(function(*x), dtype=x[0].dtype)]


def _variadic(function: Callable[[Any, Any], Any]) -> Evaluator:
    """Any number of operands, from left to right."""
    return _typed(lambda *x: functools.reduce(function, x))


def _divide(a: Array, b: Array) -> Array:
    if a.dtype.kind in "iu":
        return np.trunc(np.true_divide(a, b)).astype(a.dtype) if np.all(b) else np.zeros_like(a)
    return np.asarray(np.true_divide(a, b))


def _mod(x: Sequence[Any], a: Attributes, v: int) -> list[Array]:
    return [np.asarray(np.fmod(x[0], x[1]) if a.get("fmod") else np.mod(x[0], x[1]))]


def _reduce(function: Callable[..., Any]) -> Evaluator:
    def run(x: Sequence[Any], a: Attributes, v: int) -> list[Array]:
        axes = _axes(x, a)
        if not axes:
            if a.get("noop_with_empty_axes"):
                return [x[0]]
            axes = None
        keep = bool(a.get("keepdims", 1))
        return [np.asarray(function(x[0], axis=tuple(axes) if axes else None, keepdims=keep), dtype=x[0].dtype)]

    return run


def _reshape(x: Sequence[Any], a: Attributes, v: int) -> list[Array]:
    target = [x[0].shape[i] if d == 0 and not a.get("allowzero") else d for i, d in enumerate(_ints(x[1]))]
    return [x[0].reshape(target)]


def _unsqueeze(x: Sequence[Any], a: Attributes, v: int) -> list[Array]:
    axes = _axes(x, a) or []
    rank = x[0].ndim + len(axes)
    value = x[0]
    for axis in sorted(axis % rank for axis in axes):
        value = np.expand_dims(value, axis)
    return [value]


def _squeeze(x: Sequence[Any], a: Attributes, v: int) -> list[Array]:
    axes = _axes(x, a)
    return [np.squeeze(x[0], axis=tuple(axes) if axes else None)]


def _slice(x: Sequence[Any], a: Attributes, v: int) -> list[Array]:
    starts, ends = (_ints(x[1]), _ints(x[2])) if len(x) > 2 else (list(a["starts"]), list(a["ends"]))
    axes = _axes(x, a, 3) or list(range(len(starts)))
    steps = _ints(x[4]) if len(x) > 4 and x[4] is not None else [1] * len(starts)
    index = [slice(None)] * x[0].ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = x[0].shape[axis]
        last = None if step < 0 and end < -size else end
        index[axis] = slice(start, last, step)
    return [x[0][tuple(index)]]


def _split(x: Sequence[Any], a: Attributes, v: int) -> list[Array]:
    axis = int(a.get("axis", 0))
    size = x[0].shape[axis]
    if len(x) > 1 and x[1] is not None:
        parts = _ints(x[1])
    elif "split" in a:
        parts = list(a["split"])
    else:
        count = int(a["num_outputs"])
        parts = [-(-size // count)] * (count - 1)
    return [np.asarray(part) for part in np.split(x[0], np.cumsum(parts)[: len(parts) - (sum(parts) == size)], axis)]


def _gather_elements(x: Sequence[Any], a: Attributes, v: int) -> list[Array]:
    axis = int(a.get("axis", 0))
    others = [n for i, n in enumerate(x[0].shape) if i != axis % x[0].ndim]
    if others != [n for i, n in enumerate(x[1].shape) if i != axis % x[0].ndim]:
        raise ValueError("an index that leaves out rows")
    return [np.take_along_axis(x[0], np.where(x[1] < 0, x[1] + x[0].shape[axis], x[1]), axis)]


def _range(x: Sequence[Any], a: Attributes, v: int) -> list[Array]:
    return [np.arange(x[0].item(), x[1].item(), x[2].item(), dtype=x[0].dtype)]


def _flatten(x: Sequence[Any], a: Attributes, v: int) -> list[Array]:
    axis = int(a.get("axis", 1))
    axis = axis + x[0].ndim if axis < 0 else axis
    return [x[0].reshape(math.prod(x[0].shape[:axis]), -1)]


def _transpose(x: Sequence[Any], a: Attributes, v: int) -> list[Array]:
    return [np.transpose(x[0], a.get("perm"))]


def _scatter_nd(x: Sequence[Any], a: Attributes, v: int) -> list[Array]:
    result = np.array(x[0])
    for index in np.ndindex(x[1].shape[:-1]):
        result[tuple(x[1][index])] = x[2][index]
    return [result]


def _cumsum(x: Sequence[Any], a: Attributes, v: int) -> list[Array]:
    if a.get("exclusive") or a.get("reverse"):
        raise ValueError("a variant that exporters do not write for shapes")
    return [np.cumsum(x[0], axis=int(x[1]), dtype=x[0].dtype)]


def _trilu(x: Sequence[Any], a: Attributes, v: int) -> list[Array]:
    k = int(x[1]) if len(x) > 1 and x[1] is not None else 0
    return [np.triu(x[0], k) if a.get("upper", 1) else np.tril(x[0], k)]


def _non_zero(x: Sequence[Any], a: Attributes, v: int) -> list[Array]:
    found: Any = np.nonzero(x[0])
    return [np.asarray(found, dtype=np.int64)]


_EVALUATORS: dict[str, Evaluator] = {
    "Identity": lambda x, a, v: [x[0]],
    "Cast": lambda x, a, v: [x[0]],
    "CastLike": lambda x, a, v: [x[0]],
    "Gather": lambda x, a, v: [np.asarray(np.take(x[0], x[1], axis=int(a.get("axis", 0))))],
    "GatherElements": _gather_elements,
    "Concat": lambda x, a, v: [np.concatenate(list(x), axis=int(a["axis"]))],
    "Slice": _slice,
    "Split": _split,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Expand": lambda x, a, v: [x[0] * np.ones(_ints(x[1]), dtype=x[0].dtype)],
    "Tile": lambda x, a, v: [np.tile(x[0], _ints(x[1]))],
    "Range": _range,
    "Where": _of(np.where),
    "Add": _typed(np.add),
    "Sub": _typed(np.subtract),
    "Mul": _typed(np.multiply),
    "Div": _typed(_divide),
    "Mod": _mod,
    "Pow": _typed(np.power),
    "Max": _variadic(np.maximum),
    "Min": _variadic(np.minimum),
    "Sum": _variadic(np.add),
    "Neg": _typed(np.negative),
    "Abs": _typed(np.abs),
    "Sign": _typed(np.sign),
    "Floor": _typed(np.floor),
    "Ceil": _typed(np.ceil),
    "Round": _typed(np.round),
    "Sqrt": _typed(np.sqrt),
    "Exp": _typed(np.exp),
    "Log": _typed(np.log),
    "Reciprocal": _typed(lambda x: 1 / x),
    "Not": _of(np.logical_not),
    "IsNaN": _of(np.isnan),
    "Equal": _of(np.equal),
    "Less": _of(np.less),
    "LessOrEqual": _of(np.less_equal),
    "Greater": _of(np.greater),
    "GreaterOrEqual": _of(np.greater_equal),
    "And": _of(np.logical_and),
    "Or": _of(np.logical_or),
    "Xor": _of(np.logical_xor),
    "ReduceProd": _reduce(np.prod),
    "ReduceSum": _reduce(np.sum),
    "ReduceMax": _reduce(np.max),
    "ReduceMin": _reduce(np.min),
    "NonZero": _non_zero,
    "ScatterND": _scatter_nd,
    "CumSum": _cumsum,
    "Trilu": _trilu,
}
