"""Is a plan right? Its own decision is evaluated anew, as planning does it, and compared with what the file says."""

from planner.check.report import CheckReport, check_plan

__all__ = ["CheckReport", "check_plan"]
