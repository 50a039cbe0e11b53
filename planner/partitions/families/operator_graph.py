"""Operator graphs: largest load of accelerators and CPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from planner.errors import PlanError
from planner.importers.operator_graph import is_operator_graph, load_operator_graph
from planner.partitions.families import FAMILIES, Family, Instance, Objective
from planner.partitions.options import Options
from planner.partitions.types import Part
from planner.space.partition.max_load import MaxLoadDecision, MaxLoadProblem, max_load_problem
from planner.space.partition.types import Verdict


def _read(path: Path) -> Instance:
    graph = load_operator_graph(path)
    return Instance(
        "operator-graph",
        graph.name,
        graph.fingerprint,
        graph,
        tuple(node.id for node in graph.nodes),
        len(graph.edges),
        tuple(note.message for note in graph.notes),
    )


def _settle(instance: Instance, options: Options) -> Options:
    graph = instance.content
    return Options(
        contiguous=True if options.contiguous is None else options.contiguous,
        devices=graph.accelerators if options.devices is None else options.devices,
        cpus=graph.cpus if options.cpus is None else options.cpus,
        memory_bytes=graph.memory_bytes if options.memory_bytes is None else options.memory_bytes,
    )


def _problem(instance: Instance, options: Options) -> MaxLoadProblem:
    return max_load_problem(
        instance.content,
        contiguous=bool(options.contiguous),
        accelerators=options.devices,
        cpus=options.cpus,
        memory_bytes=options.memory_bytes,
    )


def _encode(
    instance: Instance, problem: MaxLoadProblem, decision: MaxLoadDecision, verdict: Verdict
) -> tuple[Part, ...]:
    """One part a device, those without nodes too, so that a part's place is its device's number."""
    parts = []
    for device in range(problem.devices):
        inside = [i for i, d in enumerate(decision.device_of) if d == device]
        accelerator = device < problem.accelerators
        kept = math.fsum(float(problem.size_bytes[i]) for i in inside) if accelerator else None
        kind = "accelerator" if accelerator else "cpu"
        parts.append(Part(kind, instance.ranges(inside), verdict.parts[device], kept))
    return tuple(parts)


def _decode(instance: Instance, problem: MaxLoadProblem, parts: Sequence[Part]) -> MaxLoadDecision:
    kinds = ["accelerator"] * problem.accelerators + ["cpu"] * problem.cpus
    if [part.kind for part in parts] != kinds:
        raise PlanError(
            f"the parts are not {problem.accelerators} accelerators and {problem.cpus} CPUs", where=instance.name
        )
    device_of = [-1] * len(instance.ids)
    for device, part in enumerate(parts):
        for i in instance.positions(part.nodes):
            if device_of[i] >= 0:
                raise PlanError(f"node {instance.ids[i]} is on two devices", where=instance.name)
            device_of[i] = device
    left = [instance.ids[i] for i, device in enumerate(device_of) if device < 0]
    if left:
        raise PlanError(f"node {left[0]} is on no device", where=instance.name)
    return MaxLoadDecision(tuple(device_of))


MAX_LOAD = Objective(
    name="max-load",
    unit="ms",
    what="load of the most loaded device: time a sample in steady state",
    options=frozenset({"contiguous", "devices", "cpus", "memory_bytes"}),
    settle=_settle,
    problem=_problem,
    encode=_encode,
    decode=_decode,
)

FAMILIES.register("operator-graph", Family("operator graph (JSON)", is_operator_graph, _read, (MAX_LOAD,)))
