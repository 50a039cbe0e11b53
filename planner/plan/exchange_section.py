"""How gradients travel by an exchange scheme, as a section of a plan."""

from __future__ import annotations

from planner.plan.system_sections import ExchangeSection, FusedMessage, LinkBytes, TensorExchange
from planner.plan.words import significant
from planner.sync import Exchange


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
