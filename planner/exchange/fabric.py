"""The group as an exchange sees it: ranks in machines, ports that bytes pass through, servers beside them.

A port is the way of one child of a level into that level, as in `planner.hardware.collectives`: devices into the
innermost level, machines into the network, and so on. Traffic inside a machine passes the ports of the machine's own
levels; traffic between machines is counted from the machine's network port outward, because a machine's servers and
network cards hang on its host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.errors import HardwareError, JobError
from planner.hardware import Cluster, Level

HOST_SUM_BYTE_PER_S = 40e9
"""Rate at which a host sums gradients: three accesses a byte at some 120 GB/s of host memory. An estimate."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Machines without accelerators that take part in the exchange, on the level that joins the group.

    Attributes:
        count: how many.
        byte_per_s: of one's network port, each direction, achievable; None for that of a machine of the group.
        sum_byte_per_s: rate at which one sums what it receives.
    """

    count: int
    byte_per_s: float | None = None
    sum_byte_per_s: float = HOST_SUM_BYTE_PER_S

    def __post_init__(self) -> None:
        rates = (self.sum_byte_per_s, 1.0 if self.byte_per_s is None else self.byte_per_s)
        if self.count < 0 or not all(rate > 0 for rate in rates):
            raise JobError("servers need a count of 0 or more and rates above 0", hint="give rates in bytes a second")


@dataclass(frozen=True, slots=True)
class Port:
    """The way of one child into a level.

    Attributes:
        level: index into the cluster's levels.
        child: number of the child on that level, -1 - s for server s.
        ranks: ranks of the group behind it, 0 for a server.
        byte_per_s: achievable bandwidth for this group, each direction.
        network: joins machines (else devices of one).
    """

    level: int
    child: int
    ranks: int
    byte_per_s: float
    network: bool


@dataclass(frozen=True)
class Fabric:
    """Ranks of a cluster that exchange, in machines, with servers beside them.

    Attributes:
        cluster: the machine.
        ranks: the group, ascending.
        servers: machines beside it.
        concurrent: groups of this shape that exchange at the same time through the same ports.

    Endpoints are numbered: the machines of the group first, then the servers.
    """

    cluster: Cluster
    ranks: tuple[int, ...]
    servers: Servers = Servers(0)
    concurrent: int = 1

    def __post_init__(self) -> None:
        if not self.ranks or list(self.ranks) != sorted(set(self.ranks)):
            raise JobError("a group is ranks in ascending order, each once", hint="give at least one rank")
        if self.ranks[0] < 0 or self.ranks[-1] >= self.cluster.device_count:
            raise JobError(
                f"ranks {self.ranks[0]}..{self.ranks[-1]} are not all in a cluster of {self.cluster.device_count}",
                hint="use ranks of the cluster, or more nodes",
            )
        if self.concurrent < 1:
            raise JobError(f"{self.concurrent} concurrent groups", hint="use at least 1")
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
        found: dict[int, list[int]] = {}
        for rank in self.ranks:
            found.setdefault(rank // self.node_size, []).append(rank)
        return tuple(tuple(ranks) for ranks in found.values())

    @property
    def endpoints(self) -> int:
        """Machines and servers."""
        return len(self.machines) + self.servers.count

    def inside(self, level: int) -> bool:
        """Whether a level joins devices of one machine."""
        return self.cluster.group_sizes()[level] <= self.node_size

    def _network_levels(self) -> list[int]:
        return [i for i in range(len(self.cluster.levels)) if not self.inside(i)]

    @functools.cached_property
    def top(self) -> int:
        """The lowest level that joins the whole group, and at least the first network level when there are servers."""
        sizes = self.cluster.group_sizes()
        joins = [i for i, size in enumerate(sizes) if self.ranks[0] // size == self.ranks[-1] // size]
        top = joins[0] if len(self.ranks) > 1 else -1
        return max(top, self._network_levels()[0]) if self.servers.count else top

    @property
    def cards(self) -> int:
        """Network cards of a machine, as many as devices fill its way out; 1 where there is no network."""
        levels = [self.cluster.levels[i] for i in self._network_levels()]
        return max(1, round(levels[0].byte_per_s / levels[0].device_byte_per_s)) if levels else 1

    def child_size(self, level: int) -> int:
        """Devices in a child of a level."""
        return (1, *self.cluster.group_sizes())[level]

    @functools.cached_property
    def ports(self) -> tuple[Port, ...]:
        """All ports that the exchange can pass through, innermost level first, the servers' last."""
        found = []
        for i in range(self.top + 1):
            level, size = self.cluster.levels[i], self.child_size(i)
            children, counts = np.unique(np.asarray(self.ranks) // size, return_counts=True)
            width = max(1, int(np.unique(children // level.size, return_counts=True)[1].max()))
            found += [
                Port(i, int(child), int(held), self._rate(level, size, int(held), width), not self.inside(i))
                for child, held in zip(children, counts, strict=True)
            ]
        own = self.servers.byte_per_s
        if self.servers.count and own is None:
            first = self._network_levels()[0]
            own = min(port.byte_per_s for port in found if port.level == first)
        return (*found, *(Port(self.top, -1 - s, 0, float(own or 0.0), True) for s in range(self.servers.count)))

    def _rate(self, level: Level, child: int, held: int, width: int) -> float:
        """What a child of `held` ranks can send into a level, its sibling groups' share taken off."""
        device = level.device_byte_per_s
        if level.peer_byte_per_s is not None and width > 1:
            device = min(device, (width - 1) * level.peer_byte_per_s)
        siblings = max(1, min(self.concurrent, child // held))
        return level.efficiency * min(level.byte_per_s / siblings, held * device)

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
        """Seconds that some bytes keep every port busy, ways out first, then ways in, float64 [2 ports].

        Args:
            out_bytes: that leave through each port, float64 [ports].
            in_bytes: that come in.
            efficiency: what the transport reaches of the network's achievable bandwidth.
            server_byte_per_s: rate at which a machine of the group can take (and sum) what comes from the network.
        """
        rates = np.where(self._network, self._rates * efficiency, self._rates)
        own = rates.copy()
        if len(self.machine_ports):
            own[self.machine_ports[0, : len(self.machines)]] = np.minimum(
                own[self.machine_ports[0, : len(self.machines)]], server_byte_per_s
            )
        if self.servers.count:
            own[-self.servers.count :] = np.minimum(own[-self.servers.count :], self.servers.sum_byte_per_s)
        return np.concatenate([out_bytes / rates, in_bytes / own])

    def everything(self, seconds: float) -> np.ndarray:
        """The same time on every port of the group (not the servers'), float64 [2 ports]."""
        busy = np.full(len(self.ports), seconds)
        if self.servers.count:
            busy[-self.servers.count :] = 0.0
        return np.concatenate([busy, busy])

    @property
    def network_latency_s(self) -> float:
        """Start-up time of one message between machines; 0 when there is one machine and no server."""
        return self.cluster.levels[self.top].latency_s if self.endpoints > 1 else 0.0


def fabric_of(
    cluster: Cluster, ranks: Sequence[int] | None = None, servers: Servers | None = None, concurrent: int = 1
) -> Fabric:
    """The fabric of some ranks of a cluster (all of them by default), in any order.

    Raises:
        JobError: ranks that are not in the cluster, or twice.
        HardwareError: servers on a cluster without a network.
    """
    chosen = range(cluster.device_count) if ranks is None else ranks
    return Fabric(cluster, tuple(sorted(int(r) for r in chosen)), servers or Servers(0), concurrent)
