"""What a system decides as a plan file: its stages, schedule and corrections, and how its gradients travel."""

from __future__ import annotations

import dataclasses
import math

from planner import schedules
from planner.errors import InfeasibleError, PlanError
from planner.graph import Graph
from planner.hardware.types import Cluster
from planner.plan import Plan, Provenance, with_simulation
from planner.plan.files import seal
from planner.plan.scheduled import lay_out
from planner.plan.system_sections import ExchangeSection, FusedMessage, LinkBytes, SystemSection, TensorExchange
from planner.plan.words import significant
from planner.play import Transfers
from planner.sharding import StageSharding
from planner.simulate import simulate
from planner.space.pricer import Pricer
from planner.space.types import Candidate, Configuration, Evaluation, Job, StageChoice, StageTerms
from planner.sync import Exchange
from planner.systems import SYSTEMS, get
from planner.systems._bench import Bench
from planner.systems._exchanged import price_exchange
from planner.systems._found import Found, Played
from planner.systems._plan_point import assembled, plan_point
from planner.systems._play import delays
from planner.systems._search import ask, found_of
from planner.systems.compare import Keep
from planner.systems.types import System


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
    bench = Bench(Pricer(graph, cluster, job, strict_ops=strict_ops), cluster, job)
    return plan_of(bench, system, ask(bench, system), provenance)


def plan_of(bench: Bench, system: System, found: Found, provenance: Provenance | None = None) -> Plan:
    """What was found as a plan, simulated.

    Raises:
        InfeasibleError: nothing was found.
        PlanError: the plan cannot be written; says why.
    """
    if found.reason or not math.isfinite(found.iteration_s):
        raise InfeasibleError(
            f"{system.title}: {found.reason or 'nothing was found'}", hint="`shardplan compare` says which systems can"
        )
    author, found = _author(bench, system, found), _dealt_evenly(_cut_alike(found))
    if author.search == "sharded" and found.candidate is None:
        raise PlanError(
            f"{author.title} shares every operator among unlike devices: its row has no plan file",
            hint="use devices of one type",
        )
    if found.candidate is not None:
        plan = _of_candidate(bench, found.candidate, provenance)
    elif found.played is not None:
        plan = _of_point(bench, author, found.played, provenance)
    else:
        plan = _of_exchange(bench, system, author, found.micro_batch, provenance)
    told = SystemSection(system.key, system.title, system.source, {**system.backend, **found.tells}, found.notes)
    plan = seal(dataclasses.replace(plan, system=told))
    return with_simulation(plan, simulate(plan).step_s)


def _cut_alike(found: Found) -> Found:
    """Where each kind of virtual worker has its own cut: the best with one for all, as a file has, and what that costs.

    Raises:
        PlanError: none fits.
    """
    if found.played is not None or not found.alike_words:
        return found
    alike = found.alike
    if alike is None or not alike.feasible:
        raise PlanError(
            f"each kind of virtual worker has a cut of its own, a plan file one for all, and none fits all: "
            f"{alike.reason if alike else 'no stages'}",
            hint="put the same devices into each virtual worker",
        )
    note = (
        f"one cut for all virtual workers, as a plan file has: {alike.iteration_s:.4g} s an iteration;"
        f" with a cut for each kind {found.iteration_s:.4g} s ({found.plan})"
    )
    return dataclasses.replace(
        found,
        played=alike,
        iteration_s=alike.iteration_s,
        tells={**found.tells, "allocation": found.alike_words},
        notes=(found.alike_words, note),
    )


def _dealt_evenly(found: Found) -> Found:
    """Where replicas do not share an iteration's minibatches evenly: the best that do, as a file has, and the loss.

    Raises:
        PlanError: none fits, or is faster than data parallelism.
    """
    played, even = found.played, found.alike
    if played is None or all(played.point.micro_batches % s.replicas == 0 for s in played.point.stages):
        return found
    shape = "-".join(str(s.replicas) for s in played.point.stages)
    if even is None or not even.feasible:
        raise PlanError(
            f"replicas {shape} do not share {played.point.micro_batches} minibatches evenly, as a plan file's do,"
            " and none that do is worth it",
            hint="choose a global batch of which every stage's replicas get equally many minibatches",
        )
    note = (
        f"every replica has as many minibatches of an iteration, as a plan file has: {even.iteration_s:.4g} s;"
        f" {played.point.micro_batches} minibatches on {shape} replicas would take {played.iteration_s:.4g} s"
    )
    return dataclasses.replace(
        found_of(even), tells={**found.tells, "delays": delays(even)}, notes=(*found.notes, note)
    )


def plan_keeper(plans: dict[str, Plan], refused: dict[str, str], provenance: Provenance | None = None) -> Keep:
    """What `compare_systems` is to be given as `keep` to make a plan of every row.

    Args:
        plans: filled with the plan of each system by its name.
        refused: filled with the reasons of systems whose row cannot be written as a plan.
        provenance: how the plans came to be.
    """

    def keep(bench: Bench, system: System, found: Found) -> None:
        try:
            plans[system.key] = plan_of(bench, system, found, provenance)
        except (PlanError, InfeasibleError) as error:
            refused[system.key] = str(error)

    return keep


def _author(bench: Bench, system: System, found: Found) -> System:
    """The system whose rules the result has: `auto` and others may take another's."""
    if system.search in ("pipedream", "bapipe") and found.played is None:
        return SYSTEMS.get("data-parallel")
    if system.search != "auto":
        return system
    same = (
        name
        for name, other in sorted(bench.results.items())
        if (other.played, other.iteration_s) == (found.played, found.iteration_s)
    )
    return get(next(same, system.key))


def _of_candidate(bench: Bench, candidate: Candidate, provenance: Provenance | None) -> Plan:
    """A decision in which groups of ranks share operators, with its shardings."""
    decision, prices = candidate.decision, bench.prices
    entries = (
        [prices.entry(decision.micro_batch, n) for n in sorted({s.sharding for s in decision.stages} - {0})]
        if isinstance(prices, Pricer)
        else []
    )
    evaluation = candidate.evaluation
    work_s = max(
        (t.forward_s + t.backward_s) * decision.micro_batches / s.replicas
        for t, s in zip(evaluation.stages, decision.stages, strict=True)
    )
    shardings = {entry.number: StageSharding(entry.inner, entry.sharded) for entry in entries}
    return assembled(bench, decision, evaluation, work_s, lay_out(decision), provenance, shardings)


def _of_point(bench: Bench, system: System, played: Played, provenance: Provenance | None) -> Plan:
    """A pipeline as it was played."""
    point = played.point
    schedule = schedules.get(point.schedule)
    transfers = Transfers.BLOCKING if system.search == "auto" else system.transfers
    states = int(system.options.get("states", "0"))
    return plan_point(bench, point, schedule, played.iteration_s, transfers, states=states, provenance=provenance)


def _of_exchange(bench: Bench, system: System, author: System, micro_batch: int, provenance: Provenance | None) -> Plan:
    """Data parallelism with the gradients exchanged as the system does it."""
    priced = price_exchange(bench, author, micro_batch)
    if priced.exchange is None:
        raise InfeasibleError(f"{system.title}: a replica does not fit", hint="use smaller micro-batches")
    blocks, costs = bench.blocks, bench.costs(micro_batch)
    decision = Configuration((StageChoice(0, blocks, 1),), priced.replicas, micro_batch, priced.count, "1f1b")
    types = sorted(set(bench.cluster.device_types[: priced.replicas].tolist()))
    slow = max(types, key=lambda t: float((costs.forward_s + costs.backward_s)[t].sum()))
    forward_s, backward_s = float(costs.forward_s[slow].sum()), float(costs.backward_s[slow].sum())
    exposed_s = priced.exchange.exposed_s
    work_s = priced.count * (forward_s + backward_s)
    terms = StageTerms(
        forward_s=forward_s,
        backward_s=backward_s,
        recompute_s=0.0,
        receive_s=0.0,
        sync_s=max(priced.exchange.seconds, exposed_s),
        exposed_sync_s=exposed_s,
        update_s=max(0.0, priced.iteration_s - exposed_s - work_s),
        in_flight=1,
        memory=priced.memory,
        capacity_bytes=priced.capacity_bytes,
        unit_bytes=priced.memory.activations,
    )
    evaluation = Evaluation(priced.iteration_s, (terms,), (), 0)
    plan = assembled(bench, decision, evaluation, work_s, lay_out(decision), provenance)
    if author.key == "data-parallel":
        return plan
    (stage,) = plan.predictions.stages
    predictions = dataclasses.replace(plan.predictions, stages=(dataclasses.replace(stage, collectives=()),))
    gradients = {v.name: v.gradient_bytes for v in priced.step.variables} if priced.step else {}
    return dataclasses.replace(plan, predictions=predictions, exchange=exchange_section(priced.exchange, gradients))


def exchange_section(exchange: Exchange, gradient_bytes: dict[str, float]) -> ExchangeSection:
    """An exchange by tensor, tensors that travel alike together.

    Args:
        exchange: the exchange.
        gradient_bytes: of each tensor.
    """
    shares = {p.variable: tuple(significant(share) for share in p.shares) for p in exchange.placements}
    groups: dict[tuple[str, tuple[float, ...]], list[str]] = {}
    for name, method in exchange.methods.items():
        groups.setdefault((method, shares.get(name, ())), []).append(name)
    fused = any(len(t.variables) > 1 for t in exchange.transfers)
    messages = tuple(FusedMessage(t.variables, round(t.payload_bytes)) for t in exchange.transfers)
    return ExchangeSection(
        scheme=exchange.scheme,
        seconds=significant(exchange.seconds),
        exposed_s=significant(exchange.exposed_s),
        tensors=tuple(
            TensorExchange(tuple(names), method, round(sum(gradient_bytes[n] for n in names)), held)
            for (method, held), names in groups.items()
        ),
        links=tuple(
            LinkBytes(v.level, round(v.out_bytes), round(v.in_bytes), round(v.total_bytes))
            for v in exchange.traffic.by_level()
        ),
        messages=messages if fused else (),
        notes=exchange.notes,
    )
