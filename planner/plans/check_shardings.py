"""Check a plan's shardings without the model: meshes, groups, blocks, names, readable layouts, sums."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence

from planner.errors import PlanError, UsageError
from planner.plans.findings import PLAN_AGAIN, Expected, Fault, Finding, mismatches
from planner.plans.records import Boundary, Stage
from planner.plans.shard_sections import placed_boundary
from planner.plans.shardings import ShardedBlock, Sharding, correspondence
from planner.plans.types import Plan
from planner.sharding import TensorLayout, parse_layout, refusal

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
