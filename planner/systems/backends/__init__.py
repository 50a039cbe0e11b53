"""Training frameworks as data: what the plans that each of them takes are like, one file a framework.

>>> from planner.systems.backends import BACKENDS
>>> BACKENDS.get("megatron").structure.equal_replicas
True
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.costs.precision import precision
from planner.errors import JobError, Problem
from planner.graph import Chain, Graph
from planner.graph.blocks import build_chain, layer_of
from planner.hardware.types import Cluster
from planner.plans.readings import is_decoder, kinds_of_layers
from planner.plans.types import Requirement
from planner.registry import Registry
from planner.sharding import attention_heads
from planner.space.job_options import given
from planner.space.jobs import settled
from planner.space.layers import layers_of_choice
from planner.space.recompute_choices import recomputed_modules
from planner.space.types import Job, Structure

ANY = "any"
"""In place of frameworks: none needs to take the plan."""

PIPELINE = frozenset({
    Requirement.PIPELINE, Requirement.MULTI_STAGE_RANK, Requirement.SPLIT_BACKWARD, Requirement.TIED_PARAMETERS,
    Requirement.SKIP_EDGES, Requirement.MULTI_TENSOR_BOUNDARY, Requirement.DUPLICATED_NODES,
})  # fmt: skip
"""What frameworks with pipelines do by the model's own code: what goes between stages, and which weights are tied."""

GROUPS = frozenset({
    Requirement.TENSOR_PARALLEL, Requirement.SEQUENCE_PARALLEL, Requirement.EXPERT_PARALLEL,
    Requirement.VOCABULARY_PARALLEL, Requirement.INTERLEAVED_SPLIT, Requirement.SHARED_STATISTICS,
})  # fmt: skip
"""What frameworks with tensor parallel layers do inside groups; statistics are those of a loss over the vocabulary."""

TOKEN_DIMS = 2
"""Dimensions of token ids: samples and steps."""

_SHARED = {"tensor_parallel": "--tp", "context_parallel": "--cp", "expert_parallel": "--ep"}
"""Fields of a job that say how many ranks share operators, and their options."""

REPLICAS = frozenset({
    Requirement.REPLICATED_STAGE, Requirement.RECOMPUTE, Requirement.IDLE_RANKS, Requirement.SEPARATED_WEIGHTS,
})  # fmt: skip
"""What all frameworks do; weights are those of the model's own modules, whatever a file made of them."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A training framework: what it takes of a plan as it is.

    Attributes:
        key: the name users choose it by.
        title: as its authors write it.
        can: what of `Plan.requires` it does; ZeRO stages are in `zero`.
        schedules: orders of work, names in `planner.schedules`; empty without pipelines.
        zero: ZeRO stages of plans with one stage; of those with several `structure.zero_in_pipelines`, if it says some.
        formats: precisions that it trains in, without their options, the usual one first; empty for any.
        zero_of_formats: by precision, the ZeRO stages that go with it, where not all do.
        optimizers: those that it has; empty for any.
        sharded_optimizers: those whose state ZeRO can shard; empty for all.
        unable: by precision, what it cannot do beside: run some kinds of modules again alone, or leave the `first` or
            the `last` layers in wider formats.
        decoders: it takes models of an embedding of tokens, equal layers and a loss only.
        next_token_alone: such a model may not predict further tokens behind its layers.
        structure: what its plans are like beside.
        modules: kinds of modules whose forward can be run again alone (`planner.operators.modules`), `*` for any.
        offloads: kinds of modules whose activations it can keep in the host's memory; `layer_input` for the inputs of
            layers that are recomputed.
        sources: what each of these is known from, by the field's name here or in `Structure`.
        usual: whether plans are made for it where nobody says for what.
        notes: what must be known of it beside.
    """

    key: str
    title: str
    can: frozenset[Requirement]
    schedules: tuple[str, ...]
    zero: tuple[int, ...]
    structure: Structure
    formats: tuple[str, ...] = ()
    zero_of_formats: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    optimizers: tuple[str, ...] = ()
    sharded_optimizers: tuple[str, ...] = ()
    unable: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    decoders: bool = False
    next_token_alone: bool = False
    modules: tuple[str, ...] = ()
    offloads: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    usual: bool = False
    notes: tuple[str, ...] = ()

    @property
    def pipelines(self) -> bool:
        """Whether it has pipelines of stages."""
        return Requirement.PIPELINE in self.can

    def unlike_decoders(self, blocks: Sequence[str], inputs: Iterable[tuple[Sequence[int], str]]) -> str:
        """Why a model is none of the decoders that a framework trains; "" where it is one, or where any model will do.

        Args:
            blocks: names of its blocks.
            inputs: shape and type of what it reads.
        """
        if not self.decoders:
            return ""
        if not is_decoder(blocks):
            return f"kinds of layers: {', '.join(kinds_of_layers(blocks)) or 'none'}"
        if not any(len(shape) == TOKEN_DIMS and "int" in dtype for shape, dtype in inputs):
            return "it reads no tokens"
        layers = dict.fromkeys(layer_of(name.partition("[")[0]) for name in blocks)
        kinds = kinds_of_layers(blocks)
        further = [name for name in layers if name[-1:].isdigit() and name.rstrip("0123456789") not in kinds]
        return f"it predicts further tokens: {', '.join(further)}" if further and self.next_token_alone else ""

    def heads_dealt(self, graph: Graph) -> int:
        """Attention heads of a model that the ranks of a group must divide; 0 where any number of ranks will do."""
        heads, groups = attention_heads(graph)
        return {"heads": heads, "key-value heads": groups}.get(self.structure.head_groups, 0)

    def repeats(self, modules: Sequence[str], precision: str = "") -> bool:
        """Whether it can run the forward of all these modules again, and of no others, in a precision."""
        unable = self.unable.get(precision.partition(":")[0], ())
        return not set(modules) & set(unable) and ("*" in self.modules or set(modules) <= set(self.modules))

    def trains_in(self, name: str) -> bool:
        """Whether it trains in a precision, options aside, or in one that comes to the same (`bf16:grads=fp32`).

        In one that is left open ("") it does.
        """
        if not self.formats or not name or name.partition(":")[0] in self.formats:
            return True
        wanted = dataclasses.replace(precision(name), name="")
        return any(wanted == dataclasses.replace(precision(own), name="") for own in self.formats)

    def own_precision(self, best: str) -> str:
        """The precision of a job that leaves it open: the best of its devices, or its first that computes as that does.

        Returns "" where it has none of these.
        """
        alike = (name for name in self.formats if precision(name).computes_as(precision(best)))
        return best if self.trains_in(best) else next(alike, "")

    def relaxed(self) -> Backend:
        """The framework without its pipelines and as if it trained in any precision."""
        return dataclasses.replace(self, formats=(), can=self.can - PIPELINE, schedules=())

    def zero_for(self, precision: str, optimizer: str, *, piped: bool) -> tuple[int, ...]:
        """ZeRO stages with a precision and an optimizer, of plans with several stages or with one."""
        stages = (self.structure.zero_in_pipelines if piped else ()) or self.zero
        fitting = self.zero_of_formats.get(precision.partition(":")[0], stages)
        sharded = not self.sharded_optimizers or optimizer.partition(":")[0] in self.sharded_optimizers
        return tuple(stage for stage in stages if stage in fitting and (sharded or not stage))

    def has_optimizer(self, optimizer: str) -> bool:
        """Whether it has an optimizer, options aside."""
        return not self.optimizers or optimizer.partition(":")[0] in self.optimizers

    @property
    def groups(self) -> bool:
        """Whether several ranks can share an operator."""
        return Requirement.TENSOR_PARALLEL in self.can


BACKENDS: Registry[Backend] = Registry(__name__, "training framework")
"""All frameworks by name; a module of this package registers its own."""


def register(backend: Backend) -> None:
    """Add a framework under its key."""
    BACKENDS.register(backend.key, backend)


def backend_names() -> tuple[str, ...]:
    """Names of all frameworks, sorted."""
    return BACKENDS.names()


def usual_backends() -> tuple[str, ...]:
    """Names of those for which plans are made where nobody says for what."""
    return tuple(name for name, backend in BACKENDS.items() if backend.usual)


def backends_of(job: Job) -> tuple[Backend, ...]:
    """The frameworks of which one is to take the plan of a job; none where none needs to.

    Raises:
        UsageError: no framework has one of the names.
        JobError: others stand beside "any".
    """
    if ANY in job.backends:
        if set(job.backends) != {ANY}:
            raise JobError(f"a plan for {ANY} is for no framework by name", hint=f"leave out {ANY}, or all others")
        return ()
    return tuple(BACKENDS.get(name) for name in dict.fromkeys(job.backends or usual_backends()))


def settled_for(job: Job, backends: Sequence[Backend], cluster: Cluster) -> Job:
    """The job, settled; in a framework's own precision where none is given and none of them trains in the best one.

    Raises:
        JobError, UsageError: as of `settled`.
    """
    best = settled(job, cluster)
    if job.precision or not backends or any(backend.trains_in(best.precision) for backend in backends):
        return best
    for name in backends[0].formats:
        with contextlib.suppress(JobError):
            return settled(dataclasses.replace(job, precision=name), cluster)
    return best


def distinct(backends: Sequence[Backend], job: Job) -> tuple[Backend, ...]:
    """Those of some frameworks, all able to do a job, that take plans which the others do not: searches serve all."""
    left = list(backends)
    for backend in backends:
        others, kinds = [other for other in left if other is not backend], _zero_kinds(backend, job)
        if all(any(kind in _zero_kinds(o, job) and _takes_all(o, backend, kind[1]) for o in others) for kind in kinds):
            left.remove(backend)
    return tuple(left)


def _zero_kinds(backend: Backend, job: Job) -> set[tuple[int, bool]]:
    """(ZeRO stage, whether beside a pipeline) of the plans of a job that a framework takes."""
    deep = {False, backend.pipelines}
    return {(zero, piped) for piped in deep for zero in backend.zero_for(job.precision, job.optimizer, piped=piped)}


def _takes_all(other: Backend, backend: Backend, piped: bool) -> bool:
    """Whether a framework takes all plans of another, in a pipeline or not, with the ZeRO stages that it has."""
    free, own = other.structure, backend.structure
    restrictions = ("equal_replicas", "alike", "whole_layers", "powers_of_two")
    return (
        backend.can - (frozenset() if piped else PIPELINE) <= other.can
        and (not piped or set(backend.schedules) <= set(other.schedules))
        and other.repeats(backend.modules)
        and set(backend.offloads) <= set(other.offloads)
        and _includes(free.axes, own.axes)
        and _includes(free.between_layers, own.between_layers)
        and free.head_groups in ("", "heads", own.head_groups)
        and all(getattr(own, name) or not getattr(free, name) for name in restrictions)
        and (free.some_layers or not own.some_layers)
    )


def _includes(allowed: Sequence[str], others: Sequence[str]) -> bool:
    """Whether some names include others, none being all."""
    return not allowed or (bool(others) and set(others) <= set(allowed))


def structure_of(backends: Sequence[Backend]) -> Structure:
    """What all plans of some frameworks have in common."""
    own = [backend.structure for backend in backends if backend.groups or backend.pipelines] or [Structure()]
    shared = [backend.structure for backend in backends if backend.groups] or [Structure()]
    piped = [backend.structure.zero_in_pipelines or backend.zero for backend in backends if backend.pipelines]
    alone = {stage for backend in backends for stage in backend.zero}
    axes = () if any(not s.axes for s in shared) else tuple(dict.fromkeys(name for s in shared for name in s.axes))
    groups = sorted({s.head_groups for s in shared}, key=("", "heads", "key-value heads").index)
    free = any(not s.between_layers for s in shared)
    between = [] if free else sorted({name for s in shared for name in s.between_layers})
    return Structure(
        equal_replicas=all(s.equal_replicas for s in own),
        alike=all(s.alike for s in own),
        whole_layers=all(s.whole_layers for s in own),
        axes=axes,
        powers_of_two=all(s.powers_of_two for s in shared),
        head_groups=groups[0],
        zero_in_pipelines=tuple(sorted({stage for stages in piped for stage in stages})),
        zero_alone=() if all(alone.issuperset(stages) for stages in piped) else tuple(sorted(alone)),
        between_layers=tuple(between),
        some_layers=any(s.some_layers for s in own),
        **_offload_limits(backends),
    )


def _offload_limits(backends: Sequence[Backend]) -> dict[str, tuple[Any, ...]]:
    """What activations a search may keep in the host's memory, and the ZeRO stages of the frameworks that do so."""
    able = [backend for backend in backends if backend.offloads]
    zero = {stage for backend in able for stage in (*backend.zero, *backend.structure.zero_in_pipelines)}
    kinds = {name for backend in able for name in backend.offloads}
    return {"offloads": tuple(sorted(kinds)), "offload_zero": tuple(sorted(zero))}


def within_limits(job: Job, backends: Sequence[Backend]) -> Job:
    """The job within the limits of some frameworks; for none of them without limits.

    Of what the job leaves open (orders of work, ZeRO stages) the usual choices are kept as far as a framework has them,
    and a framework without any of them gets its own.
    """
    if not backends:
        limits = _offload_limits([backend for _, backend in BACKENDS.items()])
        return dataclasses.replace(job, structure=dataclasses.replace(job.structure, offloads=limits["offloads"]))
    most = job.max_stages if any(backend.pipelines for backend in backends) else 1
    single = (most or max(job.pipeline_stages, default=0)) == 1
    zero = {
        z
        for b in backends
        for deep in {False, not single}
        for z in b.zero_for(job.precision, job.optimizer, piped=deep)
    }
    orders = {name for backend in backends for name in backend.schedules}
    kept = tuple(stage for stage in job.zero if stage in zero)
    own = not given(job, ("zero",)) and len(kept) < len(job.zero)
    names = tuple(name for name in job.schedules if name.partition(":")[0] in orders)
    modules = (b.modules and not b.unable.get(job.precision.partition(":")[0]) for b in backends)
    plain = job.recompute == "auto" and not any(modules)
    structure = structure_of(backends)
    asked = (job.tensor_parallel, job.context_parallel, job.expert_parallel, *job.meshes)
    if any(ranks & (ranks - 1) for sizes in asked for ranks in sizes):
        structure = dataclasses.replace(structure, powers_of_two=False)
    groups: dict[str, Any] = {} if any(backend.groups for backend in backends) else dict.fromkeys(_SHARED, (1,))
    return dataclasses.replace(
        job,
        **groups,
        backends=tuple(backend.key for backend in backends),
        zero=tuple(sorted(zero)) if own else kept,
        schedules=names or job.schedules,
        max_stages=most,
        recompute="layers" if plain else job.recompute,
        structure=structure,
    )


def able(job: Job, backends: Sequence[Backend], graph: Graph) -> tuple[tuple[Backend, ...], Problem | None]:
    """Those of some frameworks that can do what the user wants; if none can, also why the first one cannot."""
    problems = [next(_refusals(job, backend, graph), None) for backend in backends]
    fitting = tuple(backend for backend, problem in zip(backends, problems, strict=True) if problem is None)
    return fitting, None if fitting or not problems else problems[0]


def _refusals(job: Job, backend: Backend, graph: Graph) -> Iterator[Problem]:
    """What the user wants and a framework lacks."""
    asked = [name.partition(":")[0] for name in job.schedules]
    if given(job, ("schedules",)) and not set(asked) & set(backend.schedules):
        has = f"use {' or '.join(backend.schedules)}" if backend.schedules else "leave it out"
        yield _refusal(backend, f"has no schedule {' or '.join(asked)}", has)
    chain = build_chain(graph)
    inputs = [(t.shape, str(t.dtype)) for t in map(graph.tensors.get, graph.inputs) if t]
    if why := backend.unlike_decoders(tuple(block.name for block in chain.blocks), inputs):
        yield _refusal(backend, f"trains decoders: an embedding, equal layers and a loss ({why})")
    yield from _unlike_formats(job, backend)
    zero = {stage for piped in (False, True) for stage in backend.zero_for(job.precision, job.optimizer, piped=piped)}
    if given(job, ("zero",)) and not set(job.zero) & zero:
        own, wanted = (" or ".join(map(str, sorted(stages))) for stages in (zero, set(job.zero)))
        yield _refusal(backend, f"has no ZeRO stage {wanted}", f"use {own}")
    yield from _too_deep(job, backend, chain)
    alone = max(job.pipeline_stages, default=2) == 1
    if alone and given(job, ("zero",)) and not set(job.zero) & set(backend.zero):
        yield _refusal(backend, f"has ZeRO {' or '.join(map(str, backend.zero))} in one stage", "use that")
    modules = recomputed_modules(job.recompute)
    if not backend.repeats(modules, job.precision):
        known = f"it knows {', '.join(backend.modules)}" if backend.modules else "it repeats whole layers"
        instead = "name only these" if backend.modules else "use --recompute layers"
        yield _refusal(backend, f"cannot run {', '.join(modules)} alone again: {known}", instead)
    if layers_of_choice(job.recompute) and not backend.structure.some_layers:
        yield _refusal(backend, "recomputes all layers of a stage or none", "use --recompute always")
    yield from _too_wide(job, backend, graph)


def _refusal(backend: Backend, what: str, instead: str = "") -> Problem:
    """What a framework lacks, and what to do instead."""
    other = f"plan --for another framework, or --for {ANY}"
    return Problem(f"{backend.title} {what}", hint=f"{instead}, or {other}" if instead else other)


def _too_deep(job: Job, backend: Backend, chain: Chain) -> Iterator[Problem]:
    """Pipelines that a framework lacks, for what is asked of them or for the model's tied weights."""
    deep, piped = min(job.pipeline_stages, default=1), backend.structure.zero_in_pipelines
    if deep == 1:
        return
    if not backend.pipelines:
        yield _refusal(backend, f"has no pipelines of {deep} stages", "use --pp 1")
    if piped and given(job, ("zero",)) and not set(job.zero) & set(piped):
        yield _refusal(backend, f"has ZeRO {' or '.join(map(str, piped))} in a pipeline", "use that, --pp 1")
    first, last = (
        {name for node in block.nodes for name in chain.graph.node_parameters[node]}
        for block in (chain.blocks[0], chain.blocks[-1])
    )
    if len(chain.blocks) > 1 and first & last and Requirement.TIED_PARAMETERS not in backend.can:
        tied = chain.graph.parameters[min(first & last)].label
        yield _refusal(backend, f"keeps tied weights in one stage ({tied})", "use --pp 1")


def _unlike_formats(job: Job, backend: Backend) -> Iterator[Problem]:
    """A precision or an optimizer that a framework lacks."""
    if not backend.trains_in(job.precision):
        instead = f"use --precision {' or '.join(backend.formats)}"
        yield _refusal(backend, f"has no precision {job.precision.partition(':')[0]}", instead)
    if not backend.has_optimizer(job.optimizer):
        instead = f"use --optimizer {' or '.join(backend.optimizers)}"
        yield _refusal(backend, f"has no optimizer {job.optimizer.partition(':')[0]}", instead)


def _too_wide(job: Job, backend: Backend, graph: Graph) -> Iterator[Problem]:
    """Tensor parallel ranks that a framework cannot deal a model's heads to."""
    wide = [_SHARED[name] for name in _SHARED if min(getattr(job, name), default=1) > 1]
    if wide and not backend.groups:
        yield _refusal(backend, "shares no operator among ranks", f"use {wide[0]} 1")
    width = min(job.tensor_parallel, default=1)
    kind, count = backend.structure.head_groups, backend.heads_dealt(graph)
    fits = [ranks for ranks in job.tensor_parallel or (1,) if not count or count % ranks == 0]
    if not fits and backend.structure.axes:
        what = f"deals {kind} to the ranks of a group: {width} ranks for {count} of them"
        yield _refusal(backend, what, f"use --tp {largest_divisor(count, width)}")


def largest_divisor(count: int, most: int) -> int:
    """The largest divisor of a count that is no more than a number."""
    return next(n for n in range(min(count, most), 0, -1) if count % n == 0)
