"""How the runtime executes what a plan requires, and the plans that it refuses before a process starts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from planner.errors import PlanError, ShardplanError
from planner.graph import Graph
from planner.importers import graph_from_proto
from planner.operators import rebatch
from planner.plans import Fault, Finding, Plan, Requirement, validate
from planner.plans.identity import changed_model, other_model
from planner.plans.types import MINORS
from planner.runtime.model_file import ModelFile
from planner.units import plural

EXECUTED: Mapping[Requirement, str] = {
    Requirement.PIPELINE: "as it stands",
    Requirement.REPLICATED_STAGE: "as it stands",
    Requirement.UNEQUAL_REPLICATION: "as it stands",
    Requirement.SKIP_EDGES: "sent straight to the stage that reads it",
    Requirement.MULTI_TENSOR_BOUNDARY: "as it stands",
    Requirement.DUPLICATED_NODES: "as it stands",
    Requirement.SEPARATED_WEIGHTS: "operators that are listed read weights of their own, of the same first values",
    Requirement.TIED_PARAMETERS: "summed once over all ranks that hold it, in the exchange of its stages",
    Requirement.SEPARATE_COPIES: "as it stands",
    Requirement.MID_MODULE_CUT: "as it stands",
    Requirement.RECOMPUTE: "a stage at a time",
    Requirement.ZERO1: "as it stands",
    Requirement.ZERO2: "after every backward where the replicas run the same actions, else once an iteration",
    Requirement.ZERO3: "for every pass where the replicas run the same actions, else once an iteration",
    Requirement.SHARDED_GROUPS: "refused: state is sharded over all replicas of a stage, or over none",
    Requirement.ASYNC_WEIGHTS: "as it stands",
    Requirement.CORRECTIONS: "as it stands; first epochs that are synchronous are trained under another plan",
    Requirement.EVICTIONS: "activations stay on their rank: the same values, more memory",
    Requirement.MULTI_STAGE_RANK: "as it stands",
    Requirement.SPLIT_BACKWARD: "each half runs the shared part of the backward",
    Requirement.IDLE_RANKS: "as it stands",
    Requirement.TENSOR_PARALLEL: "as it stands",
    Requirement.SEQUENCE_PARALLEL: "as it stands",
    Requirement.EXPERT_PARALLEL: "operators that choose experts are computed whole",
    Requirement.VOCABULARY_PARALLEL: "as it stands",
    Requirement.RING_ATTENTION: "keys and values are gathered, not passed around",
    Requirement.HALO_EXCHANGE: "the whole tensor is gathered, not its borders",
    Requirement.SHARED_STATISTICS: "the whole tensor is gathered, not its statistics",
    Requirement.INTERLEAVED_SPLIT: "as it stands",
    Requirement.PADDED_SPLIT: "pieces are uneven, without padding",
    Requirement.ORDER_ROUTING: "as it stands",
    Requirement.SUB_SEQUENCES: "as it stands; the loss of a micro-batch is taken in its last part",
    Requirement.LANES: "merged in an order in which each action has what it needs",
    Requirement.STREAMING: "a stage passes on whole results",
    Requirement.PAIRED_ACTIONS: "one after the other",
    Requirement.EXPLICIT_TRANSFERS: "as it stands",
    Requirement.EXPLICIT_RECOMPUTE: "as it stands",
    Requirement.EARLY_EXCHANGE: "as it stands",
    Requirement.IN_FLIGHT_LIMITS: "as it stands",
    Requirement.PARTIAL_UPDATES: "as it stands",
    Requirement.BOUNDED_STALENESS: "a copy waits for the waves that its order names and has no newer ones",
    Requirement.MIXED_RECOMPUTE: "as it stands",
    Requirement.LAYER_RECOMPUTE: "the layers behind are repeated, too: the same values, more time",
    Requirement.MODULE_RECOMPUTE: "as it stands; kept in files of before minor version 5, which list no operators",
    Requirement.OFFLOAD: "copied to the host by operator; operators that keep the same tensor have a copy each",
    Requirement.EXCHANGE_SCHEME: "as one reduction of all gradients of a stage",
    Requirement.MIXED_SHARDINGS: "as it stands",
    Requirement.CONTEXT_PARALLEL: "as it stands",
    Requirement.BATCH_PARALLEL: "as it stands",
    Requirement.FREE_LAYOUTS: "as it stands",
    Requirement.GATHERED_WEIGHTS: "as it stands",
}
"""How each requirement of a plan is executed."""

_NOT_EXECUTED = frozenset({Fault.DIGEST, Fault.MEMORY, Fault.FIGURES})
"""Faults in predictions or in the text of a plan, which change nothing in its execution."""


def refusals(plan: Plan) -> tuple[str, ...]:
    """Reasons why the runtime does not execute a plan; () where it does."""
    reasons = list[str]()
    if plan.schedule.parts > 1 and not plan.schedule.causal:
        reasons.append(f"{Requirement.SUB_SEQUENCES}: parts of a micro-batch that are not runs of its sequence")
    if plan.schedule.parts > 1 and plan.shardings:
        reasons.append(f"{Requirement.SUB_SEQUENCES}: parts are not shared by a group of ranks")
    if any(stage.shard_over for stage in plan.stages):
        reasons.append(f"{Requirement.SHARDED_GROUPS}: state is sharded over all replicas of a stage, or over none")
    if plan.schedule.clock_distance is not None and any(stage.zero for stage in plan.stages):
        reasons.append(f"{Requirement.BOUNDED_STALENESS}: copies that run ahead of each other share no optimizer state")
    if plan.schedule.corrections and any(stage.zero and len(stage.replicas) > 1 for stage in plan.stages):
        reasons.append(f"{Requirement.CORRECTIONS}: weights are corrected for delay and sharded; plan with --zero 0")
    return tuple(reasons)


def require_executable(plan: Plan) -> None:
    """Refuse a plan whose parts contradict each other, or that the runtime cannot execute. O(actions + operators).

    Predictions and the digest are not checked: they change nothing in the execution.

    Raises:
        PlanError: names the first contradiction and counts the others, or names all reasons against execution.
    """
    _refuse([finding for finding in validate(plan) if finding.fault not in _NOT_EXECUTED])
    reasons = refusals(plan)
    if reasons:
        raise PlanError(
            f"cannot be run: {'; '.join(reasons)}", where=f"schedule {plan.schedule.name}",
            hint="plan with another --schedule, such as 1f1b or interleaved, without --shard-over",
        )  # fmt: skip


def _refuse(findings: Sequence[Finding]) -> None:
    if findings:
        more = f", and {plural(len(findings) - 1, 'further finding')}" if findings[1:] else ""
        message = f"{findings[0].fault}: {findings[0].message}{more}"
        raise PlanError(message, where="plan", hint="`shardplan check` tells all")


def require_model(plan: Plan, model: ModelFile) -> None:
    """Refuse a plan that names what a model does not have, or has in other sizes. O(operators + weights).

    Names of operators are not compared: a plan has some of its own, and a stage runs all that its results need.

    Raises:
        PlanError: names the first input, output or weight.
    """
    made = {name for step in model.steps for name in step.outputs}
    ends = [name for stage in plan.stages for name in stage.outputs]
    for what, named, known in (
        ("input", (spec.name for spec in plan.model.inputs), set(model.inputs)),
        ("output", (spec.name for spec in plan.model.outputs), made.intersection(ends)),
        ("weight", (p.name for block in plan.block_table for p in block.parameters), model.weights),
    ):
        if (name := next((name for name in named if name not in known), None)) is not None:
            require_same(plan, model)
            older = what == "weight" and plan.minor < MINORS[Requirement.SEPARATED_WEIGHTS]
            hint = f"{_OTHER_MODEL} if so, plan again: {_NOT_SAID}" if older else _OTHER_MODEL
            raise PlanError(f"no {what} {name!r}", where=plan.model.name, hint=hint)
    if not plan.model.outputs:
        raise PlanError("the plan lists no output of the model", where=plan.model.name, hint="plan again")
    parameters = {p.name: p for block in plan.block_table for p in block.parameters}
    for name, parameter in parameters.items():
        stored, shape = tuple(model.weights[name].dims), tuple(parameter.shape)
        if stored != shape and not _repeats(stored, shape, plan.model.exported_batch):
            message = f"the weight {name!r} is {list(stored)}, in the plan {list(shape)}"
            raise PlanError(message, where=plan.model.name, hint=_OTHER_MODEL)
    require_legal(plan, model)


def _repeats(stored: tuple[int, ...], shape: tuple[int, ...], batch: int) -> bool:
    """Whether a file may hold the entries of a weight several times, which count once.

    A weight of the given shape may be repeated for each sample of the file's batch; a table of which an exporter picked
    entries is planned with as a row of them.
    """
    by_sample = len(stored) == len(shape) and all(a in (b, b * batch) for a, b in zip(stored, shape, strict=True))
    picked = len(stored) == len(shape) and math.prod(shape) == shape[-1] and 2 * shape[-1] <= math.prod(stored)
    return by_sample or picked


def require_same(plan: Plan, model: ModelFile) -> None:
    """Refuse a model with other sizes, layers or operators than the plan's, as far as planning reads its file.

    Raises:
        PlanError: says in what it differs.
    """
    graph = _planned_with(model)
    if graph is not None:
        _require_same(plan, graph)


def _require_same(plan: Plan, graph: Graph) -> None:
    """Refuse a graph with other sizes or layers than the plan's; other names and seconds of operators do no harm.

    Blocks of the same weights may read otherwise at the batch of the file; their operators are checked one by one.
    """
    changes = None if graph.fingerprint == plan.model.fingerprint else changed_model(plan, graph)
    if changes is not None and (changes.sizes or changes.match.added or changes.match.removed):
        finding = other_model(plan, graph, costs=False)
        if finding is not None:
            raise PlanError(finding.message, where=plan.model.name, hint=_OTHER_MODEL)


def _planned_with(model: ModelFile) -> Graph | None:
    """The model's graph at the batch of its file; None where planning reads it otherwise, as with sizes of axes."""
    if model.source is None:
        return None
    try:
        return graph_from_proto(model.source)
    except ShardplanError:
        return None


def require_legal(plan: Plan, model: ModelFile) -> None:
    """Refuse splits of operators, layouts, and tensors between stages that are not as the model has them. O(nodes).

    Nothing is said of a model that planning reads otherwise, as where sizes of its axes were given.

    Raises:
        PlanError: names the first operator or tensor.
    """
    graph = _planned_with(model)
    if graph is None:
        return
    _require_same(plan, graph)
    try:
        graph = rebatch(graph, plan.micro_batches.size)
    except ShardplanError:
        return
    if graph.fingerprint == plan.model.fingerprint:
        sent = {boundary.tensor for boundary in plan.boundaries}
        _refuse([f for f in validate(plan, graph) if f.fault is Fault.SHARDINGS or f.tensor in sent])


_NOT_SAID = "this version of the file does not say which operators read weights that are stored as one"
_OTHER_MODEL = "is this the model that the plan was made for?"
