"""GELU, by the error function or by tanh with the cube as products, and SiLU: one kernel each in eager training.

GELU with `Pow(x, 3)` is left alone: models that have it compute it step by step, and keep every step. So is
`x * sigmoid(1.7 x)`.
"""

from __future__ import annotations

from planner.graph import Graph
from planner.operators.formulas import Match
from planner.operators.rewriting import PATTERNS, Attributes, written_out


def _by_error_function(graph: Graph, match: Match) -> Attributes:
    return {"approximate": "none"}


def _by_tanh(graph: Graph, match: Match) -> Attributes:
    return {"approximate": "tanh"}


def _alone(graph: Graph, match: Match) -> Attributes:
    return {}


PATTERNS.register("gelu", written_out("Gelu", ("k * x * (1 + Erf(k * x))",), ("x",), _by_error_function))
PATTERNS.register(
    "tanh_gelu",
    written_out(
        "Gelu",
        ("k * x * (1 + Tanh(k * (x + k * x * x * x)))", "k * x * (1 + Tanh(k * x * (1 + k * x * x)))"),
        ("x",),
        _by_tanh,
    ),
)
PATTERNS.register("silu", written_out("Swish", ("x * Sigmoid(x)",), ("x",), _alone))
