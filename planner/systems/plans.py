"""Write the decision of a system as a plan: its configuration, exchange of gradients and notes for the backend."""

from __future__ import annotations

import dataclasses

from planner.errors import InfeasibleError, PlanError
from planner.graph import Graph
from planner.hardware.types import Cluster
from planner.plans import Plan, Provenance, assemble_priced, seal
from planner.plans.records import SystemSection
from planner.space.pricer import Pricer
from planner.space.types import Job
from planner.systems import get
from planner.systems.compare import Comparison, compare_systems
from planner.systems.runner import SystemDecision, decide, exchange_details, refuse_limits
from planner.systems.types import Setting, System


def plan_system(
    name: str,
    graph: Graph,
    cluster: Cluster,
    job: Job,
    *,
    strict_ops: bool = False,
    provenance: Provenance | None = None,
) -> Plan:
    """Plan a job by the rules of a system.

    Args:
        name: name of the system, with options.
        graph: the model.
        cluster: the hardware.
        job: global batch, precision, optimizer, micro-batch sizes, devices.
        strict_ops: refuse a model with an operator that has no pricing rule.
        provenance: tool and command that made the plan, for its file.

    Raises:
        UsageError: no system has that name, or the job has a limit that the system does not follow.
        InfeasibleError: the system cannot train the model on the cluster; says why.
        PlanError: no plan file can hold its decision; says why.
    """
    system = get(name)
    setting = Setting(Pricer(graph, cluster, job, strict_ops=strict_ops), cluster, job)
    refuse_limits(setting, system)
    return plan_of(setting, system, decide(setting, system), provenance)


def plans_of(comparison: Comparison, provenance: Provenance | None = None) -> tuple[dict[str, Plan], dict[str, str]]:
    """Plans of a comparison by name of the system, and by name why the decisions of others cannot be written as one."""
    plans: dict[str, Plan] = {}
    refused: dict[str, str] = {}
    for system, decided in comparison.decisions:
        if comparison.setting is not None and decided.best is not None:
            try:
                plans[system.key] = plan_of(comparison.setting, system, decided, provenance)
            except (PlanError, InfeasibleError) as error:
                refused[system.key] = str(error)
    return plans, refused


def decide_again(plan: Plan, graph: Graph, cluster: Cluster) -> Plan:
    """Plan again by the rules of the system that made a plan.

    A system that takes the best of all runs alone first, and after the others only if that gives another plan.

    Raises:
        ShardplanError: the system is unknown, or cannot train the model.
    """
    name = plan.system.name if plan.system else ""
    new_plan = plan_system(name, graph, cluster, plan.options, provenance=plan.provenance)
    if new_plan.digest == plan.digest or not get(name).best_of_all:
        return new_plan
    comparison = compare_systems(Pricer(graph, cluster, plan.options), cluster, plan.options)
    plans, _ = plans_of(comparison, plan.provenance)
    return plans.get(name, new_plan)


def plan_of(setting: Setting, system: System, decided: SystemDecision, provenance: Provenance | None = None) -> Plan:
    """Assemble the fastest decision that a plan file can hold; a note says what that costs if another is faster.

    Raises:
        InfeasibleError: nothing fits.
        PlanError: no plan file can hold a decision that fits; says why.
    """
    best, written = decided.best, decided.written
    if best is None:
        raise InfeasibleError(
            f"{system.title}: {decided.reason}", hint="`shardplan compare` says which systems can train the model"
        )
    if written is None:
        hint = "use devices of one type, or a global batch of which all replicas get equally many micro-batches"
        raise PlanError(best.proposal.unwritten, hint=hint)
    notes = decided.notes
    if written is not best:
        notes = (
            *written.proposal.notes,
            f"{best.proposal.unwritten}: {written.iteration_s:.4g} s an iteration instead of {best.iteration_s:.4g} s"
            f" ({best.words})",
        )
    (configuration,), (evaluation,) = written.proposal.parts, written.evaluations
    where = setting.prices, setting.cluster, setting.job
    plan = assemble_priced(*where, configuration, evaluation, written.iteration_s, provenance=provenance)
    exchange = exchange_details(setting, written)
    tells = {**decided.system.backend, **written.proposal.tells, **exchange.tells}
    section = SystemSection(system.key, system.title, system.source, tells, (*notes, *exchange.notes))
    return seal(dataclasses.replace(plan, system=section))
