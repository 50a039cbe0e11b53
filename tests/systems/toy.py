"""Systems asked about numbers instead of a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from planner.hardware import Cluster
from planner.space import BlockCosts, Job
from planner.systems import System, SystemRow, SystemSetting, decide, row_of


def setting(costs: BlockCosts, machine: Cluster, batch: int, **job: Any) -> SystemSetting:
    """One micro-batch size; fp32 and plain descent, so that an element has 4 B of weight and 4 B of gradient."""
    graph = SimpleNamespace(name="toy", nodes=(), batch=costs.micro_batch)
    blocks = (None,) * len(costs.parameter_elements)
    chain = SimpleNamespace(graph=graph, blocks=blocks)
    prices: Any = SimpleNamespace(costs=lambda _: costs, chain=chain, stage_shardings=lambda _: {})
    chosen = {"precision": "fp32", "optimizer": "sgd", "micro_batches": (costs.micro_batch,), **job}
    return SystemSetting(prices, machine, Job(global_batch=batch, **chosen))


def run_system(system: System, where: SystemSetting) -> SystemRow:
    """The row of what a system decides."""
    return row_of(where, system, decide(where, system))
