"""Check a plan: evaluate its configuration anew, as planning does, and compare every value with the file."""

from planner.check.attribution import Cause, attribute
from planner.check.report import CheckReport, check_plan, replan
