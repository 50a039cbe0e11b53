"""A plan's own configuration evaluated anew: by the pricer, the judge, the assembly and the simulation of planning."""

from __future__ import annotations

import dataclasses

from planner.api import allowed_sizes
from planner.check.compare import ROUNDED
from planner.check.configuration import decision_of, price_shardings
from planner.errors import InfeasibleError
from planner.graph import Graph
from planner.hardware.types import Cluster
from planner.plan import Plan, assemble, with_simulation
from planner.plan.figures import gap_to
from planner.plan.files import seal
from planner.plan.scheduled import lay_out
from planner.plan.words import significant
from planner.plan.works import leaders, work_of
from planner.schedules import Schedule, get
from planner.schedules.own_orders import own_schedule
from planner.space import evaluate, play_terms
from planner.space.pricer import Pricer
from planner.space.types import Certificate, Violation
from planner.systems import decide_again


@dataclasses.dataclass(frozen=True, slots=True)
class Anew:
    """A plan evaluated anew.

    Attributes:
        plan: the same configuration with everything else worked out again.
        violations: limits of the job and of memory that the configuration breaks.
    """

    plan: Plan
    violations: tuple[Violation, ...] = ()


def evaluate_anew(plan: Plan, graph: Graph, cluster: Cluster) -> Anew:
    """Work a plan out again from what it decides: the model, the cluster and the options must be those of the plan.

    What only a search knows (the bound, the space that it holds for, the alternatives) is taken over. A plan by the
    rules of a published system is decided again by these rules.

    Args:
        plan: a plan whose structure is sound.
        graph: its model at any batch.
        cluster: its hardware.

    Raises:
        ShardplanError: it cannot be priced; the message says why.
    """
    if plan.system is not None:
        return Anew(decide_again(plan, graph, cluster))
    return _searched(plan, graph, cluster)


def _own_orders(plan: Plan) -> Schedule | None:
    """The orders of one copy where they are the user's own, and no schedule has their name."""
    if plan.schedule.given != "orders":
        return None
    ranks, copies = leaders(plan)
    return own_schedule(work_of(plan, ranks, copies=copies), plan.schedule.name)


def _searched(plan: Plan, graph: Graph, cluster: Cluster) -> Anew:
    """A plan of the own search, with the bound and the alternatives that it says."""
    job, size = plan.options, plan.micro_batches.size
    noted, _ = allowed_sizes(graph, job)
    pricer = Pricer(noted, cluster, job)
    costs, shardings = price_shardings(plan, pricer.graph_at(size), pricer)
    decision = decision_of(plan, {name: each.sharding for name, each in costs.items()})
    shelf = {each.sharding: each for each in costs.values()}
    if any(stage.sharding == 0 for stage in decision.stages):
        shelf[0] = pricer.costs(size)
    own = _own_orders(plan)
    chosen = own or get(decision.schedule)
    evaluation = evaluate(shelf, cluster, job, decision, schedule=own)
    if not evaluation.stages:
        raise InfeasibleError(evaluation.violations[0].message, hint="plan again")
    said, played_s = plan.predictions, play_terms(decision, chosen, evaluation.stages).iteration_s
    gap = gap_to(said.bound_s, significant(played_s))
    again = assemble(
        pricer.graph_at(size),
        pricer.chain,
        cluster,
        job,
        decision,
        evaluation,
        Certificate(said.bound_s, gap, said.space, said.proven_optimal and gap <= ROUNDED, said.tried_bound_s),
        origins=pricer.profiles(size)[0].origin,
        provenance=plan.provenance,
        shardings=shardings,
        scheduled=None if own is None else lay_out(decision, schedule=own),
    )
    schedule = dataclasses.replace(again.schedule, given=plan.schedule.given)
    again = dataclasses.replace(again, schedule=schedule)
    again = with_simulation(again, played_s)
    return Anew(seal(dataclasses.replace(again, alternatives=plan.alternatives)), evaluation.violations)
