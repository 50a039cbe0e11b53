"""Layouts of tensors on a device mesh, changes of layout, and the legal splits of every operator."""

from planner.sharding.boundary import Boundaries, Boundary, canonical_layout
from planner.sharding.choices import Means, Options
from planner.sharding.formulate import formulate
from planner.sharding.inner import BlockSharding, InnerCache, InnerCosts, InnerOptions, NodePrices, inner_costs
from planner.sharding.inner_points import InnerPoint
from planner.sharding.judge import Communication, Verdict, evaluate
from planner.sharding.layout import (
    PARTIAL,
    REPLICATED,
    Part,
    TensorLayout,
    layout_text,
    layouts,
    padding,
    parse_layout,
    refusal,
    shard_elements,
    shard_shape,
)
from planner.sharding.mesh import Axis, Mesh, factorisations, ideal_mesh, mesh_on
from planner.sharding.problem import Setting, ShardingProblem
from planner.sharding.refusals import refusals_on, split_refusals
from planner.sharding.reshard import Move, ReshardTable, Step, reshard, reshard_table
from planner.sharding.resting import StateBytes, TensorChoice, WeightChoice
from planner.sharding.sharded import ShardedCosts, sharded_costs
from planner.sharding.strategies import Exchange, Reason, Strategy, exchange_bytes, exchange_s, strategies

__all__ = [
    "PARTIAL",
    "REPLICATED",
    "Axis",
    "BlockSharding",
    "Boundaries",
    "Boundary",
    "Communication",
    "Exchange",
    "InnerCache",
    "InnerCosts",
    "InnerOptions",
    "InnerPoint",
    "Means",
    "Mesh",
    "Move",
    "NodePrices",
    "Options",
    "Part",
    "Reason",
    "ReshardTable",
    "Setting",
    "ShardedCosts",
    "ShardingProblem",
    "StateBytes",
    "Step",
    "Strategy",
    "TensorChoice",
    "TensorLayout",
    "Verdict",
    "WeightChoice",
    "canonical_layout",
    "evaluate",
    "exchange_bytes",
    "exchange_s",
    "factorisations",
    "formulate",
    "ideal_mesh",
    "inner_costs",
    "layout_text",
    "layouts",
    "mesh_on",
    "padding",
    "parse_layout",
    "refusal",
    "refusals_on",
    "reshard",
    "reshard_table",
    "shard_elements",
    "shard_shape",
    "sharded_costs",
    "split_refusals",
    "strategies",
]
