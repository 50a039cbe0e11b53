"""HetPipe's wave synchronous parallelism: virtual workers push one update a wave to parameter servers.

A virtual worker runs a pipeline with Nm mini-batches, a wave, and may be D waves ahead of the slowest. Weights lack up
to (D+1)(s_local+1)+s_local-1 updates, s_local = Nm-1 (Park et al., USENIX ATC 2020). The group is the ranks that hold
the same stage in each virtual worker. `Step.micro_batches` is Nm; `forward_s + backward_s` is the time between two
mini-batches of the slowest virtual worker, so that a wave takes Nm times as long.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum

from planner.errors import UsageError
from planner.exchange import SCHEMES
from planner.exchange.fabric import Fabric, Servers
from planner.exchange.formulas import wsp_period_s, wsp_staleness
from planner.exchange.recipe import Content
from planner.exchange.scheme import Draft, Facts, Scheme, positive, require, settle
from planner.exchange.servers import ServerPlacement, Transport, draft_servers, through_servers, whole_or_cut
from planner.exchange.types import Exchange, Staleness, Step


class ShardPlacement(StrEnum):
    """Servers on all machines of the cluster, or on those alone that hold the stage (then none need be crossed)."""

    SPREAD = "spread"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class WaveSynchronous(Scheme):
    """Parameter servers with a clock distance.

    Attributes:
        clock_distance: waves that a virtual worker may be ahead of the slowest, D.
        placement: where the servers are.
        partition_bytes: pushed and pulled at the same time in pieces of this size.
        efficiency: what the transport reaches of the network's achievable bandwidth.
    """

    clock_distance: int = 0
    placement: ShardPlacement = ShardPlacement.SPREAD
    partition_bytes: float = 4e6
    efficiency: float = 1.0

    key = "wsp"
    recipe = through_servers(Content.WEIGHTS)
    per_tensor = False
    facts = Facts(
        decides="clock distance D, where the servers are",
        time="between waves max(w, x, (w+x)/(D+1)), w a wave's work and x its exchange",
        traffic="2(n-1)/n M a wave",
        memory="all of it; a copy of the weights on the servers",
        source="Park et al., HetPipe, USENIX ATC 2020",
    )

    def staleness(self, step: Step) -> Staleness:
        """In mini-batches: of the virtual worker's own updates, and of all."""
        return wsp_staleness(step.micro_batches, self.clock_distance)

    def draft(self, fabric: Fabric, step: Step) -> Draft:
        """The pushes and pulls of one wave."""
        positive(self, "efficiency", "partition_bytes")
        wide = self._spread(fabric) if self.placement is ShardPlacement.SPREAD else fabric
        count = wide.endpoints if self.placement is ShardPlacement.SPREAD else len(wide.machines)
        transport = Transport("wsp", partition_bytes=self.partition_bytes, efficiency=self.efficiency)
        return draft_servers(wide, whole_or_cut(wide, step, self.recipe, 0, count, ServerPlacement.EVEN), transport)

    def _spread(self, fabric: Fabric) -> Fabric:
        """The fabric with the cluster's other machines as servers, where it has none of its own."""
        others = fabric.cluster.device_count // fabric.node_size - len(fabric.machines)
        if fabric.servers.count or others <= 0:
            return fabric
        return dataclasses.replace(fabric, servers=Servers(others))

    def price(self, fabric: Fabric, step: Step) -> Exchange:
        """What a wave's exchange costs; exposed is what it adds between waves, with equal virtual workers."""
        if self.clock_distance < 0:
            raise UsageError(f"clock distance {self.clock_distance}", where=self.name, hint="use 0 or more")
        require(self, fabric)
        draft = self.draft(fabric, step)
        found = settle(self, draft.traffic.fabric, step, draft)
        wave_s = step.micro_batches * (step.forward_s + step.backward_s)
        period_s = wsp_period_s(wave_s, found.seconds, self.clock_distance)
        return dataclasses.replace(found, exposed_s=max(0.0, period_s - wave_s), transfers=())


SCHEMES.register("wsp", WaveSynchronous())
