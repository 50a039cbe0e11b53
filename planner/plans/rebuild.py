"""Turn the shardings of a plan file back into decisions that `planner.sharding` can evaluate, and price them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.costs import Profile
from planner.costs.precision import optimizer_state_bytes, precision
from planner.errors import UsageError
from planner.graph import Graph, TensorKind, build_chain
from planner.hardware.types import Cluster
from planner.operators import OpCall
from planner.plans.figures import Alternative
from planner.plans.shard_sections import by_position
from planner.plans.shardings import OperatorSplit, ShardedBlock, Sharding, TensorPlace
from planner.plans.types import Plan
from planner.plans.words import significant
from planner.sharding import (
    Boundaries,
    Boundary,
    InnerOptions,
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
    roles_of,
    strategies,
)
from planner.sharding.problem import Choice, GraphFacts
from planner.space.configuration import Configuration, StageChoice
from planner.space.jobs import experts_of_row
from planner.space.pricer import Pricer
from planner.space.repeats import recomputed_modules
from planner.space.types import BlockCosts


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

    chain = build_chain(graph) if plan.shardings else None
    facts: GraphFacts | None = None
    profile: Profile | None = None
    for sharding in plan.shardings:
        axes: Mapping[str, int] = {axis.name: axis.size for axis in sharding.axes}
        mesh = ideal_mesh(axes) if cluster is None else mesh_on(cluster, axes, copies=experts_of_row(graph))
        options = InnerOptions(
            item_bytes=formats.compute.bits / 8,
            state=state,
            micro_batches=plan.micro_batches.count,
            options=Options(padded=sharding.padded, roles=roles_of(mesh.axes)),
            forbidden=plan.options.forbid,
        )
        if cluster is not None and profile is None:
            profile = Pricer(graph, cluster, plan.options).profiles(plan.micro_batches.size)[0]
        if profile is None or chain is None:
            setting = Setting(
                graph,
                mesh,
                item_bytes=options.item_bytes,
                state=state,
                micro_batches=options.micro_batches,
                options=options.options,
                sharded_states=False,
                forbidden=options.forbidden,
            )
        else:
            setting = inner_setting(chain, graph, profile, mesh, options)
        facts = facts or GraphFacts.of(setting)
        yield RebuiltSharding(sharding, setting, facts, chain.repeats if chain else ())


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
        boundary: Boundaries = tuple(map(Boundary, sharding.boundaries))
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
