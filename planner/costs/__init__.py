"""Work to seconds: roofline, measured and imported profiles."""

from planner.costs.errors import JobClass as JobClass
from planner.costs.errors import MeasuredError as MeasuredError
from planner.costs.errors import error_of as error_of
from planner.costs.errors import measured_error as measured_error
from planner.costs.errors import read_errors as read_errors
from planner.costs.imported import costs_document as costs_document
from planner.costs.imported import imported_profile as imported_profile
from planner.costs.imported import is_priced as is_priced
from planner.costs.imported import with_costs as with_costs
from planner.costs.measured import measure as measure
from planner.costs.measured import passes_profile as passes_profile
from planner.costs.precision import optimizer_state_bytes as optimizer_state_bytes
from planner.costs.precision import precision as precision
from planner.costs.precision import precision_remark as precision_remark
from planner.costs.precision import update_bytes as update_bytes
from planner.costs.pricing import alignment_advice as alignment_advice
from planner.costs.pricing import profile as profile
from planner.costs.report import CostReport as CostReport
from planner.costs.report import cost_report as cost_report
from planner.costs.types import Profile as Profile
