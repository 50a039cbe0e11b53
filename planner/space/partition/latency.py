"""Latency of one sample: place and order an operator graph on devices so that the sample finishes soonest.

Every node runs once, on one device, without interruption; a device runs its nodes one at a time, in an order that is
part of the decision. A node's result reaches another device after a delay and then stays there:

    arrival of u's result on device b = finish of u + transfer[u] * hops[a, b]      (a: the device of u; hops[a, a] = 0)
    start of v on b                   = max(end of the node before it on b, arrivals of all results that v reads)
    latency                           = latest finish

Transfers overlap with work and with each other. Between accelerators that share only host memory a result moves twice
(`hops` 2), to or from a CPU once. Node sizes add up on a device, and nodes of one colour share a device. There is one
sample and no pipelining, so more devices help only where the graph has parallel branches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from planner.errors import JobError
from planner.graph import numbered_line, topological_line
from planner.importers.operator_graph import OperatorGraph
from planner.space.partition.max_load import graph_columns
from planner.space.partition.verdict import Verdict, overfull, torn_colours
from planner.space.types import Violation


@dataclass(frozen=True, slots=True)
class LatencyDecision:
    """Where nodes run and in which order.

    Attributes:
        devices: [n] device of every node.
        order: [n] all nodes; each device runs its nodes in this order.
    """

    devices: tuple[int, ...]
    order: tuple[int, ...]


@dataclass(frozen=True)
class LatencyProblem:
    """An instance, numbers only. n nodes, m edges, k devices.

    Attributes:
        time_ms: [n, k] time of a node on a device; infinite where it cannot run.
        edges: [m, 2] source and target.
        transfer_ms: [n] time of one hop of a node's result.
        hops: [k, k] hops between devices; 0 on the diagonal.
        size_bytes: [n].
        memory_bytes: memory of every limited device.
        limited: [k] whether a device's memory is limited.
        colour: [n] nodes with the same number >= 0 share a device; -1 for none.
    """

    unit: ClassVar[str] = "ms"
    """Unit of the objective."""

    time_ms: np.ndarray
    edges: np.ndarray
    transfer_ms: np.ndarray
    hops: np.ndarray
    size_bytes: np.ndarray
    memory_bytes: float
    limited: np.ndarray
    colour: np.ndarray

    def __post_init__(self) -> None:
        n, k = self.time_ms.shape
        shapes = {
            "transfer_ms": (self.transfer_ms.shape, (n,)),
            "size_bytes": (self.size_bytes.shape, (n,)),
            "colour": (self.colour.shape, (n,)),
            "hops": (self.hops.shape, (k, k)),
            "limited": (self.limited.shape, (k,)),
        }
        for name, (shape, expected) in shapes.items():
            if shape != expected:
                raise JobError(f"{name} must have shape {expected}, not {shape}")
        if n < 1 or k < 1:
            raise JobError("a latency problem needs a node and a device")
        if len(topological_line(n, [(u, v) for u, v in self.edges.tolist()])) < n:
            raise JobError("the graph has a cycle")

    @property
    def nodes(self) -> int:
        """n."""
        return int(self.time_ms.shape[0])

    @property
    def devices(self) -> int:
        """k."""
        return int(self.time_ms.shape[1])

    def judge(self, decision: LatencyDecision) -> Verdict:
        """Latency of a decision and every broken limit; the parts are the last finish of each device."""
        faults = self._malformed(decision)
        if faults:
            return Verdict(math.inf, faults)
        finish = [0.0] * self.nodes
        free = [0.0] * self.devices
        reads: list[list[int]] = [[] for _ in range(self.nodes)]
        for u, v in self.edges.tolist():
            reads[v].append(u)
        for node in decision.order:
            device = decision.devices[node]
            begin = free[device]
            for u in reads[node]:
                delay = float(self.transfer_ms[u]) * float(self.hops[decision.devices[u], device])
                begin = max(begin, finish[u] + delay)
            finish[node] = free[device] = begin + float(self.time_ms[node, device])
        full = overfull(self.size_bytes, decision.devices, self.limited.tolist(), self.memory_bytes)
        return Verdict(max(finish), full + torn_colours(self.colour, decision.devices), tuple(free))

    def _malformed(self, decision: LatencyDecision) -> tuple[Violation, ...]:
        n = self.nodes
        if len(decision.devices) != n or sorted(decision.order) != list(range(n)):
            return (Violation("coverage", -1, f"every one of the {n} nodes needs a device and a turn"),)
        violations = []
        for node, device in enumerate(decision.devices):
            if not 0 <= device < self.devices:
                violations.append(Violation("devices", device, f"node {node} is on device {device}"))
            elif not math.isfinite(self.time_ms[node, device]):
                violations.append(Violation("option", device, f"node {node} cannot run on device {device}"))
        turn = {node: position for position, node in enumerate(decision.order)}
        for u, v in self.edges.tolist():
            if turn[u] > turn[v]:
                violations.append(Violation("order", -1, f"node {v} has its turn before node {u}, which it reads"))
        return tuple(violations)

    def trivial(self) -> tuple[tuple[str, LatencyDecision], ...]:
        """All nodes on one device, for each kind of device."""
        order = tuple(numbered_line(self.nodes, self.edges.tolist()))
        kinds: dict[tuple[bool, bytes], int] = {}
        for d in range(self.devices):
            kinds.setdefault((bool(self.limited[d]), self.time_ms[:, d].tobytes()), d)
        return tuple((f"all on device {d}", LatencyDecision((d,) * self.nodes, order)) for d in kinds.values())


def latency_problem(
    graph: OperatorGraph,
    *,
    accelerators: int | None = None,
    cpus: int | None = None,
    memory_bytes: float | None = None,
) -> LatencyProblem:
    """The problem of an operator graph: accelerators first, then CPUs, transfers through host memory.

    Args:
        graph: the graph as read.
        accelerators: how many, instead of the file's. No more than nodes are kept of each kind: further equal devices
            would stay empty.
        cpus: how many, instead of the file's.
        memory_bytes: of one accelerator, instead of the file's.
    """
    fast = min(graph.accelerators if accelerators is None else accelerators, len(graph.nodes))
    slow = min(graph.cpus if cpus is None else cpus, len(graph.nodes))
    columns = [[node.accelerator_ms if node.supported else math.inf for node in graph.nodes]] * fast
    columns += [[node.cpu_ms for node in graph.nodes]] * slow
    away = np.array([1.0] * fast + [0.0] * slow)
    hops = away[:, None] + away[None, :]
    np.fill_diagonal(hops, 0.0)
    return LatencyProblem(
        time_ms=np.array(columns, dtype=np.float64).T.reshape(len(graph.nodes), fast + slow),
        hops=hops,
        memory_bytes=graph.memory_bytes if memory_bytes is None else memory_bytes,
        limited=np.array([True] * fast + [False] * slow),
        **graph_columns(graph),
    )
