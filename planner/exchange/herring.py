"""Herring: servers on the GPU machines, filled from fusion buffers that are cut in equal shards.

Gradients fill buffers of a fixed size in order of arrival. Every server takes an equal part of each buffer, so no
server waits for another, whatever the sizes of the variables (Thangakrishnan et al., SC 2020). Bytes are those of a
ring: 2(n-1)/n M between machines. The published gain is higher bandwidth on a many-path network, `efficiency` here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from planner.exchange import SCHEMES
from planner.exchange.fabric import HOST_SUM_BYTE_PER_S, Fabric
from planner.exchange.scheme import MEGABYTE, MessagePlan, fuse
from planner.exchange.servers import SUMMED_ON_SERVERS, PushPull, ThroughServers, even
from planner.exchange.types import Step


@dataclass(frozen=True, slots=True)
class Herring(ThroughServers):
    """Balanced fusion buffers.

    Attributes:
        buffer_bytes: size of a fusion buffer.
        partition_bytes: size of the pieces that are pushed and pulled at the same time.
        efficiency: the fraction of the network's achievable bandwidth that the transport reaches.
        sum_byte_per_s: rate at which a machine's processors sum what they receive.
    """

    buffer_bytes: float = 25 * MEGABYTE
    partition_bytes: float = 4 * MEGABYTE
    efficiency: float = 1.0
    sum_byte_per_s: float = HOST_SUM_BYTE_PER_S

    key = method = "herring"
    recipe = SUMMED_ON_SERVERS

    def pushes(self, fabric: Fabric, step: Step) -> list[PushPull]:
        """One message a buffer."""
        return self.bucket_pushes(fuse(step, self.buffer_bytes), even(fabric, 0, len(fabric.machines)))

    def plan_messages(self, fabric: Fabric, step: Step) -> MessagePlan:
        """Push and pull each buffer; variables without bytes, which no buffer holds, are named too."""
        methods = {v.name: self.method for v in step.variables}
        return dataclasses.replace(ThroughServers.plan_messages(self, fabric, step), methods=methods)


SCHEMES.register("herring", Herring())
