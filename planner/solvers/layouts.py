"""Layouts of all operators on meshes of devices, as systems choose them that cut every operator: the searches of
`planner.sharding` over meshes and micro-batch sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planner.costs.precision import optimizer_state_bytes
from planner.errors import InfeasibleError, ShardplanError
from planner.hardware.types import Cluster
from planner.memory import fits
from planner.sharding import Setting as ShardingSetting
from planner.sharding import StateBytes, mesh_on
from planner.sharding.searches import ShardingAnswer, get
from planner.space.jobs import mesh_names, precision_of
from planner.space.pricer import Pricer
from planner.space.types import Job
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

Mesh = tuple[int, ...]
"""Ranks along each axis, outermost first."""


@dataclass(frozen=True, slots=True)
class Layouts:
    """How a system that cuts every operator looks for layouts.

    Attributes:
        search: a name in `planner.sharding.searches`.
        within_memory: the search where its fastest layouts exceed the memory; empty for none.
        one_node: on the devices of one node, as large as they are.
        chain: needs a coarsened graph that is almost linear.
        line: tries the line of all devices of large graphs too.
        wide: tries a model axis over several nodes where a node has too little memory.
    """

    search: str
    within_memory: str = ""
    one_node: bool = False
    chain: bool = False
    line: bool = False
    wide: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Laid:
    """Layouts on a mesh of one micro-batch size, by what the search over layouts says of them.

    Attributes:
        mesh: ranks along each axis.
        micro_batch: samples.
        answer: the search's.
        slowest: the device type that sets the pace.
        iteration_s: of the global batch.
        fixed_bytes: of a rank, without activations.
        room_bytes: usable memory of the smallest device.
    """

    mesh: Mesh
    micro_batch: int
    answer: ShardingAnswer
    slowest: int
    iteration_s: float
    fixed_bytes: float
    room_bytes: float

    @property
    def needed_bytes(self) -> float:
        """Weights, their states, activations and workspace of a rank."""
        return self.fixed_bytes + self.answer.verdict.activation_bytes

    @property
    def fits(self) -> bool:
        """Whether they fit, by the search."""
        return fits(self.needed_bytes, self.room_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class LayoutTask:
    """What layouts are looked for.

    Attributes:
        prices: of the model.
        cluster: the machine.
        job: global batch, precision and optimizer.
        devices: that are used, in line.
        sizes: micro-batch sizes that were priced.
        only: no other sizes are allowed; else every divisor of the global batch whose activations may fit.
        states_bytes: weights, gradients and optimizer state of the whole model.
    """

    prices: Pricer
    cluster: Cluster
    job: Job
    devices: int
    sizes: tuple[int, ...]
    only: bool
    states_bytes: float

    @property
    def room_bytes(self) -> float:
        """Usable memory of the smallest device."""
        return float(min(device.usable_bytes for device in self.cluster.devices))

    @property
    def large(self) -> bool:
        """Whether the graph is one of many operators."""
        return len(self.prices.graph.nodes) > LARGE_GRAPH


def lay_operators(task: LayoutTask, layouts: Layouts) -> list[Laid]:
    """Layouts that fit on all meshes, by what the searches over layouts say, fastest first.

    Raises:
        InfeasibleError: none fit, or none need be looked for; says why.
        ShardplanError: no size can be searched on any mesh.
    """
    if obstacle := _obstacle(task, layouts):
        raise InfeasibleError(obstacle)
    found = list(_every(task, layouts))
    fitting = sorted((each for each in found if each.fits), key=lambda each: (each.iteration_s, each.micro_batch))
    if not fitting:
        raise InfeasibleError(_why(found))
    return fitting


def _obstacle(task: LayoutTask, layouts: Layouts) -> str:
    """Why no layout need be looked for; empty where some may fit."""
    graph, largest = task.prices.graph, tried_meshes(task, layouts)[-1]
    joins = [sum(name in graph.producer for name in node.inputs if name) for node in graph.nodes]
    widest = max(range(len(joins)), key=joins.__getitem__)
    if layouts.chain and joins[widest] > WIDEST_JOIN:
        name = graph.nodes[widest].name or graph.nodes[widest].key
        return (
            f"the coarsened graph is no chain: {name} joins {joins[widest]} tensors, "
            "and dynamic programming over their cuts does not apply"
        )
    if largest == (1,) and layouts.one_node:
        return "operators are cut over the devices of a node, and there is one"
    return uneven_share(task.states_bytes, task.cluster, math.prod(largest))


def uneven_share(states_bytes: float, cluster: Cluster, devices: int) -> str:
    """That not even a model whose states are cut evenly over so many devices fits; empty where it may."""
    share, device = states_bytes / devices, min(cluster.devices, key=lambda d: d.usable_bytes)
    if fits(share, device.usable_bytes):
        return ""
    return (
        f"does not fit: weights, gradients and optimizer state alone are {format_bytes(share)} a device when cut evenly"
        f" over {devices}, of {format_bytes(device.capacity_bytes)}"
    )


def _why(laid: list[Laid]) -> str:
    """What the layouts that come nearest to fitting need."""
    least = min(laid, key=lambda each: each.needed_bytes)
    shape, states = " x ".join(map(str, least.mesh)), least.answer.verdict.weight_bytes
    return (
        f"does not fit: a device needs {format_bytes(least.needed_bytes)} of {format_bytes(least.room_bytes)},"
        f" {format_bytes(states)} of it weights, gradients and optimizer state"
        f" (mesh of {shape}, micro-batch {least.micro_batch})"
    )


def _every(task: LayoutTask, layouts: Layouts) -> Iterator[Laid]:
    """Layouts of the micro-batch sizes on all meshes.

    Raises:
        ShardplanError: no size can be searched on any mesh.
    """
    tried, large, refused, found = tried_meshes(task, layouts), task.large, InfeasibleError("no mesh"), False
    for mesh in tried:
        tries = 1 if large and len(mesh) == 1 and mesh != tried[-1] else MOST_TRIED
        try:
            for each in _on_mesh(task, layouts, mesh, 1 if large else MOST_FITTING, tries):
                found = True
                yield each
        except ShardplanError as error:
            refused = InfeasibleError(str(error))
        except ValueError as error:
            refused = InfeasibleError(f"the tables of the search over layouts exceed what an array can hold: {error}")
    if not found:
        raise refused


def meshes(task: LayoutTask, one_node: bool) -> Iterator[Mesh]:
    """Meshes over a node or over the cluster: one axis over all devices, and one axis a level.

    Where the devices do not divide the batch, so that most operators could only be repeated on all, as many as do too.
    """
    node = task.cluster.node_size or task.devices
    devices = min(node, task.devices) if one_node else task.devices
    dividing = max(d for d in range(1, devices + 1) if task.job.global_batch % d == 0)
    if 1 < dividing < devices:
        yield (dividing,)
    yield (devices,)
    if one_node:
        return
    if 1 < node < devices and devices % node == 0:
        yield (devices // node, node)
    elif devices >= 4 and devices % 2 == 0:
        yield (devices // 2, 2)


def wide_meshes(task: LayoutTask, most: int = MOST_WIDTHS) -> Iterator[Mesh]:
    """A batch axis beside a model axis as wide as weights, gradients and optimizer state need, where a node is too few.

    Widths are nodes times powers of two, or thrice that; the batch axis divides the batch.
    """
    node, devices = task.cluster.node_size or task.devices, task.devices
    room, states = ROOM_FOR_STATES * task.room_bytes, task.states_bytes
    widths = sorted(node * times * 2**k for times in (1, 3) for k in range(1, 1 + (devices // node).bit_length()))
    fitting = [w for w in widths if w <= devices and states <= w * room] if states > node * room else []
    for width in fitting[:most]:
        batch = max(d for d in range(1, devices // width + 1) if task.job.global_batch % d == 0)
        yield (batch, width) if batch > 1 else (width,)


def tried_meshes(task: LayoutTask, layouts: Layouts) -> list[Mesh]:
    """The meshes, of a large graph the last, and the first where it is worth it; wide ones before the last."""
    every, large = list(meshes(task, layouts.one_node)), task.large
    wide = wide_meshes(task, 1 if large else MOST_WIDTHS) if layouts.wide else ()
    if large:
        first = layouts.line or math.prod(every[0]) < math.prod(every[-1])
        every = [*every[: int(first)], every[-1]]
    return list(dict.fromkeys([*every[:-1], *(mesh for mesh in wide if mesh != every[-1]), every[-1]]))


def _on_mesh(task: LayoutTask, layouts: Layouts, mesh: Mesh, most: int, tries: int) -> Iterator[Laid]:
    """Layouts of the micro-batch sizes on one mesh, largest first, until so many fit; others are passed over.

    Raises:
        ShardplanError: no size can be searched.
    """
    seen, fitting, limit = 0, 0, math.inf
    refused: ShardplanError | None = None
    for size in _sizes(task, math.prod(mesh)):
        if size > limit:
            continue
        try:
            each = _searched(task, layouts, mesh, size)
        except ShardplanError as error:
            refused = error
            continue
        yield each
        seen, fitting = seen + 1, fitting + each.fits
        if fitting >= most or seen >= tries:
            return
        room, kept = each.room_bytes - each.fixed_bytes, each.answer.verdict.activation_bytes
        if room <= 0:
            limit = max(1.0, size / SHRINK)
        elif kept > room:
            limit = max(1.0, size * room / kept)
    if not seen and refused is not None:
        raise refused


def _sizes(task: LayoutTask, devices: int) -> list[int]:
    """Micro-batch sizes, largest first, from the one whose activations would fill all devices when cut evenly."""
    if task.only:
        return sorted(task.sizes, reverse=True)
    own, batch = task.sizes[-1], task.job.global_batch
    each = float(task.prices.costs(own).saved_bytes[0, -1]) / own / devices
    divisors = {d for k in range(1, math.isqrt(batch) + 1) if batch % k == 0 for d in (k, batch // k)}
    return sorted((d for d in divisors if d * each <= task.room_bytes or d == 1), reverse=True)


def _slowest_type(task: LayoutTask, devices: int, size: int) -> int:
    """The device type that is slowest of those of the first devices."""
    types: list[int] = sorted(set(task.cluster.device_types[:devices].tolist()))
    return max(types, key=lambda t: float(task.prices.profiles(size)[t].forward_s.sum()))


def _searched(task: LayoutTask, layouts: Layouts, mesh: Mesh, size: int) -> Laid:
    """What the system's search finds on a mesh, or, where its fastest layouts exceed the memory, its search within
    memory. Where that finds nothing, the answer exceeds the memory as little as the system's leanest layouts do.

    Raises:
        InfeasibleError: no layout is legal.
    """
    chosen, devices, costs = precision_of(task.job, task.cluster), math.prod(mesh), task.prices.costs(size)
    types = sorted(set(task.cluster.device_types[:devices].tolist()))
    slow = _slowest_type(task, devices, size)
    slowest = task.prices.profiles(size)[slow]
    count = task.job.global_batch // size
    asked = ShardingSetting(
        task.prices.graph_at(size),
        mesh_on(task.cluster, dict(zip(mesh_names(mesh), mesh, strict=True))),
        forward_s=slowest.forward_s,
        backward_s=slowest.backward_s,
        saved=slowest.saved,
        item_bytes=chosen.compute.bits / 8,
        state=StateBytes(
            chosen.held_weight_bytes, chosen.held_gradient_bytes, optimizer_state_bytes(task.job.optimizer, chosen)
        ),
        micro_batches=count,
        sharded_states=False,
        work_s=slowest.at,
    )
    workspace = float(costs.workspace_bytes.max()) / devices
    room = float(min(task.cluster.devices[t].usable_bytes for t in types))
    search = get(layouts.search)
    try:
        answer = search(asked, memory_bytes=room - workspace) if layouts.within_memory else search(asked)
    except InfeasibleError:
        if not layouts.within_memory:
            raise
        answer = get(layouts.within_memory)(asked)
    verdict, states = answer.verdict, task.states_bytes
    part = verdict.weight_bytes / states if states else 1.0
    update_s = float(np.max(costs.update_s[types], axis=0).sum()) * part
    seconds = count * verdict.seconds + update_s
    return Laid(mesh, size, answer, slow, seconds, verdict.weight_bytes + workspace, room)
