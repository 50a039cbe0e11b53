"""Parameter servers on the group's own machines: gradients are pushed, updated weights are pulled.

With equal shards each machine moves 2(n-1)/n M each direction, exactly as in a ring all-reduce; whatever such servers
gain must come from the transport (`efficiency`), from start-up times, or from sparse gradients. Whole variables on one
server each (`greedy`, `round-robin`) leave the fullest server with (n-1) times what it holds, each direction.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from planner.exchange import SCHEMES
from planner.exchange._defaults import positive
from planner.exchange._servers import HeldOnServers, Transport
from planner.exchange.fabric import HOST_SUM_BYTE_PER_S
from planner.exchange.types import Facts


@dataclass(frozen=True, slots=True)
class ColocatedServers(HeldOnServers):
    """A server on every machine.

    Attributes:
        placement: how variables are laid on the servers.
        partition_bytes: pushed and pulled at the same time in pieces of this size.
        efficiency: what the transport reaches of the network's achievable bandwidth.
        sum_byte_per_s: rate at which a machine sums what it receives.
    """

    sum_byte_per_s: float = HOST_SUM_BYTE_PER_S

    key = "ps-colocated"
    facts = Facts(
        decides="a server for each variable, or equal shards",
        time="2(n-1)/n M/B with equal shards; (n-1) times the fullest server's bytes with whole variables",
        traffic="2(n-1)/n M with equal shards",
        memory="weights and gradients; optimizer state on the servers",
        source="Li et al., OSDI 2014",
    )

    def transport(self) -> Transport:
        """How messages travel; the machines of the group are the servers."""
        positive(self, "sum_byte_per_s")
        return dataclasses.replace(HeldOnServers.transport(self), sum_byte_per_s=self.sum_byte_per_s)


SCHEMES.register("ps-colocated", ColocatedServers())
