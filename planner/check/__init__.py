"""Is a plan right? Its own configuration is evaluated anew, as planning does it, and compared with what the file says."""

from planner.check.report import CheckReport, Recheck, check_plan

__all__ = ["CheckReport", "Recheck", "check_plan"]
