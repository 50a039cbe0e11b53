"""Check a plan: evaluate its configuration anew, as planning does, and compare every value with the file."""

from planner.check.attribution import Cause as Cause
from planner.check.attribution import attribute as attribute
from planner.check.report import CheckReport as CheckReport
from planner.check.report import asked_job as asked_job
from planner.check.report import check_plan as check_plan
from planner.check.report import limits_set as limits_set
from planner.check.report import replan as replan
