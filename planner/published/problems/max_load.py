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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np

from planner.errors import JobError, UsageError
from planner.graph import topological_line
from planner.published.readers.operator_graph import OperatorGraph
from planner.solvers.cluster_chains.verdict import PartitionVerdict, over_memory
from planner.space.types import Violation

MaxLoadDecision = tuple[int, ...]
"""Device of each node: 0..accelerators-1 for an accelerator, the next `cpus` numbers for a CPU."""


@dataclass(frozen=True, eq=False)
class OperatorPlacement:
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
    """

    unit: ClassVar[str] = "ms"
    """Loads and latencies are milliseconds."""

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

    def __post_init__(self) -> None:
        for name in ("cpu_ms", "size_bytes", "supported", "backward", "colour", "transfer_ms"):
            if getattr(self, name).shape != (self.nodes,):
                raise JobError(f"{name} must have shape {(self.nodes,)}, not {getattr(self, name).shape}")

    @property
    def nodes(self) -> int:
        """n."""
        return len(self.accelerator_ms)

    @property
    def devices(self) -> int:
        """Accelerators and CPUs."""
        return self.accelerators + self.cpus

    def malformed(self, device: Sequence[int]) -> tuple[Violation, ...]:
        """What is wrong with the devices of all nodes before anything is computed."""
        if len(device) != self.nodes:
            message = f"{len(device)} nodes are placed, there are {self.nodes}"
            return (Violation("coverage", -1, message, self.nodes, len(device)),)
        return tuple(
            Violation("devices", int(d), f"node {i} is on device {d}; there are {self.devices}", float(d), self.devices)
            for i, d in enumerate(device)
            if not 0 <= d < self.devices
        )

    def faults(self, device: Sequence[int]) -> Iterator[Violation]:
        """Unsupported nodes on accelerators, accelerators over their memory, colours on several devices."""
        held: list[list[float]] = [[] for _ in range(self.devices)]
        places: dict[int, set[int]] = {}
        for i, d in enumerate(device):
            held[d].append(float(self.size_bytes[i]))
            places.setdefault(int(self.colour[i]), set()).add(d)
            if d < self.accelerators and not self.supported[i]:
                yield Violation("support", d, f"node {i} cannot run on an accelerator")
        for d, sizes in enumerate(held[: self.accelerators]):
            need = math.fsum(sizes)  # rounded once
            message = f"accelerator {d} needs {need:.0f} of {self.memory_bytes:.0f} bytes"
            yield from over_memory(d, need, self.memory_bytes, message)
        for colour, where in sorted(places.items()):
            if colour >= 0 and len(where) > 1:
                yield Violation("colour", min(where), f"colour {colour} is spread over devices {sorted(where)}")


@dataclass(frozen=True, eq=False)
class MaxLoadProblem(OperatorPlacement):
    """The largest load of a device is minimised.

    Attributes:
        contiguous: whether the devices must be stages of a pipeline.
    """

    contiguous: bool = True

    def judge(self, decision: MaxLoadDecision) -> PartitionVerdict:
        """Loads of all devices, the largest load, and every broken limit. O(nodes + edges)."""
        malformed = self.malformed(decision)
        if malformed:
            return PartitionVerdict(math.inf, malformed)
        loads = self._loads(decision)
        violations = tuple(self.faults(decision))
        if self.contiguous:
            violations += self._circular(decision)
        return PartitionVerdict(max(loads, default=0.0), violations, loads)

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


def placement_of(
    graph: OperatorGraph,
    *,
    accelerators: int | None = None,
    cpus: int | None = None,
    memory_bytes: float | None = None,
) -> dict[str, Any]:
    """By field, what an operator graph says of an `OperatorPlacement`.

    Args:
        graph: the graph; its colours may be any integers and are numbered from 0.
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
    colours: dict[int | None, int] = {None: -1}
    for node in graph.nodes:
        colours.setdefault(node.colour, len(colours) - 1)
    columns = {
        name: np.array([getattr(node, name) for node in graph.nodes], dtype=kind)
        for name, kind in (
            ("accelerator_ms", float),
            ("cpu_ms", float),
            ("size_bytes", float),
            ("supported", bool),
            ("backward", bool),
        )
    }
    return {
        **columns,
        "accelerators": min(accelerators, len(graph.nodes)),
        "cpus": min(cpus, len(graph.nodes)),
        "memory_bytes": float(memory),
        "colour": np.array([colours[node.colour] for node in graph.nodes], dtype=np.int64),
        "edges": np.array(graph.edges, dtype=np.int64).reshape(-1, 2),
        "transfer_ms": np.array(graph.transfer_ms, dtype=float),
    }


def max_load_problem(graph: OperatorGraph, *, contiguous: bool, **limits: float | None) -> MaxLoadProblem:
    """The max-load problem of an operator graph; `limits` as `placement_of` takes them."""
    return MaxLoadProblem(**placement_of(graph, **cast(Any, limits)), contiguous=contiguous)
