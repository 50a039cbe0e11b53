"""A job before anything is priced: its fields are checked, the precision that it leaves open is settled, and the meshes
of ranks that are worth considering for it on a cluster are listed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from planner.costs.precision import Precision, best_precision, precision, supported_precision
from planner.errors import JobError
from planner.exchange import recipes
from planner.graph import Graph
from planner.hardware.types import Cluster
from planner.operators.specs import graph_specs
from planner.space.placement import aligned
from planner.space.types import Job

_RECOMPUTE = ("auto", "never", "always")

_COUNTS = {"global_batch": 1, "devices": 0, "max_stages": 0}
"""Whole numbers, and the least that they may be."""

_LISTS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "micro_batches": ("whole numbers of at least 1, such as (1, 2)", lambda v: _whole(v, 1)),
    "tensor_parallel": ("whole numbers of at least 1, such as (1, 2)", lambda v: _whole(v, 1)),
    "pipeline_stages": ("whole numbers of at least 1, such as (2, 4)", lambda v: _whole(v, 1)),
    "data_parallel": ("whole numbers of at least 1, such as (2, 4)", lambda v: _whole(v, 1)),
    "zero": ("ZeRO stages from 0 to 3, such as (0, 1)", lambda v: _whole(v, 0) and v in recipes()),
    "schedules": ("names of schedules, such as ('1f1b',)", lambda v: isinstance(v, str)),
    "backends": ("names of training frameworks, such as ('megatron',)", lambda v: isinstance(v, str)),
    "forbid": ("texts such as ('MatMul:k',)", lambda v: isinstance(v, str)),
    "meshes": ("ranks by axis, such as ((8,), (2, 4))", lambda v: _mesh(v)),
    "keep": ("blocks with a stage each, such as (('layer0', 0),)", lambda v: _pin(v)),
}
"""Lists: what they hold in words, and whether an entry is such."""


def check_job(job: Job) -> None:
    """Refuse a job with a field that makes no sense by itself.

    Raises:
        JobError: names the field, its value and what it should be.
    """
    for name, least in _COUNTS.items():
        value = getattr(job, name)
        if not _whole(value, least):
            raise JobError(f"{name} is {value!r}", hint=f"give a whole number of at least {least}")
    for name, (words, fits) in _LISTS.items():
        value = getattr(job, name)
        if not isinstance(value, (tuple, list)) or not all(fits(entry) for entry in value):
            raise JobError(f"{name} is {value!r}", hint=f"give a tuple of {words}")
    for name in ("schedules", "zero"):
        if not getattr(job, name):
            raise JobError(
                f"{name} is empty: there is nothing to choose from", hint=f"give a tuple of {_LISTS[name][0]}"
            )
    if job.recompute not in _RECOMPUTE:
        raise JobError(f"recompute is {job.recompute!r}", hint=f"use {', '.join(_RECOMPUTE)}")
    if job.overlap is not None and (not isinstance(job.overlap, (int, float)) or not 0 <= job.overlap <= 1):
        raise JobError(f"overlap is {job.overlap!r}", hint="give a fraction from 0 to 1")
    if not isinstance(job.headroom, (int, float)) or not 0 <= job.headroom < 1:
        raise JobError(f"headroom is {job.headroom!r}", hint="give a fraction from 0 to below 1")


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _mesh(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) > 0 and all(_whole(size, 1) for size in value)


def _pin(value: object) -> bool:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return False
    return isinstance(value[0], str) and isinstance(value[1], int)


SPARSE = 0.5
"""Fraction of the weights beyond which a model counts as one that uses only some of them for a sample."""

_NAMES = {1: ("tensor",), 2: ("outer", "tensor"), 3: ("far", "outer", "tensor")}


def mesh_names(mesh: tuple[int, ...]) -> tuple[str, ...]:
    """Names of a mesh's axes, outermost first."""
    return _NAMES.get(len(mesh), tuple(f"axis{i}" for i in range(len(mesh))))


def meshes_for(graph: Graph, cluster: Cluster, job: Job) -> tuple[tuple[int, ...], ...]:
    """Meshes of two ranks and more that suit a cluster, smallest first.

    Inside a node one axis of 2, 4, 8 .. ranks. Ranks of several nodes share operators only in models of which most
    weights are tables or experts (of these a sample uses a few, so little is exchanged when they are spread), or where
    the job says so: one axis over all ranks, and two, the nodes and the ranks of a node. Where the devices that may be
    used are of several types there are no meshes. The job's own meshes and widths go before the rest.

    Raises:
        JobError: a field of the job makes no sense.
    """
    check_job(job)
    devices = min(job.devices or cluster.device_count, cluster.device_count)
    if len(device_types(cluster, job)) > 1:
        return ()
    if job.meshes:
        found = {mesh for mesh in job.meshes if math.prod(mesh) > 1}
    else:
        node = cluster.node_size or (cluster.levels[0].size if cluster.levels else 1)
        found = set()
        for ranks in _widths(cluster, max(node, spread_ranks(graph), *job.tensor_parallel), devices):
            found.add((ranks,))
            if ranks > node > 1 and ranks % node == 0:
                found.add((ranks // node, node))
    allowed = {m for m in found if math.prod(m) <= devices and aligned(cluster, math.prod(m))}
    wanted = {m for m in allowed if not job.tensor_parallel or math.prod(m) in job.tensor_parallel}
    return tuple(sorted(wanted, key=lambda m: (math.prod(m), len(m), m)))


def device_types(cluster: Cluster, job: Job) -> tuple[int, ...]:
    """The types of the devices that a job may use, by their numbers in `cluster.devices`."""
    return tuple(sorted(set(cluster.device_types[: job.devices or None].tolist())))


def mesh_problem(cluster: Cluster, job: Job, mesh: tuple[int, ...]) -> str:
    """Why operators cannot be shared on a mesh; empty where they can."""
    ranks, devices = math.prod(mesh), min(job.devices or cluster.device_count, cluster.device_count)
    if ranks == 1:
        return ""
    if ranks > devices:
        return f"a mesh of {' x '.join(map(str, mesh))} needs {ranks} ranks, of which there are {devices}"
    if len(device_types(cluster, job)) > 1:
        alike = int((cluster.device_types == cluster.device_types[0]).argmin())
        return f"operators are shared by equal devices only, and only the first {alike} of {cluster.name} are equal"
    return "" if aligned(cluster, ranks) else f"no mesh of {ranks} ranks lies alike everywhere on {cluster.name}"


def _widths(cluster: Cluster, most: int, devices: int) -> list[int]:
    """Powers of two, and whole children of levels, up to as many ranks as a replica may have."""
    limit = min(most, devices)
    doubled = [2**k for k in range(1, limit.bit_length()) if 2**k <= limit]
    whole = [size for size in cluster.group_sizes() if 1 < size <= limit]
    return sorted({*doubled, *whole})


def spread_ranks(graph: Graph) -> int:
    """Over how many ranks tables and experts can be spread, where most weights are such; 0 elsewhere.

    A weight that every token is multiplied with costs two FLOPs an element and token; a model's tokens are taken from
    the middle one of the operators that multiply by weights. What a weight falls short of that, it is idle. Tables are
    spread by their rows and experts by their number: the first dimension of what most idle elements are in.
    """
    work: dict[int, float] = {}
    rows: list[float] = []
    for i, spec in enumerate(graph_specs(graph)):
        weights = graph.node_parameters[i]
        elements = sum(graph.parameters[p].elements for p in weights)
        if not elements:
            continue
        for p in weights:
            work[p] = work.get(p, 0.0) + spec.matrix_flops * graph.parameters[p].elements / elements
        if spec.matrix_flops:
            rows.append(spec.matrix_flops / (2 * elements))
    tokens = sorted(rows)[len(rows) // 2] if rows else 0.0
    idle = {
        p: weight.elements - work.get(p, 0.0) / (2 * tokens)
        for p, weight in enumerate(graph.parameters)
        if tokens and weight.elements
    }
    if sum(max(0.0, each) for each in idle.values()) <= SPARSE * graph.parameter_count():
        return 0
    by_shape: dict[tuple[int, ...], float] = {}
    for p, each in idle.items():
        shape = graph.parameters[p].shape
        by_shape[shape] = by_shape.get(shape, 0.0) + each
    return max(by_shape, key=lambda shape: (by_shape[shape], shape))[0]


def settled(job: Job, cluster: Cluster) -> Job:
    """The job with a precision and an overlap: its own, or the best that all devices it may use compute in, and the
    stack's.

    Raises:
        JobError: a field of the job makes no sense, or a device that it may use does not compute in its precision.
        UsageError: no precision has that name.
    """
    check_job(job)
    used = [cluster.devices[t] for t in device_types(cluster, job)]
    chosen = job.precision or best_precision(used)
    for device in used:
        supported_precision(chosen, device)
    return dataclasses.replace(job, precision=chosen, overlap=overlap_of(job, cluster))


def precision_of(job: Job, cluster: Cluster) -> Precision:
    """The precision of a job, settled or not."""
    return precision(job.precision or settled(job, cluster).precision)


def overlap_of(job: Job, cluster: Cluster) -> float:
    """The part of a pass's work behind which exchanges hide, of a job, settled or not."""
    return cluster.stack.overlap if job.overlap is None else job.overlap
