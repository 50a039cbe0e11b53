"""Check a plan against its model: operators, edges between stages, boundary tensors, tied weights, parameters.

Of shardings it checks that splits and layouts are legal and complete, that blocks of one entry are copies of each
other, and that the listed communication is what splits and layouts need.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from planner.costs.precision import precision
from planner.errors import UsageError
from planner.graph import Graph, TensorKind
from planner.hardware.types import Cluster
from planner.plans.check_parts import FREE
from planner.plans.findings import PLAN_AGAIN, RELATIVE, Expected, Fault, Finding, mismatches
from planner.plans.rebuild import RebuiltSharding, rebuild
from planner.plans.requirement import Requirement
from planner.plans.sections import Staging, block_parameters, model_section
from planner.plans.shard_sections import group_collective, holdings, weight_origin
from planner.plans.shardings import GroupCollective, ShardedBlock, correspondence
from planner.plans.types import Plan
from planner.schedules import WeightPolicy
from planner.sharding import Boundary as Treatment
from planner.sharding import canonical_layout, collective_uses, evaluate, layout_text, refusal, shard_elements
from planner.sharding.inner import trained_parameters
from planner.sharding.sharded import held_parameters

_FOR_THIS_MODEL = "plan again for this model"


def check_graph(plan: Plan, graph: Graph) -> list[Finding]:
    """Findings about a plan and the model that it claims to be for, at the plan's micro-batch size; O(nodes)."""
    if plan.model.fingerprint != graph.fingerprint:
        message = f"the plan is for {plan.model.name} ({_short(plan.model.fingerprint)}), not {graph.name} "
        return [Finding(Fault.MODEL_FINGERPRINT, f"{message}({_short(graph.fingerprint)})", _FOR_THIS_MODEL)]
    try:
        formats = precision(plan.options.precision)
    except UsageError as error:
        return [Finding(Fault.OPTIONS, error.problem.message, error.problem.hint)]
    if graph.batch and graph.batch != plan.micro_batches.size:
        message = f"the model is at batch {graph.batch}, the plan's micro-batch is {plan.micro_batches.size}"
        return [Finding(Fault.MICRO_BATCH, message, "read the model at the plan's micro-batch size")]
    index = {node.key: i for i, node in enumerate(graph.nodes)}
    stage_of = {
        index[key]: stage.index
        for stage in reversed(plan.stages)
        for block in plan.stage_blocks(stage.index)
        for key in block.nodes
        if key in index
    }
    copies = {index[key]: frozenset(d.stages) for d in plan.duplicated for key in d.nodes if key in index}
    staging = Staging(graph, {i: s for i, s in stage_of.items() if i not in copies}, copies, formats)
    return [
        *_coverage(plan, graph, index, staging),
        *_edges(staging),
        *_order(plan, graph),
        *_boundaries(plan, staging),
        *_ties(plan, staging),
        *_block_parameters(plan, graph, index),
        *_divided(plan, staging),
        *mismatches(plan, _sections(plan, staging), _FOR_THIS_MODEL),
    ]


def _short(fingerprint: str) -> str:
    return f"fingerprint {fingerprint[:12]}"


def _coverage(plan: Plan, graph: Graph, index: dict[str, int], staging: Staging) -> Iterator[Finding]:
    """Every operator of the model is in one stage or duplicated, and the stages have no others."""
    for stage in plan.stages:
        for key in plan.stage_nodes(stage.index):
            if key not in index:
                message = f"operator {key!r} of stage {stage.index} is not in the model"
                yield Finding(Fault.OPERATOR_UNKNOWN, message, _FOR_THIS_MODEL, stage.index, tensor=key)
    for i, node in enumerate(graph.nodes):
        if i not in staging.stage_of and i not in staging.copies:
            message = f"operator {node.key!r} ({node.op}) is in no stage"
            yield Finding(Fault.OPERATOR_MISSING, message, "every operator belongs to one stage", tensor=node.key)
    for i in staging.copies:
        if graph.node_parameters[i]:
            message = f"operator {graph.nodes[i].key!r} has parameters and cannot be duplicated"
            yield Finding(Fault.DUPLICATED_PARAMETER, message, "keep it in one stage", tensor=graph.nodes[i].key)


def _edges(staging: Staging) -> Iterator[Finding]:
    """No operator reads a result of a later stage; a duplicated operator has its inputs in each of its stages."""
    graph = staging.graph
    for i, node in enumerate(graph.nodes):
        stages = staging.copies.get(i) or ({staging.stage_of[i]} if i in staging.stage_of else set())
        for name in dict.fromkeys(node.inputs):
            source = graph.producer.get(name, -1)
            makers = staging.copies.get(source)
            for stage in sorted(stages):
                if makers is not None and stage not in makers:
                    message = f"stage {stage} reads {name!r} but does not compute it"
                    hint = "duplicate its operator in that stage, too"
                    yield Finding(Fault.DUPLICATED_INCOMPLETE, message, hint, stage, tensor=name)
                if makers is None and staging.stage_of.get(source, stage) > stage:
                    maker = staging.stage_of[source]
                    message = f"operator {node.key!r} of stage {stage} reads {name!r}, made in stage {maker}"
                    hint = "stages are in order of the data's flow"
                    yield Finding(Fault.BACKWARD_EDGE, message, hint, stage, tensor=name)


def _order(plan: Plan, graph: Graph) -> Iterator[Finding]:
    """Inside a stage the operators are listed in an order that can be executed."""
    for stage in plan.stages:
        position = {key: i for i, key in enumerate(plan.stage_nodes(stage.index))}
        for key, at in position.items():
            for name in graph.nodes[graph.producer[key]].inputs if key in graph.producer else ():
                source = graph.producer.get(name, -1)
                source_key = graph.nodes[source].key if source >= 0 else ""
                if position.get(source_key, -1) > at:
                    message = f"operator {key!r} stands before {source_key!r}, which it reads"
                    yield Finding(Fault.OPERATOR_ORDER, message, _FOR_THIS_MODEL, stage.index, tensor=key)


_OF_BOUNDARIES = {
    "from_stage": Fault.BOUNDARY_STAGES,
    "to_stages": Fault.BOUNDARY_STAGES,
    "shape": Fault.BOUNDARY_SHAPE,
    "dtype": Fault.BOUNDARY_SHAPE,
    "gradient": Fault.BOUNDARY_GRADIENT,
}
"""Fields of a boundary that follow from the model, and the fault of a wrong one."""


def _boundaries(plan: Plan, staging: Staging) -> Iterator[Finding]:
    positions = {b.tensor: at for at, b in enumerate(plan.boundaries)}
    needed = {b.tensor: b for b in staging.boundaries()}
    for name, right in needed.items():
        if name not in positions:
            message = f"{name!r} goes from stage {right.from_stage} to {list(right.to_stages)} but is no boundary"
            yield Finding(Fault.BOUNDARY_MISSING, message, _FOR_THIS_MODEL, right.from_stage, tensor=name)
            continue
        path = "boundaries", positions[name]
        expected = ((fault, (*path, key), getattr(right, key)) for key, fault in _OF_BOUNDARIES.items())
        yield from mismatches(plan, expected, _FOR_THIS_MODEL)
    for name in positions.keys() - needed.keys():
        message = f"{name!r} is listed as a boundary but does not go between stages"
        yield Finding(
            Fault.BOUNDARY_UNKNOWN, message, _FOR_THIS_MODEL, plan.boundaries[positions[name]].from_stage, tensor=name
        )


def _ties(plan: Plan, staging: Staging) -> Iterator[Finding]:
    listed = {s.parameter: s for s in plan.shared_parameters}
    drains = plan.schedule.weight_policy == WeightPolicy.SYNC
    needed = {s.parameter: s for s in staging.shared_parameters(summed=drains)}
    for owner, tie in needed.items():
        if listed.get(owner) != tie:
            message = f"parameter {owner!r} ({', '.join(tie.names)}) is shared by stages {list(tie.stages)}"
            hint = f"declare it with reduction {tie.reduction!r}"
            yield Finding(Fault.UNDECLARED_TIE, message, hint, tie.stages[0], tensor=owner)
    for owner in listed.keys() - needed.keys():
        message = f"parameter {owner!r} is declared as shared but is not"
        yield Finding(Fault.WRONG_TIE, message, _FOR_THIS_MODEL, tensor=owner)


def _block_parameters(plan: Plan, graph: Graph, index: dict[str, int]) -> Iterator[Finding]:
    """Each block lists the weights that its operators read, as the file has them."""
    for stage in plan.stages:
        for block in plan.stage_blocks(stage.index):
            listed = {p.name: p for p in block.parameters}
            nodes = (index[key] for key in block.nodes if key in index)
            expected = {p.name: p for p in block_parameters(graph, nodes)}
            for name in sorted(listed.keys() | expected.keys()):
                if listed.get(name) != expected.get(name):
                    fault = "differs" if name in expected else "is not read"
                    fault = fault if name in listed else "is not listed"
                    message = f"parameter {name!r} {fault} in block {block.name!r}"
                    yield Finding(Fault.PARAMETERS, message, _FOR_THIS_MODEL, stage.index, tensor=name)


def _sections(plan: Plan, staging: Staging) -> Iterator[Expected]:
    """The model section, and the model's inputs and outputs of each stage."""
    section = model_section(staging.graph, staging.chosen).comparable(plan.model)
    yield Fault.MODEL, ("model",), replace(section, name=plan.model.name)
    for stage in plan.stages:
        yield Fault.STAGE_TENSORS, ("stages", stage.index, "inputs"), staging.inputs(stage.index)
        yield Fault.STAGE_TENSORS, ("stages", stage.index, "outputs"), staging.outputs(stage.index)


def _divided(plan: Plan, staging: Staging) -> Iterator[Finding]:
    modules = staging.divided_modules()
    if bool(modules) != (Requirement.MID_MODULE_CUT in plan.requires):
        message = f"divided between stages: {', '.join(modules) or 'no module'}; the plan's requirements say otherwise"
        yield Finding(Fault.REQUIRES, message, _FOR_THIS_MODEL)


def check_sharded_model(plan: Plan, graph: Graph) -> list[Finding]:
    """Findings about a plan's shardings and the model: legality, completeness and what a rank holds.

    O(operators of distinct blocks x their legal splits + names of all blocks).
    """
    findings: list[Finding] = []
    try:
        for rebuilt in rebuild(plan, graph):
            for entry in rebuilt.sharding.blocks:
                entry_findings = [
                    *_missing(plan, rebuilt, entry),
                    *_splits(rebuilt, entry),
                    *_places(rebuilt, entry),
                    *_copies(plan, rebuilt, entry),
                ]
                findings += entry_findings or [
                    *_block_borders(rebuilt, entry),
                    *_held(rebuilt, entry),
                    *check_communication(rebuilt, entry),
                ]
            findings += _free_borders(plan, rebuilt) if FREE in rebuilt.sharding.boundaries else ()
            findings += [] if findings else _stages(plan, rebuilt)
    except UsageError as error:
        findings.append(Finding(Fault.MESH, error.problem.message, error.problem.hint))
    return findings


def _missing(plan: Plan, rebuilt: RebuiltSharding, entry: ShardedBlock) -> Iterator[Finding]:
    """Every operator of the block, and every duplicated one that it reads, has a split; every tensor has a layout."""
    graph = rebuilt.graph
    split = {o.operator for o in entry.operators}
    side = {key for group in plan.duplicated for key in group.nodes}
    wanted = dict.fromkeys(plan.block_table[entry.first[0]].nodes)
    for key in tuple(split | wanted.keys()):
        for name in graph.nodes[graph.producer[key]].inputs if key in graph.producer else ():
            source = graph.producer.get(name, -1)
            if source >= 0 and graph.nodes[source].key in side:
                wanted[graph.nodes[source].key] = None
    for key in wanted:
        if key not in split:
            message = f"{rebuilt.sharding.name!r} does not say how operator {key!r} is split"
            yield Finding(Fault.SPLIT_MISSING, message, PLAN_AGAIN, tensor=key)
    for key in split:
        if key not in wanted:
            message = f"operator {key!r} is in an entry of {rebuilt.sharding.name!r} but not in its block"
            yield Finding(Fault.SHARDING_NAMES, message, PLAN_AGAIN, tensor=key)
    placed, used = {p.tensor for p in entry.tensors}, set(rebuilt.tensors(entry))
    for name in sorted(used - placed):
        message = f"{rebuilt.sharding.name!r} does not say how tensor {name!r} lies"
        yield Finding(Fault.LAYOUT_MISSING, message, PLAN_AGAIN, tensor=name)
    for name in sorted(placed - used):
        message = f"tensor {name!r} is in an entry of {rebuilt.sharding.name!r} but none of its operators has it"
        yield Finding(Fault.SHARDING_NAMES, message, PLAN_AGAIN, tensor=name)


def _splits(rebuilt: RebuiltSharding, entry: ShardedBlock) -> Iterator[Finding]:
    """Every split is legal for the operator's loop nests."""
    for split in entry.operators:
        if split.operator in rebuilt.graph.producer and rebuilt.strategy(split) is None:
            cut = " ".join(each or "-" for each in split.splits)
            message = (
                f"operator {split.operator!r} cannot be split as [{cut}] {list(split.reads)} -> {list(split.writes)}"
            )
            hint = "see docs/plan.md: layouts and the share of work follow from the dimension that is cut"
            yield Finding(Fault.SPLIT, message, hint, tensor=split.operator)


def _places(rebuilt: RebuiltSharding, entry: ShardedBlock) -> Iterator[Finding]:
    """Every layout fits its tensor: dimensions exist and divide; weights have all three layouts."""
    graph, sizes, padded = rebuilt.graph, rebuilt.mesh.sizes, rebuilt.sharding.padded
    for place in entry.tensors:
        if place.tensor not in graph.tensors:
            continue
        tensor = graph.tensors[place.tensor]
        weight = tensor.kind is TensorKind.PARAMETER
        has_gradient = place.tensor in rebuilt.facts.carrying
        if ((weight or has_gradient) and not place.gradient) or bool(place.optimizer) is not weight:
            message = f"{place.tensor!r} lacks the layout of its gradient or optimizer state, or has one too many"
            yield Finding(Fault.LAYOUT, message, PLAN_AGAIN, tensor=place.tensor)
            continue
        if (place.parameters, place.dims) != weight_origin(graph, place.tensor):
            message = f"{place.tensor!r} does not come from parameters {list(place.parameters)} in this way"
            yield Finding(Fault.SHARDING_NAMES, message, PLAN_AGAIN, tensor=place.tensor)
        for text in filter(None, (place.value, place.gradient, place.optimizer)):
            reason = refusal(tensor.shape, rebuilt.layout(text), sizes, padded=padded)
            if reason:
                message = f"{place.tensor!r} of shape {list(tensor.shape)} cannot lie as {text}: {reason}"
                yield Finding(Fault.LAYOUT, message, "cut dimensions that the axis divides", tensor=place.tensor)
                break


def _copies(plan: Plan, rebuilt: RebuiltSharding, entry: ShardedBlock) -> Iterator[Finding]:
    """The other blocks of an entry are copies of its first one under their own names."""
    graph = rebuilt.graph
    for block, names in entry.members()[1:]:
        known = correspondence(entry, plan.block_table, block, names)
        mismatch = next((o.operator for o in entry.operators if not _has_copy(graph, o.operator, known)), None)
        for place in entry.tensors:
            origin = tuple(known[p] for p in place.parameters), place.dims
            if mismatch is None and origin != weight_origin(graph, known[place.tensor]):
                message = f"{known[place.tensor]!r} does not come from its parameters as {place.tensor!r} does"
                yield Finding(Fault.SHARDING_NAMES, message, PLAN_AGAIN, tensor=known[place.tensor])
        if mismatch is not None:
            message = f"operator {known[mismatch]!r} of block {block} is no copy of {mismatch!r}, whose split it shares"
            yield Finding(Fault.SHARDING_NAMES, message, PLAN_AGAIN, tensor=known[mismatch])


def _has_copy(graph: Graph, key: str, known: Mapping[str, str]) -> bool:
    """True if the operator has an equal counterpart in another block, by the names in `known`."""
    if key not in graph.producer or known[key] not in graph.producer:
        return False
    node, counterpart = graph.nodes[graph.producer[key]], graph.nodes[graph.producer[known[key]]]
    same = (node.op, len(node.inputs), len(node.outputs), node.repeat) == (
        counterpart.op, len(counterpart.inputs), len(counterpart.outputs), counterpart.repeat,
    )  # fmt: skip
    if not same or node.attributes != counterpart.attributes:
        return False
    for a, b in zip((*node.inputs, *node.outputs), (*counterpart.inputs, *counterpart.outputs), strict=True):
        if a in known and known[a] != b:
            return False
        if a in graph.tensors and (b not in graph.tensors or graph.tensors[a].shape != graph.tensors[b].shape):
            return False
    return True


def _block_borders(rebuilt: RebuiltSharding, entry: ShardedBlock) -> Iterator[Finding]:
    """Tensors between blocks have the layouts that the sharding's `boundaries` prescribe."""
    graph, sharding = rebuilt.graph, rebuilt.sharding
    if FREE in sharding.boundaries:
        return
    treatment = tuple(Treatment(each) for each in sharding.boundaries)
    crossing = set(rebuilt.crossing(entry))
    for place in entry.tensors:
        if place.tensor not in crossing:
            continue
        right = layout_text(
            canonical_layout(graph.tensors[place.tensor], treatment, rebuilt.mesh.sizes, padded=sharding.padded)
        )
        gradient = right if place.tensor in rebuilt.facts.carrying else ""
        if (place.value, place.gradient) != (right, gradient):
            message = (
                f"{place.tensor!r} goes from block to block as {place.value}, its gradient as {place.gradient or '-'}; "
                f"boundaries of {sharding.name!r} lie as {right}"
            )
            yield Finding(Fault.BOUNDARY_LAYOUT, message, PLAN_AGAIN, tensor=place.tensor)


def _free_borders(plan: Plan, rebuilt: RebuiltSharding) -> Iterator[Finding]:
    """With free boundaries, the blocks that make and read a tensor give it and its gradient the same layout."""
    layouts_by_tensor: dict[str, tuple[int, str, str]] = {}
    for stage in plan.stages:
        for block in range(*stage.blocks) if stage.sharding == rebuilt.sharding.name else ():
            entry, names = plan.sharded_block(stage.index, block) or (None, {})
            for place in entry.tensors if entry else ():
                name = names[place.tensor]
                layouts = block, place.value, place.gradient
                other = layouts_by_tensor.setdefault(name, layouts)
                if not place.optimizer and other[1:] != layouts[1:]:
                    message = (
                        f"{name!r} lies as {layouts[1]}, its gradient as {layouts[2] or '-'}, for block {block}; "
                        f"for block {other[0]} as {other[1]} and {other[2] or '-'}"
                    )
                    hint = "a tensor lies in one place for all blocks"
                    yield Finding(Fault.BOUNDARY_LAYOUT, message, hint, stage.index, tensor=name)


def _held(rebuilt: RebuiltSharding, entry: ShardedBlock) -> Iterator[Finding]:
    """Experts and table rows are dealt as the layouts of their weights imply; a rank's trained elements add up."""
    graph, sizes = rebuilt.graph, rebuilt.mesh.sizes
    expected = holdings(graph, rebuilt.mesh, [o.operator for o in entry.operators], entry.tensors)
    for holding in set(expected) ^ set(entry.holdings):
        said = "does not say" if holding in expected else "is wrong about"
        message = f"the plan {said} how {holding.what} of {holding.weight!r} are dealt to the ranks"
        yield Finding(Fault.HOLDING, message, PLAN_AGAIN, tensor=holding.weight)
    held_elements = sum(
        shard_elements(graph.tensors[p.tensor].shape, rebuilt.layout(p.value), sizes)
        for p in entry.tensors
        if p.optimizer and p.tensor in rebuilt.facts.carrying
    )
    if not math.isclose(held_elements, entry.figures.parameters, rel_tol=RELATIVE):
        first = entry.first[0]
        said = f"{entry.figures.parameters:.0f}"
        message = f"a rank holds {held_elements} trained elements of block {first}, the plan says {said}"
        yield Finding(Fault.SHARDING_MEMORY, message, PLAN_AGAIN)


def _stages(plan: Plan, rebuilt: RebuiltSharding) -> Iterator[Finding]:
    """Parameters of a stage's rank follow from its layouts: each once, as in the block where a rank holds most of it.

    Stages with different shardings may hold less of a parameter that they share: then only too few are refused.
    """
    stages = [stage for stage in plan.stages if stage.sharding == rebuilt.sharding.name]
    most_held: dict[str, float] = {}
    parameters_of: dict[int, set[str]] = {}
    for stage in stages:
        for block in range(*stage.blocks):
            elements_by_name = _parameters(plan, rebuilt, stage.index, block)
            parameters_of.setdefault(stage.index, set()).update(elements_by_name)
            most_held.update(
                {name: max(most_held.get(name, 0.0), elements) for name, elements in elements_by_name.items()}
            )
    for stage in stages:
        total = round(sum(most_held[name] for name in parameters_of[stage.index]))
        if total > stage.rank_parameters or (len(stages) == len(plan.stages) and total != stage.rank_parameters):
            message = f"a rank of stage {stage.index} holds {total} parameters, the plan says {stage.rank_parameters}"
            yield Finding(Fault.SHARDING_MEMORY, message, PLAN_AGAIN, stage.index)


def _parameters(plan: Plan, rebuilt: RebuiltSharding, stage: int, block: int) -> dict[str, float]:
    """Elements that a rank holds of each trainable parameter of a block, ties resolved."""
    graph, parts = rebuilt.graph, list[tuple[str, float]]()
    entry, names = plan.sharded_block(stage, block) or (None, {})
    for place in entry.tensors if entry else ():
        name = names[place.tensor]
        if place.optimizer and name in rebuilt.facts.carrying:
            tensor = graph.tensors[name]
            held = shard_elements(tensor.shape, rebuilt.layout(place.value), rebuilt.mesh.sizes)
            parts.append((name, held / max(1, tensor.elements)))
    return held_parameters(trained_parameters(graph), parts)


def check_sharded_cluster(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """Groups of a sharded stage are neighbouring ranks on as few link levels as possible, as they were priced."""
    sizes = cluster.group_sizes()
    for stage in plan.stages:
        if not stage.sharding:
            continue
        for group in stage.replicas:
            first, count = group[0], len(group)
            neighbours = group == tuple(range(first, first + count))
            apart = any(
                first // size != (first + count - 1) // size if count <= size else first % size for size in sizes
            )
            if not neighbours or apart:
                message = f"group {first}-{group[-1]} of stage {stage.index} does not lie as the mesh is priced"
                hint = "ranks of a group are neighbours and cross no more links than they must"
                yield Finding(Fault.LINK_LEVEL, message, hint, stage.index, first)
                break


def check_communication(rebuilt: RebuiltSharding, entry: ShardedBlock) -> Iterator[Finding]:
    """Findings about the collectives of one entry, whose splits and layouts are each legal.

    Only their presence is checked: kind, size and time depend on the cluster and are compared when the plan is
    evaluated anew.
    """
    setting, decision = rebuilt.part(entry), rebuilt.decision(entry)
    verdict = evaluate(setting, decision, facts=rebuilt.facts)
    for violation in verdict.violations:
        yield Finding(Fault.LAYOUT, violation, PLAN_AGAIN)
    if verdict.violations:
        return
    uses = collective_uses(setting, decision, verdict.communication, rebuilt.facts.carrying)
    listed = set(map(_key, entry.collectives))
    needed = {_key(group_collective(use, rebuilt.mesh, setting.micro_batches)) for use in uses}
    for of, reason, phase in sorted(needed - listed):
        if phase == "backward" and (of, reason, "forward") in listed:
            continue  # what backward keeps of a gathered tensor is said by prices
        message = f"communication {phase} of {of!r} is needed but not listed"
        yield Finding(Fault.COLLECTIVE_MISSING, message, PLAN_AGAIN, tensor=of)
    for of, _, phase in sorted(listed - needed):
        message = f"communication {phase} of {of!r} is listed but not needed"
        yield Finding(Fault.COLLECTIVE_UNKNOWN, message, PLAN_AGAIN, tensor=of)


def _key(use: GroupCollective) -> tuple[str, str, str]:
    return use.of, use.reason, use.phase
