"""Run systems on a model and cluster: rank their decisions in one table, write each as a plan, price their limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from planner.errors import InfeasibleError, PlanError, UsageError
from planner.graph import Graph
from planner.hardware.types import Cluster
from planner.plans import Plan, Provenance, assemble, seal
from planner.plans.records import SystemSection
from planner.solvers import search
from planner.space.pricer import Pricer
from planner.space.timing import played_s
from planner.space.types import Job
from planner.systems import SYSTEMS, get
from planner.systems.backends import BACKENDS, Backend, backend_names, within_limits
from planner.systems.runner import SystemDecision, decide, exchange_details, refuse_limits, row_of
from planner.systems.types import Semantics, System, SystemRow, SystemSetting

LIFTED: Mapping[str, str] = {
    "equal_replicas": "unequal replicas",
    "alike": "stages unlike in sharing and recomputation",
    "whole_layers": "layers divided between stages",
    "axes": "any layout inside groups",
    "powers_of_two": "groups of any number of ranks",
    "head_groups": "ranks that do not divide the heads",
    "zero_in_pipelines": "any ZeRO stage in pipelines",
    "between_layers": "tensors between layers whole or cut by the sequence",
    "some_layers": "some of a stage's layers recomputed",
    "offloads": "any kind of activations in the host's memory",
}
"""By field of `Structure`: what plans may have once that limit is lifted."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rows of all systems, ranked.

    Attributes:
        model, hardware: names.
        global_batch: samples of an iteration.
        semantics: "any" if asynchronous rows are ranked with the others, else "sync".
        rows: fastest first; if `semantics` is "sync", asynchronous rows after the others; infeasible rows last.
        notes: assumptions of all rows.
        precision: number formats of all rows of which no note says otherwise.
        limit_costs: iteration time of the fastest plan by what plans may have once a limit of some training frameworks
            is lifted, None where none fits; empty if that was not asked for.
        price: US dollars for a device and hour, in place of the profile's.
        decisions: setting and decision of each system, from which `plans_of` makes plans.
    """

    model: str
    hardware: str
    global_batch: int
    semantics: str
    rows: tuple[SystemRow, ...]
    notes: tuple[str, ...] = ()
    precision: str = ""
    limit_costs: Mapping[str, float | None] = field(default_factory=dict)
    price: float | None = None
    decisions: tuple[tuple[SystemSetting, System, SystemDecision], ...] = field(default=(), repr=False, compare=False)


def compare_systems(
    prices: Pricer,
    cluster: Cluster,
    job: Job,
    *,
    systems: Sequence[str] = (),
    semantics: str = "sync",
    freed: Sequence[str] = (),
) -> Comparison:
    """Run systems on a model and rank their decisions.

    Args:
        prices: the model's prices (`planner.Pricer(graph, cluster, job)`).
        cluster: the hardware.
        job: global batch, precision, optimizer.
        systems: names of systems and training frameworks; all if empty. `auto` takes the best of those named.
        semantics: "sync" lists asynchronous systems after the others; "any" ranks them together.
        freed: training frameworks whose limits are lifted one by one, to see what they cost.

    Raises:
        UsageError: no system has one of the names.
        JobError: no micro-batch size divides the global batch.
    """
    if semantics not in ("sync", "any"):
        raise UsageError(f"unknown semantics {semantics!r}", hint="use sync or any")
    compared = [get(name) for name in tuple(dict.fromkeys(systems)) or (*SYSTEMS.names(), *backend_names())]
    setting = SystemSetting(prices, cluster, job, changes_semantics=semantics == "any")
    best_of_all = {system.key for system in compared if system.best_of_all}
    seen = [(setting.seen_by(system), system) for system in sorted(compared, key=lambda s: s.best_of_all)]
    decisions = [(own, system, decide(own, system)) for own, system in seen]

    def rank(row: SystemRow) -> tuple[bool, bool, float, bool, str]:
        unranked = semantics == "sync" and row.semantics is Semantics.ASYNC
        return not row.feasible, unranked, row.iteration_s, row.system not in best_of_all, row.system

    apart = [f"{system.key}: in {own.job.precision}, as it trains" for own, system in seen if own is not setting]
    frameworks = [BACKENDS.get(name) for name in dict.fromkeys(freed)]
    return Comparison(
        model=setting.name,
        hardware=cluster.name,
        global_batch=job.global_batch,
        semantics=semantics,
        rows=tuple(sorted((row_of(*decision) for decision in decisions), key=rank)),
        notes=(*setting.notes, *apart),
        precision=setting.job.precision,
        limit_costs=lifted_limits(prices, setting.cluster, setting.job, frameworks) if frameworks else {},
        decisions=tuple(decisions),
    )


def lifted_limits(prices: Pricer, cluster: Cluster, job: Job, backends: Sequence[Backend]) -> dict[str, float | None]:
    """Search within the limits of some frameworks, then with each limit lifted alone, then with all lifted."""
    times_s: dict[str, float | None] = {}
    for words, lifted_job in _lifted_jobs(within_limits(job, backends), within_limits(job, ())):
        shardings = Pricer(prices.graph, cluster, lifted_job, like=prices)
        try:
            answer = search(prices.costs, cluster, lifted_job, shardings=shardings, simulated_s=played_s)
            times_s[words] = answer.best.simulated_s
        except InfeasibleError:
            times_s[words] = None
    return times_s


def _lifted_jobs(limited: Job, unlimited: Job) -> Iterator[tuple[str, Job]]:
    """The job with no limit lifted, with each lifted alone and with all lifted, each with its description."""
    yield "none lifted", limited
    for name, words in LIFTED.items():
        free: dict[str, Any] = {name: getattr(unlimited.structure, name)}
        if getattr(limited.structure, name) != free[name]:
            yield words, replace(limited, structure=replace(limited.structure, **free))
    yield "all lifted", unlimited


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
    setting = SystemSetting(Pricer(graph, cluster, job, strict_ops=strict_ops), cluster, job).seen_by(system)
    refuse_limits(setting, system)
    return plan_of(setting, system, decide(setting, system), provenance)


def plans_of(comparison: Comparison, provenance: Provenance | None = None) -> tuple[dict[str, Plan], dict[str, str]]:
    """Plans of a comparison by name of the system, and by name why the decisions of others cannot be written as one."""
    plans: dict[str, Plan] = {}
    refused: dict[str, str] = {}
    for setting, system, decided in comparison.decisions:
        if decided.best is not None:
            try:
                plans[system.key] = plan_of(setting, system, decided, provenance)
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


def plan_of(
    setting: SystemSetting, system: System, decided: SystemDecision, provenance: Provenance | None = None
) -> Plan:
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
    plan = assemble(*where, configuration, evaluation, written.iteration_s, provenance=provenance, by_rules=True)
    _, exchange_tells, exchange_notes = exchange_details(setting, written)
    tells = {**decided.system.backend, **written.proposal.tells, **exchange_tells}
    section = SystemSection(system.key, system.title, system.source, tells, (*notes, *exchange_notes))
    return seal(replace(plan, system=section))
