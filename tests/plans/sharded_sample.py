"""Plans with groups of several ranks, decided by hand."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

from planner import Job, load_cluster, load_graph
from planner.costs import precision, profile
from planner.graph import Graph, build_chain
from planner.hardware import Cluster
from planner.operators import rebatch
from planner.plans import Plan, Provenance, assemble, with_simulation
from planner.sharding import (
    InnerPoint,
    Setting,
    StageSharding,
    StateBytes,
    inner_costs,
    mesh_on,
    sharded_costs,
)
from planner.simulate import simulate
from planner.space import BlockCosts, Certificate, Configuration, StageChoice, evaluate
from planner.space.blocks import update_s_per_element
from planner.space.jobs import mesh_names
from planner.space.sharded import sharded_block_costs
from tests.plans.sample import priced


@dataclass(frozen=True)
class Sample:
    """A plan, what it is for, and the shardings that it was written from."""

    plan: Plan
    graph: Graph
    cluster: Cluster
    entry: StageSharding

    def point(self, block: int) -> InnerPoint:
        """How a block is sharded, in its own names."""
        return self.entry.inner.blocks[block].named(self.entry.costs.points[block])


def leanest(found: tuple[BlockCosts, ...]) -> BlockCosts:
    """The sharding under which a rank holds fewest parameters."""
    return min(found, key=lambda costs: float(costs.parameter_elements.sum()))


def leanest_by_sequence(found: tuple[BlockCosts, ...]) -> BlockCosts:
    """The same of those that cut the sequence between blocks on every axis."""
    return leanest(tuple(costs for costs in found if set(costs.label.split(", ")[-1].split("/")) == {"sequence"}))


def sharded_plan(
    model: str,
    mesh: tuple[int, ...],
    *,
    hardware: str = "dgx-a100",
    nodes: int = 2,
    stages: int = 2,
    copies: int = 1,
    micro_batch: int = 1,
    pick: Callable[[tuple[BlockCosts, ...]], BlockCosts] = leanest,
    recompute: bool = False,
    dims: dict[str, int] | None = None,
) -> Sample:
    """Equal stages of groups on one mesh."""
    graph, cluster = load_graph(model, dims=dims), load_cluster(hardware, nodes=nodes, stack="eager")
    graph = graph if graph.batch == micro_batch else rebatch(graph, micro_batch)
    job = Job(global_batch=4 * micro_batch * copies, precision="bf16", headroom=0.0)
    numbers, state = precision(job.precision), StateBytes(2, 2, 12)
    chain, prices = build_chain(graph), profile(graph, cluster.devices[0])
    place = mesh_on(cluster, dict(zip(mesh_names(mesh), mesh, strict=True)))
    inner = inner_costs(chain, prices, Setting(graph, place, state=state, micro_batches=4 * copies))
    found = sharded_costs(inner)
    element_s = update_s_per_element(cluster.devices[0], numbers, job.optimizer, 0.0)
    costs = pick(tuple(sharded_block_costs(inner, each, element_s, k) for k, each in enumerate(found, 1)))
    entry = StageSharding(inner, found[costs.sharding - 1])
    count = len(chain.blocks)
    cuts = [i * count // stages for i in range(stages + 1)]
    choices = tuple(StageChoice(a, b, 1, recompute, costs.ranks, costs.sharding) for a, b in itertools.pairwise(cuts))
    decision = Configuration(choices, copies, micro_batch, 4, "1f1b")
    verdict = evaluate({costs.sharding: costs}, cluster, job, decision)
    plan = assemble(
        priced(graph, chain, prices, {costs.sharding: entry}),
        cluster,
        job,
        decision,
        verdict,
        verdict.iteration_s,
        certificate=Certificate(verdict.iteration_s, 0.0, "one decision", False),
        provenance=Provenance("shardplan", version("shardplan"), (), model, hardware),
    )
    plan = with_simulation(plan, simulate(plan).step_s)
    return Sample(plan, graph, cluster, entry)


@functools.cache
def language() -> Sample:
    """GPT-2 in two stages of eight ranks."""
    return sharded_plan("gpt2", (8,), pick=leanest_by_sequence)


@functools.cache
def mixture() -> Sample:
    """Mixtral in one stage of sixteen ranks, eight of a node by two nodes."""
    return sharded_plan("mixtral-8x7b", (2, 8), stages=1, hardware="dgx-h100", pick=leanest_by_sequence)
