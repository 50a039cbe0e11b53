"""Parameter servers on the group's own machines: gradients are pushed, updated weights are pulled.

With equal shards each machine moves 2(n-1)/n M each direction, exactly as in a ring all-reduce; whatever such servers
gain must come from the transport (`efficiency`), from start-up times, or from sparse gradients. Whole variables on one
server each (`greedy`, `round-robin`) leave the fullest server with (n-1) times what it holds, each direction.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.sync import SCHEMES
from planner.sync._defaults import Defaults, positive
from planner.sync._servers import (
    UPDATED_ON_SERVERS,
    Sending,
    ServerPlacement,
    Transport,
    draft_servers,
    fullest,
    whole_or_cut,
)
from planner.sync.fabric import HOST_SUM_BYTE_PER_S, Fabric
from planner.sync.types import Draft, Facts, MemoryFactors, Step


@dataclass(frozen=True, slots=True)
class ColocatedServers(Defaults):
    """A server on every machine.

    Attributes:
        placement: how variables are laid on the servers.
        partition_bytes: pushed and pulled at the same time in pieces of this size.
        efficiency: what the transport reaches of the network's achievable bandwidth.
        sum_byte_per_s: rate at which a machine sums what it receives.
    """

    placement: ServerPlacement = ServerPlacement.EVEN
    partition_bytes: float = 4e6
    efficiency: float = 1.0
    sum_byte_per_s: float = HOST_SUM_BYTE_PER_S

    key = "ps-colocated"
    recipe = UPDATED_ON_SERVERS
    facts = Facts(
        decides="a server for each variable, or equal shards",
        time="2(n-1)/n M/B with equal shards; (n-1) times the fullest server's bytes with whole variables",
        traffic="2(n-1)/n M with equal shards",
        memory="weights and gradients; optimizer state on the servers",
        source="Li et al., OSDI 2014",
    )

    def memory(self, fabric: Fabric, step: Step) -> MemoryFactors:
        """Weights and gradients on every rank, the optimizer state on the hosts."""
        return MemoryFactors(1.0, 1.0, 0.0, fullest(self._sendings(fabric, step), step))

    def draft(self, fabric: Fabric, step: Step) -> Draft:
        """One message a variable, sparse ones with the touched rows alone."""
        positive(self, "efficiency", "sum_byte_per_s", "partition_bytes")
        transport = Transport(
            "ps",
            partition_bytes=self.partition_bytes,
            efficiency=self.efficiency,
            sum_byte_per_s=self.sum_byte_per_s,
        )
        return draft_servers(fabric, self._sendings(fabric, step), transport)

    def _sendings(self, fabric: Fabric, step: Step) -> tuple[Sending, ...]:
        return whole_or_cut(fabric, step, self.recipe, 0, len(fabric.machines), self.placement)


SCHEMES.register("ps-colocated", ColocatedServers())
