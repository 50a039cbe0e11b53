"""Herring: servers on the GPU machines, fed from fusion buffers that are cut in equal shards.

Gradients fill fixed buffers in order of arrival, and every server takes the same part of each buffer, so none waits for
another whatever the sizes of the variables (Thangakrishnan et al., SC 2020). Bytes are a ring's: 2(n-1)/n M between
machines; the published gain is one of bandwidth reached on a many-path network, which is `efficiency` here.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.exchange import SCHEMES
from planner.exchange._defaults import MEGABYTE, Defaults, dense_note, positive
from planner.exchange.fabric import HOST_SUM_BYTE_PER_S, Fabric
from planner.exchange.messages import fuse
from planner.exchange.servers import SUMMED_ON_SERVERS, Inside, Sending, Transport, draft_servers, even, sent
from planner.exchange.types import Draft, Facts, Step


@dataclass(frozen=True, slots=True)
class Herring(Defaults):
    """Balanced fusion buffers.

    Attributes:
        buffer_bytes: size of a fusion buffer.
        partition_bytes: pushed and pulled at the same time in pieces of this size.
        efficiency: what the transport reaches of the network's achievable bandwidth.
        sum_byte_per_s: rate at which a machine's processors sum what they receive.
    """

    buffer_bytes: float = 25 * MEGABYTE
    partition_bytes: float = 4 * MEGABYTE
    efficiency: float = 1.0
    sum_byte_per_s: float = HOST_SUM_BYTE_PER_S

    key = "herring"
    recipe = SUMMED_ON_SERVERS
    facts = Facts(
        decides="fusion buffers of 25 MB, an equal shard of each on every machine",
        time="2(n-1)/n M/(eta B), eta the transport's efficiency",
        traffic="2(n-1)/n M",
        memory="all of it",
        source="Thangakrishnan et al., SC 2020",
    )

    def draft(self, fabric: Fabric, step: Step) -> Draft:
        """One message a buffer."""
        positive(self, "efficiency", "sum_byte_per_s", "partition_bytes")
        shares = even(fabric, 0, len(fabric.machines))
        buffers = fuse(step, self.buffer_bytes)
        sendings = [Sending(b.variables, *sent(self.recipe, b), b.ready_s, shares) for b in buffers]
        transport = Transport("herring", Inside.SCATTER, self.partition_bytes, self.efficiency, self.sum_byte_per_s)
        draft = draft_servers(fabric, sendings, transport)
        methods = {v.name: "herring" for v in step.variables}
        return Draft(draft.messages, draft.traffic, methods, draft.placements, dense_note(step))


SCHEMES.register("herring", Herring())
