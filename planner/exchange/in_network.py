"""In-network all-reduce: the switches add, so a port passes the payload once each way, however many machines there are.

Devices of a machine scatter first and gather afterwards, or with `inside` their own switch adds as well. On a network
of several levels each switch passes one sum upward (Graham et al., SHARP, COMHPC 2016).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.exchange import SCHEMES
from planner.exchange._defaults import MEGABYTE, Defaults, dense_note, positive
from planner.exchange.fabric import Fabric, Traffic, nothing
from planner.exchange.messages import Bucket, Leg, Message, pack
from planner.exchange.servers import Inside, Local, local
from planner.exchange.types import Draft, Facts, Step


@dataclass(frozen=True, slots=True)
class InNetwork(Defaults):
    """Switches that add.

    Attributes:
        inside: the switch inside a machine adds too.
        bucket_bytes: gradients that travel together; 0 sends each by itself.
        partition_bytes: a bucket passes the legs at the same time in pieces of this size.
        efficiency: what the switches reach of the levels' achievable bandwidth.
    """

    inside: bool = False
    bucket_bytes: float = 25 * MEGABYTE
    partition_bytes: float = 4 * MEGABYTE
    efficiency: float = 1.0

    key = "in-network"
    assumes = "switches that add what passes them"
    facts = Facts(
        decides="buckets of 25 MB; whether machines' own switches add",
        time="2 latency a level + M/B",
        traffic="M",
        memory="all of it",
        source="Graham et al., SHARP, COMHPC 2016",
    )

    def supports(self, fabric: Fabric) -> str:
        """Levels behind a switch; a mesh has none."""
        wired = [fabric.cluster.levels[i].name for i in self._switched(fabric) if not self._has_switch(fabric, i)]
        return f"level {wired[0]} is wired point to point, so no switch can add" if wired else ""

    def _has_switch(self, fabric: Fabric, level: int) -> bool:
        return fabric.cluster.levels[level].peer_byte_per_s is None

    def _switched(self, fabric: Fabric) -> list[int]:
        """Levels that the group crosses and whose switches add."""
        crossed = [i for i in range(fabric.top + 1) if len(np.unique(fabric.rank_ports[i])) > 1]
        return [i for i in crossed if self.inside or fabric.cluster.group_sizes()[i] > fabric.node_size]

    def draft(self, fabric: Fabric, step: Step) -> Draft:
        """Buckets one after the other, each in pieces: scatter inside, through the switches and back, gather inside."""
        positive(self, "efficiency", "partition_bytes")
        buckets = pack(step, self.bucket_bytes)
        unit = self._through_switches(fabric)
        inside = local(fabric, Inside.SCATTER)
        messages = tuple(self._message(b, unit, inside) for b in buckets)
        traffic = unit if self.inside else unit + inside.traffic + inside.traffic.turned()
        methods = {v: "in-network" for b in buckets for v in b.variables}
        return Draft(messages, traffic * step.gradient_bytes, methods, notes=dense_note(step))

    def _through_switches(self, fabric: Fabric) -> Traffic:
        """One byte out and in through every port of a level whose switches add."""
        traffic = nothing(fabric)
        for level in self._switched(fabric):
            used = np.unique(fabric.rank_ports[level])
            traffic.out_bytes[used] = traffic.in_bytes[used] = 1.0
        return traffic

    def _message(self, bucket: Bucket, unit: Traffic, inside: Local) -> Message:
        """Scatter, a start-up up and down each level with one copy through its ports, gather."""
        levels = unit.fabric.cluster.levels
        latency_s = sum(2 * levels[i].latency_s for i in self._switched(unit.fabric))
        across = Leg((unit * bucket.gradient_bytes).busy_s() / self.efficiency, latency_s)
        before, after = inside.legs(bucket.gradient_bytes, bucket.gradient_bytes)
        legs = (across,) if self.inside else (before, across, after)
        used = tuple(leg for leg in legs if leg.busy_s.any())
        chunk = min(1.0, self.partition_bytes / bucket.gradient_bytes) if bucket.gradient_bytes > 0 else 1.0
        return Message(bucket.variables, "in-network", bucket.gradient_bytes, bucket.ready_s, used, chunk)


SCHEMES.register("in-network", InNetwork())
