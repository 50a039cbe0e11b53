"""What a system decided as a row of the comparison."""

from __future__ import annotations

import numpy as np

from planner import schedules
from planner.plans.assemble import ExchangeWords, exchange_words
from planner.space import Configuration, lay_workers
from planner.space.workers import pipeline_of
from planner.systems.runner import Decided, Judged, alters
from planner.systems.setting import Setting
from planner.systems.types import Semantics, System, SystemRow


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
