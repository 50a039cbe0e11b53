"""What in a plan follows from other parts of it, worked out by the functions that write plans.

Stages, ranks, batches and orders follow from the configuration; sums, requirements and most figures from the rest.
`validate` compares the result with the plan, field by field.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from planner.costs.precision import optimizer_state_bytes, precision
from planner.exchange import recipe_of
from planner.graph import DType
from planner.plans.assemble import kept_blocks, stage_section
from planner.plans.collectives import replica_groups, stage_collectives
from planner.plans.figures import StagePrediction, gap_to
from planner.plans.rank_schedule import lay_out, meeting
from planner.plans.readings import requirements, schedule_of
from planner.plans.records import Boundary, SharedParameter, Stage
from planner.plans.requirement import OF_MINOR_1, Requirement
from planner.plans.sections import bubble_fraction, micro_batches_section, shared_parameters
from planner.plans.shard_sections import placed_boundary
from planner.plans.types import Plan
from planner.plans.words import significant
from planner.schedules import WeightPolicy
from planner.sharding import TensorLayout, parse_layout, refusal
from planner.space.configuration import StageChoice
from planner.space.layers import Layers

_OF_MODEL = ("inputs", "outputs", "repeated", "dropped", "offloaded", "rank_parameters", "rank_replicas")
"""Fields of a stage that only the model and its shardings say."""


def laid_out(plan: Plan) -> Plan:
    """The plan with the stages, ranks, batches and orders that its configuration has.

    Orders of the user's own are read, and laid out on ranks like any other. O(actions).

    Raises:
        UsageError: no schedule has the name.
        PlanError: the configuration cannot be laid out on ranks, or the user's orders cannot run.
    """
    decision = plan.configuration
    ranks = lay_out(decision, schedule=schedule_of(plan) if plan.schedule.given == "orders" else None)
    names = ("", *(sharding.name for sharding in plan.shardings))
    layers = Layers.of(plan.block_names)
    stages = []
    for index, (choice, said, groups) in enumerate(zip(decision.stages, plan.stages, ranks.groups, strict=True)):
        stage = stage_section(decision, index, plan.block_table, groups, names[choice.sharding])
        known = {name: getattr(said, name) for name in _OF_MODEL}
        stages.append(
            dataclasses.replace(stage, kept_blocks=kept_blocks(choice, layers, _head(said, choice, layers)), **known)
        )
    section = meeting(ranks.section, len(stages), plan.shared_parameters)
    return dataclasses.replace(
        plan,
        world_size=ranks.world_size,
        copies=decision.copies,
        micro_batches=micro_batches_section(decision),
        stages=tuple(stages),
        routing=ranks.routing,
        schedule=dataclasses.replace(section, name=decision.schedule, given=plan.schedule.given),
    )


def _head(said: Stage, choice: StageChoice, layers: Layers) -> int:
    """The head, which only the model knows: the block that a stage keeps before those behind its recomputed layers."""
    first_kept = layers.kept_from(choice.start, choice.stop, choice.layers)
    return max((block for block in said.kept_blocks if block < first_kept), default=-1)


def with_sums(plan: Plan) -> Plan:
    """The plan with what follows from its blocks, stages and shardings: counts, ties, requirements, sums of figures."""
    table = plan.block_table
    listed = {key for block in table for key in block.nodes} | {key for d in plan.duplicated for key in d.nodes}
    owners = {p.owner: p.elements for block in table for p in block.parameters if p.trainable}
    needed = requirements(plan, divided=Requirement.MID_MODULE_CUT in plan.requires)
    predictions = plan.predictions
    stages = (_with_inside(plan, stage, terms) for stage, terms in zip(plan.stages, predictions.stages, strict=True))
    samples = plan.micro_batches.global_batch
    return dataclasses.replace(
        plan,
        options=dataclasses.replace(plan.options, global_batch=samples),
        model=dataclasses.replace(plan.model, operators=len(listed), parameters=sum(owners.values())),
        boundaries=tuple(_boundary(plan, boundary) for boundary in plan.boundaries),
        shared_parameters=_shared(plan),
        predictions=dataclasses.replace(
            predictions, stages=tuple(stages), samples_per_s=significant(samples / predictions.iteration_s)
        ),
        requires=tuple(each for each in needed if plan.minor > 0 or each not in OF_MINOR_1),
    )


def _shared(plan: Plan) -> tuple[SharedParameter, ...]:
    """Parameters that several stages hold, in the order of the file."""
    said = {shared.parameter: shared for shared in plan.shared_parameters}
    names = (name for shared in plan.shared_parameters for name in (shared.parameter, *shared.names))
    found = shared_parameters(
        [plan.stage_parameters(stage.index) for stage in plan.stages],
        {name: place for place, name in reversed(list(enumerate(names)))},
        precision(plan.options.precision),
        summed=plan.schedule.weight_policy == WeightPolicy.SYNC,
    )
    if not plan.shardings:  # else they are those of one rank
        return found
    return tuple(dataclasses.replace(s, bytes=said[s.parameter].bytes) if s.parameter in said else s for s in found)


def _boundary(plan: Plan, boundary: Boundary) -> Boundary:
    """A boundary with its size and layouts, as the entries of the stages on both sides give them."""
    dtype = DType(boundary.dtype)
    size = (math.prod(boundary.shape) * dtype.bits + 7) // 8
    sized = dataclasses.replace(boundary, bytes=size, gradient=boundary.gradient and dtype.is_float)
    return placed_boundary(sized, functools.partial(_place, plan, boundary))


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


def _with_inside(plan: Plan, stage: Stage, terms: StagePrediction) -> StagePrediction:
    """A stage's predictions as sums over its sharded blocks; ZeRO 2 and 3 may add exchanges to a pass."""
    if not stage.sharding:
        return terms
    figures = {block: entry.figures for block, entry, _ in plan.sharded_blocks(stage.index)}
    recompute_s = sum((f.forward_s for b, f in figures.items() if stage.recompute and b not in stage.kept_blocks), 0.0)
    if stage.repeats:  # the file does not have the figures of single modules
        recompute_s = terms.recompute_s
    forward_s = sum((f.forward_s for f in figures.values()), 0.0)
    backward_s = sum((f.backward_s for f in figures.values()), recompute_s)
    return dataclasses.replace(
        terms,
        recompute_s=recompute_s,
        inside_s=sum((f.communication_s for f in figures.values()), 0.0),
        inside_bytes=round(sum(f.sent_bytes for f in figures.values())),
        forward_s=max(terms.forward_s, forward_s) if stage.zero >= 3 else forward_s,
        backward_s=max(terms.backward_s, backward_s) if stage.zero >= 2 else backward_s,
    )


def with_figures(plan: Plan, weight_buffers: int) -> Plan:
    """The plan with figures that follow from its other figures, its parameters and the options of its job.

    Args:
        plan: a plan whose stages are those of its configuration.
        weight_buffers: copies of the weights that its schedule keeps with the optimizer state.
    """
    predictions, stages = plan.predictions, list(zip(plan.stages, plan.predictions.stages, strict=True))
    bubble = bubble_fraction(stages, plan.micro_batches.count, predictions.iteration_s)
    return dataclasses.replace(
        plan,
        predictions=dataclasses.replace(
            predictions,
            bubble_fraction=significant(max(0.0, bubble)),
            gap=significant(gap_to(predictions.bound_s, predictions.reached_s)),
            bottleneck=_bottleneck(plan),
            stages=tuple(_holding(plan, stage, terms, weight_buffers) for stage, terms in stages),
        ),
    )


def _bottleneck(plan: Plan) -> int:
    """The slowest stage on the busiest rank; the one that the plan names if it is as slow."""
    pace = [
        (t.forward_s + t.backward_s + t.receive_s + t.return_s) / len(stage.replicas)
        for t, stage in zip(plan.predictions.stages, plan.stages, strict=True)
    ]
    hosted = {plan.stages_of(group[0]) for stage in plan.stages for group in stage.replicas}
    busiest = max(sorted(hosted), key=lambda stages: sum(pace[index] for index in stages))
    slowest, said = max(busiest, key=lambda index: (pace[index], -index)), plan.predictions.bottleneck
    return said if pace[said] >= pace[slowest] * (1 - 1e-6) else slowest


def _holding(plan: Plan, stage: Stage, terms: StagePrediction, buffers: int) -> StagePrediction:
    """A stage's memory and collectives as they follow from its parameters.

    Bytes of weights, gradients and optimizer state (with the `buffers` copies of the weights that the schedule keeps)
    are left as they are in plans of published systems, collectives in plans with an exchange section.
    """
    formats, node_size = precision(plan.options.precision), plan.hardware.machine_devices
    if plan.exchange is None:
        tied = (c for c in terms.collectives if c.of == "tied gradients")
        terms = dataclasses.replace(terms, collectives=(*stage_collectives(stage, formats, node_size), *tied))
    if plan.system is not None:
        return terms
    versions = plan.schedule.versions[stage.index] if plan.schedule.versions else 1
    elements, recipe = stage.held_parameters, recipe_of(stage.zero, stage.shard_over)
    parts = {group: replica_groups(stage, group, node_size).shape[1] for group in recipe.held if group is not None}
    state = optimizer_state_bytes(plan.options.optimizer, formats)
    copies = formats.copy_bytes * elements * (not recipe.weights or parts[recipe.weights] == 1)

    def held(element_bytes: float, group: object, extra_bytes: float) -> int:
        elements_held = stage.shard_parameters / parts[group] if group else elements  # type: ignore[index]
        return math.ceil(elements_held * element_bytes + extra_bytes)

    memory = dataclasses.replace(
        terms.memory,
        weights_bytes=held(formats.weight_bytes * versions, recipe.weights, copies * versions),
        gradients_bytes=held(formats.gradient_bytes, recipe.gradients, formats.spare_bytes * elements),
        optimizer_bytes=held(state, recipe.optimizer, buffers * elements * formats.weight_bytes),
    )
    return dataclasses.replace(terms, memory=memory)
