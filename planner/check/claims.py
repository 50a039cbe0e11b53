"""What a plan claims about all others, held against a search of its own: the bound, the proof, the alternatives."""

from __future__ import annotations

import dataclasses
import time

from planner import api
from planner.check.compare import Difference, differences
from planner.check.configuration import schedule_of
from planner.graph import Graph
from planner.hardware.types import Cluster
from planner.plans import Plan
from planner.units import format_seconds


class _TooLongError(Exception):
    """The search has had its time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Claims:
    """What came of searching again.

    Attributes:
        wrong: claims that the search makes otherwise.
        unchecked: what could not be held against it, in words.
        otherwise: how the search decides otherwise; empty where it does not.
    """

    wrong: tuple[Difference, ...] = ()
    unchecked: tuple[str, ...] = ()
    otherwise: str = ""


_BOUND = ("bound_s", "gap", "proven_optimal", "space", "tried_bound_s", "line_bound_s")


def check_claims(plan: Plan, graph: Graph, cluster: Cluster, limit_s: float) -> Claims:
    """Search again for what a plan of the own search claims.

    Args:
        plan: the plan.
        graph: its model.
        cluster: its hardware.
        limit_s: seconds after which the search is given up; the claims are then not checked.

    Raises:
        ShardplanError: the search fails.
    """
    if limit_s <= 0:
        return Claims(unchecked=("bound, proof and alternatives: no search was made",))
    end = time.monotonic() + limit_s

    def stop(done: int, total: int, best_s: float, bound_s: float) -> None:
        if time.monotonic() > end:
            raise _TooLongError

    try:
        own = schedule_of(plan) if plan.schedule.given == "orders" else None
        again = api.plan(graph, cluster, plan.options, orders=own, progress=stop, provenance=plan.provenance)
    except _TooLongError:
        return Claims(unchecked=(f"bound, proof and alternatives: searching anew takes more than {limit_s:g} s",))
    found = differences(plan, again)
    decided = [each for each in found if each.path[0] not in ("predictions", "alternatives")]
    wrong = [each for each in found if each.path[0] == "predictions" and each.path[1] in _BOUND]
    if not decided:
        wrong += [each for each in found if each.path[0] == "alternatives"]
        return Claims(tuple(wrong))
    wrong = [each for each in wrong if each.path[1] in ("bound_s", "space")]
    more = f", and {len(decided) - 1} more" if len(decided) > 1 else ""
    seconds = format_seconds(again.predictions.reached_s)
    otherwise = f"the search decides otherwise, for {seconds} an iteration: {decided[0]}{more}"
    return Claims(tuple(wrong), ("alternatives: the search decides otherwise",), otherwise)
