"""Plan how to split the training of a neural network over devices, with a bound that proves the plan.

This package exports the common names and the packages behind them; each is imported when first used, so that `import
planner` is cheap. Further names are in the packages (`planner.report`, `planner.plans`, `planner.units`, ..).
Where to begin:

- `planner.plan`: a model on a cluster; `planner.compare_systems`: what each published system would do with it;
- `planner.measure_schedule`: any pipeline schedule played with times by stage (`planner.schedules.names()`);
- `planner.formulas`: the closed forms of the published systems by name (`planner.formulas.names("chimera")`);
- `planner.partition`: published partition problems from their files; `planner.exchange`: exchange of gradients.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from planner.interpreter import MovedNames, exported, exports_of

if TYPE_CHECKING:
    # text of others in what is written
    from planner import escaping as escaping

    # models and graphs
    from planner import bundled as bundled
    from planner import graph as graph
    from planner import importers as importers
    from planner import operators as operators
    from planner.api import load_graph as load_graph
    from planner.bundled import build_bundled as build_bundled
    from planner.bundled import build_configured as build_configured
    from planner.bundled import bundled_info as bundled_info
    from planner.bundled import bundled_names as bundled_names
    from planner.graph import Graph as Graph
    from planner.importers import from_torch as from_torch
    from planner.importers import graph_from_proto as graph_from_proto
    from planner.operators import rebatch as rebatch

    # hardware, and what operators cost on it
    from planner import costs as costs
    from planner import hardware as hardware
    from planner.costs import cost_report as cost_report
    from planner.costs import profile as profile
    from planner.hardware import Cluster as Cluster
    from planner.hardware import Device as Device
    from planner.hardware import cluster_names as cluster_names
    from planner.hardware import device_names as device_names
    from planner.hardware import load_cluster as load_cluster
    from planner.hardware import load_device as load_device
    from planner.hardware import load_stack as load_stack

    # the job and planning
    from planner import sharding as sharding
    from planner import solvers as solvers
    from planner import space as space
    from planner.api import plan as plan
    from planner.space.pricer import Pricer as Pricer
    from planner.space.types import Job as Job

    # configurations of one's own and what they would take
    from planner.plans import load_configuration as load_configuration
    from planner.prediction import compare_to_best as compare_to_best
    from planner.prediction import predict as predict
    from planner.prediction import predict_many as predict_many
    from planner.space import Configuration as Configuration
    from planner.space.named import Degrees as Degrees
    from planner.space.recompute_choices import recomputed_modules as recomputed_modules

    # questions about plans
    from planner import ask as ask
    from planner.ask import explain_why_not as explain_why_not
    from planner.ask import find_fixes as find_fixes
    from planner.ask import find_worth as find_worth
    from planner.ask import least_devices as least_devices
    from planner.ask import sweep as sweep

    # measured runs to figures of one's own
    from planner import calibration as calibration
    from planner.calibration import calibrate as calibrate

    # running plans (needs torch)
    from planner import runtime as runtime

    # plans in the files of training frameworks
    from planner import export as export

    # plan files: read, write, check, explain, compare
    from planner import plans as plans
    from planner import check as check
    from planner.check import check_plan as check_plan
    from planner.check import replan as replan
    from planner.plans import Plan as Plan
    from planner.plans import default_provenance as default_provenance
    from planner.plans import diff_plans as diff_plans
    from planner.plans import dump_plan as dump_plan
    from planner.plans import load_plan as load_plan
    from planner.plans import read_plan as read_plan
    from planner.plans import with_price as with_price
    from planner.plans import write_plan as write_plan

    # comparison with published systems
    from planner import systems as systems
    from planner.systems import compare_systems as compare_systems
    from planner.systems import plan_system as plan_system

    # schedules, exchange of gradients, simulation
    from planner import exchange as exchange
    from planner import play as play
    from planner import schedules as schedules
    from planner import simulate as simulate
    from planner.play import StageTimes as StageTimes
    from planner.play import Transfers as Transfers
    from planner.play import measure_schedule as measure_schedule
    from planner.schedules import read_orders as read_orders
    from planner.simulate import simulate_plan as simulate_plan
    from planner.simulate import trace_json as trace_json

    # published partition problems, and the formulas of published systems
    from planner import published as published
    from planner import published as partitions  # noqa: F401 - its earlier name
    from planner.published import check_partition as check_partition
    from planner.published import formulas as formulas
    from planner.published import load_instance as load_instance
    from planner.published import partition as partition
    from planner.published import read_partition as read_partition
    from planner.published import solve_partition as solve_partition
    from planner.published import write_partition as write_partition

    # answers as reports: tables, and pictures
    from planner import report as report
    from planner.report import report_to_csv as report_to_csv
    from planner.report import report_to_markdown as report_to_markdown
    from planner.report import report_to_rows as report_to_rows
    from planner.report import report_to_text as report_to_text
    from planner.report.comparison import comparison_report as comparison_report
    from planner.report.plans import plan_report as plan_report
    from planner.report.timeline import draw_svg as draw_svg

    # errors, registered names, quantities for people, files
    from planner import files as files
    from planner import foreign_files as foreign_files
    from planner import processes as processes
    from planner import registry as registry
    from planner import units as units
    from planner.errors import HardwareError as HardwareError
    from planner.errors import InfeasibleError as InfeasibleError
    from planner.errors import JobError as JobError
    from planner.errors import ModelError as ModelError
    from planner.errors import OutputError as OutputError
    from planner.errors import PlanError as PlanError
    from planner.errors import RunError as RunError
    from planner.errors import ShardplanError as ShardplanError
    from planner.errors import UsageError as UsageError

_RENAMED = {
    "Evaluations": "space.evaluate_many.Evaluations",
    "PartitionChange": "plans.Change",
    "PartitionFinding": "published.run.PartitionFinding",
    "PartitionPlan": "published.plan_file.PartitionPlan",
    "Prediction": "prediction.Prediction",
    "comparison_cells": "comparison_report",
    "comparison_columns": "comparison_report",
    "comparison_csv": "report_to_csv(comparison_report(...))",
    "comparison_groups": "comparison_report",
    "comparison_links": "comparison_report",
    "comparison_markdown": "report_to_markdown(comparison_report(...))",
    "comparison_marks": "comparison_report",
    "plan_keeper": "systems.plans_of",
    "plan_schedule": "plan(..., orders=...)",
    "simulate_decision": "space.played_s",
    "sync": "exchange",
    "validate_plan": "check_plan",
}
"""By removed name of an earlier version: its replacement. A name that moved to an exported package without a rename is
found there and not listed."""

_MOVED = {
    "planner.formulas": "planner.published.formulas",
    "planner.partitions": "planner.published",
    "planner.solvers.partition": "planner.published.solvers (planner.solvers.cluster_chains what systems share)",
    "planner.space.partition": "planner.published.problems",
    **{f"planner.importers.{name}": "planner.published.readers" for name in ("operator_graph", "piper")},
    **{
        f"planner.importers.{name}": f"planner.published.readers.{name}"
        for name in (
            "OperatorGraph", "OperatorNode", "is_operator_graph", "load_operator_graph", "operator_graph_from",
            "piper_from_document", "read_piper", "sniff_piper",
        )
    },
    **{
        f"planner.report.{name}": f"planner.published.{name}" for name in ("partition_report", "partition_diff_report")
    },
}  # fmt: skip
"""By dotted name of a module of an earlier version, or of a name in a package of one: where it is now."""

if not any(isinstance(finder, MovedNames) for finder in sys.meta_path):
    sys.meta_path.insert(0, MovedNames(_MOVED))


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name == "__all__":
        return __dir__()
    if name in exports_of(__name__):
        return exported(__name__, name)
    raise AttributeError(f"module 'planner' has no attribute {name!r}{_instead(name)}")


def __dir__() -> list[str]:
    return sorted(exports_of(__name__))


def _instead(name: str) -> str:
    """The replacement that an error suggests for a name that is not exported."""
    if name.startswith("_"):
        return ""
    if name in _RENAMED:
        return f"; it is planner.{_RENAMED[name]} now"
    for package, target in exports_of(__name__).items():
        exported_package = importlib.import_module(target) if target == f"{__name__}.{package}" else None
        if exported_package is not None and name in (
            getattr(exported_package, "__all__", None) or dir(exported_package)
        ):
            return f"; it is planner.{package}.{name}"
    from planner.published.formulas import names
    from planner.registry import did_you_mean

    if name in names():
        return f"; it is planner.formulas.{name}"
    return f"; {did_you_mean(name, (*__dir__(), *(f'formulas.{formula}' for formula in names())))}"
