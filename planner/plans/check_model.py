"""Check a plan against its model: what the model says of it is worked out anew by the functions that write plans.

Of shardings the splits and layouts of every block are judged, and what they make the ranks of a group exchange and hold
is compared. Seconds and bytes depend on the cluster: they are compared when the plan is evaluated anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from planner.costs.precision import precision
from planner.errors import PlanError, UsageError
from planner.graph import Graph, TensorKind, build_chain
from planner.plans.assemble import block_table, in_model, staged
from planner.plans.findings import Fault, Finding, differences
from planner.plans.readings import requirements
from planner.plans.rebuild import RebuiltSharding, rebuild, renamed
from planner.plans.requirement import OF_MINOR_5, minor_of
from planner.plans.sections import model_section
from planner.plans.shard_sections import group_collective, holdings, weight_origin
from planner.plans.shardings import ShardedBlock, correspondence
from planner.plans.types import Plan
from planner.sharding import Boundary as Treatment
from planner.sharding import canonical_layout, collective_uses, evaluate, layout_text
from planner.sharding.problem import Choice

_FOR_THIS_MODEL = "plan again for this model"
_SHARDED = ("layout", "rank_bytes", "received")
"""Fields of a boundary that shardings say."""


def check_graph(plan: Plan, graph: Graph, *, readable: bool = True) -> list[Finding]:
    """Findings about a plan and the model that it claims to be for, at the plan's micro-batch size.

    Args:
        plan: a plan whose numbers and names lead somewhere.
        graph: the model.
        readable: false if its shardings cannot be read, and are left out.

    O(nodes), and for shardings the judge's work on every block.
    """
    if plan.model.fingerprint != graph.fingerprint:
        plan_model, model = (f"{each.name} (fingerprint {each.fingerprint[:12]})" for each in (plan.model, graph))
        return [Finding(Fault.MODEL, f"the plan is for {plan_model}, not {model}", _FOR_THIS_MODEL)]
    if graph.batch and graph.batch != plan.micro_batches.size:
        message = f"the model is at batch {graph.batch}, the plan's micro-batch is {plan.micro_batches.size}"
        return [Finding(Fault.MODEL, message, "read the model at the plan's micro-batch size")]
    try:
        right = _in_model(plan, graph)
    except (PlanError, UsageError) as error:
        return [Finding(Fault.OPTIONS, error.problem.message, error.problem.hint)]
    blocks, right_blocks = ({block.name: block for block in table} for table in (plan.block_table, right.block_table))
    found = [
        *differences(plan, dataclasses.replace(right, blocks=plan.blocks)),
        *differences(blocks, right_blocks, ("blocks",)),
    ]
    findings = [difference.finding(plan, Fault.DIFFERS, _FOR_THIS_MODEL) for difference in found]
    if readable and plan.shardings and plan.block_table == right.block_table:
        findings += _shardings(plan, graph)
    return findings


def _in_model(plan: Plan, graph: Graph) -> Plan:
    """The plan with blocks, operators, tensors and requirements as the model has them.

    Raises:
        PlanError: the stages do not cover the model's blocks.
        UsageError: the precision is unknown.
    """
    chain, formats, decision = build_chain(graph), precision(plan.options.precision), plan.configuration
    staging, duplicated = staged(graph, chain, decision, formats)
    section = model_section(graph, formats).comparable(plan.model)
    said = {boundary.tensor: boundary for boundary in plan.boundaries}
    boundaries = (
        dataclasses.replace(b, **{name: getattr(said[b.tensor], name) for name in _SHARDED}) if b.tensor in said else b
        for b in staging.boundaries()
    )
    stages = [in_model(stage, staging, chain, decision) for stage in plan.stages]
    if plan.minor < minor_of(OF_MINOR_5):  # which operators are repeated is not said
        stages = [dataclasses.replace(stage, repeated=(), dropped=()) for stage in stages]
    right = dataclasses.replace(
        plan,
        model=dataclasses.replace(section, name=plan.model.name),
        stages=tuple(stages),
        boundaries=tuple(boundaries),
        duplicated=duplicated,
    )
    table, divided = block_table(chain), bool(staging.divided_modules())
    needed = requirements(plan, divided=divided)
    has_mark = divided == ("mid_module_cut" in plan.requires)
    right = dataclasses.replace(right, requires=plan.requires if has_mark else needed)
    right.__dict__["block_table"] = table
    return right


def _shardings(plan: Plan, graph: Graph) -> Iterator[Finding]:
    """Findings about splits and layouts that the model does not allow, and what does not follow from them."""
    try:
        for rebuilt in rebuild(plan, graph):
            found = [
                Finding(Fault.SHARDINGS, f"{rebuilt.sharding.name!r}, block {block}: {message}", tensor=name)
                for entry in rebuilt.sharding.blocks
                for block, name, message in _entry(plan, rebuilt, entry)
            ]
            yield from (*found, *_between(plan, rebuilt))
    except UsageError as error:
        yield Finding(Fault.SHARDINGS, error.problem.message, error.problem.hint)


def _entry(plan: Plan, rebuilt: RebuiltSharding, entry: ShardedBlock) -> Iterator[tuple[int, str, str]]:
    """(block, name, what is wrong) with the operators and tensors of an entry."""
    graph, decision = rebuilt.graph, rebuilt.decision(entry)
    for block, further_names in entry.members():
        names = correspondence(entry, plan.block_table, block, further_names)
        wrong = list(_named(plan, rebuilt, entry, block, names)) or list(_splits(rebuilt, entry, decision))
        if not wrong:
            own = {renamed(name, names): choice for name, choice in decision.items()}
            verdict = evaluate(rebuilt.part(entry, block, names), own, facts=rebuilt.facts)
            wrong = [(message.split(" ")[0], message) for message in verdict.violations]
        if wrong:
            yield from ((block, *each) for each in dict.fromkeys(wrong))
            return
    first, setting = entry.first[0], rebuilt.part(entry)
    verdict = evaluate(setting, decision, facts=rebuilt.facts)
    uses = collective_uses(setting, decision, verdict.communication, rebuilt.facts.carrying)
    needed = {(c.of, c.reason, c.phase) for c in (group_collective(use, rebuilt.mesh, 1) for use in uses)}
    listed = {(c.of, c.reason, c.phase) for c in entry.collectives}
    for of, reason, phase in sorted(needed ^ listed):
        fault = "needed but not listed" if (of, reason, phase) in needed else "listed but not needed"
        if phase != "backward" or (of, reason, "forward") not in listed:  # what backward keeps is said by prices
            yield first, of, f"communication {phase} of {of!r} is {fault}"
    dealt = holdings(graph, rebuilt.mesh, [o.operator for o in entry.operators], entry.tensors)
    for difference in differences(entry.holdings, dealt, ("holdings",)):
        yield first, next((h.weight for h in {*dealt} ^ {*entry.holdings}), ""), str(difference)


def _named(
    plan: Plan, rebuilt: RebuiltSharding, entry: ShardedBlock, block: int, names: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """(name, what is wrong): an entry names its block's operators and their tensors, and where weights come from."""
    graph, side = rebuilt.graph, {key for group in plan.duplicated for key in group.nodes}
    listed = {names.get(o.operator, o.operator) for o in entry.operators}
    own = set(plan.block_table[block].nodes)
    for key in sorted((listed - side) ^ own):
        said = "is not an operator of the block" if key in listed else "has no split"
        yield key, f"operator {key!r} {said}"
    placed = {names.get(p.tensor, p.tensor): p for p in entry.tensors}
    for name in sorted(placed.keys() ^ set(rebuilt.tensors(entry, names))):
        yield name, f"tensor {name!r} {'is in none of its operators' if name in placed else 'has no layout'}"
    for name, place in placed.items():
        if name not in graph.tensors:
            continue
        weight, carries = graph.tensors[name].kind is TensorKind.PARAMETER, name in rebuilt.facts.carrying
        if bool(place.gradient) != (weight or carries) or bool(place.optimizer) is not weight:
            yield name, f"{name!r} lacks the layout of its gradient or optimizer state, or has one too many"
        parameters = tuple(names.get(p, p) for p in place.parameters)
        if (parameters, place.dims) != weight_origin(graph, name):
            yield name, f"{name!r} does not come from parameters {list(parameters)} in this way"


def _splits(rebuilt: RebuiltSharding, entry: ShardedBlock, decision: Mapping[str, Choice]) -> Iterator[tuple[str, str]]:
    """(operator, what is wrong) of the splits that the loop nests of their operators do not have."""
    for split in entry.operators:
        if f"op:{split.operator}" not in decision:
            cut, layouts = (
                " ".join(each or "-" for each in split.splits),
                f"{list(split.reads)} -> {list(split.writes)}",
            )
            share = f"with {split.share:g} of the work on a rank"
            yield split.operator, f"operator {split.operator!r} cannot be split as [{cut}] {layouts} {share}"


def _between(plan: Plan, rebuilt: RebuiltSharding) -> Iterator[Finding]:
    """Tensors between blocks lie as the sharding says, or where it leaves them free the same for all blocks.

    What duplicated operators make lies in each block as that block makes it.
    """
    graph, sharding = rebuilt.graph, rebuilt.sharding
    free, known = "free" in sharding.boundaries, dict[str, tuple[str, str]]()
    treatment = tuple(Treatment(each) for each in sharding.boundaries)
    side = {key for group in plan.duplicated for key in group.nodes}
    for stage in (stage for stage in plan.stages if stage.sharding == sharding.name):
        for block, entry, names in plan.sharded_blocks(stage.index):
            crossing = set(rebuilt.crossing(entry, names))
            places = {names[place.tensor]: place for place in entry.tensors}
            own = {names[o.operator] for o in entry.operators} & side
            made = {name for key in own for name in graph.nodes[graph.producer[key]].outputs}
            for name in (places.keys() & crossing) - made:
                said = places[name].value, places[name].gradient
                if not free:
                    sizes = rebuilt.mesh.sizes
                    right = layout_text(canonical_layout(graph.tensors[name], treatment, sizes, padded=sharding.padded))
                    known[name] = right, right if name in rebuilt.facts.carrying else ""
                if known.setdefault(name, said) != said:
                    lies, right = (
                        f"{value}, its gradient as {gradient or '-'}" for value, gradient in (said, known[name])
                    )
                    message = f"{name!r} lies as {lies} for block {block} of {sharding.name!r}, else as {right}"
                    hint = "a tensor between blocks lies in one place"
                    yield Finding(Fault.SHARDINGS, message, hint, stage.index, tensor=name)
