"""Exchange through servers: machines push what they summed to whoever holds a share, and pull the result.

Parameter servers on the group's own machines: gradients are pushed, updated weights are pulled.

With equal shards each machine moves 2(n-1)/n M each direction, exactly as in a ring all-reduce; whatever such servers
gain must come from the transport (`efficiency`), from start-up times, or from sparse gradients. Whole variables on one
server each (`greedy`, `round-robin`) leave the fullest server with (n-1) times what it holds, each direction.

Parameter servers on machines of their own: max(M/B, nM/(kB)) for k of them, pushes and pulls at the same time.

Half the bytes of a ring for the n workers, but each of the k servers moves n/k M each direction (Jiang et al., BytePS,
OSDI 2020, section 2), so fewer servers than workers are the bottleneck.

Inside a machine the ranks sum before its servers or its network port, and the result is spread among them afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from planner.errors import UsageError
from planner.exchange import SCHEMES
from planner.exchange._defaults import Defaults, positive
from planner.exchange.fabric import HOST_SUM_BYTE_PER_S, Fabric, Traffic, nothing, push_traffic, rank_traffic
from planner.exchange.messages import Leg, Message
from planner.exchange.recipe import Content, ElementBytes, ExchangeStep, Group, Recipe
from planner.exchange.types import Draft, Facts, MemoryFactors, Placement, Step
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


class ServerPlacement(StrEnum):
    """Where variables lie: in equal shards everywhere, or whole, dealt to the least loaded server or in turn."""

    EVEN = "even"
    GREEDY = "greedy"
    ROUND_ROBIN = "round-robin"


def through_servers(pulled: Content, optimizer: Group | None = None) -> Recipe:
    """Gradients pushed to the servers' shards, and what these make of them pulled by every rank.

    Args:
        pulled: gradients from servers that only sum, weights from servers that update.
        optimizer: who has the optimizer state in shards.
    """
    push = ExchangeStep(Collective.REDUCE_SCATTER, Content.GRADIENTS, group=Group.SERVERS)
    pull = ExchangeStep(Collective.ALL_GATHER, pulled, group=Group.SERVERS)
    return Recipe((push, pull), optimizer=optimizer)


SUMMED_ON_SERVERS = through_servers(Content.GRADIENTS)
"""Servers that only sum; every rank updates."""

UPDATED_ON_SERVERS = through_servers(Content.WEIGHTS, Group.SERVERS)
"""Servers that hold the optimizer state and update."""


@dataclass(frozen=True, slots=True)
class Sending:
    """What goes to the servers as one message; `shares[e]` of it is endpoint e's, and they sum to 1."""

    variables: tuple[str, ...]
    push_bytes: float
    pull_bytes: float
    ready_s: float
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Transport:
    """How messages travel to the servers and back.

    Attributes:
        method: what the transfers are called.
        inside: how a machine sums first.
        partition_bytes: a message is pulled partition by partition while it is pushed.
        efficiency: what the transport reaches of the network's achievable bandwidth.
        sum_byte_per_s: rate at which a machine of the group sums what it receives.
        card_ranks: ranks beside the network card.
    """

    method: str
    inside: Inside = Inside.SCATTER
    partition_bytes: float = 4e6
    efficiency: float = 1.0
    sum_byte_per_s: float = HOST_SUM_BYTE_PER_S
    card_ranks: int = 2


def draft_servers(fabric: Fabric, sendings: Sequence[Sending], transport: Transport) -> Draft:
    """Messages of four legs: sum inside, push, pull, spread inside.

    O(messages + kinds * ports), a kind being a size with its shares.
    """
    inside = local(fabric, transport.inside, transport.card_ranks)
    kinds: dict[tuple[tuple[float, ...], float, float], tuple[Leg, ...]] = {}
    totals: dict[tuple[float, ...], tuple[float, float]] = {}
    units = {shares: push_traffic(fabric, np.asarray(shares)) for shares in {s.shares for s in sendings}}
    messages = []
    for s in sendings:
        kind = (s.shares, s.push_bytes, s.pull_bytes)
        if kind not in kinds:
            kinds[kind] = _legs(fabric, s, units[s.shares], inside, transport)
        pushed, pulled = totals.get(s.shares, (0.0, 0.0))
        totals[s.shares] = (pushed + s.push_bytes, pulled + s.pull_bytes)
        largest = max(s.push_bytes, s.pull_bytes)
        chunk = min(1.0, transport.partition_bytes / largest) if largest > 0 else 1.0
        messages.append(Message(s.variables, transport.method, s.push_bytes, s.ready_s, kinds[kind], chunk))
    total = nothing(fabric)
    for shares, (pushed, pulled) in totals.items():
        total = total + (units[shares] + inside.traffic) * pushed + (units[shares] + inside.traffic).turned() * pulled
    methods = {v: transport.method for s in sendings for v in s.variables}
    return Draft(tuple(messages), total, methods, placements(sendings))


def _legs(fabric: Fabric, s: Sending, unit: Traffic, inside: Local, transport: Transport) -> tuple[Leg, ...]:
    """The legs that keep some port busy."""
    before, after = inside.legs(s.push_bytes, s.pull_bytes)
    busy = (
        (unit * s.push_bytes).busy_s(transport.efficiency, transport.sum_byte_per_s),
        (unit.turned() * s.pull_bytes).busy_s(transport.efficiency),
    )
    across = (Leg(b, fabric.network_latency_s) for b in busy)
    return tuple(leg for leg in (before, *across, after) if leg.busy_s.any())


def placements(sendings: Sequence[Sending]) -> tuple[Placement, ...]:
    """Where each variable lies: its pieces' shares by their bytes (by their number when they have none)."""
    found: dict[str, list[Sending]] = {}
    for s in sendings:
        for name in s.variables:
            found.setdefault(name, []).append(s)
    return tuple(Placement(name, _mean(pieces)) for name, pieces in found.items())


def _mean(pieces: list[Sending]) -> tuple[float, ...]:
    if all(p.shares == pieces[0].shares for p in pieces):
        return pieces[0].shares
    weights = np.asarray([p.push_bytes for p in pieces])
    weights = weights / weights.sum() if weights.sum() > 0 else np.full(len(pieces), 1 / len(pieces))
    return tuple(float(x) for x in weights @ np.asarray([p.shares for p in pieces]))


def even(fabric: Fabric, first: int, count: int) -> tuple[float, ...]:
    """Equal shares at `count` endpoints from `first` on."""
    shares = [0.0] * fabric.endpoints
    shares[first : first + count] = [1 / count] * count
    return tuple(shares)


def one(fabric: Fabric, endpoint: int) -> tuple[float, ...]:
    """All of it at one endpoint."""
    return even(fabric, endpoint, 1)


def least_loaded(sizes: Sequence[float], servers: int) -> tuple[int, ...]:
    """A server for each size: largest first, each to the one with the least so far; ties to the lowest number.

    At most 4/3 - 1/(3k) times the best possible load (Graham, 1969). O(sizes * (log(sizes) + servers)).
    """
    loads = [0.0] * servers
    chosen = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        chosen[i] = min(range(servers), key=lambda s: loads[s])
        loads[chosen[i]] += sizes[i]
    return tuple(chosen)


def in_turn(sizes: Sequence[float], servers: int) -> tuple[int, ...]:
    """A server for each size, dealt in turn."""
    return tuple(i % servers for i in range(len(sizes)))


def sent(recipe: Recipe, sizes: ElementBytes) -> tuple[float, float]:
    """Bytes that a machine pushes and pulls."""
    push, pull = (step.payload(sizes) for step in recipe.steps)
    return push, pull


def whole_or_cut(
    fabric: Fabric, step: Step, recipe: Recipe, first: int, count: int, placement: str
) -> tuple[Sending, ...]:
    """Every variable to `count` servers from endpoint `first` on."""
    arrivals = step.arrivals()
    sizes = [sent(recipe, v.sent) for v in arrivals]
    if placement is ServerPlacement.EVEN:
        shares = [even(fabric, first, count)] * len(arrivals)
    else:
        place = least_loaded if placement is ServerPlacement.GREEDY else in_turn
        order = {v.name: i for i, v in enumerate(step.variables)}
        chosen = place([sum(sent(recipe, v.sent)) for v in step.variables], count)
        shares = [one(fabric, first + chosen[order[v.name]]) for v in arrivals]
    return tuple(
        Sending((v.name,), push, pull, step.ready_s(v), share)
        for v, (push, pull), share in zip(arrivals, sizes, shares, strict=True)
    )


def fullest(sendings: Sequence[Sending], step: Step) -> float:
    """The part of all weights that the fullest server holds."""
    total = sum(v.pulled_bytes for v in step.variables)
    if total == 0 or not sendings:
        return 0.0
    sizes = {v.name: v.pulled_bytes for v in step.variables}
    loads = np.sum([np.asarray(p.shares) * sizes[p.variable] for p in placements(sendings)], axis=0)
    return float(loads.max() / total)


@dataclass(frozen=True, slots=True)
class HeldOnServers(Defaults):
    """Weights that parameter servers hold and update.

    Attributes:
        placement: how variables are laid on the servers.
        partition_bytes: pushed and pulled at the same time in pieces of this size.
        efficiency: what the transport reaches of the network's achievable bandwidth.
    """

    placement: ServerPlacement = ServerPlacement.EVEN
    partition_bytes: float = 4e6
    efficiency: float = 1.0

    recipe = UPDATED_ON_SERVERS

    def memory(self, fabric: Fabric, step: Step) -> MemoryFactors:
        """Weights and gradients on every rank, the optimizer state on the servers."""
        return MemoryFactors(1.0, 1.0, 0.0, fullest(self._sendings(fabric, step), step))

    def draft(self, fabric: Fabric, step: Step) -> Draft:
        """One message a variable, sparse ones with the touched rows alone."""
        positive(self, "efficiency", "partition_bytes")
        return draft_servers(fabric, self._sendings(fabric, step), self.transport())

    def transport(self) -> Transport:
        """How messages travel."""
        return Transport("ps", partition_bytes=self.partition_bytes, efficiency=self.efficiency)

    def servers(self, fabric: Fabric) -> tuple[int, int]:
        """First endpoint of the servers, and how many there are: all machines of the group."""
        return 0, len(fabric.machines)

    def _sendings(self, fabric: Fabric, step: Step) -> tuple[Sending, ...]:
        return whole_or_cut(fabric, step, self.recipe, *self.servers(fabric), self.placement)


@dataclass(frozen=True, slots=True)
class ColocatedServers(HeldOnServers):
    """A server on every machine.

    Attributes:
        placement: how variables are laid on the servers.
        partition_bytes: pushed and pulled at the same time in pieces of this size.
        efficiency: what the transport reaches of the network's achievable bandwidth.
        sum_byte_per_s: rate at which a machine sums what it receives.
    """

    sum_byte_per_s: float = HOST_SUM_BYTE_PER_S

    key = "ps-colocated"
    facts = Facts(
        decides="a server for each variable, or equal shards",
        time="2(n-1)/n M/B with equal shards; (n-1) times the fullest server's bytes with whole variables",
        traffic="2(n-1)/n M with equal shards",
        memory="weights and gradients; optimizer state on the servers",
        source="Li et al., OSDI 2014",
    )

    def transport(self) -> Transport:
        """How messages travel; the machines of the group are the servers."""
        positive(self, "sum_byte_per_s")
        return dataclasses.replace(HeldOnServers.transport(self), sum_byte_per_s=self.sum_byte_per_s)


SCHEMES.register("ps-colocated", ColocatedServers())


@dataclass(frozen=True, slots=True)
class SeparateServers(HeldOnServers):
    """The fabric's servers hold the weights."""

    key = "ps-separate"
    facts = Facts(
        decides="a server for each variable, or equal shards",
        time="max(M/B, n/k M/B) for k servers",
        traffic="M a worker, n/k M a server",
        memory="weights and gradients; optimizer state on the servers",
        source="Li et al., OSDI 2014; bound: Jiang et al., OSDI 2020",
    )

    def supports(self, fabric: Fabric) -> str:
        """A fabric with servers."""
        return "" if fabric.servers.count else "separate parameter servers need servers beside the group"

    def servers(self, fabric: Fabric) -> tuple[int, int]:
        """The fabric's servers."""
        return len(fabric.machines), fabric.servers.count


SCHEMES.register("ps-separate", SeparateServers())
