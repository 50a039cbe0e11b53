"""BytePS: every machine sums a share, CPU machines more, so that all ports are busy to the end.

With k CPU machines beside n GPU machines: 2n(n-1)M/((n^2+kn-2k)B), a ring's time at k = 0 and half of it, nearly, at
k = n (Jiang et al., OSDI 2020). Servers only sum, so gradients are pulled and the update runs on the GPUs. The shares
are best for one flat network and equal GPU machines; they follow the servers' bandwidth where it differs.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import UsageError
from planner.exchange import SCHEMES
from planner.exchange._defaults import Defaults, dense_note, positive
from planner.exchange.fabric import HOST_SUM_BYTE_PER_S, Fabric, Servers
from planner.exchange.formulas import byteps_shares
from planner.exchange.messages import pack
from planner.exchange.servers import SUMMED_ON_SERVERS, Inside, Sending, Transport, draft_servers, sent
from planner.exchange.types import Draft, Facts, Step


@dataclass(frozen=True, slots=True)
class BytePS(Defaults):
    """Summation services on all machines; the CPU machines are the fabric's servers.

    Attributes:
        inside: how a machine sums first.
        partition_bytes: tensors are cut in pieces of this size, pushed and pulled at the same time.
        card_ranks: ranks under a network card's switch, for `inside=nvlink`; 0 for two for each card of a machine.
        efficiency: what the transport reaches of the network's achievable bandwidth.
        sum_byte_per_s: rate at which a GPU machine's host sums what it receives.
        cpu_machines: machines without accelerators that a job adds, "n" for as many as it has with them.
    """

    inside: Inside = Inside.AUTO
    partition_bytes: float = 4e6
    card_ranks: int = 0
    efficiency: float = 1.0
    sum_byte_per_s: float = HOST_SUM_BYTE_PER_S
    cpu_machines: str = "0"

    key = "byteps"
    recipe = SUMMED_ON_SERVERS
    facts = Facts(
        decides="shares of the CPU and GPU machines; how a machine sums inside",
        time="2n(n-1)/(n^2+kn-2k) M/B",
        traffic="2n(n-1)/(n^2+kn-2k) M, every machine",
        memory="all of it",
        source="Jiang et al., OSDI 2020",
    )

    def added_servers(self, machines: int) -> Servers:
        """As many as the option says."""
        wanted = self.cpu_machines
        if wanted != "n" and not wanted.isdecimal():
            raise UsageError(f"cannot read {wanted!r}", where="cpu_machines", hint="use a number, or n for as many")
        return Servers(machines if wanted == "n" else int(wanted))

    def shares(self, fabric: Fabric) -> tuple[float, ...]:
        """The part that each endpoint sums, the machines first."""
        count, servers = len(fabric.machines), fabric.servers.count
        ratio = 1.0
        if servers:
            own = min(fabric.ports[p].byte_per_s for p in fabric.machine_ports[0, :count])
            ratio = min(fabric.ports[-1].byte_per_s, fabric.servers.sum_byte_per_s / self.efficiency) / own
        found = byteps_shares(count, servers, ratio)
        return (found.gpu,) * count + (found.cpu,) * servers

    def draft(self, fabric: Fabric, step: Step) -> Draft:
        """One message a tensor."""
        positive(self, "efficiency", "sum_byte_per_s", "partition_bytes")
        shares = self.shares(fabric)
        sendings = [Sending(b.variables, *sent(self.recipe, b), b.ready_s, shares) for b in pack(step, 0.0)]
        beside = self.card_ranks or 2 * fabric.cards
        transport = Transport("byteps", self.inside, self.partition_bytes, self.efficiency, self.sum_byte_per_s, beside)
        draft = draft_servers(fabric, sendings, transport)
        return Draft(draft.messages, draft.traffic, draft.methods, draft.placements, dense_note(step))


SCHEMES.register("byteps", BytePS())
