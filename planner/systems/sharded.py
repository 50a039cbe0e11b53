"""Systems that cut every operator instead of the model's length: Tofu, Mesh-TensorFlow, GShard."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planner.errors import InfeasibleError, ShardplanError, UsageError
from planner.memory import fits
from planner.sharding import Setting as ShardingSetting
from planner.sharding import StateBytes, mesh_on
from planner.sharding.searches import ShardingAnswer, get
from planner.space import Configuration, StageChoice
from planner.space.meshes import mesh_names
from planner.systems.proposal import SOLVERS, Proposal
from planner.systems.setting import Setting
from planner.systems.types import Layouts, System
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


@dataclass(frozen=True, slots=True, eq=False)
class _Laid:
    """Layouts on a mesh of one micro-batch size, by what the search over layouts says of them."""

    mesh: Mesh
    micro_batch: int
    answer: ShardingAnswer
    iteration_s: float
    fixed_bytes: float
    room_bytes: float

    @property
    def needed_bytes(self) -> float:
        """Weights, their states, activations and workspace of a rank."""
        return self.fixed_bytes + self.answer.verdict.activation_bytes

    @property
    def fits(self) -> bool:
        return fits(self.needed_bytes, self.room_bytes)


def propose(setting: Setting, system: System) -> Iterator[Proposal]:
    """The layouts of the system's own search on each mesh with the largest micro-batches, fastest first."""
    layouts, pricer = system.layouts, setting.pricer
    if layouts is None or pricer is None:
        raise UsageError(f"{system.title} needs a model whose operators can be cut", hint="price a model by rule")
    if obstacle := _obstacle(setting, layouts):
        raise InfeasibleError(obstacle)
    laid = list(_laid(setting, layouts))
    for each in sorted((each for each in laid if each.fits), key=lambda each: (each.iteration_s, each.micro_batch)):
        slow = _slowest(setting, math.prod(each.mesh), each.micro_batch)
        costs = pricer.whole(each.micro_batch, each.mesh, each.answer.decision, slow)
        stage = StageChoice(0, setting.blocks, 1, ranks=costs.ranks, sharding=costs.sharding)
        count = setting.job.global_batch // each.micro_batch
        configuration = Configuration((stage,), 1, each.micro_batch, count, "1f1b")
        shape = " x ".join(map(str, each.mesh))
        unlike = bool(setting.cluster.device_types[: math.prod(each.mesh)].any())
        yield Proposal(
            (configuration,),
            words=f"every operator on a mesh of {shape}, micro-batch {each.micro_batch} x {count}",
            notes=("communication is not overlapped", "unlike devices share the operators: no plan file")[: 1 + unlike],
            unwritten=f"{system.title} shares every operator among unlike devices: its row has no plan file" * unlike,
        )
        if setting.fits(configuration):
            return
    raise InfeasibleError(_why(laid))


def meshes(setting: Setting, one_node: bool) -> Iterator[Mesh]:
    """Meshes over a node or over the cluster: one axis over all devices, and one axis a level.

    Where the devices do not divide the batch, so that most operators could only be repeated on all, as many as do too.
    """
    node = setting.cluster.node_size or setting.devices
    devices = min(node, setting.devices) if one_node else setting.devices
    dividing = max(d for d in range(1, devices + 1) if setting.job.global_batch % d == 0)
    if 1 < dividing < devices:
        yield (dividing,)
    yield (devices,)
    if one_node:
        return
    if 1 < node < devices and devices % node == 0:
        yield (devices // node, node)
    elif devices >= 4 and devices % 2 == 0:
        yield (devices // 2, 2)


def wide_meshes(setting: Setting, most: int = MOST_WIDTHS) -> Iterator[Mesh]:
    """A batch axis beside a model axis as wide as weights, gradients and optimizer state need, where a node is too few.

    Widths are nodes times powers of two, or thrice that; the batch axis divides the batch.
    """
    node, devices = setting.cluster.node_size or setting.devices, setting.devices
    room, states = ROOM_FOR_STATES * setting.room_bytes, _states_bytes(setting)
    widths = sorted(node * times * 2**k for times in (1, 3) for k in range(1, 1 + (devices // node).bit_length()))
    fitting = [w for w in widths if w <= devices and states <= w * room] if states > node * room else []
    for width in fitting[:most]:
        batch = max(d for d in range(1, devices // width + 1) if setting.job.global_batch % d == 0)
        yield (batch, width) if batch > 1 else (width,)


def _tried(setting: Setting, layouts: Layouts) -> list[Mesh]:
    """The meshes, of a large graph the last, and the first where it is worth it; wide ones before the last."""
    every, large = list(meshes(setting, layouts.one_node)), _large(setting)
    wide = wide_meshes(setting, 1 if large else MOST_WIDTHS) if layouts.wide else ()
    if large:
        first = layouts.line or math.prod(every[0]) < math.prod(every[-1])
        every = [*every[: int(first)], every[-1]]
    return list(dict.fromkeys([*every[:-1], *(mesh for mesh in wide if mesh != every[-1]), every[-1]]))


def _large(setting: Setting) -> bool:
    return len(setting.prices.chain.graph.nodes) > LARGE_GRAPH


def _obstacle(setting: Setting, layouts: Layouts) -> str:
    """Why no layout need be looked for; empty where some may fit."""
    graph, largest = setting.prices.chain.graph, _tried(setting, layouts)[-1]
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
    device, devices = min(setting.cluster.devices, key=lambda d: d.usable_bytes), math.prod(largest)
    share = _states_bytes(setting) / devices
    if fits(share, device.usable_bytes):
        return ""
    return (
        f"does not fit: weights, gradients and optimizer state alone are {format_bytes(share)} a device of"
        f" {format_bytes(device.memory_bytes)} when cut evenly over {devices}"
    )


def _states_bytes(setting: Setting) -> float:
    """Weights, gradients and optimizer state of the whole model, shared weights once."""
    costs = setting.costs(setting.sizes[0])
    twice = sum(tie.elements * (len(tie.blocks) - 1) for tie in costs.ties)
    return (float(costs.parameter_elements.sum()) - twice) * setting.element_bytes


def _laid(setting: Setting, layouts: Layouts) -> Iterator[_Laid]:
    """Layouts of the micro-batch sizes on all meshes.

    Raises:
        ShardplanError: no size can be searched on any mesh.
    """
    tried, large, refused, found = _tried(setting, layouts), _large(setting), InfeasibleError("no mesh"), False
    for mesh in tried:
        tries = 1 if large and len(mesh) == 1 and mesh != tried[-1] else MOST_TRIED
        try:
            for each in _on_mesh(setting, layouts, mesh, 1 if large else MOST_FITTING, tries):
                found = True
                yield each
        except ShardplanError as error:
            refused = InfeasibleError(str(error))
        except ValueError as error:
            refused = InfeasibleError(f"the tables of the search over layouts exceed what an array can hold: {error}")
    if not found:
        raise refused


def _on_mesh(setting: Setting, layouts: Layouts, mesh: Mesh, most: int, tries: int) -> Iterator[_Laid]:
    """Layouts of the micro-batch sizes on one mesh, largest first, until so many fit; others are passed over.

    Raises:
        ShardplanError: no size can be searched.
    """
    seen, fitting, limit = 0, 0, math.inf
    refused: ShardplanError | None = None
    for size in _sizes(setting, math.prod(mesh)):
        if size > limit:
            continue
        try:
            each = _searched(setting, layouts, mesh, size)
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


def _sizes(setting: Setting, devices: int) -> list[int]:
    """Micro-batch sizes, largest first, from the one whose activations would fill all devices when cut evenly."""
    if setting.fixed or setting.job.micro_batches:
        return sorted(setting.sizes, reverse=True)
    own, batch = setting.sizes[-1], setting.job.global_batch
    each = float(setting.costs(own).saved_bytes[0, -1]) / own / devices
    divisors = {d for k in range(1, math.isqrt(batch) + 1) if batch % k == 0 for d in (k, batch // k)}
    return sorted((d for d in divisors if d * each <= setting.room_bytes or d == 1), reverse=True)


def _slowest(setting: Setting, devices: int, size: int) -> int:
    """The device type that is slowest of those of the first devices."""
    types: list[int] = sorted(set(setting.cluster.device_types[:devices].tolist()))
    return max(types, key=lambda t: float(setting.prices.profiles(size)[t].forward_s.sum()))


def _searched(setting: Setting, layouts: Layouts, mesh: Mesh, size: int) -> _Laid:
    """What the system's search finds on a mesh, or, where its fastest layouts exceed the memory, its search within
    memory. Where that finds nothing, the answer exceeds the memory as little as the system's leanest layouts do.

    Raises:
        InfeasibleError: no layout is legal.
    """
    chosen, devices, costs = setting.precision, math.prod(mesh), setting.costs(size)
    types = sorted(set(setting.cluster.device_types[:devices].tolist()))
    slowest = setting.prices.profiles(size)[_slowest(setting, devices, size)]
    count = setting.job.global_batch // size
    asked = ShardingSetting(
        setting.prices.graph_at(size),
        mesh_on(setting.cluster, dict(zip(mesh_names(mesh), mesh, strict=True))),
        forward_s=slowest.forward_s,
        backward_s=slowest.backward_s,
        saved=slowest.saved,
        item_bytes=chosen.compute.bits / 8,
        state=StateBytes(chosen.weight_bytes, chosen.gradient_bytes, setting.state_bytes),
        micro_batches=count,
        sharded_states=False,
        work_s=slowest.at,
    )
    workspace = float(costs.workspace_bytes.max()) / devices
    room = float(min(setting.cluster.devices[t].usable_bytes for t in types))
    search = get(layouts.search)
    try:
        answer = search(asked, memory_bytes=room - workspace) if layouts.within_memory else search(asked)
    except InfeasibleError:
        if not layouts.within_memory:
            raise
        answer = get(layouts.within_memory)(asked)
    verdict, states = answer.verdict, _states_bytes(setting)
    part = verdict.weight_bytes / states if states else 1.0
    update_s = float(np.max(costs.update_s[types], axis=0).sum()) * part
    seconds = count * verdict.seconds + update_s
    return _Laid(mesh, size, answer, seconds, verdict.weight_bytes + workspace, room)


def _why(laid: list[_Laid]) -> str:
    """What the layouts that come nearest to fitting need."""
    least = min(laid, key=lambda each: each.needed_bytes)
    shape, states = " x ".join(map(str, least.mesh)), least.answer.verdict.weight_bytes
    return (
        f"does not fit: a device needs {format_bytes(least.needed_bytes)} of {format_bytes(least.room_bytes)},"
        f" {format_bytes(states)} of it weights, gradients and optimizer state"
        f" (mesh of {shape}, micro-batch {least.micro_batch})"
    )


SOLVERS.register("sharded", propose)
