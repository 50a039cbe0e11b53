"""Parameter servers on machines of their own: max(M/B, nM/(kB)) for k of them, pushes and pulls at the same time.

Half the bytes of a ring for the n workers, but each of the k servers moves n/k M each direction (Jiang et al., BytePS,
OSDI 2020, section 2), so fewer servers than workers are the bottleneck.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.exchange import SCHEMES
from planner.exchange._servers import HeldOnServers
from planner.exchange.fabric import Fabric
from planner.exchange.types import Facts


@dataclass(frozen=True, slots=True)
class SeparateServers(HeldOnServers):
    """The fabric's servers hold the weights."""

    key = "ps-separate"
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

    def servers(self, fabric: Fabric) -> tuple[int, int]:
        """The fabric's servers."""
        return len(fabric.machines), fabric.servers.count


SCHEMES.register("ps-separate", SeparateServers())
