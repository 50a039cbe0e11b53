"""Who runs which micro-batch of which stage in what order, and what that keeps in memory; one file a schedule.

>>> from planner.schedules import Pipeline, get, names
>>> "1f1b" in names()
True
>>> get("1f1b").in_flight(Pipeline(replicas=(1, 1, 1, 1), micro_batches=8))
(4, 3, 2, 1)
"""

from __future__ import annotations

from planner.registry import Registry
from planner.schedules.orders_file import orders_json, read_orders
from planner.schedules.transfers import with_transfers
from planner.schedules.types import (
    Action,
    ActionKind,
    ActivationUnit,
    Pipeline,
    Schedule,
    WeightPolicy,
    Work,
    suffix_replicas,
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
    "Pipeline",
    "Schedule",
    "WeightPolicy",
    "Work",
    "get",
    "names",
    "orders_json",
    "read_orders",
    "suffix_replicas",
    "with_transfers",
]
