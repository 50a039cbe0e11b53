"""Check the fields of a job, fill in its precision and overlap, and list the meshes worth considering on a cluster."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from planner.costs.precision import Precision, best_precision, precision, supported_precision
from planner.errors import JobError, ModelError
from planner.exchange import recipes
from planner.graph import Graph, Note, NoteLevel, TensorKind
from planner.graph.types import per_graph
from planner.hardware.types import Cluster
from planner.operators import JointCut, OpCall, rule_of
from planner.operators.batching import batch_flow
from planner.operators.specs import call_classes, graph_specs
from planner.sharding.choices import expert_dims
from planner.sharding.limits import attention_heads, deals_heads
from planner.sharding.mesh import Axis, AxisRole
from planner.space.layers import layers_of_choice
from planner.space.placement import aligned
from planner.space.recompute_choices import CHOICES, recomputed_modules
from planner.space.types import Job, Structure
from planner.sums import float_sum

_COUNTS = {"global_batch": 1, "devices": 0, "max_stages": 0}
"""Fields that are whole numbers, and their smallest allowed values."""

_LISTS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "micro_batches": ("whole numbers of at least 1, such as (1, 2)", lambda v: _is_integer(v, 1)),
    "tensor_parallel": ("whole numbers of at least 1, such as (1, 2)", lambda v: _is_integer(v, 1)),
    "context_parallel": ("whole numbers of at least 1, such as (2, 4)", lambda v: _is_integer(v, 1)),
    "expert_parallel": ("whole numbers of at least 1, such as (8, 32)", lambda v: _is_integer(v, 1)),
    "pipeline_stages": ("whole numbers of at least 1, such as (2, 4)", lambda v: _is_integer(v, 1)),
    "data_parallel": ("whole numbers of at least 1, such as (2, 4)", lambda v: _is_integer(v, 1)),
    "zero": ("ZeRO stages that there are, such as (0, 1)", lambda v: _is_integer(v, 0) and v in recipes()),
    "schedules": ("names of schedules, such as ('1f1b',)", lambda v: isinstance(v, str)),
    "backends": ("names of training frameworks, such as ('megatron',)", lambda v: isinstance(v, str)),
    "forbid": ("texts such as ('MatMul:k',)", lambda v: isinstance(v, str)),
    "meshes": ("ranks by axis, such as ((8,), (2, 4))", lambda v: _is_mesh(v)),
    "keep": ("blocks with a stage each, such as (('layer0', 0),)", lambda v: _is_pin(v)),
}
"""Fields that are tuples: what they hold, in words, and the check of an entry."""


def check_job(job: Job) -> None:
    """Refuse a job with a field that is invalid by itself.

    Raises:
        JobError: names the field, its value and what it should be.
    """
    for name, least in _COUNTS.items():
        value = getattr(job, name)
        if not _is_integer(value, least):
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
    if not isinstance(job.recompute, str) or (
        job.recompute not in CHOICES and not recomputed_modules(job.recompute) and not layers_of_choice(job.recompute)
    ):
        hint = f"use {', '.join(CHOICES)}, layers:4 for the first 4 of each stage, or names of modules"
        raise JobError(f"recompute is {job.recompute!r}", hint=hint)
    if job.overlap is not None and (not isinstance(job.overlap, (int, float)) or not 0 <= job.overlap <= 1):
        raise JobError(f"overlap is {job.overlap!r}", hint="give a fraction from 0 to 1")
    if not isinstance(job.headroom, (int, float)) or not 0 <= job.headroom < 1:
        raise JobError(f"headroom is {job.headroom!r}", hint="give a fraction from 0 to below 1")


def _is_integer(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_mesh(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) > 0 and all(_is_integer(size, 1) for size in value)


def _is_pin(value: object) -> bool:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return False
    return isinstance(value[0], str) and isinstance(value[1], int)


SPARSE = 0.5
"""Fraction of idle weights above which a model counts as sparse: a sample uses few of its weights."""

_NAMES = {1: ("tensor",), 2: ("outer", "tensor"), 3: ("far", "outer", "tensor")}


def mesh_names(mesh: tuple[int, ...]) -> tuple[str, ...]:
    """Names of a mesh's axes, outermost first."""
    return _NAMES.get(len(mesh), tuple(f"axis{i}" for i in range(len(mesh))))


MeshAxes = tuple[Axis, ...]
"""Axes of a mesh, outermost first: expert, context, then the tensor axes."""


def mesh_axes(tensor: tuple[int, ...], context: int = 1, expert: int = 1) -> MeshAxes:
    """A mesh of expert, context and tensor axes of so many ranks; axes of one rank are left out."""
    dealing = (Axis(AxisRole.EXPERT.value, expert), Axis(AxisRole.CONTEXT.value, context))
    shared = tuple(map(Axis, mesh_names(tensor), tensor)) if math.prod(tensor) > 1 else ()
    return (*(axis for axis in dealing if axis.size > 1), *shared)


def ranks_of(mesh: MeshAxes) -> int:
    """Ranks of a mesh."""
    return math.prod(axis.size for axis in mesh)


def tensor_ranks(mesh: MeshAxes) -> int:
    """Ranks along the tensor axes of a mesh."""
    return ranks_of(tuple(axis for axis in mesh if not axis.role.deals))


LONG_STEPS, FEWEST_STEPS = 32768, 8192
"""Fewest steps of a sample for which context axes are considered by default, and fewest steps left to a rank."""

NARROWEST_EXPERTS = 4
"""Fewest ranks of an expert axis that is considered by default."""


def meshes_for(graph: Graph, cluster: Cluster, job: Job) -> tuple[MeshAxes, ...]:
    """Meshes of two ranks and more that suit a cluster, smallest first.

    Tensor axes: inside a node one of 2, 4, 8 .. ranks, or two where there are more ranks than key-value heads: those
    heads, and the ranks that share one. Ranks of several nodes share operators only in models of which most weights are
    tables (of these a sample uses a few, so little is exchanged when they are spread), or where the job says so: one
    axis over all ranks, and two, the nodes and the ranks of a node. Beside them an axis that deals out
    long sequences, and one that deals out experts, each of any power of two ranks that divides what it deals out, and
    over any number of nodes. Where the devices that may be used are of several types there are no meshes. The job's own
    meshes and widths go before the rest.

    Raises:
        JobError: a field of the job makes no sense for the model.
    """
    check_job(job)
    devices = job.devices_of(cluster)
    experts, steps = dealt_experts(graph), sample_steps(graph)
    check_dealt(graph, job)
    if len(device_types(cluster, job)) > 1:
        return ()
    longest = steps // FEWEST_STEPS if steps >= LONG_STEPS else 1
    context_widths = job.context_parallel or (1, *_dividing(steps, 2, min(longest, devices)))
    expert_widths = job.expert_parallel or (1, *_dividing(experts, NARROWEST_EXPERTS, min(experts, devices)))
    tensor_meshes = _tensor_meshes(graph, cluster, job, devices, spread=not experts)
    candidates = {
        mesh_axes(tensor, cp, ep) for tensor in tensor_meshes for cp in context_widths for ep in expert_widths
    } - {()}
    aligned_meshes = {m for m in candidates if ranks_of(m) <= devices and aligned(cluster, ranks_of(m))}
    allowed = {mesh for mesh in aligned_meshes if _structured(graph, job.structure, mesh)}
    return tuple(sorted(allowed, key=lambda m: (ranks_of(m), len(m), tuple((a.size, a.name) for a in m))))


def _structured(graph: Graph, structure: Structure, mesh: MeshAxes) -> bool:
    """True if the restrictions of the wanted frameworks allow a mesh (`Structure`)."""
    heads, groups = attention_heads(graph) if structure.head_groups else (0, 0)
    count = {"heads": heads, "key-value heads": groups}.get(structure.head_groups, 0)
    roles_allowed = not structure.axes or {axis.role for axis in mesh} <= {AxisRole(name) for name in structure.axes}
    sizes_allowed = not structure.powers_of_two or all(axis.size & (axis.size - 1) == 0 for axis in mesh)
    dealt = not count or deals_heads(heads, groups, [axis.size for axis in mesh if not axis.role.deals])
    return roles_allowed and sizes_allowed and dealt and count % tensor_ranks(mesh) == 0


def _tensor_meshes(graph: Graph, cluster: Cluster, job: Job, devices: int, *, spread: bool) -> set[tuple[int, ...]]:
    """Sizes of tensor axes, `(1,)` for none; with `spread` over nodes where weights are mostly tables."""
    meshes: set[tuple[int, ...]] = {(1,)}
    if job.meshes:
        meshes = set(job.meshes)
    else:
        node = cluster.node_size or (cluster.levels[0].size if cluster.levels else 1)
        heads, groups = attention_heads(graph)
        for ranks in _widths(cluster, max(node, spread and spread_ranks(graph), *job.tensor_parallel), devices):
            shares = groups > 1 and ranks > groups and ranks % groups == 0 and heads % ranks == 0
            meshes.add((groups, ranks // groups) if shares else (ranks,))
            if ranks > node > 1 and ranks % node == 0:
                meshes.add((ranks // node, node))
    return {mesh for mesh in meshes if not job.tensor_parallel or math.prod(mesh) in job.tensor_parallel}


def _dividing(count: int, least: int, most: int) -> list[int]:
    """Powers of two in a range, both ends included, that divide a number."""
    return [2**k for k in range(most.bit_length()) if least <= 2**k <= most and count % 2**k == 0]


def check_dealt(graph: Graph, job: Job) -> None:
    """Refuse CP and EP degrees that do not divide the steps, the experts or the samples.

    Raises:
        JobError: names the first.
    """
    _check_widths(job.expert_parallel, dealt_experts(graph), "EP", "experts")
    _check_widths(job.context_parallel, sample_steps(graph), "CP", "steps of a sample")
    sizes = job.micro_batches or (job.global_batch,)
    if job.expert_parallel and all(size % width for size in sizes for width in job.expert_parallel):
        width = min(job.expert_parallel)
        what = "micro-batch" if job.micro_batches else "global batch"
        raise JobError(
            f"EP {width} cannot share a {what} of {max(sizes)}",
            hint=f"the samples of a replica's micro-batch are dealt to its ranks: use a multiple of {width}",
        )


def _check_widths(widths: Sequence[int], count: int, degree: str, what: str) -> None:
    for width in (w for w in widths if w > 1):
        if not count:
            raise JobError(f"{degree} {width}: the model has no {what}", hint=f"leave --{degree.lower()} out")
        if count % width:
            near = [d for d in range(1, count + 1) if count % d == 0]
            near = sorted(sorted(near, key=lambda d: abs(d - width))[:3])
            raise JobError(
                f"{degree} {width} does not divide the {count} {what}", hint=f"use {', '.join(map(str, near))}"
            )


@per_graph
def _expert_counts(graph: Graph) -> frozenset[int]:
    """Numbers of experts of the model's mixtures."""
    counts = set()
    specs = graph_specs(graph)
    for i in call_classes(graph).first:
        if not specs[i].matrix_flops:
            continue
        call = OpCall.of(graph, graph.nodes[i])
        for position, dim in expert_dims(call, specs[i].nests).items():
            tensor = call.inputs[position]
            if tensor is not None:
                counts.add(tensor.shape[dim])
    return frozenset(counts)


def expert_count(graph: Graph) -> int:
    """Experts of the model's widest mixture; 0 where there is none."""
    return max(_expert_counts(graph), default=0)


def dealt_experts(graph: Graph) -> int:
    """The largest number of ranks that every mixture's experts can be dealt to evenly; 0 without a mixture."""
    return math.gcd(*_expert_counts(graph))


@per_graph
def experts_of_row(graph: Graph) -> int:
    """Most experts that a row is routed to, over all mixtures; 1 where no choice among all experts is found."""
    experts, counts = expert_count(graph), [1]
    for node in graph.nodes:
        if node.op == "TopK" and graph.tensors[node.inputs[0]].shape[-1:] == (experts,):
            counts.append(graph.tensors[node.outputs[0]].shape[-1])
        elif rule_of(node.op).joint is JointCut.EXPERTS:
            counts.append(int(str(node.attributes.get("k", 1))))
    return max(counts)


@per_graph
def sample_steps(graph: Graph) -> int:
    """Steps of a sample: the second dimension of the longest input of two; 0 where there is none."""
    fed = (graph.tensors[name] for name in graph.inputs if name in graph.tensors)
    inputs = (t for t in fed if t.kind is TensorKind.INPUT and len(t.shape) == 2)
    return max((tensor.shape[1] for tensor in inputs), default=0)


def device_types(cluster: Cluster, job: Job) -> tuple[int, ...]:
    """The types of the devices that a job may use, by their numbers in `cluster.devices`."""
    return tuple(sorted(set(cluster.device_types[: job.devices or None].tolist())))


def mesh_problem(cluster: Cluster, job: Job, mesh: tuple[int, ...]) -> str:
    """Why operators cannot be shared on a mesh of such sizes; empty if they can."""
    ranks, devices = math.prod(mesh), job.devices_of(cluster)
    if ranks == 1:
        return ""
    if ranks > devices:
        return f"a mesh of {' x '.join(map(str, mesh))} needs {ranks} ranks, of which there are {devices}"
    if len(device_types(cluster, job)) > 1:
        equal = int((cluster.device_types == cluster.device_types[0]).argmin())
        return f"operators are shared by equal devices only, and only the first {equal} of {cluster.name} are equal"
    if aligned(cluster, ranks):
        return ""
    node, problem = cluster.node_size, f"no mesh of {ranks} ranks lies alike everywhere on {cluster.name}"
    if ranks <= node and node & (node - 1):  # a rack of 72, say
        return f"{problem}: take --nodes {cluster.device_count // node}x{node // ranks * ranks}"
    return problem


def _widths(cluster: Cluster, most: int, devices: int) -> list[int]:
    """Powers of two, and whole children of levels, up to as many ranks as a replica may have."""
    limit = min(most, devices)
    doubled = [2**k for k in range(1, limit.bit_length()) if 2**k <= limit]
    whole = [size for size in cluster.group_sizes() if 1 < size <= limit]
    return sorted({*doubled, *whole})


@per_graph
def spread_ranks(graph: Graph) -> int:
    """Largest number of ranks over which tables or experts can be spread, in sparse models; 0 in others.

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
    if float_sum(max(0.0, each) for each in idle.values()) <= SPARSE * graph.parameter_count():
        return 0
    by_shape: dict[tuple[int, ...], float] = {}
    for p, each in idle.items():
        shape = graph.parameters[p].shape
        by_shape[shape] = by_shape.get(shape, 0.0) + each
    return max(by_shape, key=lambda shape: (by_shape[shape], shape))[0]


def settled(job: Job, cluster: Cluster) -> Job:
    """The job with its precision and overlap filled in.

    By default, the best precision that all its devices compute in, and the overlap of the cluster's stack.

    Raises:
        JobError: a field of the job makes no sense, or a device that it may use does not compute in its precision.
        UsageError: no precision has that name.
    """
    check_job(job)
    devices = [cluster.devices[t] for t in device_types(cluster, job)]
    precision_name = job.precision or best_precision(devices)
    for device in devices:
        supported_precision(precision_name, device)
    return dataclasses.replace(job, precision=precision_name, overlap=overlap_of(job, cluster))


def precision_of(job: Job, cluster: Cluster) -> Precision:
    """The precision of a job, settled or not."""
    return precision(job.precision or settled(job, cluster).precision)


def overlap_of(job: Job, cluster: Cluster) -> float:
    """The fraction of a pass behind which exchanges hide, of a job, settled or not."""
    return cluster.stack.overlap if job.overlap is None else job.overlap


def allowed_sizes(graph: Graph, job: Job) -> tuple[Graph, tuple[int, ...]]:
    """Micro-batch sizes to search; only the exported one where a node stops the batch, and the graph with a note of it.

    Raises:
        ModelError: a node stops the batch, and the exported one is not allowed or does not divide the global batch.
    """
    if job.micro_batches == (graph.batch,):
        return graph, job.micro_batches
    try:
        batch_flow(graph)
    except ModelError as error:
        allowed = not job.micro_batches or graph.batch in job.micro_batches
        if graph.batch < 1 or not allowed or job.global_batch % graph.batch:
            raise _stopped(graph, job, error) from error
        message = f"{error.problem.message}; planned with micro-batches of {graph.batch}, as exported"
        note = Note(NoteLevel.WARNING, "fixed-batch", message, error.problem.where)
        report = dataclasses.replace(graph.report, notes=(*graph.report.notes, note))
        return dataclasses.replace(graph, report=report), (graph.batch,)
    return graph, job.micro_batches


def _stopped(graph: Graph, job: Job, error: ModelError) -> ModelError:
    """The error of a batch that cannot be changed, with what would help in this job."""
    if graph.batch < 1:
        return error
    size, problem = graph.batch, error.problem
    hint = f"use a global batch that {size} divides" if job.global_batch % size else f"allow micro-batches of {size}"
    return ModelError(
        problem.message,
        where=problem.where,
        hint=f"{hint}, as exported, or export the model with a dynamic batch axis",
    )
