"""The answer as a file: types, JSON, assembly, diff, validation, explanation."""

from planner.plan.assemble import NOT_MODELLED, assemble, with_simulation
from planner.plan.files import dumps, json_schema, loads, read, write
from planner.plan.findings import Fault, Finding
from planner.plan.types import Plan, Provenance
from planner.plan.validate import validate

dump_plan, load_plan, read_plan, write_plan, plan_schema = dumps, loads, read, write, json_schema
validate_plan = validate

__all__ = [
    "NOT_MODELLED",
    "Fault",
    "Finding",
    "Plan",
    "Provenance",
    "assemble",
    "dump_plan",
    "dumps",
    "json_schema",
    "load_plan",
    "loads",
    "plan_schema",
    "read",
    "read_plan",
    "validate",
    "validate_plan",
    "with_simulation",
    "write",
    "write_plan",
]
