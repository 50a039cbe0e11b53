"""A plan's own configuration evaluated anew, by all that plans: pricer, judge, assembly, simulation, and search.

What a plan claims about all others (the bound, the proof, the alternatives) is held against a search of its own.
"""

from __future__ import annotations

import dataclasses
import time
from importlib.metadata import version

from planner import api
from planner.api import allowed_sizes
from planner.errors import InfeasibleError
from planner.graph import Graph
from planner.hardware.types import Cluster, with_headroom
from planner.plans import Plan, assemble, with_price, with_simulation
from planner.plans.figures import gap_to
from planner.plans.files import seal
from planner.plans.findings import ROUNDED, Difference, differences
from planner.plans.rank_schedule import lay_out
from planner.plans.readings import is_searched, schedule_of
from planner.plans.rebuild import priced_configuration
from planner.plans.words import significant
from planner.prediction import predict
from planner.space import evaluate, play_terms
from planner.space.pricer import Pricer
from planner.space.timing import certificate_alone
from planner.space.types import Certificate, Violation
from planner.systems import decide_again
from planner.systems.backends import ANY, BACKENDS
from planner.systems.backends.needs import running
from planner.units import format_seconds


def reevaluate(plan: Plan, graph: Graph, cluster: Cluster) -> tuple[Plan, tuple[Violation, ...]]:
    """Work a plan out again from what it decides: the model, the cluster and the options must be those of the plan.

    What only a search knows (the bound, the space that it holds for, the alternatives) is taken over. A plan by the
    rules of a published system is decided again by these rules.

    Args:
        plan: a plan whose structure is sound.
        graph: its model at any batch.
        cluster: its hardware.

    Returns:
        The same configuration with everything else worked out again, and the limits of the job and of memory that the
        configuration breaks.

    Raises:
        ShardplanError: it cannot be priced; the message says why.
    """
    if plan.system is not None:
        return decide_again(plan, graph, cluster), ()
    return _judged(plan, graph, cluster)


def _said(plan: Plan, played_s: float) -> Certificate:
    """What a plan of the own search says about all others, its gap measured at the time worked out anew."""
    said = plan.predictions
    gap = gap_to(said.bound_s, significant(played_s))
    proven = said.proven_optimal and gap <= ROUNDED
    return Certificate(said.bound_s, gap, said.space, proven, said.tried_bound_s, said.line_bound_s)


def _judged(plan: Plan, graph: Graph, cluster: Cluster) -> tuple[Plan, tuple[Violation, ...]]:
    """A plan's configuration priced, judged, played and written out, with the alternatives that the plan says."""
    job, size = plan.options, plan.micro_batches.size
    cluster = with_headroom(cluster, plan.hardware.headroom)
    noted, _ = allowed_sizes(graph, job)
    pricer = Pricer(noted, cluster, job)
    decision, shelf = priced_configuration(plan, pricer)
    schedule = schedule_of(plan)
    evaluation = evaluate(shelf, cluster, job, decision, schedule=schedule)
    if not evaluation.stages:
        raise InfeasibleError(evaluation.violations[0].message, hint="plan again")
    played_s = play_terms(decision, schedule, evaluation.stages).iteration_s
    again = assemble(
        pricer.graph_at(size),
        pricer.chain,
        cluster,
        job,
        decision,
        evaluation,
        _said(plan, played_s) if is_searched(plan) else certificate_alone(decision, evaluation.stages, played_s),
        prices=pricer.profiles(size)[0],
        provenance=plan.provenance,
        shardings=pricer.stage_shardings(decision),
        scheduled=lay_out(decision, schedule=schedule),
    )
    again = dataclasses.replace(again, schedule=dataclasses.replace(again.schedule, given=plan.schedule.given))
    again = with_simulation(again, played_s)
    if plan.headline is None:  # of before
        again = dataclasses.replace(again, headline=None)
    again = _priced_as(plan, again)
    takers = tuple(BACKENDS.get(name) for name in plan.options.backends)
    again = dataclasses.replace(
        again,
        alternatives=plan.alternatives,
        runs_on=running(again, takers, graph) if plan.runs_on else (),
        free_choice=plan.free_choice,
    )
    return seal(again), evaluation.violations


def _priced_as(plan: Plan, anew: Plan) -> Plan:
    """The new plan at the old one's price of a device, which may be the user's own."""
    old, new = plan.headline, anew.headline
    if old is None or new is None or old.dollars_per_hour == new.dollars_per_hour:
        return anew
    return with_price(anew, old.dollars_per_hour / old.device_count)


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


def replan(plan: Plan, graph: Graph, cluster: Cluster) -> Plan:
    """Plan anew what a plan is for, by what chose it: the own search, a system's rules, or the user's configuration.

    The same version of this program on the same inputs gives the same plan, so that a plan file can be held fixed as a
    lock file is.

    Args:
        plan: the plan; its options, and its orders or configuration where the user gave them, are taken.
        graph: the model as it is now.
        cluster: the hardware as it is now.

    Raises:
        InfeasibleError: nothing fits any more.
        ShardplanError: the options make no sense for the model and the hardware.
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
    """The answer of a search for what a plan was asked for."""
    own = schedule_of(plan) if plan.schedule.given == "orders" else None
    options = dataclasses.replace(plan.options, backends=plan.options.backends or (ANY,))
    return api.plan(graph, cluster, options, orders=own, progress=progress, provenance=plan.provenance)


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
        again = _searched_again(plan, graph, cluster, stop)
    except _TooLongError:
        return Claims(unchecked=(f"bound, proof and alternatives: searching anew takes more than {limit_s:g} s",))
    found = differences(plan, again)
    decided = [each for each in found if each.path[0] not in ("predictions", "alternatives", "free_choice")]
    wrong = [each for each in found if each.path[0] == "predictions" and each.path[1] in _BOUND]
    if not decided:
        wrong += [each for each in found if each.path[0] == "alternatives"]
        return Claims(tuple(wrong))
    wrong = [each for each in wrong if each.path[1] in ("bound_s", "space")]
    more = f", and {len(decided) - 1} more" if len(decided) > 1 else ""
    seconds = format_seconds(again.predictions.reached_s)
    otherwise = f"the search decides otherwise, for {seconds} an iteration: {decided[0]}{more}"
    return Claims(tuple(wrong), ("alternatives: the search decides otherwise",), otherwise)
