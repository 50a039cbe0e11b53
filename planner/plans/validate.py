"""Validate a plan: by itself, against its model and against its cluster.

First comes what must hold before anything can be worked out anew: numbers of stages, blocks and ranks that lead
somewhere, shardings that can be read. Then every section that follows from others is worked out by the functions that
wrote it, and compared.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

from planner.errors import PlanError, UsageError
from planner.exchange import get as scheme
from planner.graph import DType, Graph
from planner.hardware.types import Cluster, with_headroom
from planner.memory import fits
from planner.plans.checks import check_graph, check_orders
from planner.plans.files import digest_of
from planner.plans.findings import PLAN_AGAIN, Fault, Finding, differences, limited
from planner.plans.identity import other_hardware
from planner.plans.rebuild import laid_out, with_sums
from planner.plans.sections import hardware_section
from planner.plans.shardings import ShardedBlock, Sharding, correspondence
from planner.plans.types import Plan
from planner.sharding import parse_layout
from planner.units import plural

FREE = "free"
"""Value of a sharding's `boundaries` under which each tensor has the layout that its entries give."""


def validate(plan: Plan, graph: Graph | None = None, cluster: Cluster | None = None) -> list[Finding]:
    """What is wrong with a plan, apart from its figures (`check_figures`); an empty list for a good one.

    Args:
        plan: the plan.
        graph: the model at the plan's micro-batch size; without it, what only the model knows is not checked.
        cluster: the hardware; without it, what only the hardware knows is not checked.

    Returns:
        Findings, at most a score of each kind. O(operators + actions).
    """
    findings = [] if plan.digest == digest_of(plan) else [
        Finding(Fault.DIGEST, "the file was changed after it was written: its digest does not match")
    ]  # fmt: skip
    structure = check_structure(plan)
    findings += structure or [*check_shardings(plan), *_check_parts(plan)]
    if graph is not None and not structure:
        findings += check_graph(plan, graph, readable=not any(f.fault is Fault.SHARDINGS for f in findings))
    if cluster is not None:
        findings += check_cluster(plan, cluster)
    return limited(findings)


def require_sound(plan: Plan) -> None:
    """Refuse a plan whose parts contradict each other so far that it cannot be explained, compared or simulated.

    Raises:
        PlanError: with every such finding.
    """
    findings = check_structure(plan)
    if findings:
        problems = [finding.problem("plan") for finding in findings]
        raise PlanError(findings[0].message, where="plan", hint="`shardplan check` tells all", problems=problems)


def check_structure(plan: Plan) -> list[Finding]:
    """Findings about numbers and names that lead nowhere, on which all other checks rely; O(operators + ranks)."""
    findings = list(_stages(plan))
    return findings or [*_references(plan), *_degrees(plan), *_meshes(plan)]


def _wrong(message: str, hint: str = PLAN_AGAIN, stage: int = -1) -> Finding:
    return Finding(Fault.STRUCTURE, message, hint, stage)


def _stages(plan: Plan) -> Iterator[Finding]:
    """Stages are consecutive, non-empty ranges that cover all blocks, each with replicas for every copy."""
    expected = 0
    for at, stage in enumerate(plan.stages):
        start, stop = stage.blocks
        if stage.index != at:
            yield _wrong(f"stage {stage.index} stands at place {at}", stage=at)
        if start != expected or stop <= start:
            message = f"stage {at} is blocks [{start}, {stop}], expected to start at {expected}"
            yield _wrong(message, "stages follow each other without gap or overlap", at)
        if not stage.replicas or not all(stage.replicas) or plan.copies < 1 or len(stage.replicas) % plan.copies:
            message = f"stage {at} has {len(stage.replicas)} replicas for {plan.copies} copies of the pipeline"
            yield _wrong(message, "each copy has as many replicas, each of at least one rank", at)
        outside = [b for b in stage.kept_blocks if not start <= b < stop]
        if outside or (stage.kept_blocks and not stage.recompute):
            message = f"stage {at} keeps blocks {list(stage.kept_blocks)} of [{start}, {stop}]"
            yield _wrong(message, "a stage that recomputes keeps blocks of its own, others none", at)
        expected = stop
    if expected != len(plan.block_table) or not plan.stages:
        message = f"{len(plan.stages) or 'no'} stages end at block {expected}, the plan lists {len(plan.block_table)}"
        yield _wrong(message, "the last stage ends at the last block", len(plan.stages) - 1)


def _references(plan: Plan) -> Iterator[Finding]:
    """Stages that are named exist, tensors go to later ones, and every stage has its predictions."""
    count, predictions = len(plan.stages), plan.predictions
    for b in plan.boundaries:
        if not 0 <= b.from_stage < min(b.to_stages, default=count) or max(b.to_stages, default=0) >= count:
            message = f"{b.tensor!r} goes from stage {b.from_stage} to {list(b.to_stages)} of {count} stages"
            yield _wrong(message, "tensors go to later stages", b.from_stage)
        if b.dtype not in set(DType):
            yield _wrong(f"{b.tensor!r} has unknown type {b.dtype!r}", stage=b.from_stage)
    yield from _members(plan)
    parts = (*(block.nodes for block in plan.block_table), *(entry.nodes for entry in plan.duplicated))
    listed = Counter(key for nodes in parts for key in nodes)
    for key, times in listed.items():
        if times > 1:
            yield _wrong(f"operator {key!r} is listed {times} times", "list it in one block, or as duplicated")
    named = [
        *((s.parameter, s.stages) for s in plan.shared_parameters),
        *((d.nodes[:1], d.stages) for d in plan.duplicated),
    ]
    for name, stages in named:
        if not all(0 <= stage < count for stage in stages):
            yield _wrong(f"{name} is of stages {list(stages)}, there are {count}")
    for name, number in Counter(b.tensor for b in plan.boundaries).items():
        if number > 1:
            yield _wrong(f"boundary {name!r} is listed {number} times", "list it once")
    if len(predictions.stages) != count or not 0 <= predictions.bottleneck < count:
        yield _wrong(f"predictions are for {len(predictions.stages)} stages, the plan has {count}")
    if predictions.iteration_s <= 0:
        yield _wrong(f"an iteration takes {predictions.iteration_s} s")


def _members(plan: Plan) -> Iterator[Finding]:
    """Operators that a stage repeats, drops the results of or offloads are its own; the dropped ones are repeated."""
    for stage in plan.stages:
        own = {node for block in plan.stage_blocks(stage.index) for node in block.nodes}
        for key, among in (("repeated", own), ("dropped", set(stage.repeated)), ("offloaded", own)):
            for name in set(getattr(stage, key)) - among:
                message = f"stages[{stage.index}].{key} has {name!r}, which is none of its operators"
                yield _wrong(message, stage=stage.index)


def _degrees(plan: Plan) -> Iterator[Finding]:
    """The configuration has the plan's stages; degrees count from 1, and their ranks and batches are in the plan."""
    decision, batches = plan.configuration, plan.micro_batches
    if len(decision.stages) != len(plan.stages):
        yield _wrong(f"configuration.stages has {plural(len(decision.stages), 'entry')}, stages has {len(plan.stages)}")
        return
    for at, choice in enumerate(decision.stages):
        degrees = {name: getattr(choice, name) for name in ("replicas", "ranks", "context", "expert")}
        taken = decision.copies * choice.replicas * choice.ranks
        if min(degrees.values()) < 1 or choice.context * choice.expert > choice.ranks or taken > plan.world_size:
            shown = ", ".join(f"{name} {size}" for name, size in degrees.items())
            message = f"configuration.stages[{at}] has {shown} in a world_size of {plan.world_size}"
            yield _wrong(message, "degrees count from 1; context * expert divides ranks", at)
        if not 0 <= choice.sharding <= len(plan.shardings) or (choice.start, choice.stop) != plan.stages[at].blocks:
            blocks = list(plan.stages[at].blocks)
            message = (
                f"configuration.stages[{at}] is blocks [{choice.start}, {choice.stop}], sharding {choice.sharding}"
            )
            yield _wrong(f"{message}; stages[{at}] is {blocks} of {plural(len(plan.shardings), 'sharding')}", stage=at)
    sizes = (decision.micro_batch, decision.micro_batches * decision.copies)
    if min(decision.copies, *sizes) < 1 or sizes != (batches.size, batches.count):
        said = f"micro_batches is {batches.count} of {batches.size}"
        yield _wrong(f"configuration has {sizes[1]} micro-batches of {sizes[0]} in {decision.copies} copies, {said}")
    for at, other in enumerate(plan.alternatives):
        if min(1, *other.replicas, *other.ranks, other.context, other.expert, other.copies) < 1:
            yield _wrong(f"alternatives[{at}] ({other.label}) has degrees of parallelism below 1")


def _meshes(plan: Plan) -> Iterator[Finding]:
    """Shardings have names of their own and are used, groups are as large as their meshes, and blocks have entries."""
    counts, used = Counter(s.name for s in plan.shardings), {stage.sharding for stage in plan.stages} - {""}
    if any(count > 1 or not name for name, count in counts.items()) or counts.keys() != used:
        yield _wrong(f"stages have the shardings {sorted(used)}, the plan lists {[s.name for s in plan.shardings]}")
        return
    for stage in plan.stages:
        sharding = plan.sharding_of(stage.index)
        ranks = sharding.ranks if sharding else 1
        sizes = {len(group) for group in stage.replicas}
        if sizes != {ranks} or (sharding is None and stage.rank_parameters):
            mesh = f"the mesh of {stage.sharding!r} has {ranks}" if sharding else "it has no sharding"
            message = f"a replica of stage {stage.index} is a group of {max(sizes)} ranks; {mesh}"
            yield _wrong(message, "one rank for each point of the mesh", stage.index)
    for sharding in plan.shardings:
        names = {axis.name for axis in sharding.axes}
        treated = len(sharding.boundaries) == len(sharding.axes) == len(names)
        if not treated or 0 < sharding.boundaries.count(FREE) < len(names) or min(sharding.sizes, default=0) < 1:
            mesh = sharding.mesh or "of no axes"
            message = (
                f"{sharding.name!r} has the mesh {mesh} and boundaries {'/'.join(sharding.boundaries) or 'nowhere'}"
            )
            yield _wrong(message, "axes have names of their own and a treatment each, free on all of them or on none")
        yield from _blocks(plan, sharding)


def _blocks(plan: Plan, sharding: Sharding) -> Iterator[Finding]:
    """Every block of the stages that have a sharding is in one entry of it, and no other block."""
    wanted = {b: s.index for s in plan.stages if s.sharding == sharding.name for b in range(*s.blocks)}
    counts = Counter(block for entry in sharding.blocks for block, _ in entry.members())
    for block in sorted(wanted.keys() | counts.keys()):
        if counts[block] != (block in wanted):
            message = f"{sharding.name!r} says {counts[block]} times how block {block} is sharded"
            yield _wrong(message, "each block of its stages stands in one entry", wanted.get(block, -1))
    for series in (series for entry in sharding.blocks for series in entry.of or (None,)):
        if series is None or series.count < 1 or series.step < 1 or (series.count == 1 and series.step > 1):
            message = f"an entry of {sharding.name!r} is about {series or 'no block'}"
            yield _wrong(message, "a series counts from 1, and one of one block has step 1")


def check_shardings(plan: Plan) -> list[Finding]:
    """Findings about names and layouts in shardings that cannot be read; O(names in the shardings)."""
    return [
        Finding(Fault.SHARDINGS, message, hint, tensor=name)
        for sharding in plan.shardings
        for entry in sharding.blocks
        for name, message, hint in _unreadable(plan, sharding, entry)
    ]


def _unreadable(plan: Plan, sharding: Sharding, entry: ShardedBlock) -> Iterator[tuple[str, str, str]]:
    """(name, message, hint) of what cannot be read in an entry."""
    axes, names = {axis.name for axis in sharding.axes}, set(entry.names)
    listed = Counter([*(f"op:{o.operator}" for o in entry.operators), *(p.tensor for p in entry.tensors)])
    for name, count in listed.items():
        if count > 1:
            message = f"{name!r} is listed {count} times in an entry of {sharding.name!r}"
            yield name.removeprefix("op:"), message, "list it once"
    for name in set(entry.first[1]) - set(entry.said):
        yield name, f"{name!r} is among the names of an entry of {sharding.name!r}, which says nothing of it", ""
    try:
        for block, further_names in entry.members():
            correspondence(entry, plan.block_table, block, further_names)
    except PlanError as error:
        yield "", error.problem.message, error.problem.hint
    texts = [(o.operator, text) for o in entry.operators for text in (*o.reads, *o.writes) if text]
    texts += [(p.tensor, p.value) for p in entry.tensors]
    texts += [(p.tensor, text) for p in entry.tensors for text in (p.gradient, p.optimizer) if text]
    for name, text in texts:
        try:
            parse_layout(text, len(axes))
        except UsageError as error:
            yield name, f"{name!r}: {error.problem.message}", error.problem.hint
    for o in entry.operators:
        if len(o.splits) != len(axes):
            yield o.operator, f"operator {o.operator!r} is split on {len(o.splits)} axes of {len(axes)}", ""
    for name, along in [(c.of, c.axes) for c in entry.collectives] + [(h.weight, h.axes) for h in entry.holdings]:
        if not along or not axes.issuperset(along) or name not in names:
            message = f"{name!r} is exchanged or dealt along {', '.join(along) or 'no axis'} of {sharding.name!r}"
            yield name, message, "name axes of the mesh and tensors of the entry"


def _check_parts(plan: Plan) -> list[Finding]:
    """Findings about sections that do not follow from the configuration or each other; O(operators + actions)."""
    try:
        right = laid_out(plan)
        exchange = plan.configuration.exchange
        named = exchange if exchange and scheme(exchange).zero is None else ""
    except (PlanError, UsageError) as error:
        fault = Fault.ORDERS if plan.schedule.given == "orders" else Fault.STRUCTURE
        return [Finding(fault, f"configuration: {error.problem.message}", error.problem.hint)]
    said = plan.exchange.scheme if plan.exchange else ""
    found = [_wrong(f"configuration.exchange is {named}, exchange.scheme is {said}")] if named not in ("", said) else []
    unordered = dataclasses.replace(right, schedule=plan.schedule)
    hint = "stages, ranks and batches follow from the section `configuration`: plan again instead of editing either"
    found += [d.finding(plan, Fault.STRUCTURE, hint) for d in differences(plan, unordered)]
    if found:
        return found
    found = check_orders(plan, right.schedule)
    try:
        sums = sorted(differences(plan, with_sums(plan)), key=lambda difference: difference.path[0] == "requires")
    except (PlanError, UsageError) as error:
        return [*found, Finding(Fault.SHARDINGS, error.problem.message, error.problem.hint)]
    found += [d.finding(plan, Fault.FIGURES if d.path[0] == "predictions" else Fault.DIFFERS) for d in sums]
    return [*found, *_full(plan)]


def _full(plan: Plan) -> Iterator[Finding]:
    """Each stage fits its devices, and its activations are those of the micro-batches in flight."""
    for stage, prediction in zip(plan.stages, plan.predictions.stages, strict=True):
        needed, available = prediction.memory.total_bytes, prediction.capacity_bytes
        if not fits(needed, available):
            message = f"stage {stage.index} needs {needed} bytes a device, a device has {available}"
            hint = "smaller micro-batch, recompute, more stages or ZeRO-1"
            yield Finding(Fault.MEMORY, message, hint, stage.index, stage.ranks[0])
        count, unit_bytes = prediction.in_flight, prediction.unit_bytes
        total_bytes = prediction.memory.activations_bytes
        excess_bytes = total_bytes - count * unit_bytes
        if (halves := prediction.halves_bytes) is not None:
            turning, waiting = halves
            least, most = count * min(unit_bytes, waiting), (count - 1) * max(unit_bytes, waiting) + turning
            wrong = not least - count <= total_bytes <= most + count
        else:
            wrong = excess_bytes < 0 or (excess_bytes > count + 1 and not any(stage.keeping))
        if wrong:
            kept = f"{count} x {unit_bytes} bytes of activations"
            message = f"stage {stage.index} keeps {kept}, but says {total_bytes} in all"
            yield Finding(Fault.MEMORY, message, stage=stage.index)


def check_cluster(plan: Plan, cluster: Cluster) -> list[Finding]:
    """Findings about a plan and the hardware that it claims to be for."""
    if (other := other_hardware(plan, cluster)) is not None:
        return [other]
    headroom = with_headroom(cluster, plan.hardware.headroom)
    section = differences(plan.hardware, hardware_section(headroom), ("hardware",))
    findings = [difference.finding(plan, Fault.DIFFERS) for difference in section]
    if plan.world_size > cluster.device_count:
        message = f"the plan needs {plan.world_size} ranks, {cluster.name} has {cluster.device_count} devices"
        findings.append(Finding(Fault.HARDWARE, message, "plan again for this hardware"))
    return findings
