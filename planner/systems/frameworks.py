"""Training frameworks as rows of a comparison: the own search within the limits of each."""

from __future__ import annotations

from planner.space.asked import LIMITS, PRICED
from planner.systems.backends import Backend
from planner.systems.proposals import by_search
from planner.systems.types import System


def system_of(backend: Backend) -> System:
    """A training framework as a system that can be asked what it would do."""
    orders = " or ".join(backend.schedules)
    return System(
        key=backend.key,
        title=backend.title,
        cut=f"stages of whole layers, equally replicated; {orders}" if orders else "none: replicas of the whole model",
        sharding="columns, rows and heads of every layer" if backend.groups else "none: every tensor is whole",
        solver=by_search,
        staleness="none",
        chooses="the fastest plan that it takes as it is",
        source="; ".join(backend.sources.values()),
        limits=None,
        takes=PRICED | {*LIMITS, "overlap"} - {"backends"},
        open=backend.notes,
        framework=backend,
    )
