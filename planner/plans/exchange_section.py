"""How gradients travel by an exchange scheme: the plan's section, and the exchange in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.exchange import Exchange, Step
from planner.plans.records import ExchangeSection, FusedMessage, LinkBytes, TensorExchange
from planner.plans.types import Plan
from planner.plans.words import significant
from planner.units import format_bytes, format_seconds

MAX_SHOWN_SHARES = 8
"""Shares of servers that a line lists at most."""


@dataclass(frozen=True, slots=True)
class ExchangeWords:
    """A gradient exchange in words.

    Attributes:
        methods: what is appended to the plan's summary, ", all-reduce and ps"; "" on one rank.
        tells: what a training backend must know, by topic.
        notes: times and what the price leaves out.
    """

    methods: str = ""
    tells: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def exchange_words(exchange: Exchange, ranks: int, state_bytes: float, host_s: float) -> ExchangeWords:
    """Describe a gradient exchange.

    Args:
        exchange: the exchange.
        ranks: number of ranks that take part.
        state_bytes: weights and optimizer state of the whole model.
        host_s: seconds for rows in host memory, network time not included.
    """
    kinds = sorted(set(exchange.methods.values()))
    methods = (", ".join(kinds[:-1]) + " and " if len(kinds) > 1 else "") + (kinds[-1] if kinds else "no exchange")
    notes = [f"exchange {format_seconds(exchange.seconds)}, {format_seconds(exchange.exposed_s)} not hidden"]
    notes += exchange.notes
    if server_share := exchange.memory.server_optimizer:
        notes.append(
            f"the fullest server holds {format_bytes(state_bytes * server_share)} in host memory, whose size profiles"
            f" do not say; rows in host memory and on the way to the devices take {format_seconds(host_s)}"
        )
    return ExchangeWords(f", {methods}" if ranks > 1 else "", _servers(exchange), tuple(notes))


def _servers(exchange: Exchange) -> dict[str, str]:
    """One line on how variables are placed on servers; empty without servers."""
    if not exchange.placements:
        return {}
    shares = {tuple(round(s, 4) for s in p.shares) for p in exchange.placements}
    if len(shares) == 1:
        return {
            "servers": "every variable in shares " + ", ".join(f"{s:g}" for s in next(iter(shares))[:MAX_SHOWN_SHARES])
        }
    return {"servers": f"{len(exchange.placements)} variables in pieces, each piece on one machine"}


def with_exchange(plan: Plan, exchange: Exchange, step: Step) -> Plan:
    """The data-parallel plan with gradients exchanged tensor by tensor instead of by its stages' collectives."""
    stages = tuple(dataclasses.replace(stage, collectives=()) for stage in plan.predictions.stages)
    section = _exchange_section(exchange, {v.name: v.gradient_bytes for v in step.variables})
    predictions = dataclasses.replace(plan.predictions, stages=stages)
    return dataclasses.replace(plan, predictions=predictions, exchange=section)


def _exchange_section(exchange: Exchange, gradient_bytes: dict[str, float]) -> ExchangeSection:
    """The plan section of an exchange; tensors with the same method and shares share an entry.

    Args:
        exchange: the exchange.
        gradient_bytes: bytes of each tensor's gradient.
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
            TensorExchange(tuple(names), method, round(sum(gradient_bytes[n] for n in names)), server_shares)
            for (method, server_shares), names in groups.items()
        ),
        links=tuple(
            LinkBytes(v.level, round(v.out_bytes), round(v.in_bytes), round(v.total_bytes))
            for v in exchange.traffic.by_level()
        ),
        messages=messages if fused else (),
        notes=exchange.notes,
    )
