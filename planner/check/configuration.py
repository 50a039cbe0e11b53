"""What kind of plan a file holds: who decided it, and whether its time has a closed form."""

from __future__ import annotations

from planner.errors import UsageError
from planner.plan import Plan
from planner.schedules import get


def is_searched(plan: Plan) -> bool:
    """Whether a plan is an answer of the own search: with a closed form, and a bound for all plans of a space."""
    return plan.system is None and not plan.schedule.given


def is_judged(plan: Plan) -> bool:
    """Whether the stages of a plan were priced by the judge: of the own search, and a configuration of the user's."""
    return plan.system is None and plan.schedule.given in ("", "configuration")


def has_closed_form(plan: Plan) -> bool:
    """Whether the iteration time of a plan is the closed form of its stages' terms, rather than what playing it takes;
    not where no schedule has its name."""
    try:
        return is_judged(plan) and get(plan.schedule.name).closed_form
    except UsageError:
        return False
