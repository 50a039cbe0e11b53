"""The objective `iteration-time` for Piper instances and PipeDream profiles: synchronous pipelines on meshes.

Layers are in topological order; a stage is a run of layers on a mesh of its own. A mesh of d x t devices splits every
micro-batch over d replicas of t tensor-parallel devices. The tables hold the cost of every stage on every mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from planner.errors import JobError, PlanError
from planner.graph import numbered_line
from planner.hardware.tiers import moved_bytes
from planner.hardware.types import Collective
from planner.published.families import Instance, Objective
from planner.published.options import PartitionOptions
from planner.published.plan_file import Part
from planner.published.problems import (
    IterationDecision,
    IterationProblem,
    LayerDag,
    MeshStage,
    PartitionVerdict,
    PiperProblem,
    boundary_levels,
)
from planner.space.blocks import range_sums

_MOST_STAGES = 40_000_000
"""Most pairs of stage and mesh in the tables: about 1 GB."""
_KEPT_PER_WEIGHT = 3.0
"""Bytes kept per byte of weights: one version of the weights, gradients, momentum."""


def piper_iteration(problem: PiperProblem, options: PartitionOptions) -> IterationProblem:
    """The iteration problem of a Piper instance; each micro-batch is split over the replicas of a stage.

    With p, w, a, b of the choices and the transfer of `PiperProblem`, a stage of d replicas takes (sum p) / d +
    (transfer / d + 4 (d-1) / d / N * sum w) / B per micro-batch, and keeps sum b + in flight * sum a / d.
    """
    order = numbered_line(problem.node_count, problem.edges.tolist())
    choices = [
        (1 << power, *ways)
        for ways in _uniform_choices(problem, order)
        for power in range((problem.devices // ways[0]).bit_length())
    ]
    _check_size(problem.node_count, len(choices))
    place, names = np.argsort(order), []
    time_s, fixed, activation = np.zeros((3, problem.node_count, problem.node_count, len(choices)))
    for c, (d, tensor, name, choice) in enumerate(choices):
        work, weights = range_sums(problem.time_s[choice]), range_sums(problem.weight_bytes[choice])
        exchange = 2 * moved_bytes(Collective.ALL_REDUCE, 1.0, d) / problem.batch * weights
        moved = _transfers(problem, place, choice)
        time_s[:, :, c] = work / d + (moved / d + exchange) / problem.bandwidth_bytes_per_s
        fixed[:, :, c] = range_sums(problem.fixed_bytes[choice])
        activation[:, :, c] = range_sums(problem.activation_bytes[choice]) / d
        names.append((f"{d} x {tensor}" if tensor > 1 else f"{d}") + " devices" + (f", {name}" if name else ""))
    return IterationProblem(
        time_s=_upper(time_s), config_devices=np.array([d * t for d, t, _, _ in choices]), devices=problem.devices,
        micro_batches=problem.batch, fixed_bytes=fixed, activation_bytes=activation,
        memory_bytes=problem.memory_bytes, use_all=not options.idle, names=tuple(names),
    )  # fmt: skip


def _uniform_choices(problem: PiperProblem, order: Sequence[int]) -> Iterator[tuple[int, str, np.ndarray]]:
    """Tensor degree, name, and [n] choice of each node in order, for every choice that all nodes have at a degree."""
    names = problem.choice_names or ("",) * len(problem.choice_node)
    for tensor in problem.tensor_degrees:
        by_name: dict[str, dict[int, int]] = {}
        for index in np.flatnonzero(problem.choice_tensor == tensor).tolist():
            by_name.setdefault(names[index], {}).setdefault(int(problem.choice_node[index]), index)
        for name, choice_of in by_name.items():
            if len(choice_of) == problem.node_count:
                yield tensor, name, np.array([choice_of[node] for node in order])


def layer_iteration(layers: LayerDag, options: PartitionOptions) -> IterationProblem:
    """The iteration problem of a profile on data-parallel meshes; a profiled minibatch is a micro-batch.

    A stage of d replicas takes compute / d + 2 (d-1) / d * weights / B / M per micro-batch: the exchange of gradients,
    once per iteration, is divided by its M micro-batches. A boundary takes 2 * bytes / B over the links it crosses. A
    mesh no larger than a server is priced with the server's links, as if it never straddled two servers.
    """
    machines, rates = options.machines or (1,), options.bandwidth_byte_per_s or (math.inf,)
    devices, micro_batches = math.prod(machines), options.batch or 1
    sizes = _mesh_sizes(machines)
    _check_size(layers.count, len(sizes))
    work, weights, saved = (range_sums(v) for v in (layers.compute_s, layers.weight_bytes, layers.saved_bytes))
    live = _live_bytes(layers)
    time_s, fixed, activation = [], [], []
    for d in sizes:
        level = next(i for i in range(len(machines)) if d <= math.prod(machines[: i + 1]))
        time_s.append(work / d + moved_bytes(Collective.ALL_REDUCE, weights, d) / rates[level] / micro_batches)
        fixed.append(_KEPT_PER_WEIGHT * weights)
        activation.append((saved + live[:, None]) / d)
    groups = tuple(math.prod(machines[: i + 1]) for i in range(len(machines) - 1))
    boundary = np.stack([2 * live / rate for rate in rates]) if options.transfers else None
    return IterationProblem(
        time_s=_upper(np.stack(time_s, axis=2)), config_devices=np.array(sizes), devices=devices,
        micro_batches=micro_batches, fixed_bytes=np.stack(fixed, axis=2), activation_bytes=np.stack(activation, axis=2),
        memory_bytes=math.inf if options.memory_bytes is None else options.memory_bytes, boundary_s=boundary,
        boundary_level=boundary_levels(devices, groups) if options.transfers else None, use_all=not options.idle,
        names=tuple(f"{size} devices" for size in sizes),
    )  # fmt: skip


def iteration_objective(
    options: frozenset[str],
    settle: Callable[[Instance, PartitionOptions], PartitionOptions],
    problem: Callable[[Instance, PartitionOptions], IterationProblem],
    order: Callable[[Instance], Sequence[int]],
) -> Objective:
    """The objective of a family; `order` gives the positions of an instance's layers in topological order."""
    return Objective(
        name="iteration-time",
        unit="s",
        options=options,
        settle=settle,
        problem=problem,
        encode=lambda instance, costs, decision, verdict: _encode(instance, costs, decision, verdict, order(instance)),
        decode=lambda instance, costs, parts: _decode(instance, costs, parts, order(instance)),
    )


def _encode(
    instance: Instance,
    problem: IterationProblem,
    decision: IterationDecision,
    verdict: PartitionVerdict,
    order: Sequence[int],
) -> tuple[Part, ...]:
    """The stages as parts; `order` are the positions of the layers."""
    parts = []
    for stage, value, kept_bytes in zip(decision, verdict.parts, verdict.kept_bytes, strict=True):
        devices, name = int(problem.config_devices[stage.config]), problem.names[stage.config]
        nodes = instance.ranges(order[stage.first : stage.last + 1])
        parts.append(Part("stage", nodes, value, kept_bytes, devices=devices, configuration=name))
    return tuple(parts)


def _decode(
    instance: Instance, problem: IterationProblem, parts: Sequence[Part], order: Sequence[int]
) -> IterationDecision:
    """The stages of a plan's parts.

    Raises:
        PlanError: a part's nodes are not consecutive layers, or its configuration is unknown.
    """
    place = {position: number for number, position in enumerate(order)}
    stages = []
    for number, part in enumerate(parts):
        layers = sorted(place[position] for position in instance.positions(part.nodes))
        if not layers or layers != list(range(layers[0], layers[-1] + 1)):
            raise PlanError(f"the nodes of stage {number} do not follow each other", where=instance.name)
        if part.configuration not in problem.names:
            raise PlanError(f"stage {number} runs as {part.configuration!r}, which is unknown", where=instance.name)
        stages.append(MeshStage(layers[0], layers[-1], problem.names.index(part.configuration)))
    return tuple(stages)


def _check_size(layers: int, meshes: int) -> None:
    """Refuse tables that would exhaust memory.

    Raises:
        JobError: there are more than `_MOST_STAGES` pairs of stage and mesh.
    """
    if layers * layers * meshes > _MOST_STAGES:
        raise JobError(
            f"{layers} layers on {meshes} kinds of meshes make {layers * layers * meshes:,} stages; "
            f"{_MOST_STAGES:,} are the most that can be priced",
            hint="plan for fewer devices or for fewer layers",
        )


def _transfers(problem: PiperProblem, place: np.ndarray, choice: np.ndarray) -> np.ndarray:
    """[L, L] bytes on the cut edges of a stage, both ways."""
    count = len(place)
    moved = np.zeros((count, count))
    for e, (source, target) in enumerate(problem.edges.tolist()):
        u, v = int(place[source]), int(place[target])
        entering = 2 * (problem.edge_bytes[e] + problem.input_sync_bytes[choice[v], e])
        leaving = 2 * (problem.edge_bytes[e] + problem.output_sync_bytes[choice[u], e])
        moved[u + 1 : v + 1, v:] += entering
        moved[: u + 1, u:v] += leaving
    return moved


def _upper(table: np.ndarray) -> np.ndarray:
    """The table with infinity below the diagonal, where there is no stage."""
    table[np.tri(len(table), k=-1, dtype=bool)] = math.inf
    return table


def _live_bytes(layers: LayerDag) -> np.ndarray:
    """[L] bytes across the boundary before each layer, one way, each result once."""
    last_reader = np.arange(layers.count)
    np.maximum.at(last_reader, layers.edges[:, 0], layers.edges[:, 1])
    read = np.bincount(last_reader, layers.output_bytes)
    return np.maximum(np.cumsum(layers.output_bytes - read) - (layers.output_bytes - read), 0.0)


def _mesh_sizes(machines: tuple[int, ...]) -> list[int]:
    """Devices of the meshes: powers of two inside a lowest unit, and any number of whole units under one parent."""
    sizes = {1 << k for k in range(machines[0].bit_length()) if 1 << k <= machines[0]} | {machines[0]}
    unit = machines[0]
    for count in machines[1:]:
        sizes |= {unit * n for n in range(1, count + 1)}
        unit *= count
    return sorted(sizes)
