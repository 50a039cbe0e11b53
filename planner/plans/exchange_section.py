"""How gradients travel by an exchange scheme, as a section of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from planner.exchange import Exchange, Step
from planner.plans.files import seal
from planner.plans.system_sections import ExchangeSection, FusedMessage, LinkBytes, TensorExchange
from planner.plans.types import Plan
from planner.plans.words import significant
from planner.units import format_bytes, format_seconds

MOST_SHARES = 8
"""Shares of servers that are shown."""


@dataclass(frozen=True, slots=True)
class ExchangeWords:
    """An exchange in words: its methods, behind those of a plan; what a training backend must know; notes."""

    methods: str = ""
    tells: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def exchange_words(exchange: Exchange, ranks: int, state_bytes: float, host_s: float) -> ExchangeWords:
    """How an exchange is told of.

    Args:
        exchange: the exchange.
        ranks: that take part.
        state_bytes: weights and optimizer state of the whole model.
        host_s: seconds that rows on servers need beside the network.
    """
    kinds = sorted(set(exchange.methods.values()))
    ways = (", ".join(kinds[:-1]) + " and " if len(kinds) > 1 else "") + (kinds[-1] if kinds else "no exchange")
    notes = [f"exchange {format_seconds(exchange.seconds)}, {format_seconds(exchange.exposed_s)} not hidden"]
    notes += exchange.notes
    if held := exchange.memory.server_optimizer:
        notes.append(
            f"the fullest server holds {format_bytes(state_bytes * held)} in host memory, whose size profiles do not"
            f" say; rows in host memory and on the way to the devices take {format_seconds(host_s)}"
        )
    return ExchangeWords(f", {ways}" if ranks > 1 else "", _servers(exchange), tuple(notes))


def _servers(exchange: Exchange) -> dict[str, str]:
    """Which machines serve what, in a line: as many variables as they are alike."""
    if not exchange.placements:
        return {}
    shares = {tuple(round(s, 4) for s in p.shares) for p in exchange.placements}
    if len(shares) == 1:
        return {"servers": "every variable in shares " + ", ".join(f"{s:g}" for s in next(iter(shares))[:MOST_SHARES])}
    return {"servers": f"{len(exchange.placements)} variables in pieces, each piece on one machine"}


def with_exchange(plan: Plan, exchange: Exchange, step: Step) -> Plan:
    """A plan of data parallelism whose gradients travel by a scheme, tensor by tensor, not by a plan's collectives."""
    stages = tuple(replace(stage, collectives=()) for stage in plan.predictions.stages)
    section = exchange_section(exchange, {v.name: v.gradient_bytes for v in step.variables})
    return seal(replace(plan, predictions=replace(plan.predictions, stages=stages), exchange=section))


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
