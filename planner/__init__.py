"""Plans how to split a DNN training job over devices, and proves it.

The front door re-exports the names that users and the command line need; each is imported when first used, so that
`import planner` is cheap. Where to begin:

- `planner.plan`: a model on a cluster; `planner.compare_systems`: what each published system would do with it;
- `planner.measure_schedule`: any pipeline schedule played with times by stage (`planner.schedules.names()`);
- `planner.formulas`: the closed forms of the published systems by name (`planner.formulas.names("chimera")`);
- `planner.partition`: published partition problems from their files; `planner.exchange`: exchange of gradients.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.api import default_provenance as default_provenance
    from planner.api import load_graph as load_graph
    from planner.api import plan as plan
    from planner.bundled import build_bundled as build_bundled
    from planner.bundled import bundled_families as bundled_families
    from planner.bundled import bundled_info as bundled_info
    from planner.bundled import bundled_names as bundled_names
    from planner.check import CheckReport as CheckReport
    from planner.check import check_plan as check_plan
    from planner.check import has_closed_form as has_closed_form
    from planner.costs import Profile as Profile
    from planner.costs import cost_report as cost_report
    from planner.costs import imported_profile as imported_profile
    from planner.costs import is_priced as is_priced
    from planner.costs import measure as measure
    from planner.costs import precision_remark as precision_remark
    from planner.costs import profile as profile
    from planner.errors import HardwareError as HardwareError
    from planner.errors import InfeasibleError as InfeasibleError
    from planner.errors import JobError as JobError
    from planner.errors import ModelError as ModelError
    from planner.errors import OutputError as OutputError
    from planner.errors import PlanError as PlanError
    from planner.errors import ShardplanError as ShardplanError
    from planner.errors import UsageError as UsageError
    from planner.files import write_whole as write_whole
    from planner.graph import DType as DType
    from planner.graph import Graph as Graph
    from planner.graph import Node as Node
    from planner.graph import Parameter as Parameter
    from planner.graph import Tensor as Tensor
    from planner.hardware import Cluster as Cluster
    from planner.hardware import Collective as Collective
    from planner.hardware import Device as Device
    from planner.hardware import Level as Level
    from planner.hardware import cluster_names as cluster_names
    from planner.hardware import device_names as device_names
    from planner.hardware import lint as lint
    from planner.hardware import load_cluster as load_cluster
    from planner.hardware import load_device as load_device
    from planner.hardware import profile_json_schema as profile_json_schema
    from planner.hardware import profile_template as profile_template
    from planner.hardware import profile_text as profile_text
    from planner.hardware import profile_yaml as profile_yaml
    from planner.hardware import resolved_profile as resolved_profile
    from planner.importers import ImportOptions as ImportOptions
    from planner.importers import graph_from_proto as graph_from_proto
    from planner.operators.batching import rebatch as rebatch
    from planner.partitions.changes import PartitionChange as PartitionChange
    from planner.partitions.changes import partition_changes as partition_changes
    from planner.partitions.check import PartitionFinding as PartitionFinding
    from planner.partitions.check import check_partition as check_partition
    from planner.partitions.families import instance_family as instance_family
    from planner.partitions.families import load_instance as load_instance
    from planner.partitions.files import dump_partition as dump_partition
    from planner.partitions.files import is_partition_plan as is_partition_plan
    from planner.partitions.files import load_partition as load_partition
    from planner.partitions.files import partition_schema as partition_schema
    from planner.partitions.files import read_partition as read_partition
    from planner.partitions.files import write_partition as write_partition
    from planner.partitions.run import partition as partition
    from planner.partitions.types import PartitionPlan as PartitionPlan
    from planner.plans import Area as Area
    from planner.plans import Plan as Plan
    from planner.plans import Provenance as Provenance
    from planner.plans import diff_plans as diff_plans
    from planner.plans import dump_plan as dump_plan
    from planner.plans import explain_plan as explain_plan
    from planner.plans import load_plan as load_plan
    from planner.plans import plan_schema as plan_schema
    from planner.plans import read_plan as read_plan
    from planner.plans import validate_plan as validate_plan
    from planner.plans import write_plan as write_plan
    from planner.plans.assemble import assemble as assemble
    from planner.plans.configuration_file import configuration_document as configuration_document
    from planner.plans.configuration_file import configuration_schema as configuration_schema
    from planner.plans.configuration_file import dump_configuration as dump_configuration
    from planner.plans.configuration_file import load_configuration as load_configuration
    from planner.plans.configuration_file import parse_configuration as parse_configuration
    from planner.play import Conditions as Conditions
    from planner.play import Cost as Cost
    from planner.play import Measurement as Measurement
    from planner.play import StageBytes as StageBytes
    from planner.play import StageTimes as StageTimes
    from planner.play import Transfers as Transfers
    from planner.play import measure_orders as measure_orders
    from planner.play import measure_schedule as measure_schedule
    from planner.prediction import Prediction as Prediction
    from planner.prediction import compare_to_best as compare_to_best
    from planner.prediction import predict as predict
    from planner.prediction import predict_many as predict_many
    from planner.registry import did_you_mean as did_you_mean
    from planner.report import report_to_csv as report_to_csv
    from planner.report import report_to_lines as report_to_lines
    from planner.report import report_to_markdown as report_to_markdown
    from planner.report import report_to_rows as report_to_rows
    from planner.report import report_to_text as report_to_text
    from planner.report.catalogue import clusters_report as clusters_report
    from planner.report.catalogue import devices_report as devices_report
    from planner.report.catalogue import models_report as models_report
    from planner.report.comparison import comparison_document as comparison_document
    from planner.report.comparison import comparison_report as comparison_report
    from planner.report.difference import diff_report as diff_report
    from planner.report.explanation import explanation_report as explanation_report
    from planner.report.gantt import draw_gantt as draw_gantt
    from planner.report.hardware import cluster_report as cluster_report
    from planner.report.partitions import partition_diff_report as partition_diff_report
    from planner.report.partitions import partition_report as partition_report
    from planner.report.plans import plan_report as plan_report
    from planner.report.plot import comparison_svg as comparison_svg
    from planner.report.profile import profile_report as profile_report
    from planner.report.timeline import timeline_report as timeline_report
    from planner.report.timeline_svg import draw_svg as draw_svg
    from planner.schedules import orders_json as orders_json
    from planner.schedules import read_orders as read_orders
    from planner.simulate import Activity as Activity
    from planner.simulate import Timeline as Timeline
    from planner.simulate import simulate_plan as simulate_plan
    from planner.simulate import timeline_document as timeline_document
    from planner.simulate import trace_json as trace_json
    from planner.solvers.partition.auto import solve_partition as solve_partition
    from planner.space import Configuration as Configuration
    from planner.space import StageChoice as StageChoice
    from planner.space import simulate_decision as simulate_decision
    from planner.space.evaluate_many import Evaluations as Evaluations
    from planner.space.named import Degrees as Degrees
    from planner.space.pricer import Pricer as Pricer
    from planner.space.types import Job as Job
    from planner.systems import compare_systems as compare_systems
    from planner.systems import plan_system as plan_system
    from planner.systems import plans_of as plans_of
    from planner.systems import system_names as system_names
    from planner.units import format_bytes as format_bytes
    from planner.units import format_flop_rate as format_flop_rate
    from planner.units import format_flops as format_flops
    from planner.units import format_fraction as format_fraction
    from planner.units import format_rate as format_rate
    from planner.units import format_seconds as format_seconds
    from planner.units import plural as plural

_EXPORTS = {
    # errors
    "ShardplanError": "planner.errors",
    "UsageError": "planner.errors",
    "ModelError": "planner.errors",
    "HardwareError": "planner.errors",
    "JobError": "planner.errors",
    "InfeasibleError": "planner.errors",
    "PlanError": "planner.errors",
    "OutputError": "planner.errors",
    "did_you_mean": "planner.registry",
    "write_whole": "planner.files",
    # bundled models
    "build_bundled": "planner.bundled",
    "bundled_families": "planner.bundled",
    "bundled_info": "planner.bundled",
    "bundled_names": "planner.bundled",
    # the job
    "Degrees": "planner.space.named",
    "Evaluations": "planner.space.evaluate_many",
    "Job": "planner.space.types",
    "Pricer": "planner.space.pricer",
    "ImportOptions": "planner.importers",
    "load_graph": "planner.api",
    "compare_to_best": "planner.prediction",
    "predict": "planner.prediction",
    "predict_many": "planner.prediction",
    "Prediction": "planner.prediction",
    "Configuration": "planner.space",
    "StageChoice": "planner.space",
    "configuration_document": "planner.plans.configuration_file",
    "configuration_schema": "planner.plans.configuration_file",
    "dump_configuration": "planner.plans.configuration_file",
    "load_configuration": "planner.plans.configuration_file",
    "parse_configuration": "planner.plans.configuration_file",
    "plan": "planner.api",
    "default_provenance": "planner.api",
    # graph
    "Graph": "planner.graph",
    "Node": "planner.graph",
    "Tensor": "planner.graph",
    "Parameter": "planner.graph",
    "DType": "planner.graph",
    "rebatch": "planner.operators.batching",
    # costs
    "Profile": "planner.costs",
    "cost_report": "planner.costs",
    "imported_profile": "planner.costs",
    "is_priced": "planner.costs",
    "measure": "planner.costs",
    "precision_remark": "planner.costs",
    "profile": "planner.costs",
    # hardware
    "Cluster": "planner.hardware",
    "Collective": "planner.hardware",
    "Device": "planner.hardware",
    "Level": "planner.hardware",
    "load_cluster": "planner.hardware",
    "load_device": "planner.hardware",
    "cluster_names": "planner.hardware",
    "device_names": "planner.hardware",
    "lint": "planner.hardware",
    "profile_json_schema": "planner.hardware",
    "profile_template": "planner.hardware",
    "profile_text": "planner.hardware",
    "profile_yaml": "planner.hardware",
    "resolved_profile": "planner.hardware",
    # systems
    "compare_systems": "planner.systems",
    "plan_system": "planner.systems",
    "plans_of": "planner.systems",
    "comparison_document": "planner.report.comparison",
    "comparison_svg": "planner.report.plot",
    "models_report": "planner.report.catalogue",
    "report_to_rows": "planner.report",
    "report_to_lines": "planner.report",
    "report_to_csv": "planner.report",
    "timeline_report": "planner.report.timeline",
    "profile_report": "planner.report.profile",
    "plan_report": "planner.report.plans",
    "devices_report": "planner.report.catalogue",
    "clusters_report": "planner.report.catalogue",
    "cluster_report": "planner.report.hardware",
    "comparison_report": "planner.report.comparison",
    "system_names": "planner.systems",
    # units
    "format_bytes": "planner.units",
    "format_rate": "planner.units",
    "format_flops": "planner.units",
    "format_flop_rate": "planner.units",
    "format_seconds": "planner.units",
    "format_fraction": "planner.units",
    "plural": "planner.units",
    # schedules
    "orders_json": "planner.schedules",
    "read_orders": "planner.schedules",
    # simulate
    "Conditions": "planner.play",
    "Cost": "planner.play",
    "Measurement": "planner.play",
    "StageBytes": "planner.play",
    "StageTimes": "planner.play",
    "measure_orders": "planner.play",
    "measure_schedule": "planner.play",
    "simulate_plan": "planner.simulate",
    "simulate_decision": "planner.space",
    "Timeline": "planner.simulate",
    "Transfers": "planner.play",
    "Activity": "planner.simulate",
    "draw_gantt": "planner.report.gantt",
    "draw_svg": "planner.report.timeline_svg",
    "trace_json": "planner.simulate",
    "timeline_document": "planner.simulate",
    # plan
    "Plan": "planner.plans",
    "Provenance": "planner.plans",
    "assemble": "planner.plans.assemble",
    "dump_plan": "planner.plans",
    "load_plan": "planner.plans",
    "read_plan": "planner.plans",
    "write_plan": "planner.plans",
    "plan_schema": "planner.plans",
    "validate_plan": "planner.plans",
    "CheckReport": "planner.check",
    "check_plan": "planner.check",
    "has_closed_form": "planner.check",
    "explain_plan": "planner.plans",
    "explanation_report": "planner.report.explanation",
    "Area": "planner.plans",
    "diff_plans": "planner.plans",
    "diff_report": "planner.report.difference",
    "report_to_text": "planner.report",
    "report_to_markdown": "planner.report",
    # partitions
    "PartitionChange": "planner.partitions.changes",
    "PartitionFinding": "planner.partitions.check",
    "PartitionPlan": "planner.partitions.types",
    "check_partition": "planner.partitions.check",
    "dump_partition": "planner.partitions.files",
    "instance_family": "planner.partitions.families",
    "is_partition_plan": "planner.partitions.files",
    "load_instance": "planner.partitions.families",
    "load_partition": "planner.partitions.files",
    "partition": "planner.partitions.run",
    "partition_changes": "planner.partitions.changes",
    "partition_diff_report": "planner.report.partitions",
    "partition_report": "planner.report.partitions",
    "partition_schema": "planner.partitions.files",
    "read_partition": "planner.partitions.files",
    "write_partition": "planner.partitions.files",
    # importers
    "graph_from_proto": "planner.importers",
    # solvers
    "solve_partition": "planner.solvers.partition.auto",
}

_PACKAGES = (
    "costs",
    "formulas",
    "graph",
    "hardware",
    "importers",
    "operators",
    "partitions",
    "schedules",
    "sharding",
    "simulate",
    "solvers",
    "space",
    "exchange",
    "systems",
)
"""Packages that can be had without an import of their own."""

__all__ = sorted((*_EXPORTS, *_PACKAGES))


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name in _PACKAGES:
        return importlib.import_module(f"planner.{name}")
    if name not in _EXPORTS:
        from planner.formulas import names
        from planner.registry import did_you_mean

        known = (*__all__, *(f"formulas.{formula}" for formula in names()))
        raise AttributeError(f"module 'planner' has no attribute {name!r}; {did_you_mean(name, known)}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    return globals().setdefault(name, value)


def __dir__() -> list[str]:
    return sorted(__all__)
