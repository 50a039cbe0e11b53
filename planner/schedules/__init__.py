"""Who runs which micro-batch of which stage in what order, and what that keeps in memory; one file a family.

>>> from planner.schedules import Pipeline, get, names
>>> "1f1b" in names()
True
>>> get("1f1b").in_flight(Pipeline(replicas=(1, 1, 1, 1), micro_batches=8))
(4, 3, 2, 1)
"""

from __future__ import annotations

from planner.registry import Registry
from planner.schedules.compiling import compile_orders
from planner.schedules.custom_orders import custom_schedule
from planner.schedules.orders import with_transfers
from planner.schedules.orders_file import parse_action, read_orders
from planner.schedules.program import peak_versions, staleness, version_use
from planner.schedules.schedule import Schedule
from planner.schedules.types import (
    Action,
    ActionKind,
    ActivationUnit,
    OrderError,
    Pipeline,
    WeightPolicy,
    Work,
    evaluate,
    printed,
)

SCHEDULES: Registry[Schedule] = Registry(__name__, "schedule")
"""All schedules by name; a module of this package registers its own."""


def get(name: str) -> Schedule:
    """The schedule of that name, with options after a colon: `chimera:pairs=2,over=double`.

    Raises:
        UsageError: no schedule has that name, or an option is wrong; the hint names the closest ones.
    """
    return SCHEDULES.configured(name)


def names() -> tuple[str, ...]:
    """Names of all schedules, sorted."""
    return SCHEDULES.names()


__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "ActivationUnit",
    "OrderError",
    "Pipeline",
    "Schedule",
    "WeightPolicy",
    "Work",
    "compile_orders",
    "custom_schedule",
    "evaluate",
    "get",
    "names",
    "parse_action",
    "peak_versions",
    "printed",
    "read_orders",
    "staleness",
    "version_use",
    "with_transfers",
]
