"""What a plan file says of a sharding's collectives and layouts, from the judge's terms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.graph import Graph
from planner.plans.shardings import GroupCollective
from planner.plans.words import significant
from planner.sharding import CollectiveUse, Mesh


def by_position(layouts: Sequence[tuple[int, str]]) -> tuple[str, ...]:
    """Layouts by position, "" where there is none."""
    found = dict(layouts)
    return tuple(found.get(p, "") for p in range(max(found, default=-1) + 1))


def group_collective(use: CollectiveUse, mesh: Mesh, micro_batches: int) -> GroupCollective:
    """A collective as the plan has it: what an update runs is told whole, not by a micro-batch's share of it."""
    whole = micro_batches if use.phase == "step" else 1
    return GroupCollective(
        of=use.subject,
        reason=use.reason,  # type: ignore[arg-type]
        phase=use.phase,  # type: ignore[arg-type]
        kind=use.kind.value,
        axes=use.axes,
        level=level_crossed(mesh, use.axes),
        payload_bytes=significant(use.payload_bytes),
        sent_bytes=significant(use.sent_bytes * whole),
        times=significant(use.times * whole),
        seconds=significant(use.seconds * whole),
    )


def weight_origin(graph: Graph, tensor: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Parameters that a weight is computed from, and the parameter's dimension for each of a transposed one's.

    Both empty for a parameter itself and for what is no weight.
    """
    sources = graph.sources.get(tensor, ())
    return ((), ()) if tensor in sources else (sources, graph.permuted.get(tensor, ()) if sources else ())


def level_crossed(mesh: Mesh, axes: Sequence[str]) -> str:
    """Name of the outermost level of links between ranks along the axes; "" where there is none."""
    if mesh.cluster is None:
        return ""
    groups = mesh.groups([mesh.names.index(name) for name in axes])
    crossed, below = "", 1
    for level, size in zip(mesh.cluster.levels, mesh.cluster.group_sizes(), strict=True):
        if np.any(groups // below != groups[:, :1] // below):
            crossed = level.name
        below = size
    return crossed
