"""Work to seconds: roofline, measured and imported profiles."""

from planner.costs.errors import JobClass, MeasuredError, error_of, measured_error, read_errors
from planner.costs.imported import costs_document, imported_profile, is_priced, with_costs
from planner.costs.measured import measure, passes_profile
from planner.costs.precision import (
    OPTIMIZER_MOMENTS,
    PRECISIONS,
    Precision,
    optimizer_state_bytes,
    precision,
    precision_remark,
)
from planner.costs.pricing import alignment_advice, profile
from planner.costs.report import CostReport, cost_report
from planner.costs.types import Profile

__all__ = [
    "OPTIMIZER_MOMENTS",
    "PRECISIONS",
    "CostReport",
    "JobClass",
    "MeasuredError",
    "Precision",
    "Profile",
    "alignment_advice",
    "cost_report",
    "costs_document",
    "error_of",
    "imported_profile",
    "is_priced",
    "machine_name",
    "measure",
    "measured_error",
    "optimizer_state_bytes",
    "passes_profile",
    "precision",
    "precision_remark",
    "profile",
    "read_errors",
    "with_costs",
]
