"""A system asked: its limits applied, its solver's proposals judged, the fastest that fits as a row of a comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from planner import schedules
from planner.errors import ShardplanError
from planner.plans.assemble import ExchangeWords, exchange_words
from planner.plans.sections import compared_error
from planner.plans.words import words_of
from planner.space import Configuration, Evaluation, Timed, WorkerMemory, lay_workers, play_terms
from planner.space.asked import refuse_others
from planner.space.workers import pipeline_of
from planner.systems.types import Proposal, Semantics, Setting, System, SystemRow
from planner.units import format_bytes

SAME = 1e-9
"""Relative difference of times that counts as none."""


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """A proposal with the judge's verdicts.

    Attributes:
        proposal: what was judged.
        evaluations: of its parts, their time that of playing them.
        bubbles: of its parts, share of the workers' time in which they compute nothing.
        iteration_s: of the global batch.
    """

    proposal: Proposal
    evaluations: tuple[Evaluation, ...]
    bubbles: tuple[float, ...]
    iteration_s: float

    @property
    def fullest(self) -> WorkerMemory:
        """The worker nearest to its capacity."""
        workers = [worker for evaluation in self.evaluations for worker in evaluation.workers]
        return max(workers, key=lambda worker: worker.memory.total / worker.capacity_bytes)

    @property
    def words(self) -> str:
        """The decision in words."""
        return self.proposal.words or words_of(self.proposal.parts[0])


@dataclass(frozen=True, slots=True, eq=False)
class Decided:
    """What a system came to.

    Attributes:
        system: whose rules it has: another's where the best of all was taken from it.
        best: the fastest that fits, None where nothing does.
        written: the fastest of those that a plan file can hold.
        reason: why nothing fits.
        plan: the decision in words.
        notes: assumptions.
    """

    system: System
    best: Judged | None = None
    written: Judged | None = None
    reason: str = ""
    plan: str = ""
    notes: tuple[str, ...] = ()

    @property
    def iteration_s(self) -> float:
        """Of the global batch; infinite where nothing fits."""
        return self.best.iteration_s if self.best else math.inf


def decide(setting: Setting, system: System) -> Decided:
    """What a system decides by its own rules; why not, where it cannot express the model, fit it or follow the job.

    What it decides is remembered in the setting, for systems that take the best of all.
    """
    found = _of_all(setting, system, _own(setting, system))
    if not system.best_of_all and (system.semantics is Semantics.SYNC or setting.changes_semantics):
        setting.results[system.key] = found
    return found


def refuse_limits(setting: Setting, system: System) -> None:
    """Refuse what a system decides itself.

    Raises:
        UsageError: names it.
    """
    engine = f"the rules of {system.title}"
    refuse_others(setting.asked, system.takes, engine, "leave it out, or plan without --system to have it followed")


def _own(setting: Setting, system: System) -> Decided:
    best: Judged | None = None
    written: Judged | None = None
    reason, closest = "", math.inf
    try:
        refuse_limits(setting, system)
        for proposal in system.solver(setting, system):
            rivals = (best,) if proposal.unwritten else (best, written)
            limit_s = max(rival.iteration_s if rival else math.inf for rival in rivals)
            judged = judge(setting, proposal, limit_s)
            if isinstance(judged, Refusal):
                if not reason or judged.excess < closest:
                    reason, closest = judged.reason, judged.excess
                continue
            if best is None or judged.iteration_s < best.iteration_s:
                best = judged
            if not proposal.unwritten and (written is None or judged.iteration_s < written.iteration_s):
                written = judged
    except ShardplanError as error:
        reason = str(error)
    if best is None:
        return Decided(system, reason=reason or "no size, depth and width divide the devices and the global batch")
    return Decided(system, best, written, plan=best.words, notes=best.proposal.notes)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a proposal is not taken, and by which part of a device's memory it exceeds it; infinite for other reasons."""

    reason: str
    excess: float = math.inf


def judge(setting: Setting, proposal: Proposal, limit_s: float = math.inf) -> Judged | Refusal:
    """Judge a proposal that may be faster than a limit.

    Args:
        setting: model, cluster and job.
        proposal: what is judged.
        limit_s: proposals that cannot be faster are not played.
    """
    evaluations = [setting.evaluate(part, Timed.BOUND) for part in proposal.parts]
    for part, evaluation in zip(proposal.parts, evaluations, strict=True):
        if not evaluation.feasible:
            return _refused(part, evaluation)
    if proposal.beats * max(e.iteration_s for e in evaluations) >= limit_s * (1 - SAME):
        return Refusal("another decision is faster")
    played = [
        play_terms(part, schedules.get(part.schedule), evaluation.stages)
        for part, evaluation in zip(proposal.parts, evaluations, strict=True)
    ]
    iteration_s = proposal.beats * max(timing.iteration_s for timing in played)
    if proposal.exchange is not None:
        iteration_s = max(iteration_s, float(proposal.exchange.busy_s().max(initial=0.0)))
    timed = (replace(e, iteration_s=t.iteration_s) for e, t in zip(evaluations, played, strict=True))
    return Judged(proposal, tuple(timed), tuple(timing.bubble for timing in played), iteration_s)


def _refused(configuration: Configuration, evaluation: Evaluation) -> Refusal:
    """The first thing that a configuration breaks; memory in bytes."""
    first = evaluation.violations[0]
    if not first.available or not evaluation.workers:
        return Refusal(first.message)
    worst = max(evaluation.workers, key=lambda worker: worker.memory.total / worker.capacity_bytes)
    need, have = worst.memory.total, worst.capacity_bytes
    words = f"{words_of(configuration)}, {configuration.schedule}"
    reason = f"does not fit: the fullest device needs {format_bytes(need)} of {format_bytes(have)} ({words})"
    return Refusal(reason, need / have)


def _of_all(setting: Setting, system: System, own: Decided) -> Decided:
    """The fastest of a system's own decision and of all that the setting remembers, for one that takes the best."""
    if not system.best_of_all:
        return own
    best = replace(own, notes=("the own search is fastest", *own.notes)) if own.best else own
    for name, other in sorted(setting.results.items()):
        if other.best and not alters(setting, other.best) and other.iteration_s < best.iteration_s * (1 - SAME):
            said = f"takes {own.iteration_s:.4g} s" if own.best else "finds nothing that fits"
            notes = (f"{name} is fastest; the own search {said}",)
            best = replace(other, plan=f"as {name}: {other.plan}", notes=notes)
    return best


def alters(setting: Setting, judged: Judged) -> str:
    """In what updates differ from those of other synchronous systems: rows on servers that nobody looked up keep their
    momentum, where the optimizer has one. Empty where they do not."""
    part = judged.proposal.parts[0]
    if not part.exchange or setting.job.optimizer == "sgd":
        return ""
    served = setting.exchange(part).exchange.memory.server_optimizer
    return f"{setting.job.optimizer} updates only the rows that were looked up" if served else ""


def row_of(setting: Setting, system: System, decided: Decided) -> SystemRow:
    """The row of a system."""
    best = decided.best
    if best is None:
        return SystemRow(
            system.key, system.title, system.semantics, False, decided.reason,
            available=setting.devices, tells=system.backend, notes=decided.notes,
        )  # fmt: skip
    parts = best.proposal.parts
    traffic = [setting.traffic(part, exchanged=best.proposal.exchange is None) for part in parts]
    sent = best.proposal.beats * sum(each.sent_bytes for each in traffic)
    if best.proposal.exchange is not None:
        sent += float(best.proposal.exchange.machine_bytes()[0].sum())
    stale, exchange = staleness_of(best), exchange_details(setting, best)
    fullest = best.fullest
    return SystemRow(
        system=system.key,
        title=system.title,
        semantics=Semantics.ASYNC if stale else Semantics.SYNC,
        feasible=True,
        plan=decided.plan + exchange.methods,
        iteration_s=best.iteration_s,
        throughput=setting.job.global_batch / best.iteration_s,
        memory=fullest.memory,
        capacity_bytes=fullest.capacity_bytes,
        bubble=bubble_of(best),
        sent_bytes=sent,
        weight_versions=max(max(_schedule(p).weight_versions(pipeline_of(p))) for p in parts),
        staleness=stale,
        devices=sum(_devices(part) for part in parts),
        available=setting.devices,
        micro_batch=parts[0].micro_batch,
        tells={**system.backend, **best.proposal.tells, **exchange.tells},
        notes=(*decided.notes, *exchange.notes),
        links=tuple(v for v in (traffic[0] * best.proposal.beats).by_level() if v.total_bytes and len(parts) == 1),
        alters=alters(setting, best),
        error=compared_error(setting.cluster, parts[0]),
    )


def bubble_of(judged: Judged) -> float:
    """Share of the used devices' time in which they run no stage and no update, as plans say it."""
    parts = judged.proposal.parts
    busy_s = sum(
        _devices(part) * evaluation.iteration_s * (1 - bubble)
        for part, evaluation, bubble in zip(parts, judged.evaluations, judged.bubbles, strict=True)
    )
    total_s = judged.iteration_s * sum(map(_devices, parts))
    return min(1.0, max(0.0, 1 - judged.proposal.beats * busy_s / total_s))


def staleness_of(judged: Judged) -> int:
    """Most updates between the weights of a forward and the update that applies its gradient."""
    own = (max(_schedule(part).staleness(pipeline_of(part))) for part in judged.proposal.parts)
    return max(judged.proposal.staleness, *own)


def exchange_details(setting: Setting, judged: Judged) -> ExchangeWords:
    """How an exchange scheme is told of; nothing where the recipe of the ZeRO stage holds."""
    part = judged.proposal.parts[0]
    if not part.exchange:
        return ExchangeWords()
    found, ranks = setting.exchange(part), part.copies * part.stages[0].replicas
    share = (setting.precision.held_weight_bytes + setting.state_bytes) / setting.element_bytes
    return exchange_words(found.exchange, ranks, setting.states_bytes * share, found.host_s)


def _devices(configuration: Configuration) -> int:
    """Devices that work."""
    return sum(int(np.size(own)) for own in lay_workers(configuration, _schedule(configuration)).ranks)


def _schedule(configuration: Configuration) -> schedules.Schedule:
    return schedules.get(configuration.schedule)
