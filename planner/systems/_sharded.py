"""Systems that cut every operator instead of the model's length: Tofu, Mesh-TensorFlow, GShard."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.errors import InfeasibleError, ShardplanError
from planner.memory import fits
from planner.sharding import Setting, StateBytes, mesh_on
from planner.sharding.problem import Choice
from planner.sharding.searches import ShardingAnswer, get
from planner.space import evaluate
from planner.space.meshes import mesh_names
from planner.space.pricer import Pricer
from planner.space.types import Candidate, Configuration, MemoryBytes, StageChoice
from planner.systems._auto import shared
from planner.systems._bench import Bench
from planner.systems._found import Found
from planner.systems._search import search
from planner.systems.types import System
from planner.units import format_bytes

MOST_TRIED, MOST_FITTING = 5, 3
"""Micro-batch sizes that are priced on a mesh, largest first, and that may fit before smaller ones are left alone.

A mesh works on one micro-batch together, so that larger ones have less to exchange for each sample.
"""

SHRINK = 8
"""How much smaller the next micro-batch is where not even the weights fit: they may lie otherwise with less to keep."""

ROOM_FOR_STATES, MOST_WIDTHS = 0.6, 2
"""Part of a device's memory that weights, gradients and optimizer state may fill, and widths that are tried."""

LARGE_GRAPH = 1000
"""With more operators only the largest micro-batch that fits is searched, on the mesh that follows the levels; where a
dimension has one axis in all tensors (`line`), the largest of all also on the line of all devices."""

WIDEST_JOIN = 8
"""Tensors that one operator may join where a search needs an almost linear graph."""


@dataclass(frozen=True, slots=True, eq=False)
class _Priced:
    mesh: tuple[int, ...]
    micro_batch: int
    count: int
    iteration_s: float
    compute_s: float
    memory: MemoryBytes
    capacity_bytes: float
    sent_bytes: float
    decision: Mapping[str, Choice]


def meshes(bench: Bench, span: str) -> Iterator[tuple[int, ...]]:
    """Meshes over a node or over the cluster: one axis over all devices, and one axis a level.

    Where the devices do not divide the batch, so that most operators could only be repeated on all, as many as do too.
    """
    node = bench.cluster.node_size or bench.devices
    devices = min(node, bench.devices) if span == "node" else bench.devices
    dividing = max(d for d in range(1, devices + 1) if bench.job.global_batch % d == 0)
    if 1 < dividing < devices:
        yield (dividing,)
    yield (devices,)
    if span == "node":
        return
    if 1 < node < devices and devices % node == 0:
        yield (devices // node, node)
    elif devices >= 4 and devices % 2 == 0:
        yield (devices // 2, 2)


def wide_meshes(bench: Bench, most: int = MOST_WIDTHS) -> Iterator[tuple[int, ...]]:
    """A batch axis beside a model axis as wide as weights, gradients and optimizer state need, where a node is too few.

    Widths are nodes times powers of two, or thrice that; the batch axis divides the batch.
    """
    node, devices = bench.cluster.node_size or bench.devices, bench.devices
    room = ROOM_FOR_STATES * min(d.usable_bytes for d in bench.cluster.devices)
    widths = sorted(node * times * 2**k for times in (1, 3) for k in range(1, 1 + (devices // node).bit_length()))
    states = _states_bytes(bench)
    fitting = [w for w in widths if w <= devices and states <= w * room] if states > node * room else []
    for width in fitting[:most]:
        batch = max(d for d in range(1, devices // width + 1) if bench.job.global_batch % d == 0)
        yield (batch, width) if batch > 1 else (width,)


def _tried(bench: Bench, system: System, large: bool) -> list[tuple[int, ...]]:
    """The meshes, of a large graph the last, and the first where it is worth it; wide ones before the last."""
    every = list(meshes(bench, system.options.get("span", "cluster")))
    wide = wide_meshes(bench, 1 if large else MOST_WIDTHS) if "wide" in system.options else ()
    if large:
        first = "line" in system.options or math.prod(every[0]) < math.prod(every[-1])
        every = [*every[: int(first)], every[-1]]
    return list(dict.fromkeys([*every[:-1], *(mesh for mesh in wide if mesh != every[-1]), every[-1]]))


@search("sharded")
def by_sharding(bench: Bench, system: System) -> Found:
    """The system's search over layouts on each mesh and the largest micro-batches."""
    found: list[_Priced] = []
    refused = ""
    joined = _widest_join(bench)
    if system.options.get("needs") == "chain" and joined[1] > WIDEST_JOIN:
        return Found(
            reason=f"the coarsened graph is no chain: {joined[0]} joins {joined[1]} tensors, "
            "and dynamic programming over their cuts does not apply"
        )
    large = len(bench.prices.chain.graph.nodes) > LARGE_GRAPH
    tried = _tried(bench, system, large)
    if tried[-1] == (1,) and system.options.get("span") == "node":
        return Found(reason="operators are cut over the devices of a node, and there is one")
    if too_large := _even_share(bench, math.prod(tried[-1])):
        return Found(reason=too_large)
    for mesh in tried:
        tries = 1 if large and len(mesh) == 1 and mesh != tried[-1] else MOST_TRIED
        try:
            found += _priced(bench, system, mesh, 1 if large else MOST_FITTING, tries)
        except ShardplanError as error:
            refused = str(error)
        except ValueError as error:
            refused = f"the tables of the search over layouts exceed what an array can hold: {error}"
    fitting = [p for p in found if fits(p.memory.total, p.capacity_bytes)]
    if not fitting:
        return Found(reason=_why(found) or refused)
    fitting.sort(key=lambda p: (p.iteration_s, p.micro_batch))
    best = fitting[0]
    if isinstance(bench.prices, Pricer) and not bench.cluster.device_types[: math.prod(best.mesh)].any():
        return _decided(bench, bench.prices, fitting)
    return Found(
        plan=_words(best),
        iteration_s=best.iteration_s,
        memory=best.memory,
        capacity_bytes=best.capacity_bytes,
        bubble=max(0.0, 1 - best.compute_s / best.iteration_s),
        sent_bytes=best.sent_bytes,
        devices=math.prod(best.mesh),
        micro_batch=best.micro_batch,
        notes=("communication is not overlapped", "unlike devices share the operators: no plan file"),
    )


def _words(priced: _Priced) -> str:
    shape = " x ".join(str(n) for n in priced.mesh)
    return f"every operator on a mesh of {shape}, micro-batch {priced.micro_batch} x {priced.count}"


def _decided(bench: Bench, prices: Pricer, fitting: Sequence[_Priced]) -> Found:
    """The first that fits as the joint search judges it: one stage whose ranks share every operator."""
    reason = ""
    for priced in fitting:
        costs = prices.whole(priced.micro_batch, priced.mesh, priced.decision)
        stage = StageChoice(0, bench.blocks, 1, recompute=False, ranks=costs.ranks, sharding=costs.sharding)
        decision = Configuration((stage,), 1, priced.micro_batch, priced.count, "1f1b")
        evaluation = evaluate(costs, bench.cluster, bench.open_job(bench.job.global_batch), decision)
        reason = reason or "; ".join(v.message for v in evaluation.violations)
        if evaluation.feasible:
            found = shared(bench, Candidate("best", decision, evaluation))
            return replace(found, plan=_words(priced), notes=("communication is not overlapped",))
    return Found(reason=reason)


def _states_bytes(bench: Bench) -> float:
    """Weights, gradients and optimizer state of the whole model."""
    chosen = bench.precision
    each = chosen.weight_bytes + chosen.gradient_bytes + bench.state_bytes
    return float(bench.tables(bench.sizes[0]).elements[0, -1]) * each


def _even_share(bench: Bench, devices: int) -> str:
    """Why not even a model cut evenly over all devices fits; empty where it may."""
    share = _states_bytes(bench) / devices
    device = min(bench.cluster.devices, key=lambda d: d.usable_bytes)
    if fits(share, device.usable_bytes):
        return ""
    return (
        f"does not fit: weights, gradients and optimizer state alone are {format_bytes(share)} a device of"
        f" {format_bytes(device.memory_bytes)} when cut evenly over {devices}"
    )


def _why(found: list[_Priced]) -> str:
    """What the plan that comes nearest to fitting needs."""
    least = min(found, key=lambda p: p.memory.total, default=None)
    if least is None:
        return ""
    states = least.memory.weights + least.memory.gradients + least.memory.optimizer
    shape = " x ".join(str(n) for n in least.mesh)
    return (
        f"does not fit: a device needs {format_bytes(least.memory.total)} of {format_bytes(least.capacity_bytes)},"
        f" {format_bytes(states)} of it weights, gradients and optimizer state"
        f" (mesh of {shape}, micro-batch {least.micro_batch})"
    )


def _priced(bench: Bench, system: System, mesh: tuple[int, ...], most: int, tries: int = MOST_TRIED) -> list[_Priced]:
    """Plans of the micro-batch sizes on one mesh, largest first, until so many fit; sizes that cannot are passed over.

    Raises:
        ShardplanError: no size can be searched.
    """
    found: list[_Priced] = []
    fit, refused, limit = 0, None, math.inf
    for size in _sizes(bench, math.prod(mesh)):
        if size > limit:
            continue
        try:
            price = _price(bench, system, mesh, size)
        except ShardplanError as error:
            refused = error
            continue
        found.append(price)
        room = price.capacity_bytes - price.memory.total + price.memory.activations
        fit += fits(price.memory.total, price.capacity_bytes)
        if fit >= most or len(found) >= tries:
            break
        if room <= 0:
            limit = max(1.0, size / SHRINK)
        elif price.memory.activations > room:
            limit = max(1.0, size * room / price.memory.activations)
    if not found and refused is not None:
        raise refused
    return found


def _sizes(bench: Bench, devices: int) -> list[int]:
    """Micro-batch sizes, largest first, from the one whose activations would fill all devices when cut evenly."""
    if bench.fixed or bench.job.micro_batches:
        return sorted(bench.sizes, reverse=True)
    own, batch = bench.sizes[-1], bench.job.global_batch
    each = float(bench.tables(own).saved[0, -1]) / own / devices
    most = min(d.usable_bytes for d in bench.cluster.devices)
    divisors = {d for k in range(1, math.isqrt(batch) + 1) if batch % k == 0 for d in (k, batch // k)}
    return sorted((d for d in divisors if d * each <= most or d == 1), reverse=True)


def _widest_join(bench: Bench) -> tuple[str, int]:
    """The operator with the most computed operands, and how many."""
    graph = bench.prices.chain.graph
    counts = [sum(name in graph.producer for name in node.inputs if name) for node in graph.nodes]
    at = max(range(len(counts)), key=counts.__getitem__)
    return graph.nodes[at].name or graph.nodes[at].key, counts[at]


def _layouts(system: System, setting: Setting, room: float) -> ShardingAnswer:
    """What the system's search finds, or, where its fastest layouts exceed the memory, its search within memory.

    Where that finds nothing, the answer exceeds the memory as little as the system's leanest layouts do.

    Raises:
        InfeasibleError: no layout is legal.
    """
    search = get(system.options["layouts"])
    if "within_memory" not in system.options:
        return search(setting)
    try:
        return search(setting, memory_bytes=room)
    except InfeasibleError:
        return get(system.options["within_memory"])(setting)


def _price(bench: Bench, system: System, mesh: tuple[int, ...], size: int) -> _Priced:
    chosen, devices = bench.precision, math.prod(mesh)
    types = sorted(set(bench.cluster.device_types[:devices].tolist()))
    profiles = bench.prices.profiles(size)
    slowest = max((profiles[t] for t in types), key=lambda p: float(p.forward_s.sum()))
    count = bench.job.global_batch // size
    state = StateBytes(chosen.weight_bytes, chosen.gradient_bytes, bench.state_bytes)
    setting = Setting(
        bench.prices.graph_at(size),
        mesh_on(bench.cluster, dict(zip(mesh_names(mesh), mesh, strict=True))),
        forward_s=slowest.forward_s,
        backward_s=slowest.backward_s,
        saved=slowest.saved,
        item_bytes=chosen.compute.bits / 8,
        state=state,
        micro_batches=count,
        sharded_states=False,
        work_s=slowest.at,
    )
    device = min((bench.cluster.devices[t] for t in types), key=lambda d: d.usable_bytes)
    room = device.usable_bytes - float(bench.tables(size).workspace[0, -1]) / devices
    answer = _layouts(system, setting, room)
    verdict = answer.verdict
    whole = float(bench.tables(size).elements[0, -1]) * (state.weight + state.gradient + state.optimizer)
    part = verdict.weight_bytes / whole if whole else 1.0
    update_s = float(bench.costs(size).update_s[types].max(axis=0).sum()) * part
    bytes_a_state = verdict.weight_bytes / (state.weight + state.gradient + state.optimizer)
    memory = MemoryBytes(
        bytes_a_state * state.weight,
        bytes_a_state * state.gradient,
        bytes_a_state * state.optimizer,
        verdict.activation_bytes,
        float(bench.tables(size).workspace[0, -1]) / devices,
        float(device.reserve_bytes),
    )
    return _Priced(
        mesh,
        size,
        count,
        count * verdict.seconds + update_s,
        count * verdict.compute_s + update_s,
        memory,
        float(device.memory_bytes),
        verdict.sent_bytes * devices * count,
        answer.decision,
    )
