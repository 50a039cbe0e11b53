"""Parallax: sparse variables through parameter servers, dense ones by all-reduce.

An all-gather of sparse gradients grows with the machines, 2 alpha w (N-1) a machine, while servers move
4 alpha w (N-1)/N when the variables are spread evenly, which cutting them in partitions sees to (Kim et al., EuroSys
2019). How many partitions are best is measured (`planner.exchange.formulas`); here their number is given.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.exchange import SCHEMES
from planner.exchange.collectives import plan_recipe
from planner.exchange.fabric import Fabric
from planner.exchange.scheme import MEGABYTE, MessagePlan, Scheme, merge
from planner.exchange.servers import (
    UPDATED_ON_SERVERS,
    PushPull,
    Transport,
    even,
    fullest,
    least_loaded,
    plan_pushes,
    push_pull_bytes,
)
from planner.exchange.types import MemoryFactors, Step


@dataclass(frozen=True, slots=True)
class Parallax(Scheme):
    """All-reduce for variables with dense gradients, servers for those with sparse ones.

    Attributes:
        partitions: pieces of a sparse variable; 0 for one a machine.
        dense_from: fraction of touched rows from which a sparse variable travels as a dense one.
        bucket_bytes: dense gradients that travel together.
        partition_bytes: size of the pieces that are pushed and pulled at the same time.
        efficiency: the fraction of the network's achievable bandwidth that the servers' transport reaches.
    """

    partitions: int = 0
    dense_from: float = 1.0
    bucket_bytes: float = 25 * MEGABYTE
    partition_bytes: float = 4 * MEGABYTE
    efficiency: float = 1.0

    key = "parallax"
    sparse_recipe = UPDATED_ON_SERVERS

    def by_servers(self, step: Step) -> tuple[str, ...]:
        """Names of the variables that go through servers."""
        return tuple(v.name for v in step.variables if v.sparse and v.touched < self.dense_from)

    def memory(self, fabric: Fabric, step: Step) -> MemoryFactors:
        """Sparse variables and their state are on the servers; a rank holds the rows that its machine touches."""
        total = sum(v.pulled_bytes for v in step.variables)
        names = set(self.by_servers(step))
        if total == 0 or not names:
            return MemoryFactors()
        sparse = [v for v in step.variables if v.name in names]
        dense_part = 1 - sum(v.pulled_bytes for v in sparse) / total
        row_bytes = sum(sum(push_pull_bytes(self.sparse_recipe, v.sent)) for v in sparse)
        fullest_part = fullest(self._pieces(fabric, step, names), step)
        return MemoryFactors(dense_part, dense_part, dense_part, fullest_part, row_bytes)

    def plan_messages(self, fabric: Fabric, step: Step) -> MessagePlan:
        """Buckets of dense gradients, and one message for each partition of a sparse one, on the same ports."""
        names = set(self.by_servers(step))
        dense = Step(tuple(v for v in step.variables if v.name not in names), step.backward_s)
        transport = Transport("ps", partition_bytes=self.partition_bytes, efficiency=self.efficiency)
        return merge(
            fabric,
            [
                plan_recipe(fabric, dense, self.recipe, self.bucket_bytes),
                plan_pushes(fabric, self._pieces(fabric, step, names), transport),
            ],
        )

    def _pieces(self, fabric: Fabric, step: Step, names: set[str]) -> list[PushPull]:
        """The partitions of the sparse variables, each on one machine: largest first, to the least loaded."""
        count = len(fabric.machines)
        pieces = self.partitions or count
        sparse = [v for v in step.arrivals() if v.name in names]
        moved = [push_pull_bytes(self.sparse_recipe, v.sent) for v in sparse]
        sizes = [sum(both) / pieces for both in moved for _ in range(pieces)]
        machine_of = least_loaded(sizes, count)
        return [
            PushPull(
                (v.name,),
                push / pieces,
                pull / pieces,
                step.ready_s(v),
                even(fabric, machine_of[i * pieces + piece], 1),
            )
            for i, (v, (push, pull)) in enumerate(zip(sparse, moved, strict=True))
            for piece in range(pieces)
        ]


SCHEMES.register("parallax", Parallax())
