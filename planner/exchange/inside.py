"""Sums inside a machine: the legs of a message before it leaves through servers or the network port, and after it.

The ranks of a machine sum first; afterwards the result is spread among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from planner.errors import UsageError
from planner.exchange.fabric import Fabric, Traffic, nothing, rank_traffic
from planner.exchange.messages import Leg
from planner.hardware import Collective, Terms, collective_terms, moved_bytes


class Inside(StrEnum):
    """How the ranks of a machine sum.

    SCATTER: a reduce-scatter over all ranks; each rank sends its own shard on. PCIE: a reduce-scatter under each PCIe
    switch, then the host sums one copy per switch. NVLINK: a reduce-scatter over all ranks, then a gather of the shards
    on the ranks beside the network card. AUTO: PCIE where the innermost level of the machine is named so, else NVLINK.
    """

    AUTO = "auto"
    SCATTER = "scatter"
    PCIE = "pcie"
    NVLINK = "nvlink"


@dataclass(frozen=True)
class MachineSum:
    """The cost of summing inside the machines: affine in the payload, but for the choice of a collective's algorithm.

    Attributes:
        fabric: the ranks and their ports.
        groups: for each reduce-scatter, the ports it keeps busy (int64 indices, outgoing then incoming) and its cost.
        copy_s_per_byte: seconds a byte on every port, float64 [2 ports], of the copy to the host or the network card.
        latency_s: start-up time of that copy.
        traffic: bytes through every port when one byte is summed; spreading the result moves the same bytes back.
    """

    fabric: Fabric
    groups: tuple[tuple[np.ndarray, Terms], ...]
    copy_s_per_byte: np.ndarray
    latency_s: float
    traffic: Traffic

    def legs(self, push_bytes: float, pull_bytes: float) -> tuple[Leg, Leg]:
        """The leg before the network and the leg after it; a gather costs as much as the scatter."""
        ports = len(self.fabric.ports)
        back = np.concatenate([self.copy_s_per_byte[ports:], self.copy_s_per_byte[:ports]])
        return self._leg(push_bytes, self.copy_s_per_byte), self._leg(pull_bytes, back)

    def _leg(self, payload_bytes: float, copy_s_per_byte: np.ndarray) -> Leg:
        busy = copy_s_per_byte * payload_bytes
        for ports, terms in self.groups:
            busy[ports] += float(terms.seconds(payload_bytes))
        return Leg(busy, self.latency_s)


def machine_sum(fabric: Fabric, inside: Inside, card_ranks: int = 2) -> MachineSum:
    """The cost of summing inside the machines of a fabric.

    Args:
        fabric: the ranks and their ports.
        inside: how the ranks of a machine sum.
        card_ranks: ranks beside the network card, for NVLINK.

    Raises:
        UsageError: no rank beside the network card.
    """
    if card_ranks < 1:
        raise UsageError(f"{card_ranks} ranks beside the network card", hint="use at least one")
    levels = [i for i in range(fabric.top + 1) if fabric.cluster.group_sizes()[i] <= fabric.node_size]
    if inside is Inside.AUTO:
        inside = Inside.PCIE if levels and "pcie" in fabric.cluster.levels[0].name else Inside.NVLINK
    if not levels:
        return MachineSum(fabric, (), np.zeros(2 * len(fabric.ports)), 0.0, nothing(fabric))
    if inside is Inside.PCIE:
        return _through_host(fabric, levels)
    to_card = _to_card(fabric, card_ranks) if inside is Inside.NVLINK else nothing(fabric)
    latency_s = fabric.cluster.levels[levels[-1]].latency_s if to_card.out_bytes.any() else 0.0
    machines = _split(fabric, fabric.node_size)
    groups = tuple(_scatter(fabric, positions, levels) for positions in machines if len(positions) > 1)
    return MachineSum(fabric, groups, to_card.busy_s(), latency_s, to_card + _ring(fabric, machines))


def _split(fabric: Fabric, size: int) -> list[np.ndarray]:
    """Positions of the ranks in each block of `size` consecutive devices, one array a block."""
    blocks = np.asarray(fabric.ranks) // size
    return [np.flatnonzero(blocks == block) for block in np.unique(blocks)]


def _scatter(fabric: Fabric, positions: np.ndarray, levels: list[int]) -> tuple[np.ndarray, Terms]:
    """The ports that a reduce-scatter among some ranks keeps busy, and its cost."""
    ports = np.unique(fabric.rank_ports[np.ix_(np.asarray(levels, dtype=np.int64), positions)])
    ranks = [fabric.ranks[i] for i in positions]
    terms = collective_terms(fabric.cluster, Collective.REDUCE_SCATTER, ranks, fabric.concurrent)
    return np.concatenate([ports, ports + len(fabric.ports)]), terms


def _ring(fabric: Fabric, groups: list[np.ndarray]) -> Traffic:
    """Traffic of a reduce-scatter of one byte around a ring in each group."""
    rings = [g for g in groups if len(g) > 1]
    if not rings:
        return nothing(fabric)
    source = np.concatenate(rings)
    target = np.concatenate([np.roll(g, -1) for g in rings])
    counts = np.concatenate([np.full(len(g), moved_bytes(Collective.REDUCE_SCATTER, 1.0, len(g))) for g in rings])
    return rank_traffic(fabric, source, target, counts)


def _to_card(fabric: Fabric, card_ranks: int) -> Traffic:
    """Traffic of the shards of one byte to the first ranks of each machine, which are beside the network card."""
    sources, targets, counts = [], [], []
    for positions in _split(fabric, fabric.node_size):
        beside, others = positions[:card_ranks], positions[card_ranks:]
        pairs = np.stack(np.meshgrid(others, beside, indexing="ij"), axis=-1).reshape(-1, 2)
        sources.append(pairs[:, 0])
        targets.append(pairs[:, 1])
        counts.append(np.full(len(pairs), 1 / len(positions) / len(beside)))
    return rank_traffic(fabric, np.concatenate(sources), np.concatenate(targets), np.concatenate(counts))


def _through_host(fabric: Fabric, levels: list[int]) -> MachineSum:
    """A reduce-scatter under each switch, then one copy per switch to the host: 1 byte out of each switch."""
    host = levels[-1]
    switches = _split(fabric, fabric.child_size(host))
    groups = tuple(_scatter(fabric, s, levels[:-1]) for s in switches if len(s) > 1)
    up = nothing(fabric)
    for positions in switches:
        for level in levels:
            np.add.at(up.out_bytes, fabric.rank_ports[level, positions], 1 / len(positions))
    return MachineSum(fabric, groups, up.busy_s(), fabric.cluster.levels[host].latency_s, up + _ring(fabric, switches))
