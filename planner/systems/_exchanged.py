"""Data parallelism whose gradients travel by a scheme of `planner.sync`: BytePS, Herring, Parallax."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.errors import HardwareError, JobError, UsageError
from planner.memory import fits
from planner.space.types import MemoryBytes
from planner.sync import Exchange, Scheme, Servers, Step, fabric_of, get, step_of
from planner.sync.fabric import HOST_SUM_BYTE_PER_S
from planner.systems._bench import Bench
from planner.systems._found import Found
from planner.systems._links import links_of, sent_of
from planner.systems._search import search
from planner.systems.types import System
from planner.units import format_bytes, format_seconds

HOST_WAY_BYTE_PER_S = 12.8e9
"""From a device to its host's memory and back, each way: PCIe 3 x16 at 80 %. An estimate: profiles do not say it."""


@dataclass(frozen=True, slots=True, eq=False)
class Priced:
    """Data parallelism at one micro-batch size: `count` of them on each replica; `compute_s` has the update in it."""

    micro_batch: int
    replicas: int
    count: int
    iteration_s: float
    compute_s: float
    memory: MemoryBytes
    capacity_bytes: float
    exchange: Exchange | None
    notes: tuple[str, ...] = ()
    step: Step | None = None


@search("exchanged")
def by_exchange(bench: Bench, system: System) -> Found:
    """Each micro-batch size on as many devices as share the batch; gradients overlap with the last backward."""
    found, refused = [], ""
    for size in bench.sizes:
        try:
            found.append(price_exchange(bench, system, size))
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
    ways = (", ".join(kinds[:-1]) + " and " if len(kinds) > 1 else "") + (kinds[-1] if kinds else "no exchange")
    copies = f"{best.replicas} replicas" if best.replicas > 1 else "1 device"
    plan = f"{copies}, micro-batch {best.micro_batch} x {best.count}" + (f", {ways}" if best.replicas > 1 else "")
    return Found(
        plan=plan,
        iteration_s=best.iteration_s,
        memory=best.memory,
        capacity_bytes=best.capacity_bytes,
        bubble=1 - best.compute_s / best.iteration_s,
        sent_bytes=sent_of(exchange.traffic),
        devices=best.replicas,
        micro_batch=best.micro_batch,
        tells=_placements(exchange),
        notes=(*notes, *exchange.notes, *best.notes),
        links=links_of(exchange.traffic),
        alters=_alters(bench, exchange),
    )


def _alters(bench: Bench, exchange: Exchange) -> str:
    """Rows on servers that nobody looked up keep their momentum, where the optimizer has one."""
    if bench.job.optimizer == "sgd" or "ps" not in exchange.methods.values():
        return ""
    return f"{bench.job.optimizer} updates only the rows that were looked up"


def _placements(exchange: Exchange) -> dict[str, str]:
    """Which machines serve what, in a line: as many variables as they are alike."""
    if not exchange.placements:
        return {}
    shares = {tuple(round(s, 4) for s in p.shares) for p in exchange.placements}
    if len(shares) == 1:
        return {"servers": "every variable in shares " + ", ".join(f"{s:g}" for s in next(iter(shares))[:8])}
    return {"servers": f"{len(exchange.placements)} variables in pieces, each piece on one machine"}


def price_exchange(bench: Bench, system: System, size: int) -> Priced:
    """Data parallelism at one micro-batch size; `exchange` is None where a replica does not fit.

    Raises:
        JobError: the size does not divide the global batch.
        UsageError: the scheme cannot run on the cluster.
        HardwareError: the exchange takes for ever.
    """
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
    scheme, servers = _scheme(system, -(-replicas // (cluster.node_size or 1)))
    fabric = fabric_of(cluster, range(replicas), servers)
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
    if not fits(memory.total, capacity):
        return Priced(size, replicas, count, math.inf, 0.0, memory, capacity, None)
    exchange = scheme.price(fabric, step)
    work_s = count * float((costs.forward_s + costs.backward_s)[slow].sum())
    charged = float(costs.parameter_elements.sum())
    update_s = float(costs.update_s[slow].sum()) * exchange.memory.optimizer * (elements / charged if charged else 1.0)
    host_s = _rows_s(bench, step, exchange, min(replicas, cluster.node_size or 1))
    total_s = work_s + exchange.exposed_s + update_s + host_s
    if not math.isfinite(total_s):
        raise HardwareError("the exchange takes for ever", hint="give the cluster a network")
    notes = _held(elements * (chosen.weight_bytes + bench.state_bytes) * kept.server_optimizer, host_s)
    return Priced(size, replicas, count, total_s, work_s + update_s, memory, capacity, exchange, notes, step)


def _scheme(system: System, machines: int) -> tuple[Scheme, Servers]:
    """The exchange with what the user set, and the machines without accelerators (`cpu_machines`, "n" for as many)."""
    chosen = {name: value for name, value in system.options.items() if system.tunable.get(name, value) != value}
    wanted = chosen.pop("cpu_machines", "0")
    if wanted != "n" and not wanted.isdecimal():
        raise UsageError(f"cannot read {wanted!r}", where="cpu_machines", hint="use a number, or n for as many")
    options = ",".join(f"{name}={value}" for name, value in chosen.items())
    scheme = get(f"{system.sync}:{options}" if options else system.sync)
    return scheme, Servers(machines if wanted == "n" else int(wanted))


def _rows_s(bench: Bench, step: Step, exchange: Exchange, ranks: int) -> float:
    """Seconds of what rows on servers need beside the network: ways to the devices, sums and updates in host memory.

    Nothing hides it: rows are looked up before the forward, and their gradients are complete after the backward. A
    machine's servers have as many rows to work on as its ranks touch, when partitions are spread evenly.
    """
    own = [v for v in step.variables if v.sparse and exchange.methods.get(v.name) == "ps"]
    moved = sum(v.touched * (v.gradient_bytes + v.pulled_bytes) for v in own)
    elements = sum(v.touched * v.gradient_bytes for v in own) / bench.precision.gradient_bytes
    updated = elements * (2 * bench.state_bytes + bench.precision.gradient_bytes + bench.precision.weight_bytes)
    accesses_byte_per_s = 3 * HOST_SUM_BYTE_PER_S  # a sum is three accesses
    return moved / ranks / HOST_WAY_BYTE_PER_S + moved / HOST_SUM_BYTE_PER_S + updated / accesses_byte_per_s


def _held(server_bytes: float, host_s: float) -> tuple[str, ...]:
    if not server_bytes:
        return ()
    return (
        f"the fullest server holds {format_bytes(server_bytes)} in host memory, whose size profiles do not say;"
        f" rows in host memory and on the way to the devices take {format_seconds(host_s)}",
    )
