"""The numbers of a layer graph that PipeDream's partitioners work on, from a priced graph."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.costs import Profile
from planner.errors import ModelError, UsageError
from planner.graph import Graph


@dataclass(frozen=True, eq=False)
class Layers:
    """A DAG of n layers, numbered in topological order. Numbers only.

    Attributes:
        compute_s: float64 [n] forward and backward time of one minibatch on one device.
        weight_bytes: float64 [n] trained weights.
        output_bytes: float64 [n] what a cut behind the layer carries forward, and as much back.
        saved_bytes: float64 [n] activations that the layer is the first to keep for the backward pass.
        edges: int64 [m, 2] (producer, consumer), producer < consumer, each once.
        names: what people call the layers; may be empty.
    """

    compute_s: np.ndarray
    weight_bytes: np.ndarray
    output_bytes: np.ndarray
    saved_bytes: np.ndarray
    edges: np.ndarray
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.compute_s)
        for name in ("weight_bytes", "output_bytes", "saved_bytes"):
            if getattr(self, name).shape != (count,):
                raise ModelError(f"{name} has not one figure for each of {count} layers", where=name)
        figures = (self.compute_s, self.weight_bytes, self.output_bytes, self.saved_bytes)
        if any(not np.isfinite(v).all() or (v < 0).any() for v in figures):
            raise ModelError("a layer has a negative or infinite time or size", hint="check the profile")
        if len(self.edges) and not (self.edges[:, 0] < self.edges[:, 1]).all():
            raise ModelError("layers are not in topological order", where="edges", hint="sort them first")

    @property
    def count(self) -> int:
        """Number of layers."""
        return len(self.compute_s)

    def neighbours(self) -> tuple[list[list[int]], list[list[int]]]:
        """Producers and consumers of each layer."""
        before: list[list[int]] = [[] for _ in range(self.count)]
        after: list[list[int]] = [[] for _ in range(self.count)]
        for a, b in self.edges.tolist():
            before[b].append(a)
            after[a].append(b)
        return before, after


def chain_layers(
    compute_s: list[float],
    weight_bytes: list[float],
    output_bytes: list[float],
    saved_bytes: list[float] | None = None,
) -> Layers:
    """Layers one after another; what a layer keeps is what it puts out, unless said otherwise."""
    count = len(compute_s)
    edges = np.array([(i, i + 1) for i in range(count - 1)], dtype=np.int64).reshape(-1, 2)
    outputs = np.array(output_bytes, dtype=np.float64)
    saved = outputs if saved_bytes is None else np.array(saved_bytes, dtype=np.float64)
    weights = np.array(weight_bytes, dtype=np.float64)
    return Layers(np.array(compute_s, dtype=np.float64), weights, outputs, saved, edges)


def priced_layers(graph: Graph, profile: Profile) -> Layers:
    """Layers of any priced graph: sizes of tensors as they are, storages that are shared in place counted once.

    Weights that several layers share are charged to each of them, storages that several keep to the first.

    Args:
        graph: the model.
        profile: its prices for one minibatch (`planner.costs.imported_profile`, `planner.costs.profile`).
    """
    weight = {p.name: float(graph.tensors[p.name].byte_count) for p in graph.parameters}
    names = [p.name for p in graph.parameters]
    kept: dict[str, None] = {}
    saved = np.zeros(len(graph.nodes))
    for i, storages in enumerate(profile.saved):
        saved[i] = sum(s.byte_count for s in storages if s.storage not in kept)
        kept.update(dict.fromkeys(s.storage for s in storages))
    weights = [sum(weight[names[i]] for i in used) for used in graph.node_parameters]
    return Layers(
        compute_s=profile.forward_s + profile.backward_s,
        weight_bytes=np.array(weights),
        output_bytes=np.asarray(profile.output_bytes, dtype=np.float64),
        saved_bytes=saved,
        edges=graph.edges,
        names=tuple(node.key for node in graph.nodes),
    )


def recorded_layers(graph: Graph) -> Layers:
    """Layers of a PipeDream profile with its sizes as recorded, which is what PipeDream's own optimiser reads.

    A concatenation has the size of its first operand only, and a layer that works in place keeps its result once more.

    Raises:
        UsageError: the graph is no PipeDream profile.
    """
    if not graph.nodes or any("recorded_bytes" not in node.attributes for node in graph.nodes):
        raise UsageError("the model carries no recorded sizes", hint="read a PipeDream profile (graph.txt)")
    figures = np.array(
        [[_figure(node.attributes[k]) for k in ("forward_s", "backward_s", "recorded_bytes")] for node in graph.nodes]
    )
    weight = {p.name: float(graph.tensors[p.name].byte_count) for p in graph.parameters}
    return Layers(
        compute_s=figures[:, 0] + figures[:, 1],
        weight_bytes=np.array([sum(weight.get(name, 0.0) for name in node.inputs) for node in graph.nodes]),
        output_bytes=figures[:, 2],
        saved_bytes=figures[:, 2].copy(),
        edges=graph.edges,
        names=tuple(node.key for node in graph.nodes),
    )


def _figure(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
