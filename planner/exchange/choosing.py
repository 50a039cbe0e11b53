"""The cheapest allowed scheme for each tensor on the actual topology."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from planner.errors import UsageError
from planner.exchange.fabric import Fabric
from planner.exchange.scheme import MEGABYTE, Scheme, merge, scheduled
from planner.exchange.types import Exchange, MemoryFactors, Step, Variable


def choose(
    fabric: Fabric, step: Step, allowed: Sequence[str] | None = None, bucket_bytes: float = 25 * MEGABYTE
) -> Exchange:
    """Take the cheapest scheme for each variable, and keep the mixture if no single scheme beats it.

    A variable is priced by itself on idle ports; one below `bucket_bytes` as its part of a bucket, since it will not
    travel alone. The mixture and each allowed scheme are then scheduled for the full step, and the one with the least
    exposed time is taken (then the fewest seconds, then the order of `allowed`), so the result is never worse than any
    allowed scheme.

    Args:
        fabric: the ranks, with servers where there are any.
        step: the training step.
        allowed: schemes, with options; None for all that exchange tensor by tensor, fit the fabric, and assume nothing
            about the hardware that its profile does not state.
        bucket_bytes: size from which a variable is priced by itself.

    Returns:
        The exchange; where schemes are mixed, its methods are theirs by variable. Its notes say which allowed schemes
        the fabric cannot run.

    Raises:
        UsageError: an unknown scheme, one that changes what training means, or none that the fabric can run.
    """
    schemes, notes = _usable(fabric, step, allowed)
    tensor_schemes = [s for s in schemes if s.per_tensor]
    candidates = [s.price(fabric, step) for s in schemes]
    if len(tensor_schemes) > 1 and step.variables:
        candidates += _mixture(fabric, step, tensor_schemes, bucket_bytes)
    best = min(candidates, key=lambda exchange: (exchange.exposed_s, exchange.seconds))
    return dataclasses.replace(best, notes=(*best.notes, *notes))


def _usable(fabric: Fabric, step: Step, allowed: Sequence[str] | None) -> tuple[list[Scheme], list[str]]:
    from planner.exchange import SCHEMES, get

    if allowed is None:
        named = [scheme for _, scheme in SCHEMES.items() if scheme.per_tensor and not scheme.assumes]
    else:
        named = [get(name) for name in dict.fromkeys(allowed)]
    stale = [s.name for s in named if not s.staleness(step).synchronous]
    if stale:
        raise UsageError(f"{stale[0]} lets weights be stale, so it is no choice beside synchronous schemes",
                         hint="price it by itself")  # fmt: skip
    reasons = {s.name: s.supports(fabric) for s in named}
    usable = [s for s in named if not reasons[s.name]]
    if not usable:
        raise UsageError("no allowed scheme can run on these ranks: " + "; ".join(reasons.values()),
                         hint="allow another, such as ring")  # fmt: skip
    return usable, [f"not {name}: {reason}" for name, reason in reasons.items() if reason]


def _prices(fabric: Fabric, step: Step, scheme: Scheme, bucket_bytes: float) -> dict[str, float]:
    """Seconds of each variable by itself; equal variables are priced once."""
    priced: dict[Variable, float] = {}
    seconds = {}
    for v in step.variables:
        size = max(v.gradient_bytes, v.pulled_bytes)
        scale = max(1.0, bucket_bytes / size) if size > 0 else 1.0
        alone = dataclasses.replace(
            v,
            name="",
            ready_s=0.0,
            gradient_bytes=v.gradient_bytes * scale,
            weight_bytes=v.pulled_bytes * scale,
        )
        if alone not in priced:
            priced[alone] = scheme.price(fabric, Step((alone,))).seconds
        seconds[v.name] = priced[alone] / scale
    return seconds


def _mixture(fabric: Fabric, step: Step, schemes: list[Scheme], bucket_bytes: float) -> list[Exchange]:
    """Every variable by the scheme with its lowest price, all on the same ports; none if one scheme has all."""
    prices = {s.name: _prices(fabric, step, s, bucket_bytes) for s in schemes}
    scheme_of = {v.name: min(prices, key=lambda name: prices[name][v.name]) for v in step.variables}
    variables_of: dict[str, list[Variable]] = {}
    for v in step.variables:
        variables_of.setdefault(scheme_of[v.name], []).append(v)
    if len(variables_of) < 2:
        return []
    used = [s for s in schemes if s.name in variables_of]
    parts = [dataclasses.replace(step, variables=tuple(variables_of[s.name])) for s in used]
    plan = merge(fabric, [s.plan_messages(fabric, part) for s, part in zip(used, parts, strict=True)])
    exchange = scheduled(used[0], step, plan)
    memories = [s.memory(fabric, part) for s, part in zip(used, parts, strict=True)]
    memory = _mean_memory(memories, parts, step)
    return [dataclasses.replace(exchange, scheme="+".join(s.name for s in used), memory=memory, methods=scheme_of)]


def _mean_memory(memories: list[MemoryFactors], parts: list[Step], step: Step) -> MemoryFactors:
    """Memory factors weighted by the bytes of each scheme; the fullest servers are taken to be the same machine."""
    total = sum(v.pulled_bytes for v in step.variables)
    if total == 0:
        return MemoryFactors()
    weights = [sum(v.pulled_bytes for v in part.variables) / total for part in parts]
    names = ("weights", "gradients", "optimizer", "server_optimizer")
    mean = {n: sum(w * getattr(m, n) for w, m in zip(weights, memories, strict=True)) for n in names}
    return MemoryFactors(**mean, transient_bytes=max(m.transient_bytes for m in memories))
