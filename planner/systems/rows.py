"""What a system decided as a row of the comparison."""

from __future__ import annotations

import numpy as np

from planner import schedules
from planner.space import Configuration, lay_workers
from planner.space.workers import pipeline_of
from planner.sync import Exchange, Traffic
from planner.systems.runner import Decided, Judged, alters
from planner.systems.setting import Setting
from planner.systems.types import LinkBytes, Semantics, System, SystemRow
from planner.units import format_bytes, format_seconds

MOST_SHARES = 8
"""Shares of servers that are shown."""


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
    stale, (words, tells, notes) = staleness_of(best), exchange_details(setting, best)
    fullest = best.fullest
    return SystemRow(
        system=system.key,
        title=system.title,
        semantics=Semantics.ASYNC if stale else Semantics.SYNC,
        feasible=True,
        plan=decided.plan + words,
        iteration_s=best.iteration_s,
        throughput=setting.job.global_batch / best.iteration_s,
        memory=fullest.memory,
        capacity_bytes=fullest.capacity_bytes,
        bubble=bubble_of(setting, best),
        sent_bytes=sent,
        weight_versions=max(max(_schedule(p).weight_versions(pipeline_of(p))) for p in parts),
        staleness=stale,
        devices=sum(_devices(part) for part in parts),
        available=setting.devices,
        micro_batch=parts[0].micro_batch,
        tells={**system.backend, **best.proposal.tells, **tells},
        notes=(*decided.notes, *notes),
        links=_links(traffic[0] * best.proposal.beats) if len(parts) == 1 else (),
        alters=alters(setting, best),
    )


def bubble_of(setting: Setting, judged: Judged) -> float:
    """Share of the used devices' time in which they compute nothing, communication among the ranks of a group too."""
    parts = judged.proposal.parts
    busy_s = sum(
        _devices(part) * (evaluation.iteration_s * (1 - bubble) - _talk_s(setting, part))
        for part, evaluation, bubble in zip(parts, judged.evaluations, judged.bubbles, strict=True)
    )
    total_s = judged.iteration_s * sum(map(_devices, parts))
    return min(1.0, max(0.0, 1 - judged.proposal.beats * busy_s / total_s))


def staleness_of(judged: Judged) -> int:
    """Most updates between the weights of a forward and the update that applies its gradient."""
    own = (max(_schedule(part).staleness(pipeline_of(part))) for part in judged.proposal.parts)
    return max(judged.proposal.staleness, *own)


def exchange_details(setting: Setting, judged: Judged) -> tuple[str, dict[str, str], tuple[str, ...]]:
    """Of an exchange scheme: its methods for the plan's words, where servers are, and what it takes."""
    part = judged.proposal.parts[0]
    if not part.exchange:
        return "", {}, ()
    found = setting.exchange(part)
    exchange, replicas = found.exchange, part.copies * part.stages[0].replicas
    kinds = sorted(set(exchange.methods.values()))
    ways = (", ".join(kinds[:-1]) + " and " if len(kinds) > 1 else "") + (kinds[-1] if kinds else "no exchange")
    notes = [f"exchange {format_seconds(exchange.seconds)}, {format_seconds(exchange.exposed_s)} not hidden"]
    notes += exchange.notes
    if held := exchange.memory.server_optimizer:
        elements = (
            judged.evaluations[0].stages[0].memory.weights / setting.precision.weight_bytes / exchange.memory.weights
        )
        bytes_held = elements * (setting.precision.weight_bytes + setting.state_bytes) * held
        notes.append(
            f"the fullest server holds {format_bytes(bytes_held)} in host memory, whose size profiles do not say;"
            f" rows in host memory and on the way to the devices take {format_seconds(found.host_s)}"
        )
    return f", {ways}" if replicas > 1 else "", _placements(exchange), tuple(notes)


def _links(traffic: Traffic) -> tuple[LinkBytes, ...]:
    """Traffic by level, innermost first; levels over which nothing goes are left out."""
    levels = (level for level in traffic.by_level() if level.total_bytes)
    return tuple(LinkBytes(level.level, level.out_bytes, level.in_bytes, level.total_bytes) for level in levels)


def _placements(exchange: Exchange) -> dict[str, str]:
    """Which machines serve what, in a line: as many variables as they are alike."""
    if not exchange.placements:
        return {}
    shares = {tuple(round(s, 4) for s in p.shares) for p in exchange.placements}
    if len(shares) == 1:
        return {"servers": "every variable in shares " + ", ".join(f"{s:g}" for s in next(iter(shares))[:MOST_SHARES])}
    return {"servers": f"{len(exchange.placements)} variables in pieces, each piece on one machine"}


def _talk_s(setting: Setting, configuration: Configuration) -> float:
    """Seconds of an iteration in which the mean worker's ranks exchange what they share of operators."""
    entries = setting.shardings(configuration)
    total_s = sum(
        configuration.micro_batches * float(entries[s.sharding].sharded.communication_s[s.start : s.stop].sum())
        for s in configuration.stages
        if s.sharding
    )
    return total_s / len(lay_workers(configuration, _schedule(configuration)).hosted)


def _devices(configuration: Configuration) -> int:
    """Devices that work."""
    return sum(int(np.size(own)) for own in lay_workers(configuration, _schedule(configuration)).ranks)


def _schedule(configuration: Configuration) -> schedules.Schedule:
    return schedules.get(configuration.schedule)
