"""Search tensor layouts of all operators over device meshes and micro-batch sizes, for systems that cut every operator.

Each mesh and size is solved by one of the searches of `planner.sharding`.
"""

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
from planner.space.cuts import divisors
from planner.space.jobs import mesh_names, precision_of
from planner.space.pricer import Pricer
from planner.space.types import Job
from planner.units import format_bytes

MAX_TRIED, ENOUGH_FITTING = 5, 3
"""Most micro-batch sizes that are searched on a mesh, largest first, and the number that must fit to stop earlier.

All ranks of a mesh work on one micro-batch, so larger ones exchange less per sample.
"""

SHRINK = 8
"""Factor by which the next micro-batch is smaller if the weights do not fit: fewer activations allow other layouts."""

ROOM_FOR_STATES, MAX_WIDTHS = 0.6, 2
"""Fraction of a device's memory that weights, gradients and optimizer state may fill, and most mesh widths tried."""

LARGE_GRAPH = 1000
"""Operators above which only the largest micro-batch that fits is searched, on the mesh that follows the levels.

Systems that give a dimension the same axis in all tensors (`line`) also try the largest size on one axis of all
devices."""

MAX_JOIN = 8
"""Most computed inputs of one operator for searches that need an almost linear graph."""

Mesh = tuple[int, ...]
"""Ranks along each axis, outermost first."""


@dataclass(frozen=True, slots=True)
class Layouts:
    """How a system that cuts every operator searches for layouts.

    Attributes:
        search: a name in `planner.sharding.searches`.
        within_memory: a second search for when the layouts of the first exceed memory; empty for none.
        one_node: use the devices of one node only.
        chain: the search needs a coarsened graph that is almost linear.
        line: also try one axis over all devices for large graphs.
        wide: also try a model axis over several nodes if a node has too little memory.
    """

    search: str
    within_memory: str = ""
    one_node: bool = False
    chain: bool = False
    line: bool = False
    wide: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class MeshLayouts:
    """Result of a search over layouts on one mesh at one micro-batch size.

    Attributes:
        mesh: ranks along each axis.
        micro_batch: samples of a micro-batch.
        answer: the answer of the search.
        slowest: the device type that sets the pace.
        iteration_s: time of the global batch.
        fixed_bytes: weights, their states and workspace of a rank, without activations.
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
        """True if a rank's memory suffices."""
        return fits(self.needed_bytes, self.room_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class LayoutTask:
    """The model, cluster and job to search layouts for.

    Attributes:
        prices: prices of the model.
        cluster: the cluster.
        job: global batch, precision and optimizer.
        devices: number of devices used, in line.
        sizes: micro-batch sizes that were priced.
        only: only these sizes are allowed; else every divisor of the global batch whose activations may fit.
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
        return float(self.cluster.smallest_bytes)

    @property
    def large(self) -> bool:
        """True if the graph has more than `LARGE_GRAPH` operators."""
        return len(self.prices.graph.nodes) > LARGE_GRAPH


def search_layouts(task: LayoutTask, layouts: Layouts) -> list[MeshLayouts]:
    """Search layouts on all meshes and return those that fit, fastest first.

    Raises:
        InfeasibleError: none fits, or none can fit; says why.
        ShardplanError: no size can be searched on any mesh.
    """
    if obstacle := _obstacle(task, layouts):
        raise InfeasibleError(obstacle)
    searched = list(_layouts_on_all_meshes(task, layouts))
    fitting = sorted(
        (candidate for candidate in searched if candidate.fits),
        key=lambda candidate: (candidate.iteration_s, candidate.micro_batch),
    )
    if not fitting:
        raise InfeasibleError(_memory_message(searched))
    return fitting


def _obstacle(task: LayoutTask, layouts: Layouts) -> str:
    """Why no layout can fit, without a search; empty if one may."""
    graph, largest = task.prices.graph, tried_meshes(task, layouts)[-1]
    joins = [sum(name in graph.producer for name in node.inputs if name) for node in graph.nodes]
    widest = max(range(len(joins)), key=joins.__getitem__)
    if layouts.chain and joins[widest] > MAX_JOIN:
        name = graph.nodes[widest].name or graph.nodes[widest].key
        return (
            f"the coarsened graph is no chain: {name} joins {joins[widest]} tensors, "
            "and dynamic programming over their cuts does not apply"
        )
    if largest == (1,) and layouts.one_node:
        return "operators are cut over the devices of a node, and there is one"
    return uneven_share(task.states_bytes, task.cluster, math.prod(largest))


def uneven_share(states_bytes: float, cluster: Cluster, devices: int) -> str:
    """A message if the model's state does not fit even when cut evenly over so many devices; else empty."""
    share, device = states_bytes / devices, min(cluster.devices, key=lambda d: d.usable_bytes)
    if fits(share, device.usable_bytes):
        return ""
    return (
        f"does not fit: weights, gradients and optimizer state alone are {format_bytes(share)} a device when cut evenly"
        f" over {devices}, of {format_bytes(device.capacity_bytes)}"
    )


def _memory_message(layouts: list[MeshLayouts]) -> str:
    """A message about the memory that the leanest layouts need."""
    leanest = min(layouts, key=lambda candidate: candidate.needed_bytes)
    shape, states = " x ".join(map(str, leanest.mesh)), leanest.answer.verdict.weight_bytes
    return (
        f"does not fit: a device needs {format_bytes(leanest.needed_bytes)} of {format_bytes(leanest.room_bytes)},"
        f" {format_bytes(states)} of it weights, gradients and optimizer state"
        f" (mesh of {shape}, micro-batch {leanest.micro_batch})"
    )


def _layouts_on_all_meshes(task: LayoutTask, layouts: Layouts) -> Iterator[MeshLayouts]:
    """Yield layouts of the micro-batch sizes on all meshes.

    Raises:
        ShardplanError: no size can be searched on any mesh.
    """
    meshes_tried, large, refused, any_found = tried_meshes(task, layouts), task.large, InfeasibleError("no mesh"), False
    for mesh in meshes_tried:
        tries = 1 if large and len(mesh) == 1 and mesh != meshes_tried[-1] else MAX_TRIED
        try:
            for candidate in _on_mesh(task, layouts, mesh, 1 if large else ENOUGH_FITTING, tries):
                any_found = True
                yield candidate
        except ShardplanError as error:
            refused = InfeasibleError(str(error))
        except ValueError as error:
            refused = InfeasibleError(f"the tables of the search over layouts exceed what an array can hold: {error}")
    if not any_found:
        raise refused


def meshes(task: LayoutTask, one_node: bool) -> Iterator[Mesh]:
    """Meshes over a node or over the cluster: one axis over all devices, and one axis per level.

    If the number of devices does not divide the batch, most operators could only be replicated on them. Then the
    largest number that divides it is tried too.
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


def wide_meshes(task: LayoutTask, limit: int = MAX_WIDTHS) -> Iterator[Mesh]:
    """Meshes of a batch axis and a model axis over several nodes, wide enough for the model state; none if a node is.

    Widths are the node size times 2^k or 3 * 2^k; the batch axis divides the batch.
    """
    node, devices = task.cluster.node_size or task.devices, task.devices
    room_bytes, state_bytes = ROOM_FOR_STATES * task.room_bytes, task.states_bytes
    widths = sorted(node * times * 2**k for times in (1, 3) for k in range(1, 1 + (devices // node).bit_length()))
    if state_bytes <= node * room_bytes:
        return
    fitting = [w for w in widths if w <= devices and state_bytes <= w * room_bytes]
    for width in fitting[:limit]:
        batch = max(d for d in range(1, devices // width + 1) if task.job.global_batch % d == 0)
        yield (batch, width) if batch > 1 else (width,)


def tried_meshes(task: LayoutTask, layouts: Layouts) -> list[Mesh]:
    """All meshes to try, wide ones before the last; of a large graph only the last, and the first if it is worth it."""
    usual, large = list(meshes(task, layouts.one_node)), task.large
    wide = wide_meshes(task, 1 if large else MAX_WIDTHS) if layouts.wide else ()
    if large:
        first = layouts.line or math.prod(usual[0]) < math.prod(usual[-1])
        usual = [*usual[: int(first)], usual[-1]]
    *before, last = usual
    return list(dict.fromkeys([*before, *(mesh for mesh in wide if mesh != last), last]))


def _on_mesh(task: LayoutTask, layouts: Layouts, mesh: Mesh, enough: int, tries: int) -> Iterator[MeshLayouts]:
    """Yield layouts of the micro-batch sizes on one mesh, largest first, until `enough` fit or `tries` were searched.

    Raises:
        ShardplanError: no size can be searched.
    """
    searched, fitting, limit = 0, 0, math.inf
    refused: ShardplanError | None = None
    for size in _sizes(task, math.prod(mesh)):
        if size > limit:
            continue
        try:
            candidate = _searched(task, layouts, mesh, size)
        except ShardplanError as error:
            refused = error
            continue
        yield candidate
        searched, fitting = searched + 1, fitting + candidate.fits
        if fitting >= enough or searched >= tries:
            return
        left_bytes = candidate.room_bytes - candidate.fixed_bytes
        activation_bytes = candidate.answer.verdict.activation_bytes
        if left_bytes <= 0:
            limit = max(1.0, size / SHRINK)
        elif activation_bytes > left_bytes:
            limit = max(1.0, size * left_bytes / activation_bytes)
    if not searched and refused is not None:
        raise refused


def _sizes(task: LayoutTask, devices: int) -> list[int]:
    """Micro-batch sizes, largest first, whose activations fit all devices when cut evenly."""
    if task.only:
        return sorted(task.sizes, reverse=True)
    priced_size, batch = task.sizes[-1], task.job.global_batch
    bytes_per_sample = float(task.prices.costs(priced_size).saved_bytes[0, -1]) / priced_size / devices
    return sorted((d for d in divisors(batch) if d * bytes_per_sample <= task.room_bytes or d == 1), reverse=True)


def _searched(task: LayoutTask, layouts: Layouts, mesh: Mesh, size: int) -> MeshLayouts:
    """Run the system's search on a mesh, and its search within memory if the first finds nothing that fits.

    The second search may return layouts that exceed memory; they are then the system's leanest.

    Raises:
        InfeasibleError: no layout is legal.
    """
    precision, devices, costs = precision_of(task.job, task.cluster), math.prod(mesh), task.prices.costs(size)
    types: list[int] = sorted(set(task.cluster.device_types[:devices].tolist()))
    profiles = task.prices.profiles(size)
    slowest_type = max(types, key=lambda t: float(profiles[t].forward_s.sum()))
    slowest_profile = profiles[slowest_type]
    count = task.job.global_batch // size
    setting = ShardingSetting(
        task.prices.graph_at(size),
        mesh_on(task.cluster, dict(zip(mesh_names(mesh), mesh, strict=True))),
        forward_s=slowest_profile.forward_s,
        backward_s=slowest_profile.backward_s,
        saved=slowest_profile.saved,
        item_bytes=precision.compute.bits / 8,
        state=StateBytes(
            precision.held_weight_bytes,
            precision.held_gradient_bytes,
            optimizer_state_bytes(task.job.optimizer, precision),
        ),
        micro_batches=count,
        sharded_states=False,
        work_s=slowest_profile.at,
    )
    workspace = float(costs.workspace_bytes.max()) / devices
    room = float(min(task.cluster.devices[t].usable_bytes for t in types))
    search = get(layouts.search)
    try:
        answer = search(setting, memory_bytes=room - workspace) if layouts.within_memory else search(setting)
    except InfeasibleError:
        if not layouts.within_memory:
            raise
        answer = get(layouts.within_memory)(setting)
    verdict, states = answer.verdict, task.states_bytes
    held_fraction = verdict.weight_bytes / states if states else 1.0
    update_s = float(np.max(costs.update_s[types], axis=0).sum()) * held_fraction
    seconds = count * verdict.seconds + update_s
    return MeshLayouts(mesh, size, answer, slowest_type, seconds, verdict.weight_bytes + workspace, room)
