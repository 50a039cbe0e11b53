"""What a system decides as a plan file: its configuration, its corrections, and how its gradients travel."""

from __future__ import annotations

import dataclasses
from importlib.metadata import version

from planner.errors import InfeasibleError, PlanError
from planner.graph import Graph
from planner.hardware.types import Cluster
from planner.plans import Plan, Provenance, assemble, with_simulation
from planner.plans.records import SystemSection
from planner.space.pricer import Pricer
from planner.space.timing import certificate_alone
from planner.space.types import Job
from planner.systems import get
from planner.systems.compare import Comparison, compare_systems
from planner.systems.runner import Decided, Judged, decide, exchange_details, refuse_limits
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
    """What a system's own planner chooses, as a plan.

    Args:
        name: of the system, with options.
        graph: the model.
        cluster: the machine.
        job: global batch, precision, optimizer, micro-batch sizes, devices.
        strict_ops: refuse operators that no rule describes.
        provenance: how the plan came to be, for its file.

    Raises:
        UsageError: no system has that name, or the job has a limit that the system does not follow.
        InfeasibleError: the system cannot train the model on the cluster; says why.
        PlanError: what it decides cannot be written as a plan; says why.
    """
    system = get(name)
    setting = Setting(Pricer(graph, cluster, job, strict_ops=strict_ops), cluster, job)
    refuse_limits(setting, system)
    return plan_of(setting, system, decide(setting, system), provenance)


def plans_of(comparison: Comparison, provenance: Provenance | None = None) -> tuple[dict[str, Plan], dict[str, str]]:
    """The plan of each row of a comparison by the system's name, and why the others cannot be written as one."""
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
    """What the system of a plan decides, by its rules.

    A system that takes the best of all others is asked alone first, and beside the others if that gives another plan.

    Raises:
        ShardplanError: there is no such system, or it cannot decide.
    """
    name = plan.system.name if plan.system else ""
    again = plan_system(name, graph, cluster, plan.options, provenance=plan.provenance)
    if again.digest == plan.digest or not get(name).best_of_all:
        return again
    found = compare_systems(Pricer(graph, cluster, plan.options), cluster, plan.options)
    plans, _ = plans_of(found, plan.provenance)
    return plans.get(name, again)


def plan_of(setting: Setting, system: System, decided: Decided, provenance: Provenance | None = None) -> Plan:
    """What a system decided as a plan; the fastest that a plan file can hold, with a note of what that costs.

    Raises:
        InfeasibleError: nothing fits.
        PlanError: no plan file can hold what fits; says why.
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
    plan = _assembled(setting, written, provenance)
    exchange = exchange_details(setting, written)
    tells = {**decided.system.backend, **written.proposal.tells, **exchange.tells}
    told = SystemSection(system.key, system.title, system.source, tells, (*notes, *exchange.notes))
    return with_simulation(dataclasses.replace(plan, system=told), written.iteration_s)


def _assembled(setting: Setting, judged: Judged, provenance: Provenance | None) -> Plan:
    """The configuration with its names."""
    (configuration,), (evaluation,) = judged.proposal.parts, judged.evaluations
    size = configuration.micro_batch
    return assemble(
        setting.prices.graph_at(size),
        setting.prices.chain,
        setting.cluster,
        setting.job,
        configuration,
        evaluation,
        certificate_alone(configuration, evaluation.stages, judged.iteration_s),
        prices=setting.prices.profiles(size)[0],
        provenance=provenance or Provenance("shardplan", version("shardplan"), (), setting.name, setting.cluster.name),
        shardings=setting.prices.stage_shardings(configuration),
    )
