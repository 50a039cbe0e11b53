"""Operator graphs: the objectives `max-load` and `latency` on accelerators and CPUs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from planner.errors import PlanError
from planner.graph.ideals import topological_line
from planner.importers.operator_graph import is_operator_graph, load_operator_graph
from planner.partitions.families import FAMILIES, Family, Instance, Objective
from planner.partitions.options import Options
from planner.partitions.plan_file import Part, from_ranges, to_runs
from planner.space.partition import (
    LatencyDecision,
    LatencyProblem,
    MaxLoadDecision,
    MaxLoadProblem,
    Verdict,
    latency_problem,
    max_load_problem,
)


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
    return options.filled(contiguous=True, devices=graph.accelerators, cpus=graph.cpus, memory_bytes=graph.memory_bytes)


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
    """One part per device, also without nodes, so that a part's position is its device's number."""
    nodes: list[list[int]] = [[] for _ in range(problem.devices)]
    for node in sorted(range(len(instance.ids)), key=instance.ids.__getitem__):
        nodes[decision[node]].append(node)
    return _parts(instance, problem, problem.accelerators, nodes, verdict)


def _parts(
    instance: Instance,
    problem: MaxLoadProblem | LatencyProblem,
    accelerators: int,
    nodes: Sequence[Sequence[int]],
    verdict: Verdict,
) -> tuple[Part, ...]:
    """Parts of the accelerators, then of the CPUs, each with its nodes in the given order."""
    parts = []
    for device, inside in enumerate(nodes):
        accelerator = device < accelerators
        kept = math.fsum(float(problem.size_bytes[i]) for i in inside) if accelerator else None
        runs = to_runs(instance.ids[i] for i in inside)
        parts.append(Part("accelerator" if accelerator else "cpu", runs, verdict.parts[device], kept))
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
    unplaced = [instance.ids[i] for i, device in enumerate(device_of) if device < 0]
    if unplaced:
        raise PlanError(f"node {unplaced[0]} is on no device", where=instance.name)
    return tuple(device_of)


MAX_LOAD = Objective(
    name="max-load",
    unit="ms",
    options=frozenset({"contiguous", "devices", "cpus", "memory_bytes"}),
    settle=_settle,
    problem=_problem,
    encode=_encode,
    decode=_decode,
)


def _settle_latency(instance: Instance, options: Options) -> Options:
    return dataclasses.replace(_settle(instance, options), contiguous=None)


def _latency(instance: Instance, options: Options) -> LatencyProblem:
    return latency_problem(
        instance.content, accelerators=options.devices, cpus=options.cpus, memory_bytes=options.memory_bytes
    )


def _encode_latency(
    instance: Instance, problem: LatencyProblem, decision: LatencyDecision, verdict: Verdict
) -> tuple[Part, ...]:
    """One part per device, with its nodes in the order in which it runs them."""
    turns = [[i for i in decision.order if decision.devices[i] == device] for device in range(problem.devices)]
    return _parts(instance, problem, int(problem.limited.sum()), turns, verdict)


def _decode_latency(instance: Instance, problem: LatencyProblem, parts: Sequence[Part]) -> LatencyDecision:
    if len(parts) != problem.devices:
        raise PlanError(f"{len(parts)} parts are not {problem.devices} devices", where=instance.name)
    place = {number: i for i, number in enumerate(instance.ids)}
    devices, arcs = [-1] * len(place), problem.edges.tolist()
    for device, part in enumerate(parts):
        instance.positions(part.nodes)
        turns = [place[number] for number in from_ranges(part.nodes, len(place)) or ()]
        for i in turns:
            if devices[i] >= 0:
                raise PlanError(f"node {instance.ids[i]} has two turns", where=instance.name)
            devices[i] = device
        arcs += [[a, b] for a, b in itertools.pairwise(turns)]
    if min(devices) < 0:
        raise PlanError(f"node {instance.ids[devices.index(-1)]} is on no device", where=instance.name)
    order = topological_line(len(place), [(a, b) for a, b in arcs])
    if len(order) < len(place):
        raise PlanError("the turns of the devices wait for each other in a circle", where=instance.name)
    return LatencyDecision(tuple(devices), tuple(order))


LATENCY = Objective(
    name="latency",
    unit="ms",
    options=frozenset({"devices", "cpus", "memory_bytes"}),
    settle=_settle_latency,
    problem=_latency,
    encode=_encode_latency,
    decode=_decode_latency,
)

FAMILIES.register("operator-graph", Family("operator graph (JSON)", is_operator_graph, _read, (MAX_LOAD, LATENCY)))
