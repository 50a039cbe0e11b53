"""Layers of PipeDream's problem read off a priced graph, or off a profile as PipeDream's own optimiser reads it."""

from __future__ import annotations

import numpy as np

from planner.costs import Profile
from planner.errors import UsageError
from planner.graph import Graph
from planner.solvers.cluster_chains.pipedream_terms import LayerDag
from planner.sums import float_sum


def priced_layers(graph: Graph, profile: Profile) -> LayerDag:
    """Layers of any priced graph, with the true sizes of tensors.

    Weights that several layers share count for each of them; a storage that several layers keep counts for the first.

    Args:
        graph: the model.
        profile: its prices for one minibatch (`planner.costs.imported_profile`, `planner.costs.profile`).
    """
    weight = {p.name: float(graph.tensors[p.name].byte_count) for p in graph.parameters}
    names = [p.name for p in graph.parameters]
    seen_storages: dict[str, None] = {}
    saved = np.zeros(len(graph.nodes))
    for i, storages in enumerate(profile.saved):
        saved[i] = sum(s.byte_count for s in storages if s.storage not in seen_storages)
        seen_storages.update(dict.fromkeys(s.storage for s in storages))
    weights = [float_sum(weight[names[i]] for i in parameters) for parameters in graph.node_parameters]
    return LayerDag(
        compute_s=profile.forward_s + profile.backward_s,
        weight_bytes=np.array(weights),
        output_bytes=np.asarray(profile.output_bytes, dtype=np.float64),
        saved_bytes=saved,
        edges=graph.edges,
    )


def recorded_layers(graph: Graph) -> LayerDag:
    """Layers of a PipeDream profile with the recorded sizes, as PipeDream's own optimiser reads them.

    There a concatenation has the size of its first operand only, and an in-place layer keeps its result once more.

    Raises:
        UsageError: the graph is no PipeDream profile.
    """
    if not graph.nodes or any("recorded_bytes" not in node.attributes for node in graph.nodes):
        raise UsageError("the model carries no recorded sizes", hint="read a PipeDream profile (graph.txt)")
    figures = np.array(
        [[_figure(node.attributes[k]) for k in ("forward_s", "backward_s", "recorded_bytes")] for node in graph.nodes]
    )
    weight = {p.name: float(graph.tensors[p.name].byte_count) for p in graph.parameters}
    return LayerDag(
        compute_s=figures[:, 0] + figures[:, 1],
        weight_bytes=np.array([float_sum(weight.get(name, 0.0) for name in node.inputs) for node in graph.nodes]),
        output_bytes=figures[:, 2],
        saved_bytes=figures[:, 2].copy(),
        edges=graph.edges,
    )


def _figure(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
