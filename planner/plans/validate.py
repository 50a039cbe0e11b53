"""Validate a plan: by itself, against its model and against its cluster.

By itself it must have consistent ranges, ranks, batches, ties, memory, requirements and digest, and a configuration
that agrees with its other parts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from planner.errors import PlanError
from planner.exchange import get as scheme
from planner.graph import DType, Graph
from planner.hardware.types import Cluster, with_headroom
from planner.memory import fits
from planner.plans.check_model import check_graph, check_sharded_cluster, check_sharded_model
from planner.plans.check_parts import check_meshes, check_shardings
from planner.plans.check_schedule import check_claims, check_schedule
from planner.plans.files import digest_of
from planner.plans.findings import PLAN_AGAIN, RELATIVE, Expected, Fault, Finding, limited, mismatches
from planner.plans.readings import requirements
from planner.plans.requirement import OF_MINOR_1, Requirement
from planner.plans.sections import hardware_section
from planner.plans.types import Plan
from planner.schedules import WeightPolicy
from planner.space.layers import Layers


def check_structure(plan: Plan) -> list[Finding]:
    """Findings that need nothing but the plan; O(operators + ranks)."""
    findings = list(_stages(plan))
    if findings:
        return findings
    checks = (_digest, _operators, _ranks, _batches, _degrees, _boundaries, _ties, _memory, _predictions, _requires)
    return [*(finding for check in checks for finding in check(plan)), *mismatches(plan, _sums(plan))]


def _stages(plan: Plan) -> Iterator[Finding]:
    """Stages are consecutive, non-empty ranges that cover all blocks; every other check relies on this."""
    if not plan.stages:
        yield Finding(Fault.STAGE_RANGE, "the plan has no stages", PLAN_AGAIN)
        return
    expected = 0
    for position, stage in enumerate(plan.stages):
        start, stop = stage.blocks
        if stage.index != position:
            yield Finding(Fault.STAGE_RANGE, f"stage {stage.index} stands at place {position}", PLAN_AGAIN, position)
        if start != expected or stop <= start:
            message = f"stage {position} is blocks [{start}, {stop}], expected to start at {expected}"
            yield Finding(Fault.STAGE_RANGE, message, "stages follow each other without gap or overlap", position)
        if not stage.replicas or not all(stage.replicas):
            yield Finding(Fault.REPLICAS, f"stage {position} has an empty replica", PLAN_AGAIN, position)
        outside = [b for b in stage.kept_blocks if not start <= b < stop]
        if outside or (stage.kept_blocks and not stage.recompute):
            message = f"stage {position} keeps blocks {list(stage.kept_blocks)} of [{start}, {stop}]"
            hint = "a stage that recomputes keeps blocks of its own, others none"
            yield Finding(Fault.STAGE_RANGE, message, hint, position)
        expected = stop
    if expected != len(plan.block_table):
        message = f"stages end at block {expected}, the plan lists {len(plan.block_table)}"
        yield Finding(Fault.STAGE_RANGE, message, "the last stage ends at the last block", len(plan.stages) - 1)
    stage_numbers = range(len(plan.stages))
    mentioned = [
        *((b.tensor, (b.from_stage, *b.to_stages)) for b in plan.boundaries),
        *((s.parameter, s.stages) for s in plan.shared_parameters),
        *(("duplicated operators", d.stages) for d in plan.duplicated),
    ]
    for name, stages in mentioned:
        if any(stage not in stage_numbers for stage in stages):
            message = f"{name} names stages {stages}, there are {len(stage_numbers)}"
            yield Finding(Fault.STAGE_RANGE, message, tensor=name)


def _digest(plan: Plan) -> Iterator[Finding]:
    """The digest is that of the content."""
    if plan.digest != digest_of(plan):
        yield Finding(Fault.DIGEST, "the file was changed after it was written: its digest does not match", PLAN_AGAIN)


def _operators(plan: Plan) -> Iterator[Finding]:
    """Each operator is in one block or in one entry of duplicated operators."""
    homes: dict[str, list[int]] = {}
    for stage in plan.stages:
        for block in plan.stage_blocks(stage.index):
            for key in block.nodes:
                homes.setdefault(key, []).append(stage.index)
    for key, stages in homes.items():
        if len(stages) > 1:
            message = f"operator {key!r} is in {len(stages)} places: stages {sorted(set(stages))}"
            yield Finding(Fault.OPERATOR_TWICE, message, "declare it as duplicated or keep one", stages[1], tensor=key)
    side = Counter(key for entry in plan.duplicated for key in entry.nodes)
    for key, count in side.items():
        if count > 1 or key in homes:
            message = f"duplicated operator {key!r} is listed again elsewhere"
            yield Finding(Fault.OPERATOR_TWICE, message, "list it once", tensor=key)


def _ranks(plan: Plan) -> Iterator[Finding]:
    """Ranks exist and run one stage each, unless the plan requires several; copies have equally many replicas."""
    several = Requirement.MULTI_STAGE_RANK in plan.requires
    homes: dict[int, int] = {}
    for stage in plan.stages:
        for rank in stage.ranks:
            if not 0 <= rank < plan.world_size:
                message = f"stage {stage.index} runs on rank {rank}, the world has {plan.world_size}"
                yield Finding(Fault.RANK_RANGE, message, "ranks count from 0", stage.index, rank)
            if rank in homes and (homes[rank] == stage.index or not several):
                message = f"rank {rank} runs stage {homes[rank]} and stage {stage.index}"
                yield Finding(Fault.RANK_TWICE, message, "give each replica ranks of its own", stage.index, rank)
            homes.setdefault(rank, stage.index)
        if len(stage.replicas) % max(1, plan.copies):
            message = f"stage {stage.index} has {len(stage.replicas)} replicas for {plan.copies} copies of the pipeline"
            yield Finding(Fault.REPLICAS, message, "every copy has as many replicas of a stage", stage.index)


def _batches(plan: Plan) -> Iterator[Finding]:
    """Micro-batches add up to the global batch and divide evenly among the replicas of each stage."""
    batches = plan.micro_batches
    if plan.copies < 1:
        yield Finding(Fault.DIVISIBILITY, f"{plan.copies} copies of the pipeline", "there is at least one")
    if min(batches.size, batches.count) < 1 or batches.size * batches.count != batches.global_batch:
        message = f"{batches.count} micro-batches of {batches.size} are not a global batch of {batches.global_batch}"
        yield Finding(Fault.DIVISIBILITY, message, "size * count is the global batch")
        return
    for stage in plan.stages:
        if plan.routing == "round_robin" and batches.count % len(stage.replicas):
            message = f"{len(stage.replicas)} replicas do not divide {batches.count} micro-batches"
            hint = "every replica takes the same number"
            yield Finding(Fault.DIVISIBILITY, f"stage {stage.index}: {message}", hint, stage.index)


def _degrees(plan: Plan) -> Iterator[Finding]:
    """Every degree of parallelism is at least 1, and those inside a group together do not exceed its ranks."""
    for at, choice in enumerate(plan.configuration.stages):
        degrees = {name: getattr(choice, name) for name in ("replicas", "ranks", "context", "expert")}
        if min(degrees.values()) < 1 or choice.context * choice.expert > choice.ranks:
            shown = ", ".join(f"{name} {size}" for name, size in degrees.items())
            message = f"configuration.stages[{at}] has {shown}"
            yield Finding(Fault.DIVISIBILITY, message, "degrees count from 1; context * expert divides ranks", at)
    if plan.configuration.copies < 1:
        message = f"configuration.copies is {plan.configuration.copies}"
        yield Finding(Fault.DIVISIBILITY, message, "there is at least one copy of the pipeline")
    for at, other in enumerate(plan.alternatives):
        if min(1, *other.replicas, *other.ranks, other.context, other.expert, other.copies) < 1:
            message = f"alternatives[{at}] ({other.label}) has degrees of parallelism below 1"
            yield Finding(Fault.DIVISIBILITY, message, PLAN_AGAIN)


def _boundaries(plan: Plan) -> Iterator[Finding]:
    """Boundary tensors are listed once, go to later stages, and have a size that fits shape and type."""
    seen: set[str] = set()
    for b in plan.boundaries:
        if b.tensor in seen:
            yield Finding(Fault.BOUNDARY_UNKNOWN, f"boundary {b.tensor!r} is listed twice", tensor=b.tensor)
        seen.add(b.tensor)
        back = [to for to in b.to_stages if to <= b.from_stage]
        if back:
            message = f"{b.tensor!r} goes from stage {b.from_stage} back to stage {back[0]}"
            yield Finding(Fault.BACKWARD_EDGE, message, "tensors go to later stages only", back[0], tensor=b.tensor)
        if b.dtype not in set(DType):
            yield Finding(Fault.BOUNDARY_SHAPE, f"{b.tensor!r} has unknown type {b.dtype!r}", tensor=b.tensor)
        elif b.bytes != (math.prod(b.shape) * DType(b.dtype).bits + 7) // 8:
            message = f"{b.tensor!r}: {b.bytes} bytes are not those of {b.dtype} {list(b.shape)}"
            yield Finding(Fault.BOUNDARY_SHAPE, message, PLAN_AGAIN, b.from_stage, tensor=b.tensor)
        if b.gradient and b.dtype in set(DType) and not DType(b.dtype).is_float:
            message = f"{b.tensor!r} of type {b.dtype} cannot carry a gradient"
            yield Finding(Fault.BOUNDARY_GRADIENT, message, PLAN_AGAIN, b.from_stage, tensor=b.tensor)


def _ties(plan: Plan) -> Iterator[Finding]:
    """A trained parameter in several stages is declared as shared by exactly these stages."""
    holders: dict[str, set[int]] = {}
    for stage in plan.stages:
        for parameter in plan.stage_parameters(stage.index):
            if parameter.trainable:
                holders.setdefault(parameter.owner, set()).add(stage.index)
    declared = {shared.parameter: shared for shared in plan.shared_parameters}
    for owner, stages in holders.items():
        if len(stages) > 1 and (owner not in declared or set(declared[owner].stages) != stages):
            message = f"parameter {owner!r} is held by stages {sorted(stages)} but not declared as shared by them"
            hint = "its gradients must be summed over these stages"
            yield Finding(Fault.UNDECLARED_TIE, message, hint, min(stages), tensor=owner)
    reduction = "sum" if plan.schedule.weight_policy == WeightPolicy.SYNC else "none"
    for owner, shared in declared.items():
        if shared.reduction != reduction:
            message = f"gradients of {owner!r} have reduction {shared.reduction!r}, the orders allow {reduction!r}"
            hint = "copies in several stages can be summed only where the pipeline drains before an update"
            yield Finding(Fault.WRONG_TIE, message, hint, min(shared.stages, default=-1), tensor=owner)
        if len(holders.get(owner, ())) < 2:
            message = f"parameter {owner!r} is declared as shared, but no two stages hold it"
            yield Finding(Fault.WRONG_TIE, message, PLAN_AGAIN, tensor=owner)


def _sums(plan: Plan) -> Iterator[Expected]:
    """Values that are computed from other values of the file."""
    batches, predictions = plan.micro_batches, plan.predictions
    yield Fault.DIVISIBILITY, ("micro_batches", "global_batch"), plan.options.global_batch
    yield Fault.DIVISIBILITY, ("micro_batches", "gradient_scale"), 1.0 / max(1, batches.count)
    listed = {key for block in plan.block_table for key in block.nodes}
    listed.update(key for entry in plan.duplicated for key in entry.nodes)
    yield Fault.OPERATOR_COUNT, ("model", "operators"), len(listed)
    for stage in plan.stages:
        elements = {p.owner: p.elements for p in plan.stage_parameters(stage.index) if p.trainable}
        yield Fault.PARAMETERS, ("stages", stage.index, "parameters"), sum(elements.values())
    if predictions.iteration_s > 0:
        yield Fault.PREDICTIONS, ("predictions", "samples_per_s"), batches.global_batch / predictions.iteration_s


def _memory(plan: Plan) -> Iterator[Finding]:
    """Each stage fits its devices, and its activations are those of the micro-batches in flight."""
    for stage, prediction in zip(plan.stages, plan.predictions.stages, strict=False):
        needed, available = prediction.memory.total_bytes, prediction.capacity_bytes
        if not fits(needed, available):
            message = f"stage {stage.index} needs {needed} bytes a device, a device has {available}"
            hint = "smaller micro-batch, recompute, more stages or ZeRO-1"
            yield Finding(Fault.MEMORY, message, hint, stage.index, stage.ranks[0])
        count, unit_bytes, total_bytes = (
            prediction.in_flight,
            prediction.unit_bytes,
            prediction.memory.activations_bytes,
        )
        excess_bytes = total_bytes - count * unit_bytes
        if excess_bytes < 0 or (excess_bytes > count + 1 and not any(stage.keeping)):
            kept = f"{count} x {unit_bytes} bytes of activations"
            message = f"stage {stage.index} keeps {kept}, but says {total_bytes} in all"
            yield Finding(Fault.MEMORY, message, PLAN_AGAIN, stage.index)


def _predictions(plan: Plan) -> Iterator[Finding]:
    """There is a prediction for each stage, a positive iteration time, and no bound above it."""
    predictions = plan.predictions
    if len(predictions.stages) != len(plan.stages) or not 0 <= predictions.bottleneck < len(plan.stages):
        message = f"predictions are for {len(predictions.stages)} stages, the plan has {len(plan.stages)}"
        yield Finding(Fault.PREDICTION_STAGES, message, PLAN_AGAIN)
    if predictions.iteration_s <= 0:
        yield Finding(Fault.PREDICTION_STAGES, f"an iteration takes {predictions.iteration_s} s", PLAN_AGAIN)
    reached_s = predictions.reached_s
    if predictions.iteration_s > 0 and predictions.bound_s > reached_s * (1 + RELATIVE):
        message = f"the bound {predictions.bound_s} s is above the iteration time {reached_s} s"
        yield Finding(Fault.PREDICTIONS, message, PLAN_AGAIN)


def _requires(plan: Plan) -> Iterator[Finding]:
    """The listed requirements are those that follow from the plan."""
    derived = set(requirements(plan, divided=Requirement.MID_MODULE_CUT in plan.requires))
    derived -= OF_MINOR_1 if plan.minor < 1 else set()
    for name in sorted(derived - set(plan.requires)):
        yield Finding(Fault.REQUIRES, f"the plan needs {name} but does not require it", PLAN_AGAIN)
    for name in sorted(set(plan.requires) - derived):
        yield Finding(Fault.REQUIRES, f"the plan requires {name} but does not need it", PLAN_AGAIN)


_Pair = tuple[str, object, str, object]
"""Path and value in the configuration, path and value in another part of the file."""


def check_configuration(plan: Plan) -> list[Finding]:
    """Findings about values that differ between the configuration and other parts of the file; O(stages + ranks)."""
    configuration = plan.configuration
    if len(configuration.stages) != len(plan.stages):
        return [_finding(("configuration.stages", len(configuration.stages), "stages", len(plan.stages)), "entries")]
    return [_finding(pair) for pair in (*_configured(plan), *_configured_stages(plan)) if pair[1] != pair[3]]


def _finding(pair: _Pair, unit: str = "") -> Finding:
    path, own, other, said = (str(part) for part in pair)
    has = f" has {unit}" if unit else ""
    return Finding(Fault.CONFIGURATION, f"{path}{has} is {own}, {other}{has} is {said}", PLAN_AGAIN)


def _configured(plan: Plan) -> Iterator[_Pair]:
    """Pairs of values that hold for all stages."""
    configuration, batches = plan.configuration, plan.micro_batches
    yield "configuration.copies", configuration.copies, "copies", plan.copies
    yield "configuration.micro_batch", configuration.micro_batch, "micro_batches.size", batches.size
    count = configuration.copies * configuration.micro_batches
    yield "configuration.copies * micro_batches", count, "micro_batches.count", batches.count
    yield "configuration.schedule", configuration.schedule, "schedule.name", plan.schedule.name
    yield "configuration.transfers", configuration.transfers.value, "schedule.transfers", plan.schedule.transfers
    exchange = configuration.exchange
    if exchange and scheme(exchange).zero is None:  # collectives of a ZeRO stage are listed with the stages
        yield "configuration.exchange", exchange, "exchange.scheme", plan.exchange.scheme if plan.exchange else ""


def _configured_stages(plan: Plan) -> Iterator[_Pair]:
    """Pairs of values for each stage."""
    names = ("", *(sharding.name for sharding in plan.shardings))
    alone = all(len(plan.stages_of(rank)) < 2 for rank in range(plan.world_size))
    layers = Layers.of(plan.block_names)
    for at, (choice, stage) in enumerate(zip(plan.configuration.stages, plan.stages, strict=True)):
        own, other = f"configuration.stages[{at}]", f"stages[{at}]"
        yield f"{own}.start", choice.start, f"{other}.blocks[0]", stage.blocks[0]
        yield f"{own}.stop", choice.stop, f"{other}.blocks[1]", stage.blocks[1]
        yield f"{own}.recompute", choice.recompute, f"{other}.recompute", stage.recompute
        first_kept = int(layers.kept_from(*stage.blocks, choice.layers))
        kept = tuple(b for b in range(*stage.blocks) if b >= first_kept)
        if choice.layers:
            yield f"{own}.layers: kept blocks", kept, f"{other}.kept_blocks", stage.kept_blocks
        elif stage.recompute:
            said = layers.recomputed(*stage.blocks, stage.kept_blocks)
            yield f"{own}.layers", 0, f"{other}.kept_blocks: layers recomputed", said
        yield f"{own}.repeats", ", ".join(choice.repeats), f"{other}.repeats", ", ".join(stage.repeats)
        yield f"{own}.offload", ", ".join(choice.offload), f"{other}.offload", ", ".join(stage.offload)
        yield "configuration.zero", plan.configuration.zero, f"{other}.zero", stage.zero
        yield f"{own}.ranks", choice.ranks, f"{other}.replicas: ranks of a group", stage.group_ranks
        named = names[choice.sharding] if 0 <= choice.sharding < len(names) else choice.sharding
        yield f"{own}.sharding", named, f"{other}.sharding", stage.sharding
        if alone:
            groups = plan.copies * choice.replicas
            yield f"{own}.replicas * copies", groups, f"{other}.replicas: groups", len(stage.replicas)


_STRUCTURAL = (Fault.STAGE_RANGE, Fault.REPLICAS, Fault.DIVISIBILITY, Fault.PREDICTION_STAGES)
"""Faults after which the other checks cannot run."""

_OTHER_MODEL = frozenset((
    Fault.MODEL_FINGERPRINT, Fault.OPTIONS, Fault.MICRO_BATCH, Fault.OPERATOR_UNKNOWN, Fault.OPERATOR_MISSING,
    Fault.DUPLICATED_INCOMPLETE,
))  # fmt: skip
"""Faults after which shardings cannot be compared with the model."""

_UNREADABLE = frozenset((
    Fault.SHARDING, Fault.MESH, Fault.SHARDING_BLOCKS, Fault.SHARDING_NAMES, Fault.LAYOUT, Fault.SPLIT,
))  # fmt: skip
"""Faults after which shardings cannot be evaluated."""


def validate(plan: Plan, graph: Graph | None = None, cluster: Cluster | None = None) -> list[Finding]:
    """Everything that is wrong with a plan; an empty list for a good one.

    Args:
        plan: the plan.
        graph: the model at the plan's micro-batch size; without it, what only the model knows is not checked.
        cluster: the hardware; without it, what only the hardware knows is not checked.

    Returns:
        Findings, at most a score of each kind. O(operators + actions).
    """
    findings = check_structure(plan)
    if not any(finding.fault in _STRUCTURAL for finding in findings):
        findings += [*check_configuration(plan), *check_schedule(plan)] or check_claims(plan)
    if graph is not None and not any(finding.fault is Fault.STAGE_RANGE for finding in findings):
        findings += check_graph(plan, graph)
    if cluster is not None:
        findings += check_cluster(plan, cluster)
    if not any(finding.fault in _STRUCTURAL for finding in findings):
        findings += _sharded(plan, graph, cluster, {finding.fault for finding in findings})
    return limited(findings)


def _sharded(plan: Plan, graph: Graph | None, cluster: Cluster | None, other_faults: set[Fault]) -> list[Finding]:
    """Findings about shardings: by themselves, against the model and against the cluster, as far as these are known."""
    findings = check_shardings(plan)
    if cluster is not None and not other_faults & {Fault.HARDWARE_FINGERPRINT, Fault.RANK_RANGE}:
        findings += check_sharded_cluster(plan, cluster)
    readable = not {finding.fault for finding in findings} & _UNREADABLE
    if graph is not None and plan.shardings and readable and not other_faults & _OTHER_MODEL:
        findings += check_sharded_model(plan, graph)
    return findings


def require_sound(plan: Plan) -> None:
    """Refuse a plan whose parts contradict each other so far that it cannot be explained, compared or simulated.

    Raises:
        PlanError: with every such finding.
    """
    findings = [finding for finding in check_structure(plan) if finding.fault in _STRUCTURAL] or check_meshes(plan)
    if findings:
        problems = [finding.problem("plan") for finding in findings]
        raise PlanError(findings[0].message, where="plan", hint="`shardplan check` tells all", problems=problems)


def check_cluster(plan: Plan, cluster: Cluster) -> list[Finding]:
    """Findings about a plan and the hardware that it claims to be for."""
    if plan.hardware.fingerprint != cluster.fingerprint:
        plan_hardware = f"{plan.hardware.name} (fingerprint {plan.hardware.fingerprint[:12]})"
        given_hardware = f"{cluster.name} (fingerprint {cluster.fingerprint[:12]})"
        if plan.hardware.stack != cluster.stack.name:
            plan_hardware += f" under {plan.hardware.stack or 'no stack'}"
            given_hardware += f" under {cluster.stack.name}"
        message = f"the plan is for {plan_hardware}, not {given_hardware}"
        return [Finding(Fault.HARDWARE_FINGERPRINT, message, "plan again for this hardware")]
    headroom = with_headroom(cluster, plan.hardware.headroom)
    findings = [*mismatches(plan, [(Fault.HARDWARE, ("hardware",), hardware_section(headroom))])]
    if plan.world_size > cluster.device_count:
        message = f"the plan needs {plan.world_size} ranks, {cluster.name} has {cluster.device_count} devices"
        findings.append(Finding(Fault.RANK_RANGE, message, "plan again for this hardware"))
    return findings
