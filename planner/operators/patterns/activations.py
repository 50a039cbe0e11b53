"""GELU, by the error function or by tanh with the cube as products, and SiLU: one kernel each in eager training.

GELU with `Pow(x, 3)` is left alone: models that have it compute it step by step, and keep every step. So is
`x * sigmoid(1.7 x)`.
"""

from __future__ import annotations

from planner.operators.rewriting import PATTERNS, written_out

_BY_TANH = ("k * x * (1 + Tanh(k * (x + k * x * x * x)))", "k * x * (1 + Tanh(k * x * (1 + k * x * x)))")

PATTERNS.register("gelu", written_out("Gelu", ("k * x * (1 + Erf(k * x))",), ("x",), {"approximate": "none"}))
PATTERNS.register("tanh_gelu", written_out("Gelu", _BY_TANH, ("x",), {"approximate": "tanh"}))
PATTERNS.register("silu", written_out("Swish", ("x * Sigmoid(x)",), ("x",), {}))
