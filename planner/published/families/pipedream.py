"""PipeDream profiles: the objectives `time-per-minibatch` and `iteration-time` on a hierarchical cluster."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from planner.costs import imported_profile
from planner.errors import PlanError, UsageError
from planner.importers import load_graph
from planner.importers.pipedream import sniff
from planner.published.families import FAMILIES, Family, Instance, Objective
from planner.published.families._iteration import iteration_objective, layer_iteration
from planner.published.options import PartitionOptions, check_devices
from planner.published.plan_file import Part
from planner.published.problems import (
    IterationProblem,
    LayerDag,
    Memory,
    PartitionProblem,
    PartitionVerdict,
    PipeDreamProblem,
    PlacedPipelineProblem,
    PlacedStage,
    Released,
    ReplicatedStage,
    priced_layers,
    recorded_layers,
)

_MICRO_BATCHES = 64
"""Default number of micro-batches from one update to the next."""
_UNCOUNTED = {"batch-unknown"}
"""Notes of the importer that are not shown: times are per minibatch, so its number of samples is not needed."""


def _read(path: Path) -> Instance:
    graph = load_graph(path)
    return Instance(
        "pipedream",
        graph.name,
        graph.fingerprint,
        graph,
        tuple(int(node.key.removeprefix("node")) for node in graph.nodes),
        len(graph.edges),
        tuple(note.message for note in graph.report.notes if note.code not in _UNCOUNTED),
    )


def _settle(instance: Instance, options: PartitionOptions) -> PartitionOptions:
    machines = options.machines or ((options.devices,) if options.devices else None)
    if options.machines and options.devices:
        raise UsageError("--machines and --devices both say how many devices there are", hint="give one of them")
    rates = options.bandwidth_byte_per_s
    if machines is None or rates is None:
        missing = "--machines" if machines is None else "--bandwidth"
        raise UsageError(
            f"a PipeDream profile carries no machine: {missing} is missing", where=instance.name,
            hint="say --machines 4x2 --bandwidth 10GB/s,1.25GB/s, or --hardware NAME",
        )  # fmt: skip
    if len(rates) != len(machines):
        raise UsageError(
            f"{len(rates)} bandwidths for {len(machines)} levels of machines", where="--bandwidth",
            hint="give one a level, innermost first",
        )  # fmt: skip
    check_devices(math.prod(machines), "--machines" if options.machines else "--devices")
    layout = options.layout or ("nested" if len(machines) == 1 else "placed")
    return dataclasses.replace(options, machines=machines, devices=None).filled(
        memory_bytes=math.inf, cost="released", layout=layout, transfers=True, idle=layout == "placed"
    )


def layers_of(instance: Instance, cost: str | None) -> LayerDag:
    """Layers with the recorded sizes for the released cost, else with the true sizes."""
    graph = instance.content
    return recorded_layers(graph) if cost == "released" else priced_layers(graph, imported_profile(graph))


def _problem(instance: Instance, options: PartitionOptions) -> PartitionProblem:
    layers = layers_of(instance, options.cost)
    released = ~Released.NOTHING if options.cost == "released" else Released.NOTHING
    machines, rates = options.machines or (), options.bandwidth_byte_per_s or ()
    memory = Memory(math.inf if options.memory_bytes is None else options.memory_bytes)
    kind = PlacedPipelineProblem if options.layout == "placed" else PipeDreamProblem
    return kind(layers, machines, rates, released, bool(options.transfers), memory, use_all=not options.idle)


def _encode(
    instance: Instance,
    problem: PipeDreamProblem | PlacedPipelineProblem,
    decision: Sequence[ReplicatedStage | PlacedStage],
    verdict: PartitionVerdict,
) -> tuple[Part, ...]:
    kept_bytes = verdict.kept_bytes or (None,) * len(decision)
    return tuple(
        dataclasses.replace(_part(instance, problem.machines[:-1], stage), value=value, memory_bytes=kept)
        for stage, value, kept in zip(decision, verdict.parts, kept_bytes, strict=True)
    )


def _part(instance: Instance, unit: tuple[int, ...], stage: ReplicatedStage | PlacedStage) -> Part:
    """A stage without its figures; `unit` are the machines of a unit that it is replicated over, where it is nested."""
    part = Part("stage", instance.ranges(stage.layers), devices=stage.replicas, replicas=stage.replicas)
    if isinstance(stage, PlacedStage):
        return dataclasses.replace(part, first_device=stage.first, copies=stage.copies, stride=stage.stride)
    inner = tuple(_part(instance, unit[:-1], inside) for inside in stage.inner)
    return dataclasses.replace(part, devices=stage.replicas * math.prod(unit), inner=inner)


def _decode(
    instance: Instance, problem: PipeDreamProblem | PlacedPipelineProblem, parts: Sequence[Part]
) -> tuple[ReplicatedStage, ...] | tuple[PlacedStage, ...]:
    if isinstance(problem, PipeDreamProblem):
        return tuple(_stage(instance, part) for part in parts)
    stages = []
    for number, part in enumerate(parts):
        if part.first_device is None or part.copies < 1 or part.replicas % part.copies:
            raise PlanError(f"stage {number} has no place among the devices", where=instance.name)
        nodes, width = instance.positions(part.nodes), part.replicas // part.copies
        stages.append(PlacedStage(nodes, part.first_device, width, part.copies, part.stride))
    return tuple(stages)


def _stage(instance: Instance, part: Part) -> ReplicatedStage:
    return ReplicatedStage(
        instance.positions(part.nodes), part.replicas, tuple(_stage(instance, inner) for inner in part.inner)
    )


TIME_PER_MINIBATCH = Objective(
    name="time-per-minibatch",
    unit="s",
    options=frozenset(
        {"machines", "devices", "bandwidth_byte_per_s", "memory_bytes", "cost", "layout", "transfers", "idle"}
    ),
    settle=_settle,
    problem=_problem,
    encode=_encode,
    decode=_decode,
    aliases=("max-load",),
)


def _settle_iteration(instance: Instance, options: PartitionOptions) -> PartitionOptions:
    settled = _settle(instance, options)
    return dataclasses.replace(
        settled,
        cost=None,
        layout=None,
        idle=True if options.idle is None else options.idle,
        batch=options.batch or _MICRO_BATCHES,
    )


def _iteration(instance: Instance, options: PartitionOptions) -> IterationProblem:
    return layer_iteration(layers_of(instance, "published"), options)


ITERATION_TIME = iteration_objective(
    frozenset({"machines", "devices", "bandwidth_byte_per_s", "memory_bytes", "transfers", "idle", "batch"}),
    _settle_iteration,
    _iteration,
    lambda instance: range(len(instance.ids)),
)

FAMILIES.register(
    "pipedream",
    Family(
        "PipeDream profile (graph.txt)",
        sniff,
        _read,
        (TIME_PER_MINIBATCH, ITERATION_TIME),
        cluster=True,
        model=True,
    ),
)
