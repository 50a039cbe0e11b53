"""The named systems as data, each run by its own rules on one model and one cluster.

>>> from planner.systems import names
>>> "gpipe" in names() and "chimera" in names()
True
"""

from __future__ import annotations

from planner.registry import Registry
from planner.systems.types import Point, Semantics, System, SystemRow

SYSTEMS: Registry[System] = Registry(__name__, "system")
"""All systems by name; a module of this package registers its own."""


def get(name: str) -> System:
    """The system of that name.

    Raises:
        UsageError: no system has that name; the hint names the closest ones.
    """
    return SYSTEMS.get(name)


def names() -> tuple[str, ...]:
    """Names of all systems, sorted."""
    return SYSTEMS.names()


from planner.systems.compare import Comparison, compare_systems, run_system  # noqa: E402
from planner.systems.plot import comparison_svg  # noqa: E402
from planner.systems.report import (  # noqa: E402
    comparison_cells,
    comparison_columns,
    comparison_csv,
    comparison_document,
    comparison_groups,
    comparison_markdown,
)

system_names = names
"""The same under a name that the front door can export."""

__all__ = [
    "SYSTEMS",
    "Comparison",
    "Point",
    "Semantics",
    "System",
    "SystemRow",
    "compare_systems",
    "comparison_cells",
    "comparison_columns",
    "comparison_csv",
    "comparison_document",
    "comparison_groups",
    "comparison_markdown",
    "comparison_svg",
    "get",
    "names",
    "run_system",
    "system_names",
]
