"""Max-load partition: place a DAG on accelerators and CPUs so that the largest load of a device is least.

In steady state a pipeline finishes one sample per largest load. With S the nodes of a device:

    load(accelerator) = sum of accelerator_ms over S + sum of transfer_ms[u] over every u, each once, that is in S
                        and read outside, or outside S and read inside
    load(CPU)         = sum of cpu_ms over S                        (results lie in host memory: a CPU pays no transfer)

Nodes of one colour share a device, nodes that an accelerator cannot run go to a CPU, and the sizes of an accelerator's
nodes fit its memory. A *contiguous* plan's devices are stages of a pipeline: the quotient of the graph's forward part
over the devices has no cycle, so the devices can be ordered with every forward edge going to the same or a later one.
Backward nodes are constrained only by the colour that they share with their forward nodes.

The cost model is that of "Efficient Algorithms for Device Placement of DNN Graph Operators" (NeurIPS 2020).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from planner.errors import JobError, UsageError
from planner.graph import topological_line
from planner.importers.operator_graph import OperatorGraph
from planner.space.partition.verdict import Verdict, overfull, torn_colours
from planner.space.types import Violation

MaxLoadDecision = tuple[int, ...]
"""Device of each node: 0..accelerators-1 for an accelerator, the next `cpus` numbers for a CPU."""


@dataclass(frozen=True, eq=False)
class MaxLoadProblem:
    """A DAG of n nodes to be placed on equal accelerators and equal CPUs. Numbers only.

    Attributes:
        accelerators: how many there are.
        cpus: how many there are.
        memory_bytes: memory of one accelerator; infinite for no limit.
        accelerator_ms: float64 [n] time on an accelerator.
        cpu_ms: float64 [n] time on a CPU.
        size_bytes: float64 [n] memory on an accelerator.
        supported: bool [n] whether an accelerator can run it.
        backward: bool [n] whether it belongs to the backward pass.
        colour: int64 [n], equal for nodes that share a device; negative for none.
        edges: int64 [m, 2] (source, target), without cycles.
        transfer_ms: float64 [n] time to move a node's result between an accelerator and host memory.
        contiguous: whether the devices must be stages of a pipeline.
    """

    unit: ClassVar[str] = "ms"
    """Loads are milliseconds."""

    accelerators: int
    cpus: int
    memory_bytes: float
    accelerator_ms: np.ndarray
    cpu_ms: np.ndarray
    size_bytes: np.ndarray
    supported: np.ndarray
    backward: np.ndarray
    colour: np.ndarray
    edges: np.ndarray
    transfer_ms: np.ndarray
    contiguous: bool = True

    @property
    def devices(self) -> int:
        """Accelerators and CPUs."""
        return self.accelerators + self.cpus

    def judge(self, decision: MaxLoadDecision) -> Verdict:
        """Loads of all devices, the largest load, and every broken limit. O(nodes + edges)."""
        malformed = self._malformed(decision)
        if malformed:
            return Verdict(math.inf, malformed)
        loads = self._loads(decision)
        limited = [device < self.accelerators for device in range(self.devices)]
        full = overfull(self.size_bytes, decision, limited, self.memory_bytes)
        violations = (*self._unsupported(decision), *full, *torn_colours(self.colour, decision))
        if self.contiguous:
            violations += self._circular(decision)
        return Verdict(max(loads, default=0.0), violations, loads)

    def trivial(self) -> tuple[tuple[str, MaxLoadDecision], ...]:
        """Everything on one device, and equal shares of the work along a topological order."""
        n = len(self.accelerator_ms)
        plans = []
        if self.accelerators:
            plans.append(("one accelerator", (0,) * n))
            plans.append(("even split in topological order", self._even_split()))
        if self.cpus:
            plans.append(("one CPU", (self.accelerators,) * n))
        return tuple(plans)

    def _malformed(self, device: Sequence[int]) -> tuple[Violation, ...]:
        n = len(self.accelerator_ms)
        if len(device) != n:
            return (Violation("coverage", -1, f"{len(device)} nodes are placed, there are {n}", n, len(device)),)
        return tuple(
            Violation("devices", int(d), f"node {i} is on device {d}; there are {self.devices}", float(d), self.devices)
            for i, d in enumerate(device)
            if not 0 <= d < self.devices
        )

    def _loads(self, device: Sequence[int]) -> tuple[float, ...]:
        terms: list[list[float]] = [[] for _ in range(self.devices)]
        for i, d in enumerate(device):
            terms[d].append(float(self.accelerator_ms[i] if d < self.accelerators else self.cpu_ms[i]))
        readers: dict[int, set[int]] = {}
        for source, target in self.edges.tolist():
            readers.setdefault(source, set()).add(device[target])
        for source, users in readers.items():
            others = users - {device[source]}
            if others:
                for d in others | {device[source]}:
                    if d < self.accelerators:
                        terms[d].append(float(self.transfer_ms[source]))
        return tuple(math.fsum(t) for t in terms)

    def _unsupported(self, device: Sequence[int]) -> tuple[Violation, ...]:
        return tuple(
            Violation("support", d, f"node {i} cannot run on an accelerator")
            for i, d in enumerate(device)
            if d < self.accelerators and not self.supported[i]
        )

    def _circular(self, device: Sequence[int]) -> tuple[Violation, ...]:
        arcs = {(device[u], device[v]) for u, v in self.edges.tolist() if not self.backward[u] and not self.backward[v]}
        stuck = sorted(set(range(self.devices)) - set(topological_line(self.devices, arcs)))
        if not stuck:
            return ()
        return (Violation("order", stuck[0], f"devices {stuck} do not form a chain: forward edges run in a circle"),)

    def _even_split(self) -> tuple[int, ...]:
        """Equal shares of accelerator time along a topological order, each colour on the device of its first node."""
        order = topological_line(len(self.accelerator_ms), [(u, v) for u, v in self.edges.tolist()])
        share = float(self.accelerator_ms.sum()) / self.accelerators
        device = [0] * len(order)
        home: dict[int, int] = {}
        done = 0.0
        for i in order:
            middle = done + float(self.accelerator_ms[i]) / 2
            done += float(self.accelerator_ms[i])
            place = min(int(middle / share), self.accelerators - 1) if share > 0 else 0
            colour = int(self.colour[i])
            device[i] = home.setdefault(colour, place) if colour >= 0 else place
        return tuple(device)


def max_load_problem(
    graph: OperatorGraph,
    *,
    contiguous: bool,
    accelerators: int | None = None,
    cpus: int | None = None,
    memory_bytes: float | None = None,
) -> MaxLoadProblem:
    """The max-load problem of an operator graph.

    Args:
        graph: the graph.
        contiguous: whether the devices must be stages of a pipeline.
        accelerators: how many; the file's number by default. No more than nodes are kept of each kind: further equal
            devices would stay empty.
        cpus: how many; the file's number by default.
        memory_bytes: memory of one accelerator; the file's figure by default, `math.inf` for no limit.

    Raises:
        UsageError: a count or the memory is negative, or there is no device.
        JobError: some nodes need a CPU and there is none.
    """
    accelerators = graph.accelerators if accelerators is None else accelerators
    cpus = graph.cpus if cpus is None else cpus
    memory = graph.memory_bytes if memory_bytes is None else memory_bytes
    if accelerators < 0 or cpus < 0 or accelerators + cpus == 0:
        raise UsageError(f"{accelerators} accelerators and {cpus} CPUs are no devices to plan for",
                         hint="give at least one device")  # fmt: skip
    if not memory >= 0:
        raise UsageError(f"an accelerator cannot have {memory} bytes", hint="give a memory size of 0 or more")
    stranded = [node.id for node in graph.nodes if not node.supported]
    if stranded and not cpus:
        raise JobError(f"nodes {stranded[:8]} run on CPUs only and there is none", where=graph.name,
                       hint="allow at least one CPU")  # fmt: skip
    accelerators, cpus = (min(count, len(graph.nodes)) for count in (accelerators, cpus))
    return MaxLoadProblem(
        accelerators=accelerators,
        cpus=cpus,
        memory_bytes=float(memory),
        accelerator_ms=np.array([node.accelerator_ms for node in graph.nodes], dtype=float),
        cpu_ms=np.array([node.cpu_ms for node in graph.nodes], dtype=float),
        supported=np.array([node.supported for node in graph.nodes], dtype=bool),
        backward=np.array([node.backward for node in graph.nodes], dtype=bool),
        contiguous=contiguous,
        **graph_columns(graph),
    )


def graph_columns(graph: OperatorGraph) -> dict[str, np.ndarray]:
    """By field of a problem, what problems on operator graphs have in common; colours are numbered from 0, -1 for none.

    Colours may be any integers in a file.
    """
    numbers: dict[int | None, int] = {None: -1}
    for node in graph.nodes:
        numbers.setdefault(node.colour, len(numbers) - 1)
    return {
        "size_bytes": np.array([node.size_bytes for node in graph.nodes], dtype=float),
        "colour": np.array([numbers[node.colour] for node in graph.nodes], dtype=np.int64),
        "edges": np.array(graph.edges, dtype=np.int64).reshape(-1, 2),
        "transfer_ms": np.array(graph.transfer_ms, dtype=float),
    }
