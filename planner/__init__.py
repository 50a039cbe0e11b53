"""Plans how to split a DNN training job over devices, and proves it.

The front door re-exports the names that users and the command line need; each is imported when first used, so that
`import planner` is cheap.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

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
    "Job": "planner.space.types",
    "Pricer": "planner.api",
    "ImportOptions": "planner.importers",
    "load_graph": "planner.api",
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
    # units
    "format_bytes": "planner.units",
    "format_rate": "planner.units",
    "format_flops": "planner.units",
    "format_flop_rate": "planner.units",
    "format_seconds": "planner.units",
    "format_fraction": "planner.units",
    # simulate
    "simulate_plan": "planner.simulate",
    "simulate_decision": "planner.simulate",
    "Timeline": "planner.simulate",
    "Transfers": "planner.simulate",
    "Activity": "planner.simulate",
    "SYMBOLS": "planner.simulate",
    "draw_gantt": "planner.simulate",
    "draw_svg": "planner.simulate",
    "trace_json": "planner.simulate",
    "timeline_document": "planner.simulate",
    "rank_ranges": "planner.simulate",
    # plan
    "Plan": "planner.plan",
    "Provenance": "planner.plan",
    "assemble": "planner.plan",
    "dump_plan": "planner.plan",
    "load_plan": "planner.plan",
    "read_plan": "planner.plan",
    "write_plan": "planner.plan",
    "plan_schema": "planner.plan",
    "validate_plan": "planner.plan",
    "explain_plan": "planner.plan",
    "explanation_report": "planner.plan",
    "diff_plans": "planner.plan",
    "diff_report": "planner.plan",
    "report_to_text": "planner.plan",
    "report_to_markdown": "planner.plan",
    # importers
    "graph_from_proto": "planner.importers",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name not in _EXPORTS:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    return globals().setdefault(name, value)


def __dir__() -> list[str]:
    return sorted(__all__)


class _FrontDoor(ModuleType):
    """`planner.plan` is both the function that users call and a package: the package is made callable on import."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "plan" and isinstance(value, ModuleType):
            value.__class__ = _PlanPackage
        super().__setattr__(name, value)


class _PlanPackage(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """`planner.api.plan`."""
        return importlib.import_module("planner.api").plan(*args, **options)


sys.modules[__name__].__class__ = _FrontDoor
