"""Operator graphs: the objectives `max-load` and `latency` on accelerators and CPUs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from planner.errors import PlanError
from planner.graph.ideals import topological_line
from planner.published.families import FAMILIES, Family, Instance, Objective
from planner.published.options import PartitionOptions
from planner.published.plan_file import Part, to_runs
from planner.published.problems import (
    LatencyDecision,
    LatencyProblem,
    MaxLoadDecision,
    MaxLoadProblem,
    OperatorPlacement,
    PartitionVerdict,
    latency_problem,
    max_load_problem,
)
from planner.published.readers.operator_graph import is_operator_graph, load_operator_graph


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


def _settle(instance: Instance, options: PartitionOptions) -> PartitionOptions:
    graph = instance.content
    return options.filled(contiguous=True, devices=graph.accelerators, cpus=graph.cpus, memory_bytes=graph.memory_bytes)


def _limits(options: PartitionOptions) -> dict[str, float | None]:
    return {"accelerators": options.devices, "cpus": options.cpus, "memory_bytes": options.memory_bytes}


def _problem(instance: Instance, options: PartitionOptions) -> MaxLoadProblem:
    return max_load_problem(instance.content, contiguous=bool(options.contiguous), **_limits(options))


def _encode(
    instance: Instance, problem: MaxLoadProblem, decision: MaxLoadDecision, verdict: PartitionVerdict
) -> tuple[Part, ...]:
    """One part per device, also without nodes, so that a part's position is its device's number."""
    nodes: list[list[int]] = [[] for _ in range(problem.devices)]
    for node in sorted(range(len(instance.ids)), key=instance.ids.__getitem__):
        nodes[decision[node]].append(node)
    return _parts(instance, problem, nodes, verdict)


def _parts(
    instance: Instance, problem: OperatorPlacement, nodes: Sequence[Sequence[int]], verdict: PartitionVerdict
) -> tuple[Part, ...]:
    """Parts of the accelerators, then of the CPUs, each with its nodes in the given order."""
    parts = []
    for device, inside in enumerate(nodes):
        accelerator = device < problem.accelerators
        kept = math.fsum(float(problem.size_bytes[i]) for i in inside) if accelerator else None
        runs = to_runs(instance.ids[i] for i in inside)
        parts.append(Part("accelerator" if accelerator else "cpu", runs, verdict.parts[device], kept))
    return tuple(parts)


def _decode(instance: Instance, problem: MaxLoadProblem, parts: Sequence[Part]) -> MaxLoadDecision:
    return _device_of_nodes(instance, problem, parts)[0]


def _device_of_nodes(
    instance: Instance, problem: OperatorPlacement, parts: Sequence[Part]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The device of each node, and the nodes of each device in the order of its part.

    Raises:
        PlanError: the parts are not the problem's devices, or a node is on two devices, or on none.
    """
    if [part.kind for part in parts] != ["accelerator"] * problem.accelerators + ["cpu"] * problem.cpus:
        raise PlanError(
            f"the parts are not {problem.accelerators} accelerators and {problem.cpus} CPUs", where=instance.name
        )
    device_of, nodes = [-1] * len(instance.ids), [instance.positions(part.nodes, in_order=True) for part in parts]
    for device, inside in enumerate(nodes):
        for i in inside:
            if device_of[i] >= 0:
                raise PlanError(f"node {instance.ids[i]} is placed twice", where=instance.name)
            device_of[i] = device
    if -1 in device_of:
        raise PlanError(f"node {instance.ids[device_of.index(-1)]} is on no device", where=instance.name)
    return tuple(device_of), nodes


MAX_LOAD = Objective(
    name="max-load",
    unit="ms",
    options=frozenset({"contiguous", "devices", "cpus", "memory_bytes"}),
    settle=_settle,
    problem=_problem,
    encode=_encode,
    decode=_decode,
)


def _settle_latency(instance: Instance, options: PartitionOptions) -> PartitionOptions:
    return dataclasses.replace(_settle(instance, options), contiguous=None)


def _latency(instance: Instance, options: PartitionOptions) -> LatencyProblem:
    return latency_problem(instance.content, **_limits(options))


def _encode_latency(
    instance: Instance, problem: LatencyProblem, decision: LatencyDecision, verdict: PartitionVerdict
) -> tuple[Part, ...]:
    """One part per device, with its nodes in the order in which it runs them."""
    turns = [[i for i in decision.order if decision.devices[i] == device] for device in range(problem.devices)]
    return _parts(instance, problem, turns, verdict)


def _decode_latency(instance: Instance, problem: LatencyProblem, parts: Sequence[Part]) -> LatencyDecision:
    devices, turns = _device_of_nodes(instance, problem, parts)
    arcs = [(a, b) for a, b in problem.edges.tolist()]
    arcs += [pair for nodes in turns for pair in itertools.pairwise(nodes)]
    order = topological_line(problem.nodes, arcs)
    if len(order) < problem.nodes:
        raise PlanError("the turns of the devices wait for each other in a circle", where=instance.name)
    return LatencyDecision(devices, tuple(order))


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
