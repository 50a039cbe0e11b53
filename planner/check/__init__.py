"""Is a plan right? Its own decision is evaluated anew, as planning does it, and compared with what the file says."""

from planner.check.attribution import Attribution, Cause, Part, attribute
from planner.check.reevaluate import replan
from planner.check.report import CheckReport, check_plan

__all__ = ["Attribution", "Cause", "CheckReport", "Part", "attribute", "check_plan", "replan"]
