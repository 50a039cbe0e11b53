"""Published partition problems and the formulas of published systems: a wing above the planner, which imports nothing
of it.

`readers` read instance files, `problems` state each problem with a judge, `solvers` solve them, `families` join a
reader to its objectives. `run` plans an instance under `options` and checks plans and compares two, `plan_file` is the
plan's file, `report` its view. `formulas` holds what published systems compute with. `planner` exports what users need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.interpreter import exported, exports_of

if TYPE_CHECKING:
    from planner.published import families as families
    from planner.published import formulas as formulas
    from planner.published import problems as problems
    from planner.published import readers as readers
    from planner.published import solvers as solvers
    from planner.published.families import instance_family as instance_family
    from planner.published.families import load_instance as load_instance
    from planner.published.plan_file import dump_partition as dump_partition
    from planner.published.plan_file import is_partition_plan as is_partition_plan
    from planner.published.plan_file import load_partition as load_partition
    from planner.published.plan_file import partition_schema as partition_schema
    from planner.published.plan_file import read_partition as read_partition
    from planner.published.plan_file import write_partition as write_partition
    from planner.published.report import partition_diff_report as partition_diff_report
    from planner.published.report import partition_report as partition_report
    from planner.published.run import check_partition as check_partition
    from planner.published.run import partition as partition
    from planner.published.run import partition_changes as partition_changes
    from planner.published.solvers import solve_partition as solve_partition


def __getattr__(name: str) -> Any:  # noqa: ANN401
    return exported(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *exports_of(__name__)})
