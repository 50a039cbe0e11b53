"""Element by element: arithmetic, comparisons, activations, casts."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812

from planner.errors import ModelError
from planner.runtime.operators.call import RULES, OperatorCall, rule
from planner.runtime.operators.kernels import Gated, repeated

_TORCH_TYPES = {
    2: torch.uint8, 3: torch.int8, 4: torch.int16, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool,
    12: torch.int32, 13: torch.int64,
}  # fmt: skip
"""Torch types of the non-float element types of ONNX; unsigned types become the next larger signed type."""

_FLOATS = {1, 10, 11, 16, 17, 18, 19, 20, 23}


def torch_type(number: int, float_dtype: torch.dtype) -> torch.dtype:
    """Torch type in which an ONNX element type is computed; all float types become the type of the pass.

    Raises:
        ModelError: strings, complex numbers and packed types.
    """
    if number in _FLOATS:
        return float_dtype
    if number not in _TORCH_TYPES:
        raise ModelError(f"element type {number} has no torch type", hint="export the model in floats and integers")
    return _TORCH_TYPES[number]


_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh,
    "Atan": torch.atan, "Atanh": torch.atanh, "Ceil": torch.ceil, "Cos": torch.cos, "Cosh": torch.cosh,
    "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor, "Identity": lambda x: x, "IsNaN": torch.isnan,
    "Log": torch.log, "Mish": F.mish, "Neg": torch.neg, "Not": torch.logical_not, "Reciprocal": torch.reciprocal,
    "Relu": torch.relu, "Round": torch.round, "Sigmoid": torch.sigmoid, "Sign": torch.sign, "Sin": torch.sin,
    "Sinh": torch.sinh, "Softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)), "Softsign": F.softsign,
    "Sqrt": torch.sqrt, "Tan": torch.tan, "Tanh": torch.tanh, "HardSwish": lambda x: x * torch.clamp(x / 6 + 0.5, 0, 1),
    "BitwiseNot": torch.bitwise_not,
}  # fmt: skip

_BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "Add": torch.add, "And": torch.logical_and, "BitwiseAnd": torch.bitwise_and, "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor, "Equal": torch.eq, "Greater": torch.gt, "GreaterOrEqual": torch.ge,
    "Less": torch.lt, "LessOrEqual": torch.le, "Mul": torch.mul, "Or": torch.logical_or, "Pow": torch.pow,
    "Sub": torch.sub, "Xor": torch.logical_xor, "PRelu": lambda x, slope: torch.where(x >= 0, x, slope * x),
}  # fmt: skip

_MANY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "Max": torch.maximum, "Min": torch.minimum, "Sum": torch.add,
}  # fmt: skip

RULES.update({name: lambda c, f=f: f(c[0]) for name, f in _UNARY.items()})  # type: ignore[misc]
RULES.update({name: lambda c, f=f: f(c[0], c[1]) for name, f in _BINARY.items()})  # type: ignore[misc]
RULES.update({name: lambda c, f=f: reduce(f, [x for x in c.inputs if x is not None]) for name, f in _MANY.items()})  # type: ignore[misc]


RULES.update(
    {
        "Mod": lambda c: torch.fmod(c[0], c[1]) if c.attr("fmod", 0) else torch.remainder(c[0], c[1]),
        "Where": lambda c: torch.where(c[0], c[1], c[2]),
        "Cast": lambda c: _to(c[0], torch_type(int(c.attr("to")), c.context.float_dtype)),
        "CastLike": lambda c: _to(c[0], c[1].dtype),
        "Gelu": lambda c: F.gelu(c[0], approximate=c.attr("approximate", "none")),
        "com.microsoft.Gelu": lambda c: F.gelu(c[0], approximate=c.attr("approximate", "none")),
        "com.microsoft.QuickGelu": lambda c: c[0] * torch.sigmoid(c.attr("alpha", 1.702) * c[0]),
        "Swish": lambda c: _swish_of(c[0], c.attr("alpha", 1.0)),
        "LeakyRelu": lambda c: torch.where(c[0] >= 0, c[0], c.attr("alpha", 0.01) * c[0]),
        "ThresholdedRelu": lambda c: torch.where(c[0] > c.attr("alpha", 1.0), c[0], torch.zeros_like(c[0])),
        "Elu": lambda c: F.elu(c[0], c.attr("alpha", 1.0)),
        "Celu": lambda c: F.celu(c[0], c.attr("alpha", 1.0)),
        "HardSigmoid": lambda c: torch.clamp(c.attr("alpha", 0.2) * c[0] + c.attr("beta", 0.5), 0, 1),
    }
)


@rule("Mean")
def _mean(c: OperatorCall) -> torch.Tensor:
    present = [x for x in c.inputs if x is not None]
    return reduce(torch.add, present) / len(present)


@rule("Div")
def _divide(c: OperatorCall) -> torch.Tensor:
    if c[0].is_floating_point() or c[1].is_floating_point():
        return c[0] / c[1]
    return torch.div(c[0], c[1], rounding_mode="trunc")


@rule("IsInf")
def _is_infinite(c: OperatorCall) -> torch.Tensor:
    positive, negative = c.attr("detect_positive", 1), c.attr("detect_negative", 1)
    return (torch.isposinf(c[0]) & bool(positive)) | (torch.isneginf(c[0]) & bool(negative))


@rule("Clip")
def _clip(c: OperatorCall) -> torch.Tensor:
    low, high = c.get(1), c.get(2)
    x = c[0]
    if low is None and "min" in c.attributes:
        low = torch.as_tensor(c.attr("min"), dtype=x.dtype)
    if high is None and "max" in c.attributes:
        high = torch.as_tensor(c.attr("max"), dtype=x.dtype)
    x = x if low is None else torch.maximum(x, low)
    return x if high is None else torch.minimum(x, high)


def _to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype == dtype else x.to(dtype)


@rule("com.microsoft.FastGelu", "com.microsoft.BiasGelu")
def _gelu_with_bias(c: OperatorCall) -> torch.Tensor:
    x = c[0] + c[1] if c.has(1) else c[0]
    return F.gelu(x, approximate="tanh" if c.op.endswith("FastGelu") else "none")


def _swish_of(x: torch.Tensor, alpha: float) -> torch.Tensor:
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


@rule("SwiGLU")
def _swiglu(c: OperatorCall) -> torch.Tensor:
    alpha = c.attr("alpha", 1.0)
    if alpha == 1.0 and c[0].shape == c[1].shape:
        return cast(torch.Tensor, Gated.apply(c[0], c[1]))
    return repeated(lambda gate, x: (_swish_of(gate, alpha) * x,), (c[0], c[1]))[0]


@rule("Selu")
def _selu(c: OperatorCall) -> torch.Tensor:
    alpha, gamma = c.attr("alpha", 1.6732632), c.attr("gamma", 1.0507010)
    return gamma * torch.where(c[0] > 0, c[0], alpha * torch.expm1(torch.clamp(c[0], max=0)))


@rule("Shrink")
def _shrink(c: OperatorCall) -> torch.Tensor:
    bound, bias, x = c.attr("lambd", 0.5), c.attr("bias", 0.0), c[0]
    return torch.where(x < -bound, x + bias, torch.where(x > bound, x - bias, torch.zeros_like(x)))


@rule("Dropout", "com.microsoft.BitmaskDropout")
def _dropout(c: OperatorCall) -> list[torch.Tensor]:
    x = c[0]
    share = c.scalar(1, float(c.attr("ratio", 0.5)))
    if share == 0 or c.scalar(2, 0.0) == 0:
        return [x, torch.ones_like(x, dtype=torch.bool)]
    if x.is_meta:
        return [x.clone(), torch.ones_like(x, dtype=torch.bool)]
    kept = c.drawn(torch.rand, x.shape).to(x.device) >= share
    return [torch.where(kept, x / (1 - share), torch.zeros_like(x)), kept]
