"""Summing inside a machine before its servers or its network port, and spreading the result afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from planner.errors import UsageError
from planner.exchange.fabric import Fabric
from planner.exchange.messages import Leg
from planner.exchange.traffic import Traffic, nothing, rank_traffic
from planner.hardware import Collective, Terms, collective_terms, moved_bytes


class Inside(StrEnum):
    """How the ranks of a machine sum.

    SCATTER leaves each rank with its shard, which it hands over by itself. PCIE scatters under each switch and has the
    host sum one copy a switch. NVLINK scatters over all ranks and gathers the shards on those beside the network card.
    AUTO is PCIE where the innermost level of a machine is named so, else NVLINK.
    """

    AUTO = "auto"
    SCATTER = "scatter"
    PCIE = "pcie"
    NVLINK = "nvlink"


@dataclass(frozen=True)
class Local:
    """The legs inside the machines, affine in the payload except for the choice of a collective's algorithm.

    Attributes:
        fabric: where.
        groups: ports (indices into both ways, int64) kept busy by a reduce-scatter, with its cost.
        copy_s_per_byte: further seconds a byte on every port, float64 [2 ports], for the way to the host or card.
        latency_s: start-up time of that copy.
        traffic: bytes of summing one byte; the way back moves them the other way.
    """

    fabric: Fabric
    groups: tuple[tuple[np.ndarray, Terms], ...]
    copy_s_per_byte: np.ndarray
    latency_s: float
    traffic: Traffic

    def legs(self, push_bytes: float, pull_bytes: float) -> tuple[Leg, Leg]:
        """Before the network and after it; a gather costs what the scatter does."""
        ports = len(self.fabric.ports)
        back = np.concatenate([self.copy_s_per_byte[ports:], self.copy_s_per_byte[:ports]])
        return self._leg(push_bytes, self.copy_s_per_byte), self._leg(pull_bytes, back)

    def _leg(self, payload_bytes: float, copy_s_per_byte: np.ndarray) -> Leg:
        busy = copy_s_per_byte * payload_bytes
        for ports, terms in self.groups:
            busy[ports] += float(terms.seconds(payload_bytes))
        return Leg(busy, self.latency_s)


def local(fabric: Fabric, inside: Inside, card_ranks: int = 2) -> Local:
    """The legs of a strategy.

    Args:
        fabric: where.
        inside: the strategy.
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
        return Local(fabric, (), np.zeros(2 * len(fabric.ports)), 0.0, nothing(fabric))
    if inside is Inside.PCIE:
        return _through_host(fabric, levels)
    extra = _to_card(fabric, card_ranks) if inside is Inside.NVLINK else nothing(fabric)
    used = bool(extra.out_bytes.any())
    latency_s = fabric.cluster.levels[levels[-1]].latency_s if used else 0.0
    positions = _split(fabric, fabric.node_size)
    groups = tuple(_scatter(fabric, machine, levels) for machine in positions if len(machine) > 1)
    traffic = extra + _ring(fabric, positions)
    return Local(fabric, groups, extra.busy_s(), latency_s, traffic)


def _split(fabric: Fabric, size: int) -> list[np.ndarray]:
    """Positions of the ranks in each run of `size` devices."""
    blocks = np.asarray(fabric.ranks) // size
    return [np.flatnonzero(blocks == block) for block in np.unique(blocks)]


def _scatter(fabric: Fabric, positions: np.ndarray, levels: list[int]) -> tuple[np.ndarray, Terms]:
    """Ports that a reduce-scatter of some ranks keeps busy, and what it costs."""
    ports = np.unique(fabric.rank_ports[np.ix_(np.asarray(levels, dtype=np.int64), positions)])
    ranks = [fabric.ranks[i] for i in positions]
    terms = collective_terms(fabric.cluster, Collective.REDUCE_SCATTER, ranks, fabric.concurrent)
    return np.concatenate([ports, ports + len(fabric.ports)]), terms


def _ring(fabric: Fabric, groups: list[np.ndarray]) -> Traffic:
    """A reduce-scatter of one byte in each group."""
    several = [g for g in groups if len(g) > 1]
    if not several:
        return nothing(fabric)
    source = np.concatenate(several)
    target = np.concatenate([np.roll(g, -1) for g in several])
    counts = np.concatenate([np.full(len(g), moved_bytes(Collective.REDUCE_SCATTER, 1.0, len(g))) for g in several])
    return rank_traffic(fabric, source, target, counts)


def _to_card(fabric: Fabric, card_ranks: int) -> Traffic:
    """The shards of one byte going to the first ranks of each machine, which are beside the card."""
    sources, targets, counts = [], [], []
    for positions in _split(fabric, fabric.node_size):
        beside, others = positions[:card_ranks], positions[card_ranks:]
        pairs = np.stack(np.meshgrid(others, beside, indexing="ij"), axis=-1).reshape(-1, 2)
        sources.append(pairs[:, 0])
        targets.append(pairs[:, 1])
        counts.append(np.full(len(pairs), 1 / len(positions) / len(beside)))
    return rank_traffic(fabric, np.concatenate(sources), np.concatenate(targets), np.concatenate(counts))


def _through_host(fabric: Fabric, levels: list[int]) -> Local:
    """Scatter under each switch, then one copy a switch to the host: 1 byte out through each switch's way."""
    host = levels[-1]
    switches = _split(fabric, fabric.child_size(host))
    groups = tuple(_scatter(fabric, s, levels[:-1]) for s in switches if len(s) > 1)
    up = nothing(fabric)
    for positions in switches:
        for level in levels:
            np.add.at(up.out_bytes, fabric.rank_ports[level, positions], 1 / len(positions))
    return Local(fabric, groups, up.busy_s(), fabric.cluster.levels[host].latency_s, up + _ring(fabric, switches))
