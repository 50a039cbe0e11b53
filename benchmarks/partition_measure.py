"""One case of the partition benchmark, in a process of its own: what was found and proven, and what it took."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.instances.iteration import synthetic_iteration_problem
from benchmarks.instances.layerwise import synthetic_layerwise_problem
from benchmarks.instances.max_load import repeated, widened
from benchmarks.partition_cases import Case
from planner.errors import InfeasibleError
from planner.graph import components, enumerate_ideals
from planner.importers import load_graph
from planner.published.problems import (
    MaxLoadProblem,
    PipeDreamProblem,
    PiperProblem,
    PlacedPipelineProblem,
    Released,
    latency_problem,
    max_load_problem,
    piper_problem,
    recorded_layers,
)
from planner.published.readers import OperatorGraph, load_operator_graph, piper_from_document
from planner.published.solvers import PARTITION_SOLVERS, solve_partition

MOST_IDEALS = 100_000


def measure(case: Case) -> dict[str, Any]:
    """Solve a case: figures of the plan, seconds from reading the file to the judged plan, peak memory.

    Ideals are counted afterwards, so that they neither take time nor memory of the solver.
    """
    import ortools.sat.python.cp_model  # noqa: F401  # an import is no part of any solver's time

    PARTITION_SOLVERS.names()
    begin = time.perf_counter()
    problem = build(case)
    cpu = time.process_time()
    row: dict[str, Any] = {"objective": None, "bound": None, "gap": None, "proven": False, "unit": problem.unit}
    try:
        result = solve_partition(problem, time_limit_s=case["limit_s"])
    except InfeasibleError as error:
        row |= {"error": str(error), "proven": "within" not in str(error)}
    else:
        row |= {"objective": result.objective, "bound": result.bound, "gap": 0.0 if result.proven else result.gap}
        row |= {"proven": result.proven, "solver": result.solver, "statistics": result.statistics}
    row |= {
        "seconds": time.perf_counter() - begin,
        "cpu_s": time.process_time() - cpu,
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    row["nodes"], row["ideals"] = size(problem, case)
    return row


def build(case: Case) -> Any:  # noqa: ANN401
    """The problem of a case."""
    return {
        "max-load": _max_load,
        "latency": _latency,
        "piper": _piper,
        "pipedream": _pipedream,
        "placed": _placed,
        "iteration": _iteration,
        "layerwise": _layerwise,
    }[case["kind"]](case)


def size(problem: Any, case: Case) -> tuple[int, int | None]:  # noqa: ANN401
    """Nodes, and ideals of the graph that is cut; None when there are more than `MOST_IDEALS`, or none to speak of.

    Nodes that must stay together count as one node: those of a colour, and circles that arise from that.
    """
    if isinstance(problem, MaxLoadProblem):
        return len(problem.accelerator_ms), case.get("recorded", {}).get("ideals") or _forward_ideals(problem)
    if isinstance(problem, PiperProblem):
        return problem.node_count, _count(problem.node_count, problem.edges.tolist())
    if isinstance(problem, PipeDreamProblem | PlacedPipelineProblem):
        return problem.layers.count, _count(problem.layers.count, problem.layers.edges.tolist())
    return int(problem.nodes if hasattr(problem, "nodes") else problem.layers), None


def _forward_ideals(problem: MaxLoadProblem) -> int | None:
    count = len(problem.accelerator_ms)
    first: dict[int, int] = {}
    into = [first.setdefault(int(c), i) if c >= 0 else i for i, c in enumerate(problem.colour)]
    forward = [not problem.backward[i] for i in range(count)]
    arcs = [(into[a], into[b]) for a, b in problem.edges.tolist() if forward[a] and forward[b]]
    together = components(count, [(a, b) for a, b in arcs if a != b])
    merged = {(together[a], together[b]) for a, b in arcs if together[a] != together[b]}
    only = np.zeros(count, dtype=bool)
    only[[together[into[i]] for i in range(count) if forward[i]]] = True
    ideals = enumerate_ideals(count, merged, MOST_IDEALS, only=only)
    return None if ideals is None else len(ideals)


def _count(count: int, arcs: list[tuple[int, int]]) -> int | None:
    ideals = enumerate_ideals(count, [(a, b) for a, b in arcs], MOST_IDEALS)
    return None if ideals is None else len(ideals)


def _graph(case: Case) -> OperatorGraph:
    graph = load_operator_graph(case["path"])
    graph = repeated(graph, case["repeat"]) if case.get("repeat", 1) > 1 else graph
    return widened(graph, case["widen"]) if case.get("widen", 1) > 1 else graph


def _max_load(case: Case) -> MaxLoadProblem:
    return max_load_problem(
        _graph(case),
        contiguous=case["contiguous"],
        accelerators=case.get("devices"),
        memory_bytes=math.inf if "repeat" in case or "widen" in case else None,
    )


def _latency(case: Case) -> Any:  # noqa: ANN401
    return latency_problem(_graph(case))


def _piper(case: Case) -> PiperProblem:
    document = json.loads(Path(case["path"]).read_text())
    file = piper_from_document(deepened(document, case["layers"] - 32), case["path"])
    problem = piper_problem(file, devices=case["devices"], memory_bytes=case["memory_bytes"], batch=case["batch"])
    return dataclasses.replace(problem, bandwidth_bytes_per_s=case["bandwidth_byte_per_s"])


def deepened(document: Case, more: int) -> Case:
    """The published study's deeper models: the layer before the last is repeated, copies without the mask's edge."""
    repeated_id, head = (node["id"] for node in document["nodes"][-3:-1])
    nodes = {node["id"]: node for node in document["nodes"]}
    forerunner = max(edge["sourceId"] for edge in document["edges"] if edge["destId"] == repeated_id)
    link = next(e for e in document["edges"] if (e["sourceId"], e["destId"]) == (repeated_id, head))
    template = json.dumps(nodes[repeated_id])
    last = repeated_id
    for number in range(max(nodes) + 1, max(nodes) + 1 + more):
        node = json.loads(template)
        node["id"] = number
        for choice in itertools.chain.from_iterable(node["TMPCs"].values()):
            choice["syncTimeFw"] = {str(last): choice["syncTimeFw"][str(forerunner)]}
        for choice in itertools.chain.from_iterable(nodes[last]["TMPCs"].values()):
            choice["syncTimeBw"] = {str(number): choice["syncTimeBw"][str(head)]}
        for choice in itertools.chain.from_iterable(nodes[head]["TMPCs"].values()):
            choice["syncTimeFw"][str(number)] = choice["syncTimeFw"].pop(str(last))
        link["destId"] = number
        link = {**link, "sourceId": number, "destId": head}
        document["edges"].append(link)
        document["nodes"].append(node)
        nodes[number], last = node, number
    return document


def _pipedream(case: Case) -> PipeDreamProblem:
    """As the released optimiser has it, its sizes and its rules.

    Without its own rule of memory, which charges nothing to the last stage: it decides none of the recorded runs.
    """
    return PipeDreamProblem(
        recorded_layers(load_graph(case["path"])),
        tuple(case["machines"]),
        tuple(case["bandwidth_byte_per_s"]),
        ~Released.NOTHING,
        transfers=case["transfers"],
        replicate=case["replicate"],
        use_all=not case["idle"],
    )


def _placed(case: Case) -> PlacedPipelineProblem:
    """The same layers, each stage on devices of its own."""
    return PlacedPipelineProblem(
        recorded_layers(load_graph(case["path"])),
        tuple(case["machines"]),
        tuple(case["bandwidth_byte_per_s"]),
        ~Released.NOTHING,
        transfers=case["transfers"],
        use_all=False,
    )


def _iteration(case: Case) -> Any:  # noqa: ANN401
    layers, devices, configs = case["sizes"]
    memory = case["memory_bytes"] or math.inf
    return synthetic_iteration_problem(layers, devices, configs, memory_bytes=memory, links=case["links"])


def _layerwise(case: Case) -> Any:  # noqa: ANN401
    layers, strategies = case["sizes"]
    problem = synthetic_layerwise_problem(layers, strategies, case["fraction"], kinds=3, noise=0.02)
    scale = case["scale"]
    return dataclasses.replace(
        problem, fixed_bytes=problem.fixed_bytes * scale, memory_bytes=problem.memory_bytes * scale
    )
