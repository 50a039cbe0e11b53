"""From the text of a plan's shardings back to what the judge of shardings evaluates, and to what they cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
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
class Rebuilt:
    """A sharding of a plan as a problem's setting.

    Attributes:
        sharding: as the plan has it.
        setting: the whole graph on the mesh; without a cluster on an ideal mesh, and without seconds.
        facts: of the graph.
        repeats: by block, duplicated operators that an earlier block has worked out (`Chain.repeats`).
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

    def nodes(self, entry: ShardedBlock) -> tuple[int, ...]:
        """Indices of the operators in an entry that the model knows, in the order of the entry."""
        places = (self.graph.producer.get(o.operator, -1) for o in entry.operators)
        return tuple(i for i in places if i >= 0)

    def part(self, entry: ShardedBlock) -> Setting:
        """The setting of one entry's operators."""
        block = entry.first[0]
        again = self.repeats[block] if 0 <= block < len(self.repeats) else frozenset()
        return dataclasses.replace(priced_once(self.setting, again), nodes=self.nodes(entry))

    def tensors(self, entry: ShardedBlock) -> tuple[str, ...]:
        """Tensors of an entry's operators that rest somewhere, in order of first use."""
        nodes = (self.graph.nodes[i] for i in self.nodes(entry))
        used = dict.fromkeys(name for node in nodes for name in (*node.inputs, *node.outputs) if name)
        kinds = {name: self.graph.tensors[name].kind for name in used if name in self.graph.tensors}
        return tuple(name for name, kind in kinds.items() if kind not in (TensorKind.INPUT, TensorKind.CONSTANT))

    def crossing(self, entry: ShardedBlock) -> tuple[str, ...]:
        """Tensors of an entry, no weights, that operators outside its block make or read."""
        members, graph = set(self.nodes(entry)), self.graph

        def crosses(name: str) -> bool:
            inside = graph.producer.get(name, -1) in members
            return not inside or any(i not in members for i in graph.consumers.get(name, ()))

        weights = {name for name in self.tensors(entry) if graph.tensors[name].kind is TensorKind.PARAMETER}
        return tuple(name for name in self.tensors(entry) if name not in weights and crosses(name))

    def layout(self, text: str) -> TensorLayout:
        """A layout on the mesh.

        Raises:
            UsageError: not a layout of as many axes as the mesh has.
        """
        return parse_layout(text, len(self.mesh.axes))

    def place(self, place: TensorPlace) -> TensorChoice | WeightChoice:
        """Where a tensor rests.

        Raises:
            UsageError: a layout cannot be read, or one that a weight needs is missing.
        """
        value = self.layout(place.value)
        if self.graph.tensors[place.tensor].kind is TensorKind.PARAMETER:
            return WeightChoice(value, self.layout(place.gradient), self.layout(place.optimizer))
        return TensorChoice(value, self.layout(place.gradient) if place.gradient else None)

    def strategy(self, split: OperatorSplit) -> Strategy | None:
        """The legal way to run an operator that a split describes; None where there is none.

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
                and _texts(s.reads) == split.reads
                and _texts(s.writes) == split.writes
                and significant(s.share) == split.share
            ),
            None,
        )

    def decision(self, entry: ShardedBlock) -> dict[str, Choice]:
        """Every choice that an entry says, as far as it is legal and can be read."""
        found: dict[str, Choice] = {}
        for split in entry.operators:
            try:
                chosen = self.strategy(split) if split.operator in self.graph.producer else None
            except UsageError:
                chosen = None
            if chosen is not None:
                found[f"op:{split.operator}"] = chosen
        for place in entry.tensors:
            if place.tensor in self.graph.tensors:
                try:
                    found[place.tensor] = self.place(place)
                except UsageError:
                    continue
        return found


def _texts(layouts: Sequence[tuple[int, TensorLayout]]) -> tuple[str, ...]:
    return by_position(layouts)


def rebuild(plan: Plan, graph: Graph, cluster: Cluster | None = None) -> Iterator[Rebuilt]:
    """The plan's shardings in order, on the cluster where there is one.

    Raises:
        UsageError: the plan's precision or optimizer is unknown, or a mesh is larger than the cluster.
    """
    chosen = precision(plan.options.precision)
    state = StateBytes(
        chosen.held_weight_bytes, chosen.held_gradient_bytes, optimizer_state_bytes(plan.options.optimizer, chosen)
    )

    chain = build_chain(graph) if plan.shardings else None
    facts: GraphFacts | None = None
    found: Profile | None = None
    for sharding in plan.shardings:
        axes: Mapping[str, int] = {axis.name: axis.size for axis in sharding.axes}
        mesh = ideal_mesh(axes) if cluster is None else mesh_on(cluster, axes, copies=experts_of_row(graph))
        options = InnerOptions(
            item_bytes=chosen.compute.bits / 8,
            state=state,
            micro_batches=plan.micro_batches.count,
            options=Options(padded=sharding.padded, roles=roles_of(mesh.axes)),
            forbidden=plan.options.forbid,
        )
        if cluster is not None and found is None:
            found = Pricer(graph, cluster, plan.options).profiles(plan.micro_batches.size)[0]
        if found is None or chain is None:
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
            setting = inner_setting(chain, graph, found, mesh, options)
        facts = facts or GraphFacts.of(setting)
        yield Rebuilt(sharding, setting, facts, chain.repeats if chain else ())


def priced_configuration(plan: Plan, pricer: Pricer) -> tuple[Configuration, dict[int, BlockCosts]]:
    """A plan's configuration, its shardings numbered as the pricer numbers them, and their costs.

    Raises:
        UsageError: something about a sharding is not said, or cannot lie as it is said to.
        InfeasibleError: a split is not legal.
        HardwareError: a mesh does not fit the cluster.
    """
    size = plan.micro_batches.size
    priced = _price_shardings(plan, pricer.graph_at(size), pricer)
    numbers = (0, *(costs.sharding for costs in priced))
    stages = tuple(dataclasses.replace(s, sharding=numbers[s.sharding]) for s in plan.configuration.stages)
    shelf = {costs.sharding: costs for costs in priced}
    if any(stage.sharding == 0 for stage in stages):
        shelf[0] = pricer.costs(size)
    return dataclasses.replace(plan.configuration, stages=stages), shelf


def _price_shardings(plan: Plan, graph: Graph, pricer: Pricer) -> list[BlockCosts]:
    """The plan's shardings in order, priced by what they say of operators and tensors."""
    found: list[BlockCosts] = []
    for rebuilt in rebuild(plan, graph):
        sharding = rebuilt.sharding
        decisions: list[dict[str, Choice] | None] = [None] * len(plan.block_table)
        own = {id(entry): rebuilt.decision(entry) for entry in sharding.blocks}
        for stage in (stage for stage in plan.stages if stage.sharding == sharding.name):
            for block in range(*stage.blocks):
                known = plan.sharded_block(stage.index, block)
                if known is not None:
                    entry, names = known
                    decisions[block] = {_named(name, names): choice for name, choice in own[id(entry)].items()}
        boundary: Boundaries = tuple(map(Boundary, sharding.boundaries))
        mesh = rebuilt.mesh.axes
        found.append(pricer.decided(plan.micro_batches.size, mesh, boundary, decisions))
    return found


def _named(name: str, names: Mapping[str, str]) -> str:
    """What a variable of an entry's first block is called in another block."""
    return f"op:{names[name[3:]]}" if name.startswith("op:") else names[name]


def alternative_configuration(other: Alternative, blocks: int) -> Configuration:
    """The configuration of an alternative of a plan of so many blocks, as far as the plan says it."""
    count = len(other.starts)
    ends = (*other.starts[1:], blocks)
    ranks = other.ranks or (1,) * count
    repeats = [recomputed_modules(said) for said in other.repeats] or [()] * count
    stages = tuple(
        StageChoice(
            other.starts[i], ends[i], other.replicas[i], i in other.recompute, ranks[i],
            context=other.context, expert=other.expert, repeats=repeats[i],
        )
        for i in range(count)
    )  # fmt: skip
    return Configuration(stages, other.copies, other.micro_batch, other.micro_batches, other.schedule, other.zero)
