"""Instances of published partition problems: read, solve, write, check.

`families` holds the kinds of instance files, `options` the options of a problem; `run` plans an instance, `plan_file`
is the plan's file, `check` judges a plan and compares two. `planner` exports what users need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.interpreter import exported, exports_of

if TYPE_CHECKING:
    from planner.partitions.families import instance_family as instance_family
    from planner.partitions.plan_file import dump_partition as dump_partition
    from planner.partitions.plan_file import is_partition_plan as is_partition_plan
    from planner.partitions.plan_file import load_partition as load_partition
    from planner.partitions.plan_file import partition_schema as partition_schema
    from planner.partitions.run import partition_changes as partition_changes


def __getattr__(name: str) -> Any:  # noqa: ANN401
    return exported(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *exports_of(__name__)})
