"""What in a plan follows from other parts of it, worked out by the functions that write plans; and its shardings turned
back into decisions that `planner.sharding` can evaluate, and priced.

Stages, ranks, batches and orders follow from the configuration; sums, requirements and most figures from the rest.
`validate` compares the result with the plan, field by field.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.costs.precision import optimizer_state_bytes, precision
from planner.errors import UsageError
from planner.exchange import RankGroup, kept_bytes, recipe_of
from planner.graph import DType, Graph, TensorKind, build_chain
from planner.hardware.types import Cluster
from planner.operators import OpCall
from planner.plans.assemble import kept_blocks, stage_section
from planner.plans.collectives import replica_groups, stage_collectives
from planner.plans.figures import IDLE_CONVENTION, Alternative, StagePrediction, gap_to
from planner.plans.rank_schedule import lay_out, meeting
from planner.plans.readings import requirements, schedule_of
from planner.plans.records import Boundary, SharedParameter, Stage
from planner.plans.sections import micro_batches_section, shared_parameters
from planner.plans.shard_sections import by_position, placed_boundary
from planner.plans.shardings import OperatorSplit, ShardedBlock, Sharding, TensorPlace
from planner.plans.step import plan_step
from planner.plans.types import OF_MINOR_1, Plan, Requirement
from planner.plans.words import significant
from planner.schedules import WeightPolicy
from planner.sharding import (
    Boundaries,
    BoundaryLayout,
    Mesh,
    Options,
    Setting,
    StateBytes,
    Strategy,
    TensorChoice,
    TensorLayout,
    WeightChoice,
    ideal_mesh,
    inner_setting,
    mesh_on,
    parse_layout,
    priced_once,
    refusal,
    roles_of,
    strategies,
)
from planner.sharding.problem import Choice, GraphFacts
from planner.space.configuration import Configuration, StageChoice
from planner.space.jobs import experts_of_row
from planner.space.layers import Layers
from planner.space.pricer import Pricer
from planner.space.recompute_choices import recomputed_modules
from planner.space.types import BlockCosts
from planner.sums import float_sum


@dataclass(frozen=True)
class RebuiltSharding:
    """A sharding of a plan with the setting in which it is evaluated.

    Attributes:
        sharding: the section of the plan.
        setting: the whole graph on the mesh; without a cluster on an ideal mesh, with no seconds.
        facts: of the graph.
        repeats: by block, duplicated operators that an earlier block has computed (`Chain.repeats`).
    """

    sharding: Sharding
    setting: Setting
    facts: GraphFacts
    repeats: tuple[frozenset[int], ...]

    @property
    def graph(self) -> Graph:
        """The model."""
        return self.setting.graph

    @property
    def mesh(self) -> Mesh:
        """The mesh of a group."""
        return self.setting.mesh

    def nodes(self, entry: ShardedBlock, names: Mapping[str, str] | None = None) -> tuple[int, ...]:
        """Indices of an entry's operators in its order, without those that the model lacks.

        Args:
            entry: the entry.
            names: names of another block by those of the entry; by default its first block is meant.
        """
        keys = (o.operator if names is None else names.get(o.operator, "") for o in entry.operators)
        places = (self.graph.producer.get(key, -1) for key in keys)
        return tuple(i for i in places if i >= 0)

    def part(self, entry: ShardedBlock, block: int = -1, names: Mapping[str, str] | None = None) -> Setting:
        """The setting of the operators of one of an entry's blocks; of the first by default."""
        block = entry.first[0] if block < 0 else block
        computed_before = self.repeats[block] if 0 <= block < len(self.repeats) else frozenset()
        return dataclasses.replace(priced_once(self.setting, computed_before), nodes=self.nodes(entry, names))

    def tensors(self, entry: ShardedBlock, names: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """Tensors of a block's operators that need a layout (no inputs, no constants), in order of first use."""
        nodes = (self.graph.nodes[i] for i in self.nodes(entry, names))
        used = dict.fromkeys(name for node in nodes for name in (*node.inputs, *node.outputs) if name)
        kinds = {name: self.graph.tensors[name].kind for name in used if name in self.graph.tensors}
        return tuple(name for name, kind in kinds.items() if kind not in (TensorKind.INPUT, TensorKind.CONSTANT))

    def crossing(self, entry: ShardedBlock, names: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """Tensors of a block, weights excluded, that operators outside the block make or read."""
        members, graph = set(self.nodes(entry, names)), self.graph

        def crosses(name: str) -> bool:
            inside = graph.producer.get(name, -1) in members
            return not inside or any(i not in members for i in graph.consumers.get(name, ()))

        tensors = self.tensors(entry, names)
        weights = {name for name in tensors if graph.tensors[name].kind is TensorKind.PARAMETER}
        return tuple(name for name in tensors if name not in weights and crosses(name))

    def layout(self, text: str) -> TensorLayout:
        """A layout on the mesh.

        Raises:
            UsageError: not a layout of as many axes as the mesh has.
        """
        return parse_layout(text, len(self.mesh.axes))

    def place(self, place: TensorPlace) -> TensorChoice | WeightChoice:
        """The layouts of a tensor as a choice of the sharding problem.

        Raises:
            UsageError: a layout cannot be read, or a weight lacks one.
        """
        value = self.layout(place.value)
        if self.graph.tensors[place.tensor].kind is TensorKind.PARAMETER:
            return WeightChoice(value, self.layout(place.gradient), self.layout(place.optimizer))
        return TensorChoice(value, self.layout(place.gradient) if place.gradient else None)

    def strategy(self, split: OperatorSplit) -> Strategy | None:
        """The strategy of an operator that a split describes; None if it is not legal.

        Raises:
            UsageError: a layout cannot be read.
        """
        i = self.graph.producer[split.operator]
        node, spec, options = self.graph.nodes[i], self.facts.specs[i], self.setting.options
        texts = [text for text in (*split.reads, *split.writes) if text]
        blocks = {part.blocks for text in texts for part in self.layout(text)} - {1}
        options = dataclasses.replace(options, blocks=tuple(sorted(blocks)))
        call = OpCall.of(self.graph, node)
        return next(
            (
                s
                for s in strategies(call, spec, self.mesh, self.setting.item_bytes, options)
                if s.splits == split.splits
                and by_position(s.reads) == split.reads
                and by_position(s.writes) == split.writes
                and significant(s.share) == split.share
            ),
            None,
        )

    def decision(self, entry: ShardedBlock) -> dict[str, Choice]:
        """The choices of an entry, without those that are illegal or cannot be read."""
        choices: dict[str, Choice] = {}
        for split in entry.operators:
            try:
                strategy = self.strategy(split) if split.operator in self.graph.producer else None
            except UsageError:
                strategy = None
            if strategy is not None:
                choices[f"op:{split.operator}"] = strategy
        for place in entry.tensors:
            if place.tensor in self.graph.tensors:
                try:
                    choices[place.tensor] = self.place(place)
                except UsageError:
                    continue
        return choices


def rebuild(plan: Plan, graph: Graph, cluster: Cluster | None = None) -> Iterator[RebuiltSharding]:
    """The plan's shardings in order, with settings on the cluster if one is given.

    Raises:
        UsageError: the plan's precision or optimizer is unknown, or a mesh is larger than the cluster.
    """
    formats = precision(plan.options.precision)
    state = StateBytes(
        formats.held_weight_bytes, formats.held_gradient_bytes, optimizer_state_bytes(plan.options.optimizer, formats)
    )
    if not plan.shardings:
        return
    chain, facts = build_chain(graph), None
    pricer = None if cluster is None else Pricer(graph, cluster, plan.options)
    for sharding in plan.shardings:
        axes: Mapping[str, int] = {axis.name: axis.size for axis in sharding.axes}
        mesh = ideal_mesh(axes) if cluster is None else mesh_on(cluster, axes, copies=experts_of_row(graph))
        setting = Setting(
            graph,
            mesh,
            item_bytes=formats.compute.bits / 8,
            state=state,
            micro_batches=plan.micro_batches.count,
            options=Options(padded=sharding.padded, roles=roles_of(mesh.axes)),
            sharded_states=False,
            forbidden=plan.options.forbid,
        )
        if pricer is not None:
            setting = inner_setting(chain, pricer.profiles(plan.micro_batches.size)[0], setting)
        facts = facts or GraphFacts.of(setting)
        yield RebuiltSharding(sharding, setting, facts, chain.repeats)


def priced_configuration(plan: Plan, pricer: Pricer) -> tuple[Configuration, dict[int, BlockCosts]]:
    """A plan's configuration, its shardings numbered as the pricer numbers them, and their costs.

    Raises:
        UsageError: a sharding leaves a choice out, or a tensor cannot have its layout.
        InfeasibleError: a split is not legal.
        HardwareError: a mesh does not fit the cluster.
    """
    size = plan.micro_batches.size
    priced = _price_shardings(plan, pricer.graph_at(size), pricer)
    numbers = (0, *(costs.sharding for costs in priced))
    stages = tuple(dataclasses.replace(s, sharding=numbers[s.sharding]) for s in plan.configuration.stages)
    costs_by_sharding = {costs.sharding: costs for costs in priced}
    if any(stage.sharding == 0 for stage in stages):
        costs_by_sharding[0] = pricer.costs(size)
    return dataclasses.replace(plan.configuration, stages=stages), costs_by_sharding


def _price_shardings(plan: Plan, graph: Graph, pricer: Pricer) -> list[BlockCosts]:
    """The plan's shardings in order, priced as their entries split operators and place tensors."""
    priced: list[BlockCosts] = []
    for rebuilt in rebuild(plan, graph):
        sharding = rebuilt.sharding
        decisions: list[dict[str, Choice] | None] = [None] * len(plan.block_table)
        decision_of = {id(entry): rebuilt.decision(entry) for entry in sharding.blocks}
        for stage in (stage for stage in plan.stages if stage.sharding == sharding.name):
            for block, entry, names in plan.sharded_blocks(stage.index):
                decisions[block] = {renamed(name, names): choice for name, choice in decision_of[id(entry)].items()}
        boundary: Boundaries = tuple(map(BoundaryLayout, sharding.boundaries))
        mesh = rebuilt.mesh.axes
        priced.append(pricer.decided(plan.micro_batches.size, mesh, boundary, decisions))
    return priced


def renamed(name: str, names: Mapping[str, str]) -> str:
    """Name in another block of a variable of the entry's first block."""
    return f"op:{names[name[3:]]}" if name.startswith("op:") else names[name]


def alternative_configuration(other: Alternative, blocks: int) -> Configuration:
    """The configuration of an alternative, as far as the plan states it; `blocks` is the plan's number of blocks."""
    count = len(other.starts)
    ends = (*other.starts[1:], blocks)
    ranks = other.ranks or (1,) * count
    repeats, offload = ([recomputed_modules(names) for names in own] or [()] * count
                        for own in (other.repeats, other.offload))  # fmt: skip
    layers = other.layers or (0,) * count
    stages = tuple(
        StageChoice(
            other.starts[i], ends[i], other.replicas[i], i in other.recompute, ranks[i],
            context=other.context, expert=other.expert, repeats=repeats[i], layers=layers[i],
            offload=offload[i],
        )
        for i in range(count)
    )  # fmt: skip
    return Configuration(stages, other.copies, other.micro_batch, other.micro_batches, other.schedule, other.zero)


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
    names = (name for shared in plan.shared_parameters for name in (shared.parameter, *shared.names))
    return shared_parameters(
        [plan.stage_parameters(stage.index) for stage in plan.stages],
        {name: place for place, name in reversed(list(enumerate(names)))},
        precision(plan.options.precision),
        summed=plan.schedule.weight_policy == WeightPolicy.SYNC,
    )


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
    recompute_s = float_sum(
        (f.forward_s for b, f in figures.items() if stage.recompute and b not in stage.kept_blocks), 0.0
    )
    if stage.repeats:  # the file does not have the figures of single modules
        recompute_s = terms.recompute_s
    forward_s = float_sum((f.forward_s for f in figures.values()), 0.0)
    backward_s = float_sum((f.backward_s for f in figures.values()), recompute_s)
    return dataclasses.replace(
        terms,
        recompute_s=recompute_s,
        inside_s=float_sum((f.communication_s for f in figures.values()), 0.0),
        inside_bytes=round(float_sum(f.sent_bytes for f in figures.values())),
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
    return dataclasses.replace(
        plan,
        predictions=dataclasses.replace(
            predictions,
            bubble_fraction=significant(_bubble(plan)),
            gap=significant(gap_to(predictions.bound_s, predictions.reached_s)),
            bottleneck=_bottleneck(plan),
            stages=tuple(_holding(plan, stage, terms, weight_buffers) for stage, terms in stages),
        ),
    )


def _bubble(plan: Plan) -> float:
    """The bubble by the convention that the plan states."""
    if plan.predictions.bubble_convention == IDLE_CONVENTION:
        return _idle_fraction(plan)
    return plan_step(plan, plan.predictions.iteration_s).bubble


def _idle_fraction(plan: Plan) -> float:
    """Fraction of the working ranks' time in which they run no forward, backward or update, counted once a step."""
    busy_s = 0.0
    for stage, terms in zip(plan.stages, plan.predictions.stages, strict=True):
        passes_s = (terms.forward_s + terms.backward_s) * plan.micro_batches.count
        busy_s += (passes_s + terms.update_s * len(stage.replicas)) * stage.group_ranks
    ranks = {rank for stage in plan.stages for rank in stage.ranks}
    return max(0.0, 1.0 - busy_s / (len(ranks) * plan.predictions.iteration_s))


def _bottleneck(plan: Plan) -> int:
    """The slowest stage on the busiest rank; the one that the plan names if it is as slow."""
    pace = [
        (t.forward_s + t.backward_s + t.receive_s + t.return_s) / len(stage.replicas)
        for t, stage in zip(plan.predictions.stages, plan.stages, strict=True)
    ]
    hosted = {plan.stages_of(group[0]) for stage in plan.stages for group in stage.replicas}
    busiest = max(sorted(hosted), key=lambda stages: float_sum(pace[index] for index in stages))
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
    inner_shards = elements / stage.shard_parameters if stage.shard_parameters else 1.0

    def shards(group: RankGroup | None) -> float:
        return 1.0 if group is None else replica_groups(stage, group, node_size).shape[1] * inner_shards

    state_bytes = optimizer_state_bytes(plan.options.optimizer, formats)
    beside = formats.spare_bytes, formats.copy_bytes
    kept = kept_bytes(recipe, formats, state_bytes, shards, elements, 0.0, *beside)  # what is transient is not compared
    memory = dataclasses.replace(
        terms.memory,
        weights_bytes=math.ceil(versions * kept.weights),
        gradients_bytes=math.ceil(kept.gradients),
        optimizer_bytes=math.ceil(kept.optimizer + buffers * elements * formats.weight_bytes),
    )
    return dataclasses.replace(terms, memory=memory)
