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

import functools
import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from planner.errors import JobError
from planner.graph import numbered_line, topological_line
from planner.published.problems.max_load import OperatorPlacement, placement_of
from planner.published.readers.operator_graph import OperatorGraph
from planner.solvers.cluster_chains.verdict import PartitionVerdict
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


@dataclass(frozen=True, eq=False)
class LatencyProblem(OperatorPlacement):
    """The finish of the last node is minimised. k devices: the accelerators, then the CPUs."""

    def __post_init__(self) -> None:
        OperatorPlacement.__post_init__(self)
        if self.nodes < 1 or self.devices < 1:
            raise JobError("a latency problem needs a node and a device")
        if len(topological_line(self.nodes, [(u, v) for u, v in self.edges.tolist()])) < self.nodes:
            raise JobError("the graph has a cycle")

    @functools.cached_property
    def limited(self) -> np.ndarray:
        """bool [k] whether a device is an accelerator, whose memory is limited."""
        return np.arange(self.devices) < self.accelerators

    @functools.cached_property
    def time_ms(self) -> np.ndarray:
        """float64 [n, k] time of a node on a device; infinite where it cannot run."""
        on_accelerator = np.where(self.supported, self.accelerator_ms, math.inf)
        return np.where(self.limited, on_accelerator[:, None], self.cpu_ms[:, None])

    @functools.cached_property
    def hops(self) -> np.ndarray:
        """float64 [k, k] hops between devices: between an accelerator and host memory one, 0 on the diagonal."""
        hops = np.add.outer(self.limited.astype(float), self.limited)
        np.fill_diagonal(hops, 0.0)
        return np.asarray(hops)

    def judge(self, decision: LatencyDecision) -> PartitionVerdict:
        """Latency of a decision and every broken limit; the parts are the last finish of each device."""
        faults = self.malformed(decision.devices) or self._out_of_order(decision)
        if faults:
            return PartitionVerdict(math.inf, faults)
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
        return PartitionVerdict(max(finish), tuple(self.faults(decision.devices)), tuple(free))

    def _out_of_order(self, decision: LatencyDecision) -> tuple[Violation, ...]:
        turn = {node: position for position, node in enumerate(decision.order)}
        if sorted(decision.order) != list(range(self.nodes)):
            return (Violation("coverage", -1, f"every one of the {self.nodes} nodes needs a turn"),)
        return tuple(
            Violation("order", -1, f"node {v} has its turn before node {u}, which it reads")
            for u, v in self.edges.tolist()
            if turn[u] > turn[v]
        )

    def trivial(self) -> tuple[tuple[str, LatencyDecision], ...]:
        """All nodes on one device, for each kind of device."""
        order = tuple(numbered_line(self.nodes, self.edges.tolist()))
        firsts = (d for d, count in ((0, self.accelerators), (self.accelerators, self.cpus)) if count)
        return tuple((f"all on device {d}", LatencyDecision((d,) * self.nodes, order)) for d in firsts)


def latency_problem(graph: OperatorGraph, **limits: float | None) -> LatencyProblem:
    """The latency problem of an operator graph, with transfers through host memory; `limits` as in `placement_of`."""
    return LatencyProblem(**placement_of(graph, **cast(Any, limits)))
