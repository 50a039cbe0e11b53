"""What each operator is: its loop nest, from which work, saved tensors, gradients and legal splits follow."""

from planner.operators.batching import batch_flow, rebatch
from planner.operators.nest import gradient_nest, loop_nest
from planner.operators.site import RULES, JointCut, OutputTypes, Role, Rule, Site, Statistics, like, rule_of
from planner.operators.specs import call_classes, graph_specs, needs_gradient, spec
from planner.operators.splits import Layout, Placement, Split, splits
from planner.operators.types import Access, Dim, DimKind, LoopNest, OpCall, OpSpec, Origin, Saved
from planner.operators.values import evaluate

__all__ = [
    "RULES",
    "Access",
    "Dim",
    "DimKind",
    "JointCut",
    "Layout",
    "LoopNest",
    "OpCall",
    "OpSpec",
    "Origin",
    "OutputTypes",
    "Placement",
    "Role",
    "Rule",
    "Saved",
    "Site",
    "Split",
    "Statistics",
    "batch_flow",
    "call_classes",
    "evaluate",
    "gradient_nest",
    "graph_specs",
    "like",
    "loop_nest",
    "needs_gradient",
    "rebatch",
    "rule_of",
    "spec",
    "splits",
]
