"""Evaluate a plan's configuration anew with the same pricing, evaluation, simulation and assembly as planning.

The bound, the proof and the alternatives are compared with those of a new search.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from importlib.metadata import version

from planner import api
from planner.api import allowed_sizes
from planner.errors import InfeasibleError
from planner.graph import Graph
from planner.hardware.types import Cluster, with_headroom
from planner.plans import Plan, assemble_priced, with_price
from planner.plans.figures import gap_to
from planner.plans.files import seal
from planner.plans.findings import ROUNDED, Difference, differences
from planner.plans.readings import is_searched, schedule_of
from planner.plans.rebuild import priced_configuration
from planner.plans.words import significant
from planner.prediction import predict
from planner.space import evaluate, play_terms
from planner.space.pricer import Pricer
from planner.space.types import Certificate, Violation
from planner.systems import decide_again
from planner.systems.backends import ANY, BACKENDS
from planner.systems.backends.needs import running
from planner.units import format_seconds


def reevaluate(plan: Plan, graph: Graph, cluster: Cluster) -> tuple[Plan, tuple[Violation, ...]]:
    """Compute a plan anew from its configuration, for the plan's model, cluster and options.

    Bound, search space and alternatives are copied from the plan. The plan of a published system is decided anew by the
    system's rules.

    Args:
        plan: a plan whose structure is sound.
        graph: its model at any batch.
        cluster: its hardware.

    Returns:
        The plan with the same configuration and all else computed anew, and the violated limits of the job and of
        memory.

    Raises:
        ShardplanError: the configuration cannot be priced; the message says why.
    """
    if plan.system is not None:
        return decide_again(plan, graph, cluster), ()
    return _judged(plan, graph, cluster)


def _certificate_of(plan: Plan, played_s: float) -> Certificate:
    """The plan's certificate, with the gap to the iteration time computed anew."""
    predictions = plan.predictions
    gap = gap_to(predictions.bound_s, significant(played_s))
    proven = predictions.proven_optimal and gap <= ROUNDED
    return Certificate(
        predictions.bound_s, gap, predictions.space, proven, predictions.tried_bound_s, predictions.line_bound_s
    )


def _judged(plan: Plan, graph: Graph, cluster: Cluster) -> tuple[Plan, tuple[Violation, ...]]:
    """The plan's configuration priced, evaluated, simulated and assembled, with the plan's alternatives."""
    job = plan.options
    cluster = with_headroom(cluster, plan.hardware.headroom)
    noted, _ = allowed_sizes(graph, job)
    pricer = Pricer(noted, cluster, job)
    decision, costs_by_sharding = priced_configuration(plan, pricer)
    schedule = schedule_of(plan)
    evaluation = evaluate(costs_by_sharding, cluster, job, decision, schedule=schedule)
    if not evaluation.stages:
        raise InfeasibleError(evaluation.violations[0].message, hint="plan again")
    played_s = play_terms(decision, schedule, evaluation.stages).iteration_s
    anew = assemble_priced(
        pricer,
        cluster,
        job,
        decision,
        evaluation,
        played_s,
        certificate=_certificate_of(plan, played_s) if is_searched(plan) else None,
        provenance=plan.provenance,
        schedule=schedule,
        given=plan.schedule.given,
    )
    if plan.headline is None:  # of before
        anew = dataclasses.replace(anew, headline=None)
    anew = _priced_as(plan, anew)
    takers = tuple(BACKENDS.get(name) for name in plan.options.backends)
    anew = dataclasses.replace(
        anew,
        alternatives=plan.alternatives,
        runs_on=running(anew, takers, graph) if plan.runs_on else (),
        free_choice=plan.free_choice,
    )
    return seal(anew), evaluation.violations


def _priced_as(plan: Plan, anew: Plan) -> Plan:
    """The new plan at the old plan's price per device-hour, which may be the user's own."""
    old, new = plan.headline, anew.headline
    if old is None or new is None or old.dollars_per_hour == new.dollars_per_hour:
        return anew
    return with_price(anew, old.dollars_per_hour / old.device_count)


ClaimCheck = tuple[Sequence[Difference], tuple[str, ...], str]
"""Claims of a plan that differ from those of a new search, what could not be compared, and how the search decides
otherwise ("" if it does not)."""


class _TooLongError(Exception):
    """The search exceeded its time limit."""


def replan(plan: Plan, graph: Graph, cluster: Cluster) -> Plan:
    """Plan anew in the way in which the plan was made: by search, a system's rules, or the user's configuration.

    The same version of this program gives the same plan for the same inputs, so that a plan file can serve as a lock
    file.

    Args:
        plan: the plan; its options are used, and its orders or configuration if the user gave them.
        graph: the model as it is now.
        cluster: the hardware as it is now.

    Raises:
        InfeasibleError: nothing fits any more.
        ShardplanError: the options are not possible for the model and the hardware.
    """
    now = dataclasses.replace(plan.provenance, version=version("shardplan"))
    if plan.system is not None:
        anew = decide_again(plan, graph, cluster)
    elif plan.schedule.given in ("name", "configuration"):
        anew = predict(graph, cluster, plan.options, plan).plan
    else:
        anew = _searched_again(plan, graph, cluster)
        if anew.free_choice is None:
            anew = dataclasses.replace(anew, free_choice=plan.free_choice)
    return seal(dataclasses.replace(_priced_as(plan, anew), provenance=now))


def _searched_again(plan: Plan, graph: Graph, cluster: Cluster, progress: api.Progress | None = None) -> Plan:
    """The result of a search with the plan's options."""
    user_schedule = schedule_of(plan) if plan.schedule.given == "orders" else None
    options = dataclasses.replace(plan.options, backends=plan.options.backends or (ANY,))
    return api.plan(graph, cluster, options, orders=user_schedule, progress=progress, provenance=plan.provenance)


_BOUND = ("bound_s", "gap", "proven_optimal", "space", "tried_bound_s", "line_bound_s")


def check_claims(plan: Plan, graph: Graph, cluster: Cluster, limit_s: float) -> ClaimCheck:
    """Search again, and compare bound, proof and alternatives with those of the plan.

    Args:
        plan: the plan.
        graph: its model.
        cluster: its hardware.
        limit_s: time limit of the search in seconds; the claims stay unchecked if it is exceeded.

    Raises:
        ShardplanError: the search fails.
    """
    if limit_s <= 0:
        return (), ("bound, proof and alternatives: no search was made",), ""
    end = time.monotonic() + limit_s

    def stop(done: int, total: int, best_s: float, bound_s: float) -> None:
        if time.monotonic() > end:
            raise _TooLongError

    try:
        again = _searched_again(plan, graph, cluster, stop)
    except _TooLongError:
        return (), (f"bound, proof and alternatives: searching anew takes more than {limit_s:g} s",), ""
    found = list(differences(plan, dataclasses.replace(again, model=again.model.comparable(plan.model))))
    decided = [each for each in found if each.path[0] not in ("predictions", "alternatives", "free_choice")]
    wrong = [each for each in found if each.path[0] == "predictions" and each.path[1] in _BOUND]
    if not decided:
        wrong += [each for each in found if each.path[0] == "alternatives"]
        return wrong, (), ""
    wrong = [each for each in wrong if each.path[1] in ("bound_s", "space")]
    more = f", and {len(decided) - 1} more" if len(decided) > 1 else ""
    seconds = format_seconds(again.predictions.reached_s)
    otherwise = f"the search decides otherwise, for {seconds} an iteration: {decided[0]}{more}"
    return wrong, ("alternatives: the search decides otherwise",), otherwise
