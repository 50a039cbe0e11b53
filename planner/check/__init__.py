"""Check a plan: evaluate its configuration anew, as planning does, and compare every value with the file."""

from planner.check.attribution import Attribution, Cause, Part, attribute
from planner.check.reevaluate import replan
from planner.check.report import CheckReport, check_plan

__all__ = ["Attribution", "Cause", "CheckReport", "Part", "attribute", "check_plan", "replan"]
