"""Check that parts of a plan agree with each other, without model and hardware: shardings, sums, limits of the job."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from planner import schedules
from planner.costs.precision import optimizer_state_bytes, precision
from planner.errors import PlanError, UsageError
from planner.exchange import recipe_of
from planner.hardware.types import neighbours
from planner.plans.collectives import replica_groups, stage_collectives
from planner.plans.documents import KeyPath, readable
from planner.plans.figures import Alternative, StagePrediction, gap_to
from planner.plans.files import to_document
from planner.plans.findings import PLAN_AGAIN, RELATIVE, ROUNDED, Expected, Fault, Finding, mismatches, stage_in
from planner.plans.readings import is_searched, schedule_of
from planner.plans.rebuild import alternative_configuration
from planner.plans.records import Boundary, Stage
from planner.plans.sections import bubble_fraction
from planner.plans.shard_sections import placed_boundary
from planner.plans.shardings import ShardedBlock, Sharding, correspondence
from planner.plans.types import Plan
from planner.plans.words import module_ranges, summary
from planner.sharding import TensorLayout, parse_layout, refusal
from planner.space.limits import forbidden_choices
from planner.space.workers import lay_workers
from planner.units import format_bytes, format_seconds, plural

FREE = "free"
"""Value of `boundaries` under which each tensor has the layout that its entries give."""


def check_shardings(plan: Plan) -> list[Finding]:
    """Findings that need nothing but the plan; O(names in the shardings + ranks)."""
    findings = check_meshes(plan)
    for sharding in plan.shardings:
        for entry in sharding.blocks:
            findings += _entry(plan, sharding, entry)
    if not findings:
        findings += mismatches(plan, _boundaries(plan))
        for stage in plan.stages:
            findings += mismatches(plan, _stage(plan, stage)) if stage.sharding else ()
    return findings


def check_meshes(plan: Plan) -> list[Finding]:
    """Findings about names, meshes, group sizes and blocks of a plan's shardings; O(blocks + ranks)."""
    findings = [*_named(plan), *_groups(plan)]
    for sharding in plan.shardings:
        findings += [*_mesh(sharding), *_blocks(plan, sharding)]
    return findings


def _named(plan: Plan) -> Iterator[Finding]:
    """Stages name shardings that exist, and every sharding is used."""
    counts = Counter(sharding.name for sharding in plan.shardings)
    for name, count in counts.items():
        if count > 1 or not name:
            yield Finding(Fault.SHARDING, f"sharding {name!r} is listed {count} times", "give each a name", tensor=name)
    used = {stage.sharding for stage in plan.stages}
    for stage in plan.stages:
        if stage.sharding and stage.sharding not in counts:
            message = f"stage {stage.index} has sharding {stage.sharding!r}, which is not in the plan"
            yield Finding(Fault.SHARDING, message, PLAN_AGAIN, stage.index)
        if not stage.sharding and stage.rank_parameters:
            message = f"stage {stage.index} says what a rank of a group holds but has no sharding"
            yield Finding(Fault.SHARDING, message, PLAN_AGAIN, stage.index)
    for name in counts.keys() - used:
        yield Finding(Fault.SHARDING, f"no stage has sharding {name!r}", "leave it out", tensor=name)


def _groups(plan: Plan) -> Iterator[Finding]:
    """Groups of a stage are as large as its mesh."""
    for stage in plan.stages:
        sharding = plan.sharding_of(stage.index)
        expected_ranks = sharding.ranks if sharding else 1
        for group in stage.replicas:
            if len(group) != expected_ranks:
                mesh = f"the mesh of {stage.sharding!r} has {expected_ranks}" if sharding else "it has no sharding"
                message = f"a replica of stage {stage.index} is a group of {len(group)} ranks; {mesh}"
                yield Finding(Fault.MESH, message, "one rank for each point of the mesh", stage.index, group[0])
                break


def _mesh(sharding: Sharding) -> Iterator[Finding]:
    """The mesh has named axes and at least two ranks, and `boundaries` has an entry for each axis."""
    names = [axis.name for axis in sharding.axes]
    if len(set(names)) < len(names) or any(axis.size < 1 for axis in sharding.axes) or sharding.ranks < 2:
        sizes = " x ".join(f"{axis.name} {axis.size}" for axis in sharding.axes)
        message = f"{sharding.name!r} has the mesh {sizes or 'of no axes'}"
        yield Finding(
            Fault.MESH, message, "axes have names of their own, a mesh at least two ranks", tensor=sharding.name
        )
    if len(sharding.boundaries) != len(sharding.axes):
        message = f"{sharding.name!r} treats boundaries on {len(sharding.boundaries)} axes of {len(sharding.axes)}"
        yield Finding(Fault.MESH, message, PLAN_AGAIN, tensor=sharding.name)
    elif 0 < sharding.boundaries.count(FREE) < len(sharding.boundaries):
        message = f"{sharding.name!r} leaves boundaries free on some axes and treats them alike on others"
        yield Finding(Fault.MESH, message, "free on all axes or on none", tensor=sharding.name)


def _blocks(plan: Plan, sharding: Sharding) -> Iterator[Finding]:
    """Every block of the stages that have a sharding is in one entry of it, and no other block."""
    stage_of_block = {b: s.index for s in plan.stages if s.sharding == sharding.name for b in range(*s.blocks)}
    counts: Counter[int] = Counter()
    for entry in sharding.blocks:
        if not entry.of:
            yield Finding(Fault.SHARDING_BLOCKS, f"an entry of {sharding.name!r} is about no block", PLAN_AGAIN)
        counts.update(block for block, _ in entry.members())
        for series in entry.of:
            if series.count < 1 or series.step < 1 or (series.count == 1 and series.step > 1):
                message = f"a series of {series.count} blocks, {series.step} apart, from block {series.first} on"
                yield Finding(Fault.SHARDING_BLOCKS, message, "a series of one has step 1")
    for block, count in counts.items():
        if block not in stage_of_block or count > 1:
            message = f"{sharding.name!r} says {count} times how block {block} is sharded"
            hint = "each block of its stages stands in one entry"
            yield Finding(Fault.SHARDING_BLOCKS, message, hint, stage_of_block.get(block, -1))
    for block in stage_of_block.keys() - counts.keys():
        message = f"{sharding.name!r} does not say how block {block} is sharded"
        yield Finding(Fault.SHARDING_BLOCKS, message, PLAN_AGAIN, stage_of_block[block])


def _entry(plan: Plan, sharding: Sharding, entry: ShardedBlock) -> Iterator[Finding]:
    """Names of all member blocks can be derived, no name occurs twice, and layouts and axes can be read."""
    blocks, axes = plan.block_table, {axis.name for axis in sharding.axes}
    listed = (("operator", [o.operator for o in entry.operators]), ("tensor", [p.tensor for p in entry.tensors]))
    for kind, listed_names in listed:
        for name, count in Counter(listed_names).items():
            if count > 1:
                message = f"{kind} {name!r} is listed {count} times in an entry of {sharding.name!r}"
                yield Finding(Fault.SHARDING_NAMES, message, PLAN_AGAIN, tensor=name)
    for name in set(entry.first[1]) - set(entry.said) if entry.members() else ():
        message = f"{name!r} is among the names of an entry of {sharding.name!r}, which says nothing of it"
        yield Finding(Fault.SHARDING_NAMES, message, PLAN_AGAIN, tensor=name)
    for block, names in entry.members():
        if not 0 <= block < len(blocks):
            continue
        try:
            correspondence(entry, blocks, block, names)
        except PlanError as error:
            yield Finding(Fault.SHARDING_NAMES, error.problem.message, error.problem.hint)
            return
    for tensor, text in _texts(entry):
        try:
            parse_layout(text, len(sharding.axes))
        except UsageError as error:
            yield Finding(Fault.LAYOUT, f"{tensor!r}: {error.problem.message}", error.problem.hint, tensor=tensor)
    for o in entry.operators:
        if len(o.splits) != len(sharding.axes):
            message = f"operator {o.operator!r} is split on {len(o.splits)} axes of {len(sharding.axes)}"
            yield Finding(Fault.SPLIT, message, PLAN_AGAIN, tensor=o.operator)
    for name, axes_used in [(c.of, c.axes) for c in entry.collectives] + [(h.weight, h.axes) for h in entry.holdings]:
        unknown_axes = set(axes_used) - axes
        if unknown_axes or not axes_used or name not in set(entry.names):
            message = f"{name!r} is exchanged or dealt along {', '.join(axes_used) or 'no axis'} of {sharding.name!r}"
            yield Finding(
                Fault.COLLECTIVE_UNKNOWN, message, "name axes of the mesh and tensors of the entry", tensor=name
            )


def _texts(entry: ShardedBlock) -> Iterator[tuple[str, str]]:
    """(operator or tensor, layout) for every layout in an entry."""
    for o in entry.operators:
        yield from ((o.operator, text) for text in (*o.reads, *o.writes) if text)
    for p in entry.tensors:
        yield p.tensor, p.value
        yield from ((p.tensor, text) for text in (p.gradient, p.optimizer) if text)


def _boundaries(plan: Plan) -> Iterator[Expected]:
    """Each boundary tensor has the layout that the entries of the stages on both sides give it."""
    for at, boundary in enumerate(plan.boundaries):
        expected = placed_boundary(boundary, functools.partial(_place, plan, boundary))
        for key in ("layout", "rank_bytes", "received"):
            yield Fault.BOUNDARY_LAYOUT, ("boundaries", at, key), getattr(expected, key)


def _place(plan: Plan, boundary: Boundary, stage: int, tensor: str) -> tuple[TensorLayout, Sequence[int]] | None:
    """Layout of a boundary tensor on a stage's groups; of a reader whose entries do not have it, what is said there."""
    sharding, place = plan.sharding_of(stage), plan.layout_of(tensor, stage)
    if sharding is None:
        return None
    received_by = dict(zip(boundary.to_stages, boundary.received, strict=False))
    text = place.value if place else received_by.get(stage, "")
    layout = parse_layout(text, len(sharding.axes)) if text else ()
    if not layout or refusal(boundary.shape, layout, sharding.sizes, padded=sharding.padded):
        return None
    return layout, sharding.sizes


def _stage(plan: Plan, stage: Stage) -> Iterator[Expected]:
    """A stage's predictions are sums over its blocks; ZeRO 2 and 3 may add exchanges to a pass."""
    terms = plan.predictions.stages[stage.index]
    entries = {b: plan.sharded_block(stage.index, b) for b in range(*stage.blocks)}
    figures = {b: entry[0].figures for b, entry in entries.items() if entry}
    recompute_s = sum((f.forward_s for b, f in figures.items() if stage.recompute and b not in stage.kept_blocks), 0.0)
    if stage.repeats:  # the file does not have the figures of single modules
        recompute_s = terms.recompute_s
    forward_s = sum((f.forward_s for f in figures.values()), 0.0)
    backward_s = sum((f.backward_s for f in figures.values()), recompute_s)
    sums = {
        "recompute_s": recompute_s,
        "inside_s": sum((f.communication_s for f in figures.values()), 0.0),
        "inside_bytes": round(sum(f.sent_bytes for f in figures.values())),
        "forward_s": max(terms.forward_s, forward_s) if stage.zero >= 3 else forward_s,
        "backward_s": max(terms.backward_s, backward_s) if stage.zero >= 2 else backward_s,
    }
    for field, expected in sums.items():
        yield Fault.SHARDED_STAGE, ("predictions", "stages", stage.index, field), expected


_MAY_BE_NEGATIVE = (("options", "keep"), ("predictions", "bubble_fraction"), ("model", "rebatch"))


def check_figures(plan: Plan) -> list[Finding]:
    """Findings about figures that contradict each other; O(size of the file)."""
    findings = [*_negative((), to_document(plan)), *_hardware(plan)]
    for stage, terms in zip(plan.stages, plan.predictions.stages, strict=True):
        findings += [*_device(plan, stage, terms), *_terms(stage, terms)]
    return [*findings, *_predictions(plan), *_alternatives(plan), *mismatches(plan, _figures(plan))]


def _figures(plan: Plan) -> Iterator[Expected]:
    """Figures of the whole plan, worked out from other figures of the file."""
    predictions = plan.predictions
    bubble = bubble_fraction(
        zip(plan.stages, predictions.stages, strict=True), plan.micro_batches.count, predictions.iteration_s
    )
    yield Fault.PREDICTIONS, ("predictions", "bubble_fraction"), bubble
    yield Fault.BOUND, ("predictions", "gap"), gap_to(predictions.bound_s, predictions.reached_s)
    owners = {p.owner: p.elements for block in plan.block_table for p in block.parameters if p.trainable}
    yield Fault.MODEL, ("model", "parameters"), sum(owners.values())
    for stage in plan.stages:
        names = [block.name for block in plan.stage_blocks(stage.index)]
        yield Fault.PARAMETERS, ("stages", stage.index, "modules"), module_ranges(names)


def _negative(path: KeyPath, value: object) -> Iterator[Finding]:
    """Findings about negative numbers, where the schema allows none."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _negative((*path, key), item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _negative((*path, index), item)
    elif isinstance(value, (int, float)) and value < 0 and path[:2] not in _MAY_BE_NEGATIVE:
        yield Finding(Fault.NEGATIVE, f"{readable(path)} is {value}", PLAN_AGAIN, stage_in(path))


def _hardware(plan: Plan) -> Iterator[Finding]:
    """Device types cover ranks without gaps, and their number is what the levels of links connect."""
    hardware = plan.hardware
    starts = [run.first_rank for run in hardware.devices]
    ends = list(itertools.accumulate((run.count for run in hardware.devices), initial=0))
    if starts != ends[:-1]:
        yield Finding(Fault.HARDWARE, f"device types begin at ranks {starts}, expected {ends[:-1]}", PLAN_AGAIN)
    joined = math.prod(level.size for level in hardware.levels)
    for count, what in ((ends[-1], "listed"), (joined, "joined by the levels of links")):
        if count != hardware.device_count:
            message = f"{plural(count, 'device')} are {what}, the cluster has {hardware.device_count}"
            yield Finding(Fault.HARDWARE, message, PLAN_AGAIN)
    if plan.world_size > hardware.device_count:
        message = f"the world has {plan.world_size} ranks, the cluster {plural(hardware.device_count, 'device')}"
        yield Finding(Fault.RANK_RANGE, message, PLAN_AGAIN)


def _device(plan: Plan, stage: Stage, terms: StagePrediction) -> Iterator[Finding]:
    """Capacity and reserve of a stage are those of its devices in the hardware section."""
    runs = [
        run
        for run in plan.hardware.devices
        if any(run.first_rank <= rank < run.first_rank + run.count for rank in stage.ranks)
    ]
    filled = 1 - plan.hardware.headroom
    peers = neighbours(stage.group_ranks, len(stage.replicas), len(plan.stages) > 1)
    for what, said, known in (
        ("capacity_bytes", terms.capacity_bytes, {math.floor(run.memory_bytes * filled) for run in runs}),
        ("memory.reserve_bytes", terms.memory.reserve_bytes,
         {run.reserve_bytes + peers * run.neighbour_bytes for run in runs}),
    ):  # fmt: skip
        if known and said not in known:
            devices = ", ".join(format_bytes(size) for size in sorted(known))
            message = f"{what} of stage {stage.index} is {format_bytes(said)}, its devices have {devices}"
            yield Finding(Fault.HARDWARE, message, PLAN_AGAIN, stage.index)


def _terms(stage: Stage, terms: StagePrediction) -> Iterator[Finding]:
    """Parts of a stage's times do not exceed the total that they are part of."""
    parts = [
        ("recompute_s", terms.recompute_s, "backward_s", terms.backward_s),
        ("tied_sync_s", terms.tied_sync_s, "exposed_sync_s", terms.exposed_sync_s),
        ("exposed_sync_s", terms.exposed_sync_s, "sync_s + tied_sync_s", terms.sync_s + terms.tied_sync_s),
    ]
    for part, part_s, total_name, total_s in parts:
        if part_s > total_s * (1 + RELATIVE):
            message = f"stage {stage.index}: {part} is {format_seconds(part_s)}, {total_name} {format_seconds(total_s)}"
            yield Finding(Fault.PREDICTIONS, message, PLAN_AGAIN, stage.index)
    if terms.host_bytes and not stage.offload:
        message = (
            f"stage {stage.index} offloads nothing, but keeps {format_bytes(terms.host_bytes)} in the host's memory"
        )
        yield Finding(Fault.PREDICTIONS, message, PLAN_AGAIN, stage.index)
    recomputes = stage.recompute or (bool(stage.repeats) and terms.recompute_s > 0)
    if recomputes != (terms.recompute_s > 0) and stage.kept_blocks != tuple(range(*stage.blocks)):
        claim = "recomputes" if stage.recompute else "does not recompute"
        repeated = format_seconds(terms.recompute_s)
        message = f"stage {stage.index} {claim}, but its backward repeats {repeated} of forward"
        yield Finding(Fault.PREDICTIONS, message, PLAN_AGAIN, stage.index)


def _slowest(plan: Plan, pace: Sequence[float]) -> int:
    """The slowest stage on the busiest rank: that whose stages take most seconds together."""
    hosted: dict[int, list[int]] = {}
    for stage in plan.stages:
        for replica in stage.replicas:
            hosted.setdefault(replica[0], []).append(stage.index)
    busiest = max(hosted.values(), key=lambda stages: sum(pace[index] for index in stages))
    return max(busiest, key=lambda index: (pace[index], -index))


def _predictions(plan: Plan) -> Iterator[Finding]:
    """The bottleneck is the slowest stage, bounds are in order, and a proof has no gap."""
    predictions = plan.predictions
    pace = [
        (t.forward_s + t.backward_s + t.receive_s + t.return_s) / max(1, len(stage.replicas))
        for t, stage in zip(predictions.stages, plan.stages, strict=True)
    ]
    slowest = _slowest(plan, pace)
    if pace[predictions.bottleneck] < pace[slowest] * (1 - RELATIVE):
        message = f"stage {predictions.bottleneck} is called the bottleneck, stage {slowest} is slower"
        yield Finding(Fault.PREDICTIONS, message, PLAN_AGAIN, predictions.bottleneck)
    gap = gap_to(predictions.bound_s, predictions.reached_s)
    tried_s, longest_s = predictions.tried_bound_s, predictions.reached_s * (1 + RELATIVE)
    if tried_s is not None and not predictions.bound_s <= tried_s <= longest_s:
        message = f"the bound of what was tried, {tried_s} s, does not lie between bound and iteration time"
        yield Finding(Fault.BOUND, message, PLAN_AGAIN)
    line_s = predictions.line_bound_s
    if line_s is not None and line_s < predictions.bound_s:
        message = f"the bound of one stage a worker, {line_s} s, is below that of all, {predictions.bound_s} s"
        yield Finding(Fault.BOUND, message, PLAN_AGAIN)
    if predictions.proven_optimal and gap > ROUNDED:
        message = f"the plan is called proven optimal at {format_seconds(gap * predictions.reached_s)} above its bound"
        yield Finding(Fault.BOUND, message, PLAN_AGAIN)


def _alternatives(plan: Plan) -> Iterator[Finding]:
    """Alternatives have the plan's global batch and match their summary, and none is faster than the bound."""
    for number, other in enumerate(plan.alternatives):
        for problem in _problems(plan, other):
            yield Finding(Fault.ALTERNATIVES, f"alternatives[{number}] ({other.label}): {problem}", PLAN_AGAIN)


def _problems(plan: Plan, other: Alternative) -> Iterator[str]:
    """What is wrong with one alternative, a sentence each."""
    stages = len(other.starts)
    lengths = (len(other.replicas), len(other.ranks) or stages, len(other.layers) or stages)
    if not stages or any(length != stages for length in lengths) or other.starts[0] != 0:
        counts = f"{lengths[0]} replicas, {lengths[1]} ranks and {lengths[2]} numbers of layers"
        yield f"{stages} starts, {counts} of stages that begin at block 0"
        return
    batch = other.copies * other.micro_batch * other.micro_batches
    if batch != plan.micro_batches.global_batch:
        yield f"its micro-batches are {plural(batch, 'sample')}, not {plan.micro_batches.global_batch}"
    if other.summary != summary(alternative_configuration(other, len(plan.block_table))):
        yield f"it is not {other.summary!r}"
    seconds = other.simulated_iteration_s
    if seconds is not None and not other.infeasible and seconds < plan.predictions.bound_s * (1 - RELATIVE):
        yield f"it takes {format_seconds(seconds)}, less than the bound for all plans"


def check_options(plan: Plan) -> list[Finding]:
    """Findings about what stages hold and exchange, and about the limits of the job; O(parameters)."""
    names = tuple(block.name for block in plan.block_table)
    findings: list[Finding] = []
    try:
        schedule = schedule_of(plan)
        for name in plan.options.schedules if plan.schedule.given != "orders" else ():
            schedules.get(name)
        workers = lay_workers(plan.configuration, schedule)
        for stage in plan.stages:
            findings += mismatches(plan, _expected_holdings(plan, stage, schedule.weight_buffers))
        broken_limits = forbidden_choices(plan.options, plan.configuration, names, workers) if is_searched(plan) else []
    except UsageError as error:
        return [*findings, Finding(Fault.OPTIONS, error.problem.message, error.problem.hint)]
    return [*findings, *(Finding(Fault.OPTIONS, limit.message, PLAN_AGAIN, limit.stage) for limit in broken_limits)]


def _expected_holdings(plan: Plan, stage: Stage, buffers: int) -> Iterator[Expected]:
    """Memory and collectives of a stage as they follow from its parameters.

    Bytes of weights, gradients and optimizer state (with the `buffers` copies of the weights that the schedule keeps)
    are left unchecked in plans of published systems, collectives in plans with an exchange section.
    """
    formats, node_size = precision(plan.options.precision), plan.hardware.machine_devices
    path = "predictions", "stages", stage.index
    if plan.exchange is None:
        tied = (c for c in plan.predictions.stages[stage.index].collectives if c.of == "tied gradients")
        yield Fault.COLLECTIVE, (*path, "collectives"), (*stage_collectives(stage, formats, node_size), *tied)
    if plan.system is not None:
        return
    versions = plan.schedule.versions[stage.index] if plan.schedule.versions else 1
    elements, recipe = stage.held_parameters, recipe_of(stage.zero)
    parts = {group: replica_groups(stage, group, node_size).shape[1] for group in recipe.held if group is not None}
    state = optimizer_state_bytes(plan.options.optimizer, formats)
    copies = formats.copy_bytes * elements * (not recipe.weights or parts[recipe.weights] == 1)
    buffer_bytes = buffers * elements * formats.weight_bytes
    for what, element_bytes, group, extra_bytes in (
        ("weights_bytes", formats.weight_bytes * versions, recipe.weights, copies * versions),
        ("gradients_bytes", formats.gradient_bytes, recipe.gradients, formats.spare_bytes * elements),
        ("optimizer_bytes", state, recipe.optimizer, buffer_bytes),
    ):
        held_elements = stage.shard_parameters / parts[group] if group else elements
        yield Fault.MEMORY, (*path, "memory", what), math.ceil(held_elements * element_bytes + extra_bytes)
