"""The answer as a file: types, JSON, assembly, diff, validation, explanation."""

from planner.plan.assemble import NOT_MODELLED, assemble, with_simulation
from planner.plan.files import dumps, json_schema, loads, read, write
from planner.plan.types import Plan, Provenance

dump_plan, load_plan, read_plan, write_plan, plan_schema = dumps, loads, read, write, json_schema

__all__ = [
    "NOT_MODELLED",
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
    "with_simulation",
    "write",
    "write_plan",
]
