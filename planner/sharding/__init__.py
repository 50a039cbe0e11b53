"""Layouts of tensors on a device mesh, changes of layout, and the legal splits of every operator."""

from planner.sharding.choices import Means, Options
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
from planner.sharding.reshard import Move, ReshardTable, Step, reshard, reshard_table
from planner.sharding.strategies import Exchange, Reason, Strategy, exchange_bytes, exchange_s, strategies

__all__ = [
    "PARTIAL",
    "REPLICATED",
    "Axis",
    "Exchange",
    "Means",
    "Mesh",
    "Move",
    "Options",
    "Part",
    "Reason",
    "ReshardTable",
    "Step",
    "Strategy",
    "TensorLayout",
    "exchange_bytes",
    "exchange_s",
    "factorisations",
    "ideal_mesh",
    "layout_text",
    "layouts",
    "mesh_on",
    "padding",
    "parse_layout",
    "refusal",
    "reshard",
    "reshard_table",
    "shard_elements",
    "shard_shape",
    "strategies",
]
