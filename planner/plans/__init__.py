"""The answer as a file: types, JSON, assembly, diff, validation, explanation."""

from planner.plans.assemble import NOT_MODELLED, assemble, with_simulation
from planner.plans.configuration_file import (
    configuration_document,
    configuration_schema,
    dump_configuration,
    load_configuration,
    parse_configuration,
)
from planner.plans.diff import Area, Change, diff
from planner.plans.diff_report import diff_report
from planner.plans.explain import Explanation, explain
from planner.plans.explain_report import explanation_report
from planner.plans.files import dumps, json_schema, loads, read, write
from planner.plans.findings import Fault, Finding
from planner.plans.records import Provenance
from planner.plans.report import Report, to_markdown, to_text
from planner.plans.types import Plan
from planner.plans.validate import validate

dump_plan, load_plan, read_plan, write_plan, plan_schema = dumps, loads, read, write, json_schema
validate_plan, explain_plan, diff_plans = validate, explain, diff
report_to_text, report_to_markdown = to_text, to_markdown

__all__ = [
    "NOT_MODELLED",
    "Area",
    "Change",
    "Explanation",
    "Fault",
    "Finding",
    "Plan",
    "Provenance",
    "Report",
    "assemble",
    "configuration_document",
    "configuration_schema",
    "diff",
    "diff_plans",
    "diff_report",
    "dump_configuration",
    "dump_plan",
    "dumps",
    "explain",
    "explain_plan",
    "explanation_report",
    "json_schema",
    "load_configuration",
    "load_plan",
    "loads",
    "parse_configuration",
    "plan_schema",
    "read",
    "read_plan",
    "report_to_markdown",
    "report_to_text",
    "to_markdown",
    "to_text",
    "validate",
    "validate_plan",
    "with_simulation",
    "write",
    "write_plan",
]
