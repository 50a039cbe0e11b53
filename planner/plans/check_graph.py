"""A plan against the model: every operator once, no backward edge, boundaries equal to the cut, ties, gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from planner.costs.precision import precision
from planner.errors import UsageError
from planner.graph import Graph
from planner.plans.compare import compared
from planner.plans.files import plain
from planner.plans.findings import Fault, Finding
from planner.plans.records import Boundary, Requirement
from planner.plans.sections import Staging, block_parameters, model_section
from planner.plans.types import Plan
from planner.schedules.types import WeightPolicy

_MAKE_AGAIN = "plan again for this model"


def check_graph(plan: Plan, graph: Graph) -> list[Finding]:
    """Findings about a plan and the model it is said to be for, at the plan's micro-batch size; O(nodes)."""
    if plan.model.fingerprint != graph.fingerprint:
        message = f"the plan is for {plan.model.name} ({_short(plan.model.fingerprint)}), not {graph.name} "
        return [Finding(Fault.MODEL_FINGERPRINT, f"{message}({_short(graph.fingerprint)})", _MAKE_AGAIN)]
    try:
        chosen = precision(plan.options.precision)
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
    staging = Staging(graph, {i: s for i, s in stage_of.items() if i not in copies}, copies, chosen)
    return [
        *_coverage(plan, graph, index, staging),
        *_edges(staging),
        *_order(plan, graph),
        *_boundaries(plan.boundaries, staging.boundaries()),
        *_ties(plan, staging),
        *_parameters(plan, graph, index),
        *_tensors(plan, staging),
        *_model(plan, staging),
    ]


def _short(fingerprint: str) -> str:
    return f"fingerprint {fingerprint[:12]}"


def _coverage(plan: Plan, graph: Graph, index: dict[str, int], staging: Staging) -> Iterator[Finding]:
    for stage in plan.stages:
        for key in plan.stage_nodes(stage.index):
            if key not in index:
                message = f"operator {key!r} of stage {stage.index} is not in the model"
                yield Finding(Fault.OPERATOR_UNKNOWN, message, _MAKE_AGAIN, stage.index, tensor=key)
    for i, node in enumerate(graph.nodes):
        if i not in staging.stage_of and i not in staging.copies:
            message = f"operator {node.key!r} ({node.op}) is in no stage"
            yield Finding(Fault.OPERATOR_MISSING, message, "every operator belongs to one stage", tensor=node.key)
    for i in staging.copies:
        if graph.node_parameters[i]:
            message = f"operator {graph.nodes[i].key!r} has parameters and cannot be duplicated"
            yield Finding(Fault.DUPLICATED_PARAMETER, message, "keep it in one stage", tensor=graph.nodes[i].key)


def _edges(staging: Staging) -> Iterator[Finding]:
    """No operator reads a result of a later stage; duplicated ones have their inputs in every stage they are in."""
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
                    made = staging.stage_of[source]
                    message = f"operator {node.key!r} of stage {stage} reads {name!r}, made in stage {made}"
                    hint = "stages are in order of the data's flow"
                    yield Finding(Fault.BACKWARD_EDGE, message, hint, stage, tensor=name)


def _order(plan: Plan, graph: Graph) -> Iterator[Finding]:
    """Inside a stage the operators are listed in an order that can be executed."""
    for stage in plan.stages:
        place = {key: i for i, key in enumerate(plan.stage_nodes(stage.index))}
        for key, at in place.items():
            for name in graph.nodes[graph.producer[key]].inputs if key in graph.producer else ():
                source = graph.producer.get(name, -1)
                before = graph.nodes[source].key if source >= 0 else ""
                if place.get(before, -1) > at:
                    message = f"operator {key!r} stands before {before!r}, which it reads"
                    yield Finding(Fault.OPERATOR_ORDER, message, _MAKE_AGAIN, stage.index, tensor=key)


def _boundaries(listed: Sequence[Boundary], cut: Sequence[Boundary]) -> Iterator[Finding]:
    by_name = {b.tensor: b for b in listed}
    true = {b.tensor: b for b in cut}
    for name, right in true.items():
        if name not in by_name:
            message = f"{name!r} goes from stage {right.from_stage} to {list(right.to_stages)} but is no boundary"
            yield Finding(Fault.BOUNDARY_MISSING, message, _MAKE_AGAIN, right.from_stage, tensor=name)
            continue
        given = by_name[name]
        if (given.from_stage, given.to_stages) != (right.from_stage, right.to_stages):
            message = (
                f"{name!r} is said to go from stage {given.from_stage} to {list(given.to_stages)}; "
                f"it goes from {right.from_stage} to {list(right.to_stages)}"
            )
            yield Finding(Fault.BOUNDARY_STAGES, message, _MAKE_AGAIN, right.from_stage, tensor=name)
        if (given.shape, given.dtype) != (right.shape, right.dtype):
            message = (
                f"{name!r} is said to be {given.dtype} {list(given.shape)}; it is {right.dtype} {list(right.shape)}"
            )
            yield Finding(Fault.BOUNDARY_SHAPE, message, _MAKE_AGAIN, right.from_stage, tensor=name)
        if given.gradient != right.gradient:
            flows = "does" if right.gradient else "does not"
            message = f"a gradient {flows} flow back through {name!r}, the plan says otherwise"
            yield Finding(Fault.BOUNDARY_GRADIENT, message, _MAKE_AGAIN, right.from_stage, tensor=name)
    for name in by_name.keys() - true.keys():
        message = f"{name!r} is listed as a boundary but does not go between stages"
        yield Finding(Fault.BOUNDARY_UNKNOWN, message, _MAKE_AGAIN, by_name[name].from_stage, tensor=name)


def _ties(plan: Plan, staging: Staging) -> Iterator[Finding]:
    listed = {s.parameter: s for s in plan.shared_parameters}
    drains = plan.schedule.weight_policy == WeightPolicy.SYNC
    true = {s.parameter: s for s in staging.shared_parameters(summed=drains)}
    for owner, right in true.items():
        if listed.get(owner) != right:
            message = f"parameter {owner!r} ({', '.join(right.names)}) is shared by stages {list(right.stages)}"
            hint = f"declare it with reduction {right.reduction!r}"
            yield Finding(Fault.UNDECLARED_TIE, message, hint, right.stages[0], tensor=owner)
    for owner in listed.keys() - true.keys():
        message = f"parameter {owner!r} is declared as shared but is not"
        yield Finding(Fault.WRONG_TIE, message, _MAKE_AGAIN, tensor=owner)


def _parameters(plan: Plan, graph: Graph, index: dict[str, int]) -> Iterator[Finding]:
    """Each block lists the weights that its operators read, as the file has them."""
    for stage in plan.stages:
        for block in plan.stage_blocks(stage.index):
            given = {p.name: p for p in block.parameters}
            nodes = (index[key] for key in block.nodes if key in index)
            right = {p.name: p for p in block_parameters(graph, nodes)}
            for name in sorted(given.keys() | right.keys()):
                if given.get(name) != right.get(name):
                    what = "is not listed" if name not in given else "is not read" if name not in right else "differs"
                    message = f"parameter {name!r} {what} in block {block.name!r}"
                    yield Finding(Fault.PARAMETERS, message, _MAKE_AGAIN, stage.index, tensor=name)


def _tensors(plan: Plan, staging: Staging) -> Iterator[Finding]:
    for stage in plan.stages:
        for what, given, right in (
            ("reads model inputs", stage.inputs, staging.inputs(stage.index)),
            ("makes model outputs", stage.outputs, staging.outputs(stage.index)),
        ):
            if given != right:
                message = f"stage {stage.index} {what} {list(right)}, the plan says {list(given)}"
                yield Finding(Fault.STAGE_TENSORS, message, _MAKE_AGAIN, stage.index)


def _model(plan: Plan, staging: Staging) -> Iterator[Finding]:
    right = model_section(staging.graph, staging.chosen)
    for difference in compared(("model",), plain(replace(plan.model, name=right.name)), plain(right)):
        yield Finding(Fault.MODEL, str(difference), _MAKE_AGAIN)
    divided = staging.divided_modules()
    if bool(divided) != (Requirement.MID_MODULE_CUT in plan.requires):
        message = f"divided between stages: {', '.join(divided) or 'no module'}; the plan's requirements say otherwise"
        yield Finding(Fault.REQUIRES, message, _MAKE_AGAIN)
