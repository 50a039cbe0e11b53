"""Layouts of tensors on a device mesh, changes of layout, and the legal splits of every operator."""

from planner.sharding.annotations import load_annotations
from planner.sharding.choices import Means, Options
from planner.sharding.describe import CollectiveUse, OperatorLayout, RestingLayout, ShardingText, describe
from planner.sharding.embedding_tables import TableCut, TablePlacement, embedding_tables, place_tables
from planner.sharding.forbidden import split_refusals, unmatched
from planner.sharding.formulate import formulate
from planner.sharding.inner import (
    BlockSharding,
    InnerCache,
    InnerCosts,
    InnerOptions,
    NodePrices,
    inner_costs,
    inner_setting,
    priced_once,
)
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
from planner.sharding.mixtures import ExpertPlan, Mixture, expert_plans
from planner.sharding.problem import Facts, Setting, ShardingProblem
from planner.sharding.reshard import ReshardTable, Step, reshard, reshard_table
from planner.sharding.resting import Boundaries, Boundary, StateBytes, TensorChoice, WeightChoice, canonical_layout
from planner.sharding.sharded import ShardedCosts, StageSharding, sharded_costs, whole_costs
from planner.sharding.strategies import Exchange, Reason, Strategy, exchange_bytes, exchange_s, strategies

__all__ = [
    "PARTIAL",
    "REPLICATED",
    "Axis",
    "BlockSharding",
    "Boundaries",
    "Boundary",
    "CollectiveUse",
    "Communication",
    "Exchange",
    "ExpertPlan",
    "Facts",
    "InnerCache",
    "InnerCosts",
    "InnerOptions",
    "InnerPoint",
    "Means",
    "Mesh",
    "Mixture",
    "NodePrices",
    "OperatorLayout",
    "Options",
    "Part",
    "Reason",
    "ReshardTable",
    "RestingLayout",
    "Setting",
    "ShardedCosts",
    "ShardingProblem",
    "ShardingText",
    "StageSharding",
    "StateBytes",
    "Step",
    "Strategy",
    "TableCut",
    "TablePlacement",
    "TensorChoice",
    "TensorLayout",
    "Verdict",
    "WeightChoice",
    "canonical_layout",
    "describe",
    "embedding_tables",
    "evaluate",
    "exchange_bytes",
    "exchange_s",
    "expert_plans",
    "factorisations",
    "formulate",
    "ideal_mesh",
    "inner_costs",
    "inner_setting",
    "layout_text",
    "layouts",
    "load_annotations",
    "mesh_on",
    "padding",
    "parse_layout",
    "place_tables",
    "priced_once",
    "refusal",
    "reshard",
    "reshard_table",
    "shard_elements",
    "shard_shape",
    "sharded_costs",
    "split_refusals",
    "strategies",
    "unmatched",
    "whole_costs",
]
