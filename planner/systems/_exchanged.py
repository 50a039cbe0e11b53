"""Data parallelism whose gradients travel by a scheme of `planner.sync`: BytePS, Herring, Parallax."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.errors import HardwareError, JobError, UsageError
from planner.space.types import MemoryBytes
from planner.sync import Exchange, fabric_of, get, step_of
from planner.systems._bench import Bench
from planner.systems._search import Found, search
from planner.systems.types import System
from planner.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, eq=False)
class _Priced:
    micro_batch: int
    replicas: int
    count: int
    iteration_s: float
    compute_s: float
    memory: MemoryBytes
    capacity_bytes: float
    exchange: Exchange | None


@search("exchanged")
def by_exchange(bench: Bench, system: System) -> Found:
    """Each micro-batch size on as many devices as share the batch; gradients overlap with the last backward."""
    found, refused = [], ""
    for size in bench.sizes:
        try:
            found.append(_price(bench, system, size))
        except (UsageError, HardwareError, JobError) as error:
            refused = str(error)
    if not found:
        return Found(reason=refused or "no micro-batch size divides the global batch")
    fitting = [(p, p.exchange) for p in found if p.exchange is not None]
    if not fitting:
        least = min(found, key=lambda p: p.memory.total)
        have = format_bytes(least.capacity_bytes)
        return Found(reason=f"a replica needs {format_bytes(least.memory.total)} of {have}")
    best, exchange = min(fitting, key=lambda e: (e[0].iteration_s, e[0].micro_batch))
    kinds = sorted(set(exchange.methods.values()))
    notes = (f"exchange {format_seconds(exchange.seconds)}, {format_seconds(exchange.exposed_s)} not hidden",)
    ways = " and ".join(kinds) or "no exchange"
    plan = f"{best.replicas} replicas, micro-batch {best.micro_batch} x {best.count}, {ways}"
    return Found(
        plan=plan,
        iteration_s=best.iteration_s,
        memory=best.memory,
        capacity_bytes=best.capacity_bytes,
        bubble=1 - best.compute_s / best.iteration_s,
        sent_bytes=sum(level.total_bytes for level in exchange.traffic.by_level()) if best.replicas > 1 else 0.0,
        devices=best.replicas,
        micro_batch=best.micro_batch,
        tells=_placements(exchange),
        notes=(*notes, *exchange.notes),
    )


def _placements(exchange: Exchange) -> dict[str, str]:
    """Which machines serve what, in a line: as many variables as they are alike."""
    if not exchange.placements:
        return {}
    shares = {tuple(round(s, 4) for s in p.shares) for p in exchange.placements}
    if len(shares) == 1:
        return {"servers": "every variable in shares " + ", ".join(f"{s:g}" for s in next(iter(shares))[:8])}
    return {"servers": f"{len(exchange.placements)} variables in pieces, each piece on one machine"}


def _price(bench: Bench, system: System, size: int) -> _Priced:
    parts, rest = divmod(bench.job.global_batch, size)
    replicas = 0 if rest else max(r for r in range(1, bench.devices + 1) if parts % r == 0)
    if not replicas:
        raise JobError("no micro-batch size divides the global batch", hint="use another")
    cluster, chosen, costs = bench.cluster, bench.precision, bench.costs(size)
    types = sorted(set(cluster.device_types[:replicas].tolist()))
    slow = max(types, key=lambda t: float((costs.forward_s + costs.backward_s)[t].sum()))
    profile = bench.prices.profiles(size)[slow]
    count = parts // replicas
    step = step_of(
        bench.prices.graph_at(size),
        profile.forward_s,
        profile.backward_s,
        gradient_bytes=chosen.gradient_bytes,
        weight_bytes=chosen.weight_bytes,
        micro_batches=count,
        lookups=count * min(replicas, cluster.node_size or 1),
    )
    fabric, scheme = fabric_of(cluster, range(replicas)), get(system.sync)
    tables, kept = bench.tables(size), scheme.memory(fabric, step)
    elements = float(tables.elements[0, -1])
    device = min((cluster.devices[t] for t in types), key=lambda d: d.usable_bytes)
    memory = MemoryBytes(
        elements * chosen.weight_bytes * kept.weights,
        elements * chosen.gradient_bytes * kept.gradients,
        elements * bench.state_bytes * kept.optimizer,
        float(tables.saved[0, -1]),
        float(tables.workspace[0, -1]) + kept.transient_bytes,
        float(device.reserve_bytes),
    )
    capacity = float(device.memory_bytes)
    if memory.total > capacity:
        return _Priced(size, replicas, count, math.inf, 0.0, memory, capacity, None)
    exchange = scheme.price(fabric, step)
    work_s = count * float((costs.forward_s + costs.backward_s)[slow].sum())
    update_s = float(costs.update_s[slow].sum()) * exchange.memory.optimizer
    total_s = work_s + exchange.exposed_s + update_s
    if not math.isfinite(total_s):
        raise HardwareError("the exchange takes for ever", hint="give the cluster a network")
    return _Priced(size, replicas, count, total_s, work_s + update_s, memory, capacity, exchange)
