"""In-network all-reduce: the switches add, so a port passes the payload once each way for any number of machines.

No hardware profile says whether its switches can add: whoever asks for this scheme has some that do.

Devices of a machine scatter first and gather afterwards, or with `inside` their own switch adds as well. On a network
of several levels each switch passes one sum upward (Graham et al., SHARP, COMHPC 2016).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.exchange import SCHEMES
from planner.exchange.fabric import Fabric, Traffic, nothing
from planner.exchange.scheme import MEGABYTE, Bucket, Leg, Message, MessagePlan, Scheme, dense_note, pack
from planner.exchange.servers import Inside, MachineSum, machine_sum
from planner.exchange.types import Step


@dataclass(frozen=True, slots=True)
class InNetwork(Scheme):
    """An all-reduce by switches that add.

    Attributes:
        inside: whether the switch inside a machine adds too.
        bucket_bytes: gradients that travel together; 0 sends each by itself.
        partition_bytes: size of the pieces in which a bucket passes all its legs at the same time.
        efficiency: the fraction of the levels' achievable bandwidth that the switches reach.
    """

    inside: bool = False
    bucket_bytes: float = 25 * MEGABYTE
    partition_bytes: float = 4 * MEGABYTE
    efficiency: float = 1.0

    key = "in-network"
    assumes = "switches that add what passes them"

    def supports(self, fabric: Fabric) -> str:
        """Requires a switch on every level that is crossed; a mesh has none."""
        levels = [fabric.cluster.levels[i] for i in self._switched(fabric)]
        wired = [level.name for level in levels if level.peer_byte_per_s is not None]
        return f"level {wired[0]} is wired point to point, so no switch can add" if wired else ""

    def _switched(self, fabric: Fabric) -> list[int]:
        """The levels that the group crosses and whose switches add."""
        crossed = [i for i in range(fabric.top + 1) if len(np.unique(fabric.rank_ports[i])) > 1]
        return [i for i in crossed if self.inside or fabric.cluster.group_sizes()[i] > fabric.node_size]

    def plan_messages(self, fabric: Fabric, step: Step) -> MessagePlan:
        """One message a bucket: scatter inside the machine, through the switches and back, gather inside."""
        buckets = pack(step, self.bucket_bytes)
        unit = self._through_switches(fabric)
        inside = machine_sum(fabric, Inside.SCATTER)
        messages = tuple(self._message(b, unit, inside) for b in buckets)
        traffic = unit if self.inside else unit + inside.traffic + inside.traffic.turned()
        methods = {v: "in-network" for b in buckets for v in b.variables}
        return MessagePlan(messages, traffic * step.gradient_bytes, methods, notes=dense_note(step))

    def _through_switches(self, fabric: Fabric) -> Traffic:
        """Traffic of one byte out and in through every port of a level whose switches add."""
        traffic = nothing(fabric)
        for level in self._switched(fabric):
            used = np.unique(fabric.rank_ports[level])
            traffic.out_bytes[used] = traffic.in_bytes[used] = 1.0
        return traffic

    def _message(self, bucket: Bucket, unit: Traffic, inside: MachineSum) -> Message:
        """The message of a bucket: one copy through the ports of each level, a start-up time up and one down."""
        levels = unit.fabric.cluster.levels
        latency_s = sum(2 * levels[i].latency_s for i in self._switched(unit.fabric))
        across = Leg((unit * bucket.gradient_bytes).busy_s() / self.efficiency, latency_s)
        before, after = inside.legs(bucket.gradient_bytes, bucket.gradient_bytes)
        legs = (across,) if self.inside else (before, across, after)
        busy_legs = tuple(leg for leg in legs if leg.busy_s.any())
        chunk = min(1.0, self.partition_bytes / bucket.gradient_bytes) if bucket.gradient_bytes > 0 else 1.0
        return Message(bucket.variables, "in-network", bucket.gradient_bytes, bucket.ready_s, busy_legs, chunk)


SCHEMES.register("in-network", InNetwork())
