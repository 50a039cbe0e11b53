"""BytePS: every machine sums a share, CPU machines a larger one, so that all ports are busy until the end.

With k CPU machines beside n GPU machines: 2n(n-1)M/((n^2+kn-2k)B), a ring's time at k = 0 and half of it, nearly, at
k = n (Jiang et al., OSDI 2020). Servers only sum, so gradients are pulled and the update runs on the GPUs. The shares
are best for one flat network and equal GPU machines; they follow the servers' bandwidth where it differs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from planner.errors import UsageError
from planner.exchange import SCHEMES
from planner.exchange.fabric import HOST_SUM_BYTE_PER_S, Fabric, Servers
from planner.exchange.formulas import byteps_shares
from planner.exchange.scheme import pack
from planner.exchange.servers import SUMMED_ON_SERVERS, Inside, PushPull, ThroughServers, Transport
from planner.exchange.types import Step


@dataclass(frozen=True, slots=True)
class BytePS(ThroughServers):
    """Summation services on all machines; the CPU machines are the servers of the fabric.

    Attributes:
        inside: how the ranks of a machine sum first.
        partition_bytes: size of the pieces that are pushed and pulled at the same time.
        card_ranks: ranks beside the network cards, for `inside=nvlink`; 0 for two for each card of a machine.
        efficiency: the fraction of the network's achievable bandwidth that the transport reaches.
        sum_byte_per_s: rate at which a GPU machine's host sums what it receives.
        cpu_machines: machines without accelerators that a job adds, "n" for as many as it has with them.
    """

    inside: Inside = Inside.AUTO
    partition_bytes: float = 4e6
    card_ranks: int = 0
    efficiency: float = 1.0
    sum_byte_per_s: float = HOST_SUM_BYTE_PER_S
    cpu_machines: str = "0"

    key = method = "byteps"
    recipe = SUMMED_ON_SERVERS

    def added_servers(self, machines: int) -> Servers:
        """As many as `cpu_machines` says."""
        wanted = self.cpu_machines
        if wanted != "n" and not wanted.isdecimal():
            raise UsageError(f"cannot read {wanted!r}", where="cpu_machines", hint="use a number, or n for as many")
        return Servers(machines if wanted == "n" else int(wanted))

    def shares(self, fabric: Fabric) -> tuple[float, ...]:
        """The fraction that each endpoint sums, the machines first."""
        machines, servers = len(fabric.machines), fabric.servers.count
        ratio = 1.0
        if servers:
            machine_rate = min(fabric.ports[p].byte_per_s for p in fabric.machine_ports[0, :machines])
            server_rate = min(fabric.ports[-1].byte_per_s, fabric.servers.sum_byte_per_s / self.efficiency)
            ratio = server_rate / machine_rate
        best = byteps_shares(machines, servers, ratio)
        return (best.gpu,) * machines + (best.cpu,) * servers

    def pushes(self, fabric: Fabric, step: Step) -> list[PushPull]:
        """One message a tensor."""
        return self.bucket_pushes(pack(step, 0.0), self.shares(fabric))

    def transport(self, fabric: Fabric) -> Transport:
        """The transport, by default with two ranks beside each network card."""
        card_ranks = self.card_ranks or 2 * fabric.cards
        return dataclasses.replace(ThroughServers.transport(self, fabric), card_ranks=card_ranks)


SCHEMES.register("byteps", BytePS())
