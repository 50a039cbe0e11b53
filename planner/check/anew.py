"""A plan's own configuration evaluated anew: by the pricer, the judge, the assembly and the simulation of planning."""

from __future__ import annotations

import dataclasses

from planner.api import allowed_sizes
from planner.check.compare import ROUNDED
from planner.check.configuration import is_searched, schedule_of
from planner.errors import InfeasibleError
from planner.graph import Graph
from planner.hardware.types import Cluster
from planner.plans import Plan, assemble, with_simulation
from planner.plans.figures import gap_to
from planner.plans.files import seal
from planner.plans.priced import priced_configuration
from planner.plans.scheduled import lay_out
from planner.plans.words import significant
from planner.space import evaluate, play_terms
from planner.space.pricer import Pricer
from planner.space.timing import certificate_alone
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
    return _judged(plan, graph, cluster)


def _said(plan: Plan, played_s: float) -> Certificate:
    """What a plan of the own search says about all others, its gap measured at the time worked out anew."""
    said = plan.predictions
    gap = gap_to(said.bound_s, significant(played_s))
    proven = said.proven_optimal and gap <= ROUNDED
    return Certificate(said.bound_s, gap, said.space, proven, said.tried_bound_s, said.line_bound_s)


def _judged(plan: Plan, graph: Graph, cluster: Cluster) -> Anew:
    """A plan's configuration priced, judged, played and written out, with the alternatives that the plan says."""
    job, size = plan.options, plan.micro_batches.size
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
        origins=pricer.profiles(size)[0].origin,
        provenance=plan.provenance,
        shardings=pricer.stage_shardings(decision),
        scheduled=lay_out(decision, schedule=schedule),
    )
    again = dataclasses.replace(again, schedule=dataclasses.replace(again.schedule, given=plan.schedule.given))
    again = with_simulation(again, played_s)
    return Anew(seal(dataclasses.replace(again, alternatives=plan.alternatives)), evaluation.violations)
