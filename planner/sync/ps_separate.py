"""Parameter servers on machines of their own: max(M/B, nM/(kB)) for k of them, pushes and pulls at the same time.

Half the bytes of a ring for the n workers, but each of the k servers moves n/k M each direction (Jiang et al., BytePS,
OSDI 2020, section 2), so fewer servers than workers are the bottleneck.
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
from planner.sync.fabric import Fabric
from planner.sync.types import Draft, Facts, MemoryFactors, Step


@dataclass(frozen=True, slots=True)
class SeparateServers(Defaults):
    """The fabric's servers hold the weights.

    Attributes:
        placement: how variables are laid on the servers.
        partition_bytes: pushed and pulled at the same time in pieces of this size.
        efficiency: what the transport reaches of the network's achievable bandwidth.
    """

    placement: ServerPlacement = ServerPlacement.EVEN
    partition_bytes: float = 4e6
    efficiency: float = 1.0

    key = "ps-separate"
    recipe = UPDATED_ON_SERVERS
    facts = Facts(
        decides="a server for each variable, or equal shards",
        time="max(M/B, n/k M/B) for k servers",
        traffic="M a worker, n/k M a server",
        memory="weights and gradients; optimizer state on the servers",
        source="Li et al., OSDI 2014; bound: Jiang et al., OSDI 2020",
    )

    def supports(self, fabric: Fabric) -> str:
        """A fabric with servers."""
        return "" if fabric.servers.count else "separate parameter servers need servers beside the group"

    def memory(self, fabric: Fabric, step: Step) -> MemoryFactors:
        """Weights and gradients on every rank, the optimizer state on the servers."""
        return MemoryFactors(1.0, 1.0, 0.0, fullest(self._sendings(fabric, step), step))

    def draft(self, fabric: Fabric, step: Step) -> Draft:
        """One message a variable, sparse ones with the touched rows alone."""
        positive(self, "efficiency", "partition_bytes")
        transport = Transport("ps", partition_bytes=self.partition_bytes, efficiency=self.efficiency)
        return draft_servers(fabric, self._sendings(fabric, step), transport)

    def _sendings(self, fabric: Fabric, step: Step) -> tuple[Sending, ...]:
        return whole_or_cut(fabric, step, self.recipe, len(fabric.machines), fabric.servers.count, self.placement)


SCHEMES.register("ps-separate", SeparateServers())
