"""What each operator is: its loop nest, from which work, saved tensors, gradients and legal splits follow."""

from planner.operators.classes import needs_gradient
from planner.operators.nest import gradient_nest, loop_nest
from planner.operators.site import RULES, Rule, Site, rule
from planner.operators.specs import graph_specs, spec
from planner.operators.splits import Layout, Placement, Split, splits
from planner.operators.types import Access, Dim, DimKind, LoopNest, OpCall, OpSpec, Origin, Saved

__all__ = [
    "RULES",
    "Access",
    "Dim",
    "DimKind",
    "Layout",
    "LoopNest",
    "OpCall",
    "OpSpec",
    "Origin",
    "Placement",
    "Rule",
    "Saved",
    "Site",
    "Split",
    "gradient_nest",
    "graph_specs",
    "loop_nest",
    "needs_gradient",
    "rule",
    "spec",
    "splits",
]
