"""Parallax: sparse variables through parameter servers, dense ones by all-reduce.

An all-gather of sparse gradients grows with the machines, 2 alpha w (N-1) a machine, while servers move
4 alpha w (N-1)/N when the variables are spread evenly, which cutting them in partitions sees to (Kim et al., EuroSys
2019). How many partitions are best is measured (`planner.exchange.formulas`); here their number is given.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import UsageError
from planner.exchange import SCHEMES
from planner.exchange._defaults import MEGABYTE, Defaults, merge, positive
from planner.exchange.collectives import draft_recipe
from planner.exchange.fabric import Fabric
from planner.exchange.servers import (
    UPDATED_ON_SERVERS,
    Sending,
    Transport,
    draft_servers,
    fullest,
    least_loaded,
    one,
    sent,
)
from planner.exchange.types import Draft, Facts, MemoryFactors, Step


@dataclass(frozen=True, slots=True)
class Parallax(Defaults):
    """A way for each variable, by what its gradient is: dense ones are summed, sparse ones go through servers.

    Attributes:
        partitions: pieces of a sparse variable; 0 for one a machine.
        dense_from: a sparse variable of which this part is touched, or more, travels as a dense one.
        bucket_bytes: dense gradients that travel together.
        partition_bytes: pushed and pulled at the same time in pieces of this size.
        efficiency: what the servers' transport reaches of the network's achievable bandwidth.
    """

    partitions: int = 0
    dense_from: float = 1.0
    bucket_bytes: float = 25 * MEGABYTE
    partition_bytes: float = 4 * MEGABYTE
    efficiency: float = 1.0

    key = "parallax"
    sparse_recipe = UPDATED_ON_SERVERS
    facts = Facts(
        decides="servers for sparse variables, all-reduce for dense ones; partitions of a sparse variable",
        time="all-reduce of the dense bytes, then 2(n-1)/n alpha M/B of the sparse ones",
        traffic="2(n-1)/n M dense, 2(n-1)/n alpha M sparse when evenly placed",
        memory="dense variables and the rows looked up; sparse variables and their state on the servers",
        source="Kim et al., EuroSys 2019",
    )

    def by_servers(self, step: Step) -> tuple[str, ...]:
        """Names of the variables that go through servers."""
        return tuple(v.name for v in step.variables if v.sparse and v.touched < self.dense_from)

    def memory(self, fabric: Fabric, step: Step) -> MemoryFactors:
        """Sparse variables and their optimizer state are on the hosts; a rank holds rows that its machine touches."""
        total = sum(v.pulled_bytes for v in step.variables)
        names = set(self.by_servers(step))
        if total == 0 or not names:
            return MemoryFactors()
        own = [v for v in step.variables if v.name in names]
        dense = 1 - sum(v.pulled_bytes for v in own) / total
        rows = sum(sum(sent(self.sparse_recipe, v.sent)) for v in own)
        return MemoryFactors(dense, dense, dense, fullest(self._pieces(fabric, step, names), step), rows)

    def draft(self, fabric: Fabric, step: Step) -> Draft:
        """Buckets of dense gradients and one message a partition of a sparse one, on the same ports."""
        positive(self, "efficiency", "partition_bytes")
        if self.partitions < 0:
            raise UsageError(f"{self.partitions} partitions", where=self.name, hint="use 0 for one a machine, or more")
        names = set(self.by_servers(step))
        dense = Step(tuple(v for v in step.variables if v.name not in names), step.backward_s)
        transport = Transport("ps", partition_bytes=self.partition_bytes, efficiency=self.efficiency)
        return merge(
            fabric,
            [
                draft_recipe(fabric, dense, self.recipe, self.bucket_bytes),
                draft_servers(fabric, self._pieces(fabric, step, names), transport),
            ],
        )

    def _pieces(self, fabric: Fabric, step: Step, names: set[str]) -> list[Sending]:
        """The partitions of the sparse variables, largest first to the least loaded machine."""
        count = len(fabric.machines)
        pieces = self.partitions or count
        sparse = [v for v in step.arrivals() if v.name in names]
        moved = [sent(self.sparse_recipe, v.sent) for v in sparse]
        sizes = [sum(both) / pieces for both in moved for _ in range(pieces)]
        chosen = least_loaded(sizes, count)
        return [
            Sending((v.name,), push / pieces, pull / pieces, step.ready_s(v), one(fabric, chosen[i * pieces + piece]))
            for i, (v, (push, pull)) in enumerate(zip(sparse, moved, strict=True))
            for piece in range(pieces)
        ]


SCHEMES.register("parallax", Parallax())
