"""Run one system: evaluate what its solver proposes, keep the fastest that fits, and make its row of a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from planner import schedules
from planner.errors import ShardplanError
from planner.plans.collectives import ExchangeWords, exchange_words
from planner.plans.sections import compared_error
from planner.plans.words import words_of
from planner.space import Configuration, Evaluation, Timed, WorkerMemory, lay_workers, play_terms
from planner.space.job_options import refuse_others
from planner.space.steps import fullest_of, step_view
from planner.space.workers import pipeline_of
from planner.sums import float_sum
from planner.systems.types import Proposal, Semantics, System, SystemRow, SystemSetting
from planner.units import format_bytes

SAME = 1e-9
"""Times whose relative difference is smaller count as equal."""


@dataclass(frozen=True, slots=True, eq=False)
class JudgedProposal:
    """A feasible proposal with its evaluations.

    Attributes:
        proposal: the proposal.
        evaluations: one for each of its parts, with the simulated time.
        iteration_s: simulated time of a global batch.
    """

    proposal: Proposal
    evaluations: tuple[Evaluation, ...]
    iteration_s: float

    @property
    def fullest(self) -> WorkerMemory:
        """The worker with the largest fraction of its memory in use."""
        return fullest_worker(self.evaluations)

    @property
    def words(self) -> str:
        """Description for people."""
        return self.proposal.words or words_of(self.proposal.parts[0])


@dataclass(frozen=True, slots=True, eq=False)
class SystemDecision:
    """The decision of a system.

    Attributes:
        system: the system whose proposal it is; not the system that decided, if that took over the best of all.
        best: the fastest proposal that fits; None if none does.
        written: the fastest of those that a plan file can hold.
        reason: why nothing fits.
        plan: description of `best` for people.
        notes: assumptions.
    """

    system: System
    best: JudgedProposal | None = None
    written: JudgedProposal | None = None
    reason: str = ""
    plan: str = ""
    notes: tuple[str, ...] = ()

    @property
    def iteration_s(self) -> float:
        """Time of a global batch; infinite if nothing fits."""
        return self.best.iteration_s if self.best else math.inf


def decide(setting: SystemSetting, system: System) -> SystemDecision:
    """Decide by a system's rules; the decision has a reason instead if the system cannot train the model or the job.

    The setting remembers the decision, for systems that take the best of all.
    """
    decision = _fastest_proposal(setting, system)
    if system.best_of_all:
        return _best_of_all(setting, decision)
    if system.semantics is Semantics.SYNC or setting.changes_semantics:
        setting.results[system.key] = decision
    return decision


def refuse_limits(setting: SystemSetting, system: System) -> None:
    """Refuse a job with limits on what a system decides itself.

    Raises:
        UsageError: names the limit.
    """
    engine = f"the rules of {system.title}"
    refuse_others(setting.user_job, system.takes, engine, "leave it out, or plan without --system to have it followed")


def _fastest_proposal(setting: SystemSetting, system: System) -> SystemDecision:
    """Evaluate the proposals of a system; if none fits, the reason is that of the one closest to fitting."""
    best: JudgedProposal | None = None
    written: JudgedProposal | None = None
    reason, least_excess = "", math.inf
    try:
        refuse_limits(setting, system)
        for proposal in system.solver(setting, system):
            rivals = (best,) if proposal.unwritten else (best, written)
            limit_s = max(rival.iteration_s if rival else math.inf for rival in rivals)
            judged = judge(setting, proposal, limit_s)
            if isinstance(judged, Refusal):
                if not reason or judged.excess < least_excess:
                    reason, least_excess = judged.reason, judged.excess
                continue
            if best is None or judged.iteration_s < best.iteration_s:
                best = judged
            if not proposal.unwritten and (written is None or judged.iteration_s < written.iteration_s):
                written = judged
    except ShardplanError as error:
        reason = str(error)
    if best is None:
        return SystemDecision(
            system, reason=reason or "no size, depth and width divide the devices and the global batch"
        )
    return SystemDecision(system, best, written, plan=best.words, notes=best.proposal.notes)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a proposal is not taken; `excess` is needed over available memory, infinite if memory is not the reason."""

    reason: str
    excess: float = math.inf


def judge(setting: SystemSetting, proposal: Proposal, limit_s: float = math.inf) -> JudgedProposal | Refusal:
    """Evaluate a proposal, and simulate it if it fits.

    Args:
        setting: model, cluster and job.
        proposal: the proposal.
        limit_s: a proposal whose lower bound reaches this time is refused without simulation.
    """
    evaluations = [setting.evaluate(part, Timed.BOUND) for part in proposal.parts]
    for part, evaluation in zip(proposal.parts, evaluations, strict=True):
        if not evaluation.feasible:
            return _refused(part, evaluation)
    if proposal.beats * max(e.iteration_s for e in evaluations) >= limit_s * (1 - SAME):
        return Refusal("another decision is faster")
    timings = [
        play_terms(part, schedules.get(part.schedule), evaluation.stages)
        for part, evaluation in zip(proposal.parts, evaluations, strict=True)
    ]
    iteration_s = proposal.beats * max(timing.iteration_s for timing in timings)
    if proposal.exchange is not None:
        iteration_s = max(iteration_s, float(proposal.exchange.busy_s().max(initial=0.0)))
    timed = (replace(e, iteration_s=t.iteration_s) for e, t in zip(evaluations, timings, strict=True))
    return JudgedProposal(proposal, tuple(timed), iteration_s)


def _refused(configuration: Configuration, evaluation: Evaluation) -> Refusal:
    """The first violation of a configuration; one of memory names the fullest device."""
    first = evaluation.violations[0]
    if not first.available or not evaluation.workers:
        return Refusal(first.message)
    fullest = fullest_worker((evaluation,))
    need, have = fullest.memory.total, fullest.capacity_bytes
    words = f"{words_of(configuration)}, {configuration.schedule}"
    reason = f"does not fit: the fullest device needs {format_bytes(need)} of {format_bytes(have)} ({words})"
    return Refusal(reason, need / have)


def fullest_worker(evaluations: Iterable[Evaluation]) -> WorkerMemory:
    """The worker with the largest fraction of its memory in use."""
    return fullest_of([worker for evaluation in evaluations for worker in evaluation.workers])


def _best_of_all(setting: SystemSetting, own: SystemDecision) -> SystemDecision:
    """The fastest of an own decision and of the synchronous decisions that the setting remembers."""
    best = replace(own, notes=("the own search is fastest", *own.notes)) if own.best else own
    for name, other in sorted(setting.results.items()):
        if other.best and not alters(setting, other.best) and other.iteration_s < best.iteration_s * (1 - SAME):
            own_result = f"takes {own.iteration_s:.4g} s" if own.best else "finds nothing that fits"
            notes = (f"{name} is fastest; the own search {own_result}",)
            best = replace(other, plan=f"as {name}: {other.plan}", notes=notes)
    return best


def alters(setting: SystemSetting, judged: JudgedProposal) -> str:
    """How updates differ from those of other synchronous systems; empty if they do not.

    A server updates only the embedding rows that were looked up; an optimizer with momentum would change others, too.
    """
    part = judged.proposal.parts[0]
    if not part.exchange or setting.job.optimizer == "sgd":
        return ""
    served = setting.exchange(part).exchange.memory.server_optimizer
    return f"{setting.job.optimizer} updates only the rows that were looked up" if served else ""


def row_of(setting: SystemSetting, system: System, decided: SystemDecision) -> SystemRow:
    """The row of a system in a comparison."""
    best = decided.best
    if best is None:
        return SystemRow(
            system.key, system.title, system.semantics, False, decided.reason,
            available=setting.devices, tells=system.backend, notes=decided.notes,
        )  # fmt: skip
    parts = best.proposal.parts
    traffic = [setting.traffic(part, exchanged=best.proposal.exchange is None) for part in parts]
    sent = best.proposal.beats * float_sum(part_traffic.sent_bytes for part_traffic in traffic)
    if best.proposal.exchange is not None:
        sent += float(best.proposal.exchange.machine_bytes()[0].sum())
    methods, tells, notes = exchange_details(setting, best)
    staleness, fullest = staleness_of(best), best.fullest
    bubble, exposed = idle_shares(best)
    return SystemRow(
        system=system.key,
        title=system.title,
        semantics=Semantics.ASYNC if staleness else Semantics.SYNC,
        feasible=True,
        plan=decided.plan + methods,
        iteration_s=best.iteration_s,
        samples_per_s=setting.job.global_batch / best.iteration_s,
        memory=fullest.memory,
        capacity_bytes=fullest.capacity_bytes,
        bubble=bubble,
        exposed=exposed,
        sent_bytes=sent,
        weight_versions=max(max(schedules.get(p.schedule).weight_versions(pipeline_of(p))) for p in parts),
        staleness=staleness,
        devices=sum(_devices(part) for part in parts),
        available=setting.devices,
        micro_batch=parts[0].micro_batch,
        tells={**system.backend, **best.proposal.tells, **tells},
        notes=(*decided.notes, *notes),
        links=tuple(v for v in (traffic[0] * best.proposal.beats).by_level() if v.total_bytes and len(parts) == 1),
        alters=alters(setting, best),
        error=compared_error(setting.cluster, parts[0]),
    )


def idle_shares(judged: JudgedProposal) -> tuple[float, float]:
    """(bubble, exposed communication) as fractions of the used devices' time, as plans say them.

    Waiting for the slowest part counts as bubble where parts are pipelines, else as exposed, as what the exchange among
    parts takes longer than all of them.
    """
    beats, evaluations = judged.proposal.beats, judged.evaluations
    slowest_s = beats * max(evaluation.iteration_s for evaluation in evaluations)
    total_s = exposed_s = waiting_s = 0.0
    for part, evaluation in zip(judged.proposal.parts, evaluations, strict=True):
        step = step_view(part, schedules.get(part.schedule), evaluation.stages, evaluation.iteration_s)
        part_s = beats * evaluation.iteration_s
        total_s += step.devices * judged.iteration_s
        exposed_s += step.devices * (part_s * step.exposed + judged.iteration_s - slowest_s)
        waiting_s += step.devices * (part_s * step.bubble + slowest_s - part_s)
    if all(len(part.stages) == 1 for part in judged.proposal.parts):
        exposed_s, waiting_s = exposed_s + waiting_s, 0.0
    return waiting_s / total_s, exposed_s / total_s


def staleness_of(judged: JudgedProposal) -> int:
    """Updates between the weights of a forward and the update that applies its gradient, maximum over the stages."""
    by_part = (max(schedules.get(part.schedule).staleness(pipeline_of(part))) for part in judged.proposal.parts)
    return max(judged.proposal.staleness, *by_part)


def exchange_details(setting: SystemSetting, judged: JudgedProposal) -> ExchangeWords:
    """Words on the exchange scheme of a proposal; empty if it names none, and its ZeRO stage says it all."""
    part = judged.proposal.parts[0]
    if not part.exchange:
        return "", {}, ()
    exchange, ranks = setting.exchange(part), part.copies * part.stages[0].replicas
    share = (setting.precision.held_weight_bytes + setting.optimizer_bytes) / setting.parameter_bytes
    return exchange_words(exchange.exchange, ranks, setting.model_states_bytes * share, exchange.host_s)


def _devices(configuration: Configuration) -> int:
    """Number of devices that a configuration uses."""
    return sum(int(np.size(ranks)) for ranks in lay_workers(configuration, schedules.get(configuration.schedule)).ranks)
