"""The plan type: everything that a backend, a person or a later comparison needs to know; what it needs of a backend.

`Plan` and the records that it is made of are the file's schema: field names are the keys of the JSON. Optional fields
of parameters, notes and provenance are left out of the file when empty. Indices count from 0; a range `[a, b]` stands
for a, a + 1, ..., b - 1; times are seconds, sizes bytes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Literal, TypeVar

from planner.costs.report import Coverage
from planner.errors import PlanError
from planner.graph import Note
from planner.plans import records
from planner.plans.figures import Alternative, FreeChoice, Headline, Predictions
from planner.plans.model import Block, BlockParameter, BlockRun, ModelSection, expand, turned_copies
from planner.plans.orders import RankOrder
from planner.plans.shardings import (
    Holding,
    OperatorSplit,
    ShardedBlock,
    Sharding,
    TensorPlace,
    correspondence,
    dealt,
    with_parameters,
)
from planner.schedules import Action, ActionKind
from planner.space.configuration import Configuration
from planner.space.types import Job
from planner.sums import float_sum


class Requirement(StrEnum):
    """What a backend must be able to do to run a plan; derived from the rest of it."""

    PIPELINE = "pipeline"
    """More than one stage."""
    REPLICATED_STAGE = "replicated_stage"
    """A stage runs on several ranks, which take micro-batches in turn and sum their gradients."""
    UNEQUAL_REPLICATION = "unequal_replication"
    """Stages differ in the number of replicas."""
    SKIP_EDGES = "skip_edges"
    """A tensor is read by a stage that does not follow the one that makes it."""
    MULTI_TENSOR_BOUNDARY = "multi_tensor_boundary"
    """More than one tensor goes from one stage to another."""
    DUPLICATED_NODES = "duplicated_nodes"
    """Parameter-free operators are computed in several stages."""
    TIED_PARAMETERS = "tied_parameters"
    """A parameter is held by several stages and its gradient summed over them."""
    SEPARATED_WEIGHTS = "separated_weights"
    """Weights of several modules that the file stores once are trained each by itself."""
    SEPARATE_COPIES = "separate_copies"
    """A parameter is held by several stages, each of which updates its own copy: the tie is given up."""
    MID_MODULE_CUT = "mid_module_cut"
    """A numbered module (a layer) is divided between stages."""
    RECOMPUTE = "recompute"
    """A stage drops its activations and computes them again."""
    ZERO1 = "zero1"
    """The optimizer state of a stage is sharded over its replicas."""
    ZERO2 = "zero2"
    """Its gradients, too: they are scattered after every backward pass."""
    ZERO3 = "zero3"
    """Its weights, too (FSDP): they are gathered block by block before every pass."""
    SHARDED_GROUPS = "sharded_groups"
    """What ZeRO shards is so over a part of a stage's replicas, and each shard is held by several of them (HSDP)."""
    ASYNC_WEIGHTS = "async_weights"
    """Weights are updated without draining the pipeline."""
    MULTI_STAGE_RANK = "multi_stage_rank"
    """A rank runs several stages."""
    SPLIT_BACKWARD = "split_backward"
    """Input and weight gradients are computed in separate actions."""
    IDLE_RANKS = "idle_ranks"
    """Some ranks of the world take no part."""
    TENSOR_PARALLEL = "tensor_parallel"
    """The ranks of a group share every operator of a replica."""
    SEQUENCE_PARALLEL = "sequence_parallel"
    """Tensors between the blocks of a stage are cut along the sequence."""
    EXPERT_PARALLEL = "expert_parallel"
    """Ranks of a group hold different experts of a mixture."""
    VOCABULARY_PARALLEL = "vocabulary_parallel"
    """Ranks of a group hold different rows of an embedding table; their results are partial sums."""
    RING_ATTENTION = "ring_attention"
    """Keys and values of an attention go around the ranks of a group."""
    HALO_EXCHANGE = "halo_exchange"
    """Neighbours supply the borders of a window (a convolution cut in space)."""
    SHARED_STATISTICS = "shared_statistics"
    """A softmax or norm is cut along the dimension that it normalises; statistics are reduced."""
    INTERLEAVED_SPLIT = "interleaved_split"
    """Each of several equal blocks of a dimension is cut by itself (a fused projection)."""
    PADDED_SPLIT = "padded_split"
    """A tensor is cut into uneven pieces, padded to the largest."""
    ORDER_ROUTING = "order_routing"
    """Micro-batches run on the replicas whose orders have them, not in turn (pipelines in two directions)."""
    SUB_SEQUENCES = "sub_sequences"
    """A micro-batch runs in parts of its sequence, each of which reads the keys and values of those before it."""
    LANES = "lanes"
    """A rank does two things side by side."""
    STREAMING = "streaming"
    """A stage passes its result on while it works."""
    PAIRED_ACTIONS = "paired_actions"
    """Two actions of a rank run together as one (`+`)."""
    EXPLICIT_TRANSFERS = "explicit_transfers"
    """Orders say when tensors between stages are sent and received."""
    EXPLICIT_RECOMPUTE = "explicit_recompute"
    """Orders say when a forward is repeated."""
    EARLY_EXCHANGE = "early_exchange"
    """The exchange of gradients begins before the action that waits for it."""
    EVICTIONS = "evictions"
    """Activations are moved to another rank or the host, and come back."""
    IN_FLIGHT_LIMITS = "in_flight_limits"
    """A forward waits until the rank keeps fewer micro-batches than a limit."""
    PARTIAL_UPDATES = "partial_updates"
    """An update has the gradients of fewer micro-batches than an iteration."""
    BOUNDED_STALENESS = "bounded_staleness"
    """Copies of the pipeline run ahead of each other by so many waves."""
    CORRECTIONS = "corrections"
    """Learning rates, momentum or weights are corrected for delay or for another batch."""
    MIXED_RECOMPUTE = "mixed_recompute"
    """Stages differ in what they compute again or keep in the host's memory."""
    MODULE_RECOMPUTE = "module_recompute"
    """A stage repeats the forward of some of its modules alone."""
    LAYER_RECOMPUTE = "layer_recompute"
    """A stage repeats the forward of the first of its layers, and keeps the others."""
    OFFLOAD = "offload"
    """Activations lie in the host's memory from forward to backward."""
    EXCHANGE_SCHEME = "exchange_scheme"
    """Gradients travel tensor by tensor, by several methods or over servers."""
    MIXED_SHARDINGS = "mixed_shardings"
    """Stages differ in how the ranks of a group share the work, or in how many they are."""
    CONTEXT_PARALLEL = "context_parallel"
    """Ranks of a group take parts of the sequence through the whole stage."""
    BATCH_PARALLEL = "batch_parallel"
    """Ranks of a group take samples of the micro-batch."""
    FREE_LAYOUTS = "free_layouts"
    """Tensors between blocks lie each in a layout of its own."""
    GATHERED_WEIGHTS = "gathered_weights"
    """Weights lie cut on the ranks of a group and are gathered for a pass."""


OF_MINOR_1 = frozenset(list(Requirement)[list(Requirement).index(Requirement.ORDER_ROUTING) :])
"""Requirements that files of minor version 0 do not list."""
MINORS: Mapping[Requirement, int] = {
    **dict.fromkeys(OF_MINOR_1, 1),
    Requirement.OFFLOAD: 2,
    Requirement.SHARDED_GROUPS: 2,
    Requirement.LAYER_RECOMPUTE: 3,
    Requirement.MODULE_RECOMPUTE: 5,
    Requirement.SPLIT_BACKWARD: 6,
    Requirement.SEPARATED_WEIGHTS: 7,
}
"""The minor version since which files say what these requirements are about; readers of before refuse their keys.

Files of before 5 do not list the operators that stages repeat, those of before 6 not what stays between the halves of a
backward, those of before 7 not which operators of the model file read a weight that it stores as one with others.
"""


EXPOSED_MINOR = 8
"""The minor version since which stages say what they expose, blocks what they compute, and a bubble is of pipelines
alone."""


def minor_of(needed: Collection[Requirement]) -> int:
    """The least minor version of the schema that can say these requirements."""
    return max((MINORS.get(requirement, 0) for requirement in needed), default=0)


T = TypeVar("T")

SCHEMA_VERSION: Literal[2] = 2
FORMAT: Literal["shardplan-plan"] = "shardplan-plan"


@dataclass(frozen=True)
class Plan:
    """A complete plan.

    Attributes:
        format: always "shardplan-plan".
        version: of this schema.
        digest: sha256 (hex) over the plan without `digest` and `provenance`, as JSON with sorted keys, no spaces,
            UTF-8.
        provenance: how it came to be.
        model: the model.
        hardware: the cluster.
        options: what was asked for.
        configuration: what was decided; what the other parts say of it follows from this. `sharding` of a stage counts
            the plan's `shardings` from 1.
        world_size: ranks, numbered 0 to world_size - 1 along the cluster's devices; some may be idle.
        copies: copies of the whole pipeline, laid on equal slices of neighbouring ranks.
        micro_batches: how the global batch is divided.
        requires: what a backend must be able to do.
        stages: in order.
        routing: "round_robin": micro-batch m runs on replica `m % len(replicas)` of every stage; "by_order": on the one
            whose orders have it.
        boundaries: tensors that go between stages, by stage and in order of production.
        shared_parameters: parameters that several stages hold.
        duplicated: operators that several stages compute for themselves.
        schedule: who does what in which order.
        predictions: what it is expected to do.
        alternatives: what else was priced.
        coverage: how the operators of the model file were treated.
        notes: what was assumed while reading the model.
        not_modelled: what the predictions leave out.
        blocks: the model's operators and parameters, cut into blocks; stages refer to them by number.
        shardings: how groups of several ranks share the work; stages refer to them by name; left out where there are
            none.
        system: the published system whose rules chose the plan; left out where it was the own search.
        exchange: how gradients travel, tensor by tensor; left out where a stage's replicas reduce them all alike.
        runs_on: training frameworks, of those that the plan is for, that take it as it is; left out where it is for
            none.
        free_choice: what no framework needs to take, beside it; left out where the plan is for none.
        headline: the figures that people compare training runs by; left out in files of before.
        minor: minor version of this schema; left out at 0. From 1 on `requires` is complete: files of 0 say nothing of
            order_routing and what follows it in the list. From 2 on stages say what they offload,
            from 8 on in what parts of their times devices communicate alone.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}

    format: Literal["shardplan-plan"]
    version: Literal[2]
    digest: str
    provenance: records.Provenance
    model: ModelSection
    hardware: records.HardwareSection
    options: Job
    configuration: Configuration
    world_size: int
    copies: int
    micro_batches: records.MicroBatches
    requires: tuple[Requirement, ...]
    stages: tuple[records.Stage, ...]
    routing: Literal["round_robin", "by_order"]
    boundaries: tuple[records.Boundary, ...]
    shared_parameters: tuple[records.SharedParameter, ...]
    duplicated: tuple[records.Duplicated, ...]
    schedule: records.ScheduleSection
    predictions: Predictions
    alternatives: tuple[Alternative, ...]
    coverage: Coverage
    notes: tuple[Note, ...]
    not_modelled: tuple[str, ...]
    blocks: tuple[BlockRun, ...]
    shardings: tuple[Sharding, ...] = ()
    system: records.SystemSection | None = None
    exchange: records.ExchangeSection | None = None
    runs_on: tuple[str, ...] = ()
    free_choice: FreeChoice | None = None
    headline: Headline | None = None
    minor: int = 0

    def compared_s(self, other: Alternative) -> tuple[float, float | None]:
        """Iteration times of this plan and of an alternative: simulated where both were, else by closed form."""
        plan_s = self.predictions.simulated_iteration_s
        if plan_s is None or other.simulated_iteration_s is None:
            return self.predictions.iteration_s, other.iteration_s
        return plan_s, other.simulated_iteration_s

    @functools.cached_property
    def block_table(self) -> tuple[Block, ...]:
        """All blocks, repeated ones written out."""
        return expand(self.blocks)

    @functools.cached_property
    def block_names(self) -> tuple[str, ...]:
        """Names of all blocks."""
        return tuple(block.name for block in self.block_table)

    @functools.cached_property
    def _orders_of(self) -> Mapping[int, tuple[RankOrder, ...]]:
        by_rank: dict[int, list[RankOrder]] = {}
        for order in sorted(self.schedule.orders, key=lambda order: order.lane):
            for rank in order.ranks:
                by_rank.setdefault(rank, []).append(order)
        return {rank: tuple(orders) for rank, orders in by_rank.items()}

    @functools.cached_property
    def _routes(self) -> Mapping[tuple[int, int], int]:
        """Replica by stage and micro-batch, as the orders have it."""
        replicas = {(s.index, rank): j for s in self.stages for j, group in enumerate(s.replicas) for rank in group}
        return {
            (action.stage, action.micro_batch): replicas[action.stage, rank]
            for rank in self._stages_of
            for action in self.actions(rank)
            if action.kind is ActionKind.FORWARD and (action.stage, rank) in replicas
        }

    @functools.cached_property
    def _stages_of(self) -> Mapping[int, tuple[int, ...]]:
        by_rank: dict[int, list[int]] = {}
        for stage in self.stages:
            for rank in stage.ranks:
                by_rank.setdefault(rank, []).append(stage.index)
        return {rank: tuple(stages) for rank, stages in by_rank.items()}

    def actions(self, rank: int) -> tuple[Action, ...]:
        """What a rank does in one iteration, in order; () for a rank without an order.

        Of a schedule that never drains these are the actions of `schedule.iterations` iterations; lanes that run side
        by side follow each other.

        Raises:
            PlanError: the line of actions cannot be read.
        """
        return tuple(action for lane in self.lanes(rank) for action in lane)

    def lanes(self, rank: int, times: int = 1) -> tuple[tuple[Action, ...], ...]:
        """The lists of actions that a rank runs side by side, mostly one.

        Args:
            rank: the rank.
            times: repetitions of the part that never drains.

        Raises:
            PlanError: a line of actions cannot be read.
        """
        return tuple(order.expand(rank, times) for order in self.orders(rank))

    def orders(self, rank: int) -> tuple[RankOrder, ...]:
        """The lines of actions of a rank, lane by lane; () for a rank without."""
        return self._orders_of.get(rank, ())

    @property
    def idle_ranks(self) -> tuple[int, ...]:
        """Ranks that no stage runs on."""
        return tuple(rank for rank in range(self.world_size) if rank not in self._stages_of)

    def stage_of(self, rank: int) -> int:
        """The (first) stage that a rank runs; -1 for an idle rank."""
        return self.stages_of(rank)[0] if self.stages_of(rank) else -1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """All stages that a rank runs."""
        return self._stages_of.get(rank, ())

    def route(self, stage: int, micro_batch: int) -> int:
        """The replica of a stage that runs a micro-batch.

        Raises:
            PlanError: the plan is routed by its orders, and none runs the micro-batch there.
        """
        if self.routing == "round_robin":
            return micro_batch % len(self.stages[stage].replicas)
        if (stage, micro_batch) not in self._routes:
            raise PlanError(f"no rank runs micro-batch {micro_batch} at stage {stage}", hint="plan again")
        return self._routes[stage, micro_batch]

    def ranks_for(self, stage: int, micro_batch: int) -> tuple[int, ...]:
        """The ranks that run a micro-batch at a stage: one replica's group."""
        return self.stages[stage].replicas[self.route(stage, micro_batch)]

    def stage_blocks(self, stage: int) -> tuple[Block, ...]:
        """The blocks of a stage."""
        start, stop = self.stages[stage].blocks
        return self.block_table[start:stop]

    def stage_nodes(self, stage: int) -> tuple[str, ...]:
        """Operators of a stage by first output name: its duplicated ones first, in an order that can be executed."""
        side = [node for entry in self.duplicated if stage in entry.stages for node in entry.nodes]
        return (*side, *(node for block in self.stage_blocks(stage) for node in block.nodes))

    def stage_parameters(self, stage: int) -> tuple[BlockParameter, ...]:
        """Weights that a stage reads, each once, in order of first use."""
        by_name = {p.name: p for block in self.stage_blocks(stage) for p in block.parameters}
        return tuple(by_name.values())

    def sharding_of(self, stage: int) -> Sharding | None:
        """How the ranks of a stage's groups share its work; None for groups of one rank."""
        name = self.stages[stage].sharding
        return next((s for s in self.shardings if s.name == name), None) if name else None

    @functools.cached_property
    def _entries(self) -> Mapping[tuple[str, int], tuple[ShardedBlock, tuple[str, ...]]]:
        """Entry and further names of a block, by the name of the sharding and the block's number."""
        return {
            (sharding.name, block): (entry, names)
            for sharding in self.shardings
            for entry in sharding.blocks
            for block, names in entry.members()
        }

    def sharded_blocks(self, stage: int) -> Iterator[tuple[int, ShardedBlock, Mapping[str, str]]]:
        """Number, sharding entry, and names by the entry's names of each block of a stage.

        None for groups of one rank.

        Raises:
            PlanError: a block has not the form of its entry's first one.
        """
        for block in range(*self.stages[stage].blocks):
            entry, further_names = self._entries.get((self.stages[stage].sharding, block), (None, ()))
            if entry is not None:
                yield block, entry, correspondence(entry, self.block_table, block, further_names)

    @functools.cached_property
    def turned_copies(self) -> Mapping[str, str]:
        """Tied weights that the model file stores as the transpose of the one that they are copies of, and that one."""
        return turned_copies(self.block_table)

    @functools.cached_property
    def _sharded(self) -> tuple[Mapping[tuple[type, str], Any], ...]:
        """By stage, what the entries of its blocks say, by type and the model's name; the first block counts."""
        by_stage = []
        for stage in range(len(self.stages)):
            items: dict[tuple[type, str], Any] = {}
            for _, entry, names in self.sharded_blocks(stage):
                for name, item in entry.renamed(names):
                    items.setdefault((type(item), name), item)
            for copy, owner in self.turned_copies.items():
                if (place := items.get((TensorPlace, copy))) is not None:
                    turned = dataclasses.replace(place, parameters=(owner,), dims=(1, 0))
                    items.setdefault((TensorPlace, owner), dict(with_parameters(turned))[owner])
            by_stage.append(items)
        return tuple(by_stage)

    def _said(self, kind: type[T], name: str, stage: int | None) -> T | None:
        """What the entries of a stage, or of the first that does, say of a name; None where none does."""
        stages = self._sharded if stage is None else self._sharded[stage : stage + 1]
        return next((items[kind, name] for items in stages if (kind, name) in items), None)

    def layout_of(self, tensor: str, stage: int | None = None) -> TensorPlace | None:
        """Layouts of a tensor, weight or parameter of the model on the ranks of a group.

        For a parameter that the model reads transposed these are layouts of the parameter as stored. For one that it
        reads in another form (joined with others, reshaped) they are those of the resulting weight.

        Args:
            tensor: its name in the model.
            stage: the stage that makes or reads it; the first that does where absent.

        Returns:
            None where every rank holds the full tensor: groups of one rank, model inputs and constants.
        """
        return self._said(TensorPlace, tensor, stage)

    def operator_split(self, operator: str, stage: int | None = None) -> OperatorSplit | None:
        """Split of an operator, in the model's names; None where one rank runs all of it.

        Args:
            operator: name of its first output.
            stage: one of the stages that run it; the first where absent.
        """
        return self._said(OperatorSplit, operator, stage)

    def inside_s(self, stage: int) -> tuple[float, float, float]:
        """Seconds of communication inside a stage's group for a micro-batch.

        Returns: (forward and backward, forward alone, the recomputed forward).
        """
        stage_section, forward_s, repeated_s = self.stages[stage], 0.0, 0.0
        for block, entry, _ in self.sharded_blocks(stage):
            seconds = float_sum(c.seconds for c in entry.collectives if c.phase == "forward")
            forward_s += seconds
            repeated_s += seconds if stage_section.recompute and block not in stage_section.kept_blocks else 0.0
        return self.predictions.stages[stage].inside_s, forward_s, repeated_s

    def summed_s(self, stage: int) -> float:
        """Seconds in which a stage's group adds up gradients once an iteration; a part of the update's."""
        entries = (entry for _, entry, _ in self.sharded_blocks(stage))
        return float_sum(c.seconds for entry in entries for c in entry.collectives if c.phase == "step")

    def held(self, weight: str, rank: int) -> range | None:
        """Indices of the experts or table rows of a weight that a rank holds; None where it holds all or has none."""
        for stage in self.stages_of(rank):
            holding, sharding = self._said(Holding, weight, stage), self.sharding_of(stage)
            if holding is not None and sharding is not None:
                group = next(group for group in self.stages[stage].replicas if rank in group)
                return dealt(holding, sharding.axes, group.index(rank))
        return None
