"""What each operator is: its loop nest, from which work, saved tensors, gradients and legal splits follow."""

from planner.operators.batching import BatchConstants, batch_constants, rebatch
from planner.operators.kept import keeping_nothing, kept_pairs
from planner.operators.nest import gradient_nest, loop_nest
from planner.operators.rewriting import rewritten
from planner.operators.saved import (
    SavedOptions,
    element_bytes,
    require_trained,
    saved_for_backward,
    saved_notes,
    unique_bytes,
)
from planner.operators.site import RULES, JointCut, OutputTypes, Role, Site, Statistics, evaluate, rule_of
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
    "Saved",
    "SavedBytes",
    "SavedOptions",
    "Site",
    "Statistics",
    "Storages",
    "batch_constants",
    "call_classes",
    "dense_strides",
    "element_bytes",
    "evaluate",
    "gradient_nest",
    "graph_specs",
    "keeping_nothing",
    "kept_pairs",
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
