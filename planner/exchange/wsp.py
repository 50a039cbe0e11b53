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

from planner.exchange import SCHEMES
from planner.exchange.fabric import Fabric, Servers
from planner.exchange.formulas import wsp_period_s, wsp_staleness
from planner.exchange.recipe import Content
from planner.exchange.scheme import MessagePlan, Scheme
from planner.exchange.servers import PushPull, ServerPlacement, ThroughServers, place_variables, through_servers
from planner.exchange.types import Exchange, Staleness, Step


class ShardPlacement(StrEnum):
    """Servers on all machines of the cluster, or only on the machines of the group."""

    SPREAD = "spread"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class WaveSynchronous(ThroughServers):
    """Parameter servers with a clock distance.

    Attributes:
        clock_distance: waves that a virtual worker may be ahead of the slowest, D.
        placement: where the servers are.
        partition_bytes: size of the pieces that are pushed and pulled at the same time.
        efficiency: the fraction of the network's achievable bandwidth that the transport reaches.
    """

    clock_distance: int = 0
    placement: ShardPlacement = ShardPlacement.SPREAD
    partition_bytes: float = 4e6
    efficiency: float = 1.0

    key = method = "wsp"
    recipe = through_servers(Content.WEIGHTS)
    per_tensor = False

    def staleness(self, step: Step) -> Staleness:
        """Updates that weights lack, in mini-batches: of the virtual worker itself, and of all workers."""
        return wsp_staleness(step.micro_batches, self.clock_distance)

    def pushes(self, fabric: Fabric, step: Step) -> tuple[PushPull, ...]:
        """The pushes and pulls of one wave, in equal shards on all servers."""
        count = fabric.endpoints if self.placement is ShardPlacement.SPREAD else len(fabric.machines)
        return place_variables(fabric, step, self.recipe, 0, count, ServerPlacement.EVEN)

    def plan_messages(self, fabric: Fabric, step: Step) -> MessagePlan:
        """The messages of one wave; spread servers are on the cluster's other machines too."""
        others = fabric.cluster.device_count // fabric.node_size - len(fabric.machines)
        if self.placement is ShardPlacement.SPREAD and not fabric.servers.count and others > 0:
            fabric = dataclasses.replace(fabric, servers=Servers(others))
        return ThroughServers.plan_messages(self, fabric, step)

    def price(self, fabric: Fabric, step: Step) -> Exchange:
        """The cost of a wave's exchange; exposed is what it adds to each wave, with equally fast virtual workers."""
        exchange = Scheme.price(self, fabric, step)
        wave_s = step.micro_batches * (step.forward_s + step.backward_s)
        period_s = wsp_period_s(wave_s, exchange.seconds, self.clock_distance)
        return dataclasses.replace(exchange, exposed_s=max(0.0, period_s - wave_s), transfers=())


SCHEMES.register("wsp", WaveSynchronous())
