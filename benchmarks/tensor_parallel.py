"""Megatron-LM's tensor parallelism as it was before sequence parallelism: the costs of a chain of blocks shared so."""

from __future__ import annotations

from benchmarks.published import NOT_SPLIT
from planner.costs import optimizer_state_bytes, precision
from planner.graph import Chain, Graph
from planner.hardware import Cluster
from planner.operators import needs_gradient
from planner.sharding.inner import InnerOptions, NodePrices, inner_costs
from planner.sharding.mesh import mesh_on
from planner.sharding.resting import Boundary, StateBytes
from planner.sharding.sharded import sharded_costs
from planner.space import BlockCosts, Job
from planner.space.sharded import Training, sharded_block_costs


def megatron_costs(
    chain: Chain, graph: Graph, prices: NodePrices, cluster: Cluster, what: Job, ranks: int
) -> BlockCosts:
    """The chain on one axis of ranks: whole tensors between blocks, whole norms and sums, otherwise fastest.

    Args:
        chain: blocks of a GPT.
        graph: the GPT at its micro-batch.
        prices: what its operators cost.
        cluster: where the ranks are.
        what: number formats, optimizer, global batch.
        ranks: that share every operator; their costs have number 1.
    """
    chosen, differentiable = precision(what.precision), frozenset(needs_gradient(graph))
    state = optimizer_state_bytes(what.optimizer, chosen)
    inner = inner_costs(
        chain,
        graph,
        prices,
        mesh_on(cluster, {"tensor": ranks}),
        options=InnerOptions(
            boundaries=(Boundary.REPLICATED,),
            item_bytes=chosen.compute.bits / 8,
            state=StateBytes(chosen.weight_bytes, chosen.gradient_bytes, state),
            micro_batches=max(1, what.global_batch // prices.micro_batch),
            forbidden=NOT_SPLIT,
        ),
    )
    # All weights are cut, that of the embedding too, though looking words up in a whole table would be faster.
    fastest = min(sharded_costs(inner, differentiable), key=lambda c: (c.parameter_elements.sum(), c.totals))
    return sharded_block_costs(inner, fastest, Training(cluster.devices[0], chosen, what.optimizer), differentiable, 1)
