"""The ranks of an exchange in their machines, the ports between them and the bytes through them, and servers.

A port connects one child of a level to that level, as in `planner.hardware.collectives`: a device to the innermost
level, a machine to the network, and so on. Traffic inside a machine passes the ports of the machine's own levels;
traffic between machines is counted from the machine's network port outward, because a machine's servers and network
cards are attached to its host. `PortTraffic` counts bytes through the ports.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.errors import HardwareError, JobError
from planner.hardware import Cluster
from planner.hardware.tiers import child_sizes
from planner.sums import float_sum

HOST_SUM_BYTE_PER_S = 40e9
"""Rate at which a host sums gradients: three accesses a byte at some 120 GB/s of host memory. An estimate."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Machines without accelerators that take part in the exchange, on the level that joins the group.

    Their network ports are as fast as the slowest of the group's machines.

    Attributes:
        count: number of servers.
        sum_byte_per_s: rate at which a server sums what it receives.
    """

    count: int
    sum_byte_per_s: float = HOST_SUM_BYTE_PER_S

    def __post_init__(self) -> None:
        if self.count < 0 or not self.sum_byte_per_s > 0:
            raise JobError("servers need a count of 0 or more and a rate above 0", hint="give it in bytes a second")


@dataclass(frozen=True, slots=True)
class LinkPort:
    """The connection of one child to a level.

    Attributes:
        level: index into the cluster's levels.
        child: number of the child on that level, -1 - s for server s.
        byte_per_s: achievable bandwidth for this group, each direction.
        network: whether the level joins machines, not devices of one machine.
    """

    level: int
    child: int
    byte_per_s: float
    network: bool


@dataclass(frozen=True)
class Fabric:
    """Ranks of a cluster that exchange, in machines, with servers beside them.

    Attributes:
        cluster: where the ranks are.
        ranks: the group, ascending.
        servers: machines without accelerators that take part.

    Endpoints are the machines of the group, then the servers, numbered in this order.
    """

    cluster: Cluster
    ranks: tuple[int, ...]
    servers: Servers = Servers(0)

    def __post_init__(self) -> None:
        if not self.ranks or list(self.ranks) != sorted(set(self.ranks)):
            raise JobError("a group is ranks in ascending order, each once", hint="give at least one rank")
        if self.ranks[0] < 0 or self.ranks[-1] >= self.cluster.device_count:
            raise JobError(
                f"ranks {self.ranks[0]}..{self.ranks[-1]} are not all in a cluster of {self.cluster.device_count}",
                hint="use ranks of the cluster, or more nodes",
            )
        if self.servers.count and not self._network_levels():
            raise HardwareError(
                f"{self.cluster.name} has no network for servers to be on", hint="give it more nodes, or no servers"
            )

    @functools.cached_property
    def node_size(self) -> int:
        """Devices of one machine; 1 where the profile has no nodes."""
        return self.cluster.node_size or 1

    @functools.cached_property
    def machines(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each machine."""
        ranks_of: dict[int, list[int]] = {}
        for rank in self.ranks:
            ranks_of.setdefault(rank // self.node_size, []).append(rank)
        return tuple(tuple(ranks) for ranks in ranks_of.values())

    @property
    def endpoints(self) -> int:
        """Number of endpoints: machines and servers."""
        return len(self.machines) + self.servers.count

    def inside(self, level: int) -> bool:
        """Whether a level joins devices of one machine."""
        return self.cluster.group_sizes()[level] <= self.node_size

    def _network_levels(self) -> list[int]:
        return [i for i in range(len(self.cluster.levels)) if not self.inside(i)]

    @functools.cached_property
    def top(self) -> int:
        """The lowest level that joins all ranks of the group; with servers at least the first network level."""
        sizes = self.cluster.group_sizes()
        joins = [i for i, size in enumerate(sizes) if self.ranks[0] // size == self.ranks[-1] // size]
        top = joins[0] if len(self.ranks) > 1 else -1
        return max(top, self._network_levels()[0]) if self.servers.count else top

    @property
    def cards(self) -> int:
        """Network cards of a machine, estimated as the devices that saturate its network port; 1 without a network."""
        levels = [self.cluster.levels[i] for i in self._network_levels()]
        return max(1, round(levels[0].byte_per_s / levels[0].device_byte_per_s)) if levels else 1

    def child_size(self, level: int) -> int:
        """Devices in a child of a level."""
        return child_sizes(self.cluster)[level]

    @functools.cached_property
    def ports(self) -> tuple[LinkPort, ...]:
        """All ports that the exchange can use, innermost level first, those of servers last."""
        ports = []
        for i in range(self.top + 1):
            level, size = self.cluster.levels[i], self.child_size(i)
            children, counts = np.unique(np.asarray(self.ranks) // size, return_counts=True)
            width = max(1, int(np.unique(children // level.size, return_counts=True)[1].max()))
            rate, network = level.device_rate(width), not self.inside(i)
            ports += [
                LinkPort(i, int(child), level.efficiency * min(level.byte_per_s, int(held) * rate), network)
                for child, held in zip(children, counts, strict=True)
            ]
        if self.servers.count:
            first = self._network_levels()[0]
            slowest = min(port.byte_per_s for port in ports if port.level == first)
            ports += [LinkPort(self.top, -1 - s, slowest, True) for s in range(self.servers.count)]
        return tuple(ports)

    @functools.cached_property
    def rank_ports(self) -> np.ndarray:
        """Port of each rank on each level up to `top`, int64 [levels, ranks]."""
        index = {(p.level, p.child): i for i, p in enumerate(self.ports)}
        rows = [[index[i, r // self.child_size(i)] for r in self.ranks] for i in range(self.top + 1)]
        return np.asarray(rows, dtype=np.int64).reshape(self.top + 1, len(self.ranks))

    @functools.cached_property
    def machine_ports(self) -> np.ndarray:
        """Port of each endpoint on each network level, -1 for none, int64 [network levels, endpoints], lowest first."""
        levels = [i for i in self._network_levels() if i <= self.top]
        first = [self.ranks.index(machine[0]) for machine in self.machines]
        table = np.full((len(levels), self.endpoints), -1, dtype=np.int64)
        for row, level in enumerate(levels):
            table[row, : len(first)] = self.rank_ports[level, first]
            if level == self.top:
                table[row, len(first) :] = np.arange(len(self.ports) - self.servers.count, len(self.ports))
        return table

    @functools.cached_property
    def _rates(self) -> np.ndarray:
        return np.asarray([p.byte_per_s for p in self.ports], dtype=np.float64)

    @functools.cached_property
    def _network(self) -> np.ndarray:
        return np.asarray([p.network for p in self.ports], dtype=bool)

    def busy_s(
        self,
        out_bytes: np.ndarray,
        in_bytes: np.ndarray,
        efficiency: float = 1.0,
        server_byte_per_s: float = math.inf,
    ) -> np.ndarray:
        """Seconds that some bytes keep every port busy, outgoing then incoming, float64 [2 ports].

        Args:
            out_bytes: bytes that leave through each port, float64 [ports].
            in_bytes: bytes that come in through each port, float64 [ports].
            efficiency: the fraction of the network's achievable bandwidth that the transport reaches.
            server_byte_per_s: rate at which a machine of the group receives (and sums) data from the network.
        """
        rates = np.where(self._network, self._rates * efficiency, self._rates)
        in_rates = rates.copy()
        if len(self.machine_ports):
            in_rates[self.machine_ports[0, : len(self.machines)]] = np.minimum(
                in_rates[self.machine_ports[0, : len(self.machines)]], server_byte_per_s
            )
        if self.servers.count:
            in_rates[-self.servers.count :] = np.minimum(in_rates[-self.servers.count :], self.servers.sum_byte_per_s)
        return np.concatenate([out_bytes / rates, in_bytes / in_rates])

    def busy_everywhere(self, seconds: float) -> np.ndarray:
        """Busy times with the same seconds on every port of the group, none on those of servers, float64 [2 ports]."""
        busy = np.full(len(self.ports), seconds)
        if self.servers.count:
            busy[-self.servers.count :] = 0.0
        return np.concatenate([busy, busy])

    @property
    def network_latency_s(self) -> float:
        """Start-up time of one message between machines; 0 when there is one machine and no server."""
        return self.cluster.levels[self.top].latency_s if self.endpoints > 1 else 0.0


def fabric_of(cluster: Cluster, ranks: Sequence[int] | None = None, servers: Servers | None = None) -> Fabric:
    """The fabric of some ranks of a cluster (all of them by default), in any order.

    Raises:
        JobError: ranks that are not in the cluster, or twice.
        HardwareError: servers on a cluster without a network.
    """
    members = range(cluster.device_count) if ranks is None else ranks
    return Fabric(cluster, tuple(sorted(int(r) for r in members)), servers or Servers(0))


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """Bytes of one iteration over the links of a level.

    Attributes:
        level: name of the level.
        out_bytes: out of the busiest port.
        in_bytes: into the busiest port.
        total_bytes: through all ports together.
    """

    level: str
    out_bytes: int
    in_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class PortTraffic:
    """Bytes through every port of a fabric in one step, float64 [ports] each direction."""

    fabric: Fabric
    out_bytes: np.ndarray
    in_bytes: np.ndarray

    def __add__(self, other: PortTraffic) -> PortTraffic:
        return PortTraffic(self.fabric, self.out_bytes + other.out_bytes, self.in_bytes + other.in_bytes)

    def __mul__(self, factor: float) -> PortTraffic:
        return PortTraffic(self.fabric, self.out_bytes * factor, self.in_bytes * factor)

    def turned(self) -> PortTraffic:
        """The same bytes in the other direction."""
        return PortTraffic(self.fabric, self.in_bytes, self.out_bytes)

    def busy_s(self, efficiency: float = 1.0, server_byte_per_s: float = math.inf) -> np.ndarray:
        """Seconds that it keeps every port busy (`Fabric.busy_s`), float64 [2 ports]."""
        return self.fabric.busy_s(self.out_bytes, self.in_bytes, efficiency, server_byte_per_s)

    def machine_bytes(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes that each endpoint sends into the network and receives from it, float64 [endpoints] each."""
        fabric = self.fabric
        if not len(fabric.machine_ports):
            return np.zeros(fabric.endpoints), np.zeros(fabric.endpoints)
        lowest = fabric.machine_ports[0].copy()
        lowest[len(fabric.machines) :] = fabric.machine_ports[-1, len(fabric.machines) :]
        return self.out_bytes[lowest], self.in_bytes[lowest]

    @property
    def sent_bytes(self) -> float:
        """Bytes that all devices and servers send, each counted where it leaves a device, or a machine for another."""
        ports = self.fabric.ports
        levels = ({p.level for p in ports if p.network is network} for network in (False, True))
        first = {min(numbers) for numbers in levels if numbers}
        counted = np.array([p.level in first or p.child < 0 for p in ports], dtype=bool)
        return float(self.out_bytes[counted].sum()) if len(counted) else 0.0

    def by_level(self) -> tuple[LinkBytes, ...]:
        """The busiest port and the sum of each level, innermost level first."""
        level_of = np.asarray([p.level for p in self.fabric.ports], dtype=np.int64)
        return tuple(
            LinkBytes(
                self.fabric.cluster.levels[i].name,
                round(self.out_bytes[level_of == i].max()),
                round(self.in_bytes[level_of == i].max()),
                round(self.out_bytes[level_of == i].sum()),
            )
            for i in range(self.fabric.top + 1)
        )


def nothing(fabric: Fabric) -> PortTraffic:
    """No traffic."""
    return PortTraffic(fabric, np.zeros(len(fabric.ports)), np.zeros(len(fabric.ports)))


def rank_traffic(
    fabric: Fabric, source: np.ndarray, target: np.ndarray, byte_counts: np.ndarray | float
) -> PortTraffic:
    """Traffic of flows between ranks, given by their positions in `fabric.ranks`; O(flows * levels)."""
    ranks = np.asarray(fabric.ranks)
    counts = np.broadcast_to(np.asarray(byte_counts, dtype=np.float64), source.shape)
    same_machine = ranks[source] // fabric.node_size == ranks[target] // fabric.node_size
    out_bytes, in_bytes = np.zeros(len(fabric.ports)), np.zeros(len(fabric.ports))
    for level in range(fabric.top + 1):
        size = fabric.child_size(level)
        crossing = ranks[source] // size != ranks[target] // size
        if fabric.inside(level):
            crossing &= same_machine
        np.add.at(out_bytes, fabric.rank_ports[level, source[crossing]], counts[crossing])
        np.add.at(in_bytes, fabric.rank_ports[level, target[crossing]], counts[crossing])
    return PortTraffic(fabric, out_bytes, in_bytes)


def push_traffic(fabric: Fabric, shares: np.ndarray) -> PortTraffic:
    """Traffic when every machine of the group sends `shares[e]` bytes to each endpoint e but itself.

    Data for a server on the same machine passes no port. O(endpoints * network levels).
    """
    count = len(fabric.machines)
    out_bytes, in_bytes = np.zeros(len(fabric.ports)), np.zeros(len(fabric.ports))
    total = float(shares.sum())
    for row in fabric.machine_ports:
        held = np.zeros(len(fabric.ports))
        machines = np.zeros(len(fabric.ports))
        known = row >= 0
        np.add.at(held, row[known], shares[known])
        np.add.at(machines, row[:count], 1.0)
        out_bytes += machines * (total - held) * (machines > 0)
        in_bytes += held * (count - machines)
    return PortTraffic(fabric, out_bytes, in_bytes)


def spread_traffic(fabric: Fabric, held_bytes: np.ndarray) -> PortTraffic:
    """Traffic when every rank pushes what it holds to servers on all machines and pulls as much, in equal shards.

    Of the B_i bytes that the ranks of machine i hold, each of N machines serves a part: machine i pushes B_i / N to
    machine j and answers the pulls of machine j with B_j / N. A rank's own port passes what the rank holds.

    Args:
        fabric: the ranks and their ports.
        held_bytes: bytes that each rank holds, float64 [ranks], in the order of `fabric.ranks`.
    """
    held = dict(zip(fabric.ranks, held_bytes.tolist(), strict=True))
    machine = np.array([float_sum(held[rank] for rank in ranks) for ranks in fabric.machines])
    flows = (machine[:, None] + machine[None, :]) / len(machine)
    out_bytes, in_bytes = np.zeros(len(fabric.ports)), np.zeros(len(fabric.ports))
    for level in range(fabric.top + 1):
        if fabric.inside(level):
            np.add.at(out_bytes, fabric.rank_ports[level], held_bytes)
            np.add.at(in_bytes, fabric.rank_ports[level], held_bytes)
    for row in fabric.machine_ports:
        crossing = np.where(row[:, None] != row[None, :], flows, 0.0)
        np.add.at(out_bytes, row, crossing.sum(axis=1))
        np.add.at(in_bytes, row, crossing.sum(axis=0))
    return PortTraffic(fabric, out_bytes, in_bytes)
