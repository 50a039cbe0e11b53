"""Operators in torch, by rule: one entry an operator, its name that of `planner.operators`."""

from planner.runtime.operators import (
    attention,
    elementwise,
    indexing,
    norms,
    products,
    recurrent,
    reductions,
    sampling,
    scans,
    shapes,
)
from planner.runtime.operators.call import RULES, Context, OperatorCall
from planner.runtime.operators.elementwise import torch_type

__all__ = [
    "RULES",
    "Context",
    "OperatorCall",
    "attention",
    "elementwise",
    "indexing",
    "norms",
    "products",
    "recurrent",
    "reductions",
    "sampling",
    "scans",
    "shapes",
    "torch_type",
]
