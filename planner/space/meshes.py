"""Which meshes of ranks are worth considering on a cluster: a joint search asks for the shardings on each of them."""

from __future__ import annotations

import math

from planner.graph import Graph
from planner.hardware.types import Cluster
from planner.operators.specs import graph_specs
from planner.space.placement import aligned
from planner.space.types import Job

MOST_NODES = 4
"""Nodes that one replica's ranks span at the most, in a model that works with all of its weights."""

SPARSE = 0.5
"""Fraction of the weights beyond which a model counts as one that uses only some of them for a sample."""

_NAMES = {1: ("tensor",), 2: ("outer", "tensor"), 3: ("far", "outer", "tensor")}


def mesh_names(mesh: tuple[int, ...]) -> tuple[str, ...]:
    """Names of a mesh's axes, outermost first."""
    return _NAMES.get(len(mesh), tuple(f"axis{i}" for i in range(len(mesh))))


def meshes_for(graph: Graph, cluster: Cluster, job: Job) -> tuple[tuple[int, ...], ...]:
    """Meshes of two ranks and more that suit a cluster, smallest first.

    Inside a node one axis of 2, 4, 8 .. ranks. Across nodes one axis over all ranks, and two: the nodes, and the ranks
    of a node; up to `MOST_NODES` nodes, or all of them where most weights are tables and experts, of which a sample
    uses a few: those can be spread over far links, because little is exchanged. Clusters with several device types
    have none. The job's own meshes and widths go before all this.
    """
    if len(cluster.devices) > 1 and not job.meshes:
        return ()
    devices = min(job.devices or cluster.device_count, cluster.device_count)
    if job.meshes:
        found = {mesh for mesh in job.meshes if math.prod(mesh) > 1}
    else:
        node = cluster.node_size or (cluster.levels[0].size if cluster.levels else 1)
        found = set()
        for ranks in _widths(cluster, node, devices, spread=uses_few_weights(graph)):
            found.add((ranks,))
            if ranks > node > 1 and ranks % node == 0:
                found.add((ranks // node, node))
    allowed = {m for m in found if math.prod(m) <= devices and aligned(cluster, math.prod(m))}
    wanted = {m for m in allowed if not job.tensor_parallel or math.prod(m) in job.tensor_parallel}
    return tuple(sorted(wanted, key=lambda m: (math.prod(m), len(m), m)))


def _widths(cluster: Cluster, node: int, devices: int, *, spread: bool) -> list[int]:
    """Powers of two, and whole children of levels, up to as many ranks as a replica may have."""
    most = devices if spread else min(devices, MOST_NODES * node)
    doubled = [2**k for k in range(1, most.bit_length()) if 2**k <= most]
    whole = [size for size in cluster.group_sizes() if 1 < size <= most]
    return sorted({*doubled, *whole})


def uses_few_weights(graph: Graph) -> bool:
    """Whether most weights are tables and experts: less work in them than a product with each weight for every sample.

    A weight that every token is multiplied with costs two FLOPs an element and token; a model's tokens are taken from
    the operator that multiplies by the largest number of rows.
    """
    specs = graph_specs(graph)
    work: dict[int, float] = {}
    rows: dict[int, float] = {}
    for i, spec in enumerate(specs):
        weights = graph.node_parameters[i]
        elements = sum(graph.parameters[p].elements for p in weights)
        for p in weights:
            share = graph.parameters[p].elements / elements if elements else 0.0
            work[p] = work.get(p, 0.0) + spec.matrix_flops * share
        if spec.matrix_flops and elements:
            rows[i] = spec.matrix_flops / (2 * elements)
    matrices = [p for p in range(len(graph.parameters)) if graph.parameters[p].elements > 1]
    total = sum(graph.parameters[p].elements for p in matrices)
    if not rows or not total:
        return False
    tokens = sorted(rows.values())[len(rows) // 2]
    idle = sum(
        graph.parameters[p].elements * max(0.0, 1 - work.get(p, 0.0) / (2 * tokens * graph.parameters[p].elements))
        for p in matrices
    )
    return idle > SPARSE * total
