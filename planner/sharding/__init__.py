"""Layouts of tensors on a device mesh, changes of layout, and the legal splits of every operator."""

from planner.sharding.choices import Options, splits
from planner.sharding.formulate import formulate
from planner.sharding.inner import (
    InnerCache,
    InnerCosts,
    InnerOptions,
    NodePrices,
    inner_costs,
    inner_setting,
    priced_once,
)
from planner.sharding.inner_points import InnerPoint
from planner.sharding.judge import CollectiveUse, Verdict, collective_uses, evaluate
from planner.sharding.layout import (
    PARTIAL,
    REPLICATED,
    Part,
    TensorLayout,
    layout_text,
    layouts,
    parse_layout,
    refusal,
    shard_elements,
    shard_shape,
)
from planner.sharding.limits import attention_heads, unmatched
from planner.sharding.mesh import Axis, AxisRole, Mesh, axes_text, ideal_mesh, mesh_on, roles_of
from planner.sharding.problem import GraphFacts, Setting, ShardingProblem
from planner.sharding.reshard import Mixture, ReshardStep, reshard, reshard_table
from planner.sharding.resting import Boundaries, Boundary, StateBytes, TensorChoice, WeightChoice, canonical_layout
from planner.sharding.sharded import StageSharding, sharded_costs
from planner.sharding.strategies import Reason, Strategy, exchange_bytes, exchange_s, strategies

__all__ = [
    "PARTIAL",
    "REPLICATED",
    "Axis",
    "AxisRole",
    "Boundaries",
    "Boundary",
    "CollectiveUse",
    "GraphFacts",
    "InnerCache",
    "InnerCosts",
    "InnerOptions",
    "InnerPoint",
    "Mesh",
    "Mixture",
    "NodePrices",
    "Options",
    "Part",
    "Reason",
    "ReshardStep",
    "Setting",
    "ShardingProblem",
    "StageSharding",
    "StateBytes",
    "Strategy",
    "TensorChoice",
    "TensorLayout",
    "Verdict",
    "WeightChoice",
    "attention_heads",
    "axes_text",
    "canonical_layout",
    "collective_uses",
    "evaluate",
    "exchange_bytes",
    "exchange_s",
    "formulate",
    "ideal_mesh",
    "inner_costs",
    "inner_setting",
    "layout_text",
    "layouts",
    "mesh_on",
    "parse_layout",
    "priced_once",
    "refusal",
    "reshard",
    "reshard_table",
    "roles_of",
    "shard_elements",
    "shard_shape",
    "sharded_costs",
    "splits",
    "strategies",
    "unmatched",
]
