"""What kind of plan a file holds: who decided it, and whether its time has a closed form."""

from __future__ import annotations

from planner.errors import UsageError
from planner.plans import Plan
from planner.plans.works import leaders, work_of
from planner.schedules import Schedule, get
from planner.schedules.own_orders import own_schedule
from planner.space.evaluate import in_closed_form


def is_searched(plan: Plan) -> bool:
    """Whether a plan is an answer of the own search: with a closed form, and a bound for all plans of a space."""
    return plan.system is None and plan.schedule.given in ("", "orders")


def is_judged(plan: Plan) -> bool:
    """Whether a plan is decided by the planner's own search or the user, not by the rules of a published system."""
    return plan.system is None


def schedule_of(plan: Plan) -> Schedule:
    """The schedule by its name, or the orders of one copy where they are the user's own.

    Raises:
        UsageError: no schedule has the name.
        PlanError: the orders cannot run.
    """
    if plan.schedule.given != "orders":
        return get(plan.schedule.name)
    ranks, copies = leaders(plan)
    return own_schedule(work_of(plan, ranks, copies=copies), plan.schedule.name)


def has_closed_form(plan: Plan) -> bool:
    """Whether the iteration time of a plan is the closed form of its stages' terms, rather than what playing it takes;
    not where no schedule has its name."""
    try:
        return is_judged(plan) and in_closed_form(plan.configuration, schedule_of(plan))
    except UsageError:
        return False
