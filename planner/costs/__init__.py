"""Work to seconds: roofline, measured and imported profiles."""

from planner.costs.precision import (
    OPTIMIZER_STATE_BYTES,
    PRECISIONS,
    Precision,
    optimizer_state_bytes,
    precision,
)
from planner.costs.pricing import profile
from planner.costs.types import Profile

__all__ = [
    "OPTIMIZER_STATE_BYTES",
    "PRECISIONS",
    "Precision",
    "Profile",
    "optimizer_state_bytes",
    "precision",
    "profile",
]
