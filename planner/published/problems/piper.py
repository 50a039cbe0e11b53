"""Piper's problem: pipeline stages, each with a tensor degree, a data degree and a choice for every layer.

Stage i of the pipeline holds nodes S_i on d_i replicas of t_i tensor-parallel devices each; every node takes one of its
choices (with or without recomputation, for example) at degree t_i. With batch N and bandwidth B:

    transfer_i = sum over edges (u, v) into S_i of 2 (c + sync_v[u]) + over edges (v, x) out of it of 2 (c + sync_v[x])
    time_i     = (sum p) / d_i + (transfer_i / d_i + 4 (d_i - 1) / d_i / N * sum w) / B
    in flight  = ceil((d_i + d_{i+1} + ... + d_last) / d_i)
    memory_i   = sum (a * in flight + b) on one device

The objective is the longest stage time: time per sample (Tarnawski et al., "Piper: Multidimensional Planner for DNN
Parallelization", NeurIPS 2021, section 3). Limits: memory; sum d_i t_i <= devices; d_i divides N; sum d_i <= N; edges
lead to the same stage or a later one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from planner.graph import numbered_line
from planner.hardware.tiers import moved_bytes
from planner.hardware.types import Collective
from planner.published.readers.piper import PiperFile, PiperNode
from planner.solvers.cluster_chains.verdict import PartitionVerdict, over_memory
from planner.space.cuts import check_samples, divisors
from planner.space.types import Violation
from planner.sums import float_sum


@dataclass(frozen=True, slots=True)
class PiperStage:
    """One stage.

    Attributes:
        nodes: positions of its nodes, ascending.
        tensor: devices that share each sample's work (t).
        data: replicas that process the samples in turn (d).
        choices: for each node, the position of its choice among its choices at this tensor degree.
    """

    nodes: tuple[int, ...]
    tensor: int
    data: int
    choices: tuple[int, ...]


PiperDecision = tuple[PiperStage, ...]
"""Stages in pipeline order; together they hold every node once."""


@dataclass(frozen=True)
class PiperProblem:
    """An instance, numbers only. n nodes, m edges, c choices over all nodes and degrees.

    Attributes:
        names: [n] node names, for messages.
        choice_node: [c] node of a choice; the choices of one node and degree are in the file's order.
        choice_tensor: [c] tensor degree of a choice.
        time_s: [c] p, seconds a sample on one replica.
        weight_bytes: [c] w.
        activation_bytes: [c] a, for each sample in flight.
        fixed_bytes: [c] b.
        edges: [m, 2] source and target positions.
        edge_bytes: [m] c of an edge.
        input_sync_bytes: [c, m] extra bytes when edge m enters the choice's node from another stage; 0 for other edges.
        output_sync_bytes: [c, m] extra bytes when edge m leaves the choice's node to another stage.
        devices: k.
        memory_bytes: M of one device.
        batch: N, samples a batch.
        bandwidth_bytes_per_s: B.
        choice_names: [c] for messages.
    """

    unit: ClassVar[str] = "s"
    """Unit of the objective."""

    names: tuple[str, ...]
    choice_node: np.ndarray
    choice_tensor: np.ndarray
    time_s: np.ndarray
    weight_bytes: np.ndarray
    activation_bytes: np.ndarray
    fixed_bytes: np.ndarray
    edges: np.ndarray
    edge_bytes: np.ndarray
    input_sync_bytes: np.ndarray
    output_sync_bytes: np.ndarray
    devices: int
    memory_bytes: float
    batch: int
    bandwidth_bytes_per_s: float
    choice_names: tuple[str, ...] = ()

    @property
    def node_count(self) -> int:
        """n."""
        return len(self.names)

    @property
    def tensor_degrees(self) -> tuple[int, ...]:
        """Tensor degrees that any node has choices at, ascending."""
        return tuple(sorted({int(t) for t in self.choice_tensor}))

    def options(self, node: int, tensor: int) -> np.ndarray:
        """Indices of a node's choices at a tensor degree, in order; may be empty."""
        return np.flatnonzero((self.choice_node == node) & (self.choice_tensor == tensor))

    def judge(self, decision: PiperDecision) -> PartitionVerdict:
        """Time per sample of a decision and every broken limit; the parts are the stage times."""
        shape = _shape_violations(self, decision)
        if any(v.kind in ("coverage", "option") for v in shape):
            return PartitionVerdict(float("inf"), tuple(shape))
        violations = list(shape)
        times, kept, ahead = [], [], 0
        for position in range(len(decision) - 1, -1, -1):
            stage = decision[position]
            ahead += stage.data
            in_flight = -(-ahead // stage.data)
            seconds, needed = stage_figures(self, stage, in_flight)
            times.append(seconds)
            kept.append(needed)
            message = f"stage {position} needs {needed:.0f} bytes with {in_flight} samples in flight"
            violations += over_memory(position, needed, self.memory_bytes, message)
        return PartitionVerdict(max(times), tuple(violations), tuple(reversed(times)), tuple(reversed(kept)))

    def trivial(self) -> tuple[tuple[str, PiperDecision], ...]:
        """One device, data parallel, tensor parallel, and an even pipeline, each with first choices."""
        everything = tuple(range(self.node_count))
        replicas = divisors(self.batch, self.devices)[-1]
        shared = [t for t in self.tensor_degrees if all(len(self.options(v, t)) for v in everything)]
        plans: list[tuple[str, PiperDecision]] = []
        if 1 in shared:
            plans.append(("one device", (PiperStage(everything, 1, 1, (0,) * len(everything)),)))
            data = PiperStage(everything, 1, replicas, (0,) * len(everything))
            plans.append(("data parallel", (data,)))
            plans.append(("even pipeline", _even_pipeline(self, min(self.devices, self.batch, self.node_count))))
        wide = [t for t in shared if 1 < t <= self.devices]
        if wide:
            stage = PiperStage(everything, wide[-1], 1, (0,) * len(everything))
            plans.append(("tensor parallel", (stage,)))
        return tuple(plans)


def piper_problem(
    file: PiperFile, *, devices: int | None = None, memory_bytes: float | None = None, batch: int | None = None
) -> PiperProblem:
    """The problem of a Piper instance, with its devices, memory or batch replaced where given.

    The data degrees of a plan add up to at most the batch, so no plan uses more devices than the batch times the
    largest tensor degree; `devices` is lowered to that.

    Raises:
        JobError: the batch is too large (`check_samples`).
    """
    batch = file.batch if batch is None else batch
    check_samples(batch)
    widest = max((t for node in file.nodes for t in node.choices), default=1)
    devices = min(file.devices if devices is None else devices, batch * widest)
    position = {node.id: i for i, node in enumerate(file.nodes)}
    edges = np.array([(position[u], position[v]) for u, v, _ in file.edges], dtype=np.int64).reshape(-1, 2)
    entries = [(node, t, c) for node in file.nodes for t, cs in node.choices.items() for c in cs]
    return PiperProblem(
        names=tuple(_name(node) for node in file.nodes),
        choice_node=np.array([position[node.id] for node, _, _ in entries], dtype=np.int64),
        choice_tensor=np.array([t for _, t, _ in entries], dtype=np.int64),
        time_s=np.array([c.time_s for _, _, c in entries], dtype=np.float64),
        weight_bytes=np.array([c.weight_bytes for _, _, c in entries], dtype=np.float64),
        activation_bytes=np.array([c.activation_bytes for _, _, c in entries], dtype=np.float64),
        fixed_bytes=np.array([c.fixed_bytes for _, _, c in entries], dtype=np.float64),
        edges=edges,
        edge_bytes=np.array([size for _, _, size in file.edges], dtype=np.float64),
        input_sync_bytes=_syncs(file, entering=True),
        output_sync_bytes=_syncs(file, entering=False),
        devices=devices,
        memory_bytes=file.memory_bytes if memory_bytes is None else memory_bytes,
        batch=batch,
        bandwidth_bytes_per_s=file.bandwidth_bytes_per_s,
        choice_names=tuple(c.name for _, _, c in entries),
    )


def _name(node: PiperNode) -> str:
    return node.name or f"node {node.id}"


def _syncs(file: PiperFile, *, entering: bool) -> np.ndarray:
    """[c, m] bytes of every choice on the edges that enter (or leave) its node."""
    edges_of: dict[int, list[tuple[int, int]]] = {node.id: [] for node in file.nodes}
    for e, (source, target, _) in enumerate(file.edges):
        edges_of[target if entering else source].append((e, source if entering else target))
    rows = []
    for node in file.nodes:
        for choices in node.choices.values():
            for choice in choices:
                row = np.zeros(len(file.edges))
                table = choice.input_sync_bytes if entering else choice.output_sync_bytes
                for e, neighbour in edges_of[node.id]:
                    row[e] = table.get(neighbour, 0.0)
                rows.append(row)
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(file.edges))


def stage_figures(problem: PiperProblem, stage: PiperStage, in_flight: int) -> tuple[float, float]:
    """Seconds of a stage and bytes of one of its devices, straight from the definition."""
    inside = set(stage.nodes)
    choice_of = {v: int(problem.options(v, stage.tensor)[c]) for v, c in zip(stage.nodes, stage.choices, strict=True)}
    transfer_bytes = 0.0
    for e, (u, v) in enumerate(problem.edges.tolist()):
        if v in inside and u not in inside:
            transfer_bytes += 2 * (problem.edge_bytes[e] + problem.input_sync_bytes[choice_of[v], e])
        if u in inside and v not in inside:
            transfer_bytes += 2 * (problem.edge_bytes[e] + problem.output_sync_bytes[choice_of[u], e])
    work_s = float_sum(float(problem.time_s[c]) for c in choice_of.values())
    weights = float_sum(float(problem.weight_bytes[c]) for c in choice_of.values())
    d = stage.data
    exchange_bytes = 2 * moved_bytes(Collective.ALL_REDUCE, weights, d) / problem.batch
    seconds = work_s / d + (transfer_bytes / d + exchange_bytes) / problem.bandwidth_bytes_per_s
    kept = math.fsum(
        float(problem.activation_bytes[c]) * in_flight + float(problem.fixed_bytes[c]) for c in choice_of.values()
    )
    return seconds, kept


def _shape_violations(problem: PiperProblem, decision: PiperDecision) -> list[Violation]:
    """Every broken limit except memory."""
    violations: list[Violation] = []
    stage_of: dict[int, int] = {}
    for position, stage in enumerate(decision):
        for node in stage.nodes:
            if node in stage_of or not 0 <= node < problem.node_count:
                violations.append(Violation("coverage", position, f"node {node} is placed twice or does not exist"))
            stage_of[node] = position
        violations += _option_violations(problem, stage, position)
    unplaced = [v for v in range(problem.node_count) if v not in stage_of]
    if unplaced or not decision:
        violations.append(Violation("coverage", -1, f"{len(unplaced)} nodes are in no stage"))
        return violations
    for u, v in problem.edges.tolist():
        if stage_of[u] > stage_of[v]:
            message = f"edge {problem.names[u]} -> {problem.names[v]} leads back to an earlier stage"
            violations.append(Violation("order", stage_of[v], message))
    devices = sum(stage.data * stage.tensor for stage in decision)
    if devices > problem.devices:
        violations.append(Violation("devices", -1, f"takes {devices} devices", devices, problem.devices))
    replicas = sum(stage.data for stage in decision)
    if replicas > problem.batch:
        violations.append(Violation("divisibility", -1, f"{replicas} replicas share {problem.batch} samples"))
    return violations


def _option_violations(problem: PiperProblem, stage: PiperStage, position: int) -> list[Violation]:
    violations = []
    if stage.data < 1 or stage.tensor < 1 or not stage.nodes or len(stage.choices) != len(stage.nodes):
        violations.append(Violation("option", position, "a stage needs nodes, a choice for each, and degrees from 1"))
        return violations
    if problem.batch % stage.data:
        violations.append(Violation("divisibility", position, f"{stage.data} replicas do not divide {problem.batch}"))
    for node, choice in zip(stage.nodes, stage.choices, strict=True):
        if 0 <= node < problem.node_count and not 0 <= choice < len(problem.options(node, stage.tensor)):
            message = f"node {node} has no choice {choice} at tensor degree {stage.tensor}"
            violations.append(Violation("option", position, message))
    return violations


def _even_pipeline(problem: PiperProblem, stages: int) -> PiperDecision:
    """Nodes in topological order, cut into stages of about equal work on one device each."""
    order = numbered_line(problem.node_count, problem.edges.tolist())
    work = np.cumsum([float(problem.time_s[problem.options(v, 1)[0]]) for v in order])
    place = np.minimum((work / max(work[-1], 1e-300) * stages).astype(int), stages - 1)
    groups = [tuple(sorted(order[i] for i in np.flatnonzero(place == s))) for s in range(stages)]
    return tuple(PiperStage(g, 1, 1, (0,) * len(g)) for g in groups if g)
