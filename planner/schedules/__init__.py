"""Who runs which micro-batch of which stage in what order, and what that keeps in memory; one file a family.

>>> from planner.schedules import Pipeline, get, names
>>> "1f1b" in names()
True
>>> get("1f1b").in_flight(Pipeline(replicas=(1, 1, 1, 1), micro_batches=8))
(4, 3, 2, 1)
"""

from __future__ import annotations

from planner.registry import Registry
from planner.schedules.compiling import compile_orders as compile_orders
from planner.schedules.custom_orders import custom_schedule as custom_schedule
from planner.schedules.orders_file import parse_action as parse_action
from planner.schedules.orders_file import read_orders as read_orders
from planner.schedules.program import peak_versions as peak_versions
from planner.schedules.program import staleness as staleness
from planner.schedules.program import version_use as version_use
from planner.schedules.schedule import Schedule as Schedule
from planner.schedules.types import Action as Action
from planner.schedules.types import ActionKind as ActionKind
from planner.schedules.types import ActivationUnit as ActivationUnit
from planner.schedules.types import OrderError as OrderError
from planner.schedules.types import Pipeline as Pipeline
from planner.schedules.types import WeightPolicy as WeightPolicy
from planner.schedules.types import Work as Work
from planner.schedules.types import evaluate as evaluate
from planner.schedules.types import printed as printed

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
