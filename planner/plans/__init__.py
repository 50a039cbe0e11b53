"""The answer as a file: types, JSON, assembly, diff, validation, explanation; `planner.report` shows them."""

from planner.plans.assemble import NOT_MODELLED, assemble, with_simulation
from planner.plans.diff import Area, Change, diff
from planner.plans.explain import Explanation, explain
from planner.plans.files import dumps, json_schema, loads, read, write
from planner.plans.findings import Fault, Finding
from planner.plans.records import Provenance
from planner.plans.types import Plan
from planner.plans.validate import validate

dump_plan, load_plan, read_plan, write_plan, plan_schema = dumps, loads, read, write, json_schema
validate_plan, explain_plan, diff_plans = validate, explain, diff

__all__ = [
    "NOT_MODELLED",
    "Area",
    "Change",
    "Explanation",
    "Fault",
    "Finding",
    "Plan",
    "Provenance",
    "assemble",
    "diff",
    "diff_plans",
    "dump_plan",
    "dumps",
    "explain",
    "explain_plan",
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
