"""Published schemes through servers on the machines of the group or beside them: BytePS, Herring, HetPipe, Parallax.

BytePS: every machine sums a share, CPU machines a larger one, so that all ports are busy until the end. With k CPU
machines beside n GPU machines: 2n(n-1)M/((n^2+kn-2k)B), a ring's time at k = 0 and half of it, nearly, at k = n (Jiang
et al., OSDI 2020). Servers only sum, so gradients are pulled and the update runs on the GPUs. The shares are best for
one flat network and equal GPU machines; they follow the servers' bandwidth where it differs.

Herring: gradients fill buffers of a fixed size in order of arrival. Every server takes an equal part of each buffer, so
no server waits for another, whatever the sizes of the variables (Thangakrishnan et al., SC 2020). Bytes are those of a
ring: 2(n-1)/n M between machines. The published gain is higher bandwidth on a many-path network, `efficiency` here.

HetPipe's wave synchronous parallelism (`wsp`): a virtual worker runs a pipeline with Nm mini-batches, a wave, pushes
one update a wave and may be D waves ahead of the slowest. Weights lack up to (D+1)(s_local+1)+s_local-1 updates,
s_local = Nm-1 (Park et al., USENIX ATC 2020). The group is the ranks that hold the same stage in each virtual worker.
`Step.micro_batches` is Nm; `forward_s + backward_s` is the time between two mini-batches of the slowest virtual worker,
so that a wave takes Nm times as long.

Parallax: sparse variables through parameter servers, dense ones by all-reduce. An all-gather of sparse gradients grows
with the machines, 2 alpha w (N-1) a machine, while servers move 4 alpha w (N-1)/N when the variables are spread evenly,
which cutting them in partitions sees to (Kim et al., EuroSys 2019). How many partitions are best is measured
(`planner.exchange.formulas`); here their number is given.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum

from planner.errors import UsageError
from planner.exchange import SCHEMES
from planner.exchange.collective_schemes import plan_recipe
from planner.exchange.fabric import HOST_SUM_BYTE_PER_S, Fabric, Servers
from planner.exchange.formulas import byteps_shares, wsp_period_s, wsp_staleness
from planner.exchange.recipe import Content
from planner.exchange.scheme import MEGABYTE, Bucket, MessagePlan, Scheme, fuse, merge, pack
from planner.exchange.servers import (
    COLOCATED,
    SUMMED_ON_SERVERS,
    UPDATED_ON_SERVERS,
    Inside,
    ServerPlacement,
    ThroughServers,
    even,
    fullest,
    least_loaded,
    place_variables,
    push_pull_bytes,
    through_servers,
)
from planner.exchange.types import Exchange, MemoryFactors, Staleness, Step
from planner.sums import float_sum


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
        cpu_share, gpu_share = byteps_shares(machines, servers, ratio)
        return (gpu_share,) * machines + (cpu_share,) * servers

    def pushes(self, fabric: Fabric, step: Step) -> list[Bucket]:
        """One message a tensor."""
        shares = self.shares(fabric)
        return [dataclasses.replace(bucket, shares=shares) for bucket in pack(step, 0.0)]

    def ranks_at_card(self, fabric: Fabric) -> int:
        """As many as `card_ranks` says."""
        return self.card_ranks or 2 * fabric.cards


SCHEMES.register("byteps", BytePS())


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

    def pushes(self, fabric: Fabric, step: Step) -> list[Bucket]:
        """One message a buffer."""
        shares = even(fabric, 0, len(fabric.machines))
        return [dataclasses.replace(buffer, shares=shares) for buffer in fuse(step, self.buffer_bytes)]

    def price(self, fabric: Fabric, step: Step) -> Exchange:
        """The cost of the exchange of one step; variables without bytes, which no buffer holds, are named too."""
        methods = {v.name: self.method for v in step.variables}
        return dataclasses.replace(Scheme.price(self, fabric, step), methods=methods)


SCHEMES.register("herring", Herring())


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

    def pushes(self, fabric: Fabric, step: Step) -> tuple[Bucket, ...]:
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


@dataclass(frozen=True, slots=True)
class Parallax(Scheme):
    """All-reduce for variables with dense gradients, servers for those with sparse ones.

    Attributes:
        partitions: pieces of a sparse variable; 0 for one a machine.
        dense_from: fraction of touched rows from which a sparse variable travels as a dense one.
        bucket_bytes: dense gradients that travel together.
        partition_bytes: size of the pieces that are pushed and pulled at the same time.
        efficiency: the fraction of the network's achievable bandwidth that the servers' transport reaches.
    """

    partitions: int = 0
    dense_from: float = 1.0
    bucket_bytes: float = 25 * MEGABYTE
    partition_bytes: float = 4 * MEGABYTE
    efficiency: float = 1.0

    key = "parallax"
    sparse_recipe = UPDATED_ON_SERVERS

    def by_servers(self, step: Step) -> tuple[str, ...]:
        """Names of the variables that go through servers."""
        return tuple(v.name for v in step.variables if v.sparse and v.touched < self.dense_from)

    def memory(self, fabric: Fabric, step: Step) -> MemoryFactors:
        """Sparse variables and their state are on the servers; a rank holds the rows that its machine touches."""
        total = float_sum(v.pulled_bytes for v in step.variables)
        names = set(self.by_servers(step))
        if total == 0 or not names:
            return MemoryFactors()
        sparse = [v for v in step.variables if v.name in names]
        dense_part = 1 - float_sum(v.pulled_bytes for v in sparse) / total
        row_bytes = float_sum(float_sum(push_pull_bytes(self.sparse_recipe, v.sent)) for v in sparse)
        fullest_part = fullest(self._pieces(fabric, step, names), step)
        return MemoryFactors(dense_part, dense_part, dense_part, fullest_part, row_bytes)

    def plan_messages(self, fabric: Fabric, step: Step) -> MessagePlan:
        """Buckets of dense gradients, and one message for each partition of a sparse one, on the same ports."""
        names = set(self.by_servers(step))
        dense = Step(tuple(v for v in step.variables if v.name not in names), step.backward_s)
        servers = dataclasses.replace(COLOCATED, partition_bytes=self.partition_bytes, efficiency=self.efficiency)
        return merge(
            fabric,
            [
                plan_recipe(fabric, dense, self.recipe, self.bucket_bytes),
                servers.plan_pushes(fabric, self._pieces(fabric, step, names)),
            ],
        )

    def _pieces(self, fabric: Fabric, step: Step, names: set[str]) -> list[Bucket]:
        """The partitions of the sparse variables, each on one machine: largest first, to the least loaded."""
        count = len(fabric.machines)
        pieces = self.partitions or count
        sparse = [v for v in step.arrivals() if v.name in names]
        sizes = [float_sum(push_pull_bytes(self.sparse_recipe, v.sent)) / pieces for v in sparse for _ in range(pieces)]
        machine_of = iter(least_loaded(sizes, count))
        return [
            Bucket(
                (v.name,),
                v.sent.gradient_bytes / pieces,
                step.ready_s(v),
                v.sent.weight_bytes / pieces,
                even(fabric, next(machine_of), 1),
            )
            for v in sparse
            for _ in range(pieces)
        ]


SCHEMES.register("parallax", Parallax())
