"""GELU, by the error function or by tanh with the cube as products, SiLU and Mish: one kernel each in eager training.

GELU with `Pow(x, 3)` is left alone: models that have it compute it step by step, and keep every step. So is
`x * sigmoid(1.7 x)`.
"""

from __future__ import annotations

from planner.operators.rewriting import PATTERNS, written_out

_TANH = ("Tanh(k * (x + k * x * x * x))", "Tanh(k * x * (1 + k * x * x))")
_BY_TANH = tuple(gelu.format(tanh) for tanh in _TANH for gelu in ("k * x * (1 + {})", "x * (k + k * {})"))
_BY_ERF = ("k * x * (1 + Erf(k * x))", "x * (k + k * Erf(k * x))")

PATTERNS.register("gelu", written_out("Gelu", _BY_ERF, ("x",), {"approximate": "none"}))
PATTERNS.register("tanh_gelu", written_out("Gelu", _BY_TANH, ("x",), {"approximate": "tanh"}))
PATTERNS.register("silu", written_out("Swish", ("x * Sigmoid(x)", "x / (1 + Exp(Neg(x)))"), ("x",), {}))
PATTERNS.register("mish", written_out("Mish", ("x * Tanh(Softplus(x))",), ("x",), {}))
