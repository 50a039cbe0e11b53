"""Bytes counted through the ports of a fabric."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from planner.exchange.fabric import Fabric


@dataclass(frozen=True, slots=True)
class LevelTraffic:
    """Bytes through the ports of one level: the busiest port each way, and all ports together."""

    level: str
    out_bytes: float
    in_bytes: float
    total_bytes: float


@dataclass(frozen=True)
class Traffic:
    """Bytes through every port of a fabric in one step, float64 [ports] each way."""

    fabric: Fabric
    out_bytes: np.ndarray
    in_bytes: np.ndarray

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.fabric, self.out_bytes + other.out_bytes, self.in_bytes + other.in_bytes)

    def __mul__(self, factor: float) -> Traffic:
        return Traffic(self.fabric, self.out_bytes * factor, self.in_bytes * factor)

    def turned(self) -> Traffic:
        """The same bytes the other way."""
        return Traffic(self.fabric, self.in_bytes, self.out_bytes)

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
        """What all devices (and servers) send: each byte counted where it leaves a device, or a machine for another."""
        ports = self.fabric.ports
        levels = ({p.level for p in ports if p.network is network} for network in (False, True))
        first = {min(own) for own in levels if own}
        counted = np.array([p.level in first or p.child < 0 for p in ports], dtype=bool)
        return float(self.out_bytes[counted].sum()) if len(counted) else 0.0

    def by_level(self) -> tuple[LevelTraffic, ...]:
        """The busiest port and the sum of every level, innermost first."""
        level_of = np.asarray([p.level for p in self.fabric.ports], dtype=np.int64)
        return tuple(
            LevelTraffic(
                self.fabric.cluster.levels[i].name,
                float(self.out_bytes[level_of == i].max()),
                float(self.in_bytes[level_of == i].max()),
                float(self.out_bytes[level_of == i].sum()),
            )
            for i in range(self.fabric.top + 1)
        )


def nothing(fabric: Fabric) -> Traffic:
    """No traffic."""
    return Traffic(fabric, np.zeros(len(fabric.ports)), np.zeros(len(fabric.ports)))


def rank_traffic(fabric: Fabric, source: np.ndarray, target: np.ndarray, byte_counts: np.ndarray | float) -> Traffic:
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
    return Traffic(fabric, out_bytes, in_bytes)


def push_traffic(fabric: Fabric, shares: np.ndarray) -> Traffic:
    """Traffic when every machine of the group sends `shares[e]` bytes to each endpoint e but itself.

    What goes to a server on the same machine passes no port. O(endpoints * network levels).
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
    return Traffic(fabric, out_bytes, in_bytes)


def spread_traffic(fabric: Fabric, held_bytes: np.ndarray) -> Traffic:
    """Traffic when every rank pushes what it holds to servers on all machines, and pulls as much, shards spread evenly.

    Of the B_i bytes that the ranks of machine i hold, each of N machines serves a part: machine i pushes B_i / N to
    machine j and answers the pulls of j's ranks with B_j / N. A rank's own port passes what it holds.

    Args:
        fabric: of the ranks.
        held_bytes: float64 [ranks], in the order of `fabric.ranks`.
    """
    held = dict(zip(fabric.ranks, held_bytes.tolist(), strict=True))
    machine = np.array([sum(held[rank] for rank in own) for own in fabric.machines])
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
    return Traffic(fabric, out_bytes, in_bytes)
