"""What each operator is: its loop nest, from which work, saved tensors, gradients and legal splits follow."""

from planner.operators.batching import BatchConstants, batch_constants, batch_flow, rebatch
from planner.operators.kept import keeping_nothing, kept_pairs
from planner.operators.modules import find_expert_products
from planner.operators.nest import gradient_nest, loop_nest
from planner.operators.rewriting import rewritten
from planner.operators.saved import (
    SavedOptions,
    element_bytes,
    logits_of,
    require_trained,
    saved_for_backward,
    saved_notes,
    unique_bytes,
)
from planner.operators.site import RULES, JointCut, OutputTypes, Role, Rule, Site, Statistics, evaluate, like, rule_of
from planner.operators.specs import call_classes, graph_specs, needs_gradient, spec
from planner.operators.storage import Storages, dense_strides, reshaped_strides
from planner.operators.types import Access, Dim, DimKind, LoopNest, OpCall, OpSpec, Origin, Saved, SavedBytes

__all__ = [
    "RULES",
    "Access",
    "BatchConstants",
    "Dim",
    "DimKind",
    "JointCut",
    "LoopNest",
    "OpCall",
    "OpSpec",
    "Origin",
    "OutputTypes",
    "Role",
    "Rule",
    "Saved",
    "SavedBytes",
    "SavedOptions",
    "Site",
    "Statistics",
    "Storages",
    "batch_constants",
    "batch_flow",
    "call_classes",
    "dense_strides",
    "element_bytes",
    "evaluate",
    "find_expert_products",
    "gradient_nest",
    "graph_specs",
    "keeping_nothing",
    "kept_pairs",
    "like",
    "logits_of",
    "loop_nest",
    "needs_gradient",
    "rebatch",
    "require_trained",
    "reshaped_strides",
    "rewritten",
    "rule_of",
    "saved_for_backward",
    "saved_notes",
    "spec",
    "unique_bytes",
]
