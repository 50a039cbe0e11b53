"""Exchange through servers: every machine pushes what it summed to the servers' shares, and pulls the result.

Colocated servers run on the group's own machines. With equal shares each machine moves 2(n-1)/n M each direction,
exactly as in a ring all-reduce; any gain of such servers must come from the transport (`efficiency`), from start-up
times, or from sparse gradients. With full variables on one server each (`greedy`, `round-robin`) the fullest server
moves (n-1) times what it holds, each direction.

Separate servers run on machines of their own: max(M/B, nM/(kB)) for k of them, pushes and pulls at the same time. That
is half the bytes of a ring for the n workers, but each of the k servers moves n/k M each direction (Jiang et al.,
BytePS, OSDI 2020, section 2), so fewer servers than workers are the bottleneck.

The ranks of a machine sum first; afterwards the result is spread among them: the legs of a message before it leaves
through the network port, and after it.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from planner.errors import UsageError
from planner.exchange import SCHEMES
from planner.exchange.fabric import HOST_SUM_BYTE_PER_S, Fabric, PortTraffic, nothing, push_traffic, rank_traffic
from planner.exchange.recipe import Content, ElementBytes, ExchangeStep, Group, Recipe
from planner.exchange.scheme import Bucket, Leg, Message, MessagePlan, Scheme, dense_note, part_of
from planner.exchange.types import MemoryFactors, Step
from planner.hardware import Collective, Terms, collective_terms, moved_bytes
from planner.sums import float_sum


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
        groups: for each reduce-scatter, the ports it keeps busy (int64 indices, outgoing then incoming) and its cost.
        copy_s_per_byte: seconds a byte on every port, float64 [2 ports], of the copy to the host or the network card.
        latency_s: start-up time of that copy.
        traffic: bytes through every port when one byte is summed; spreading the result moves the same bytes back.
    """

    groups: tuple[tuple[np.ndarray, Terms], ...]
    copy_s_per_byte: np.ndarray
    latency_s: float
    traffic: PortTraffic

    def legs(self, push_bytes: float, pull_bytes: float) -> tuple[Leg, Leg]:
        """The leg before the network and the leg after it; a gather costs as much as the scatter."""
        ports = len(self.traffic.fabric.ports)
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
        return MachineSum((), np.zeros(2 * len(fabric.ports)), 0.0, nothing(fabric))
    if inside is Inside.PCIE:
        return _through_host(fabric, levels)
    to_card = _to_card(fabric, card_ranks) if inside is Inside.NVLINK else nothing(fabric)
    latency_s = fabric.cluster.levels[levels[-1]].latency_s if to_card.out_bytes.any() else 0.0
    machines = _split(fabric, fabric.node_size)
    groups = tuple(_scatter(fabric, positions, levels) for positions in machines if len(positions) > 1)
    return MachineSum(groups, to_card.busy_s(), latency_s, to_card + _ring(fabric, machines))


def _split(fabric: Fabric, size: int) -> list[np.ndarray]:
    """Positions of the ranks in each block of `size` consecutive devices, one array a block."""
    blocks = np.asarray(fabric.ranks) // size
    return [np.flatnonzero(blocks == block) for block in np.unique(blocks)]


def _scatter(fabric: Fabric, positions: np.ndarray, levels: list[int]) -> tuple[np.ndarray, Terms]:
    """The ports that a reduce-scatter among some ranks keeps busy, and its cost."""
    ports = np.unique(fabric.rank_ports[np.ix_(np.asarray(levels, dtype=np.int64), positions)])
    ranks = [fabric.ranks[i] for i in positions]
    terms = collective_terms(fabric.cluster, Collective.REDUCE_SCATTER, ranks)
    return np.concatenate([ports, ports + len(fabric.ports)]), terms


def _ring(fabric: Fabric, groups: list[np.ndarray]) -> PortTraffic:
    """Traffic of a reduce-scatter of one byte around a ring in each group."""
    rings = [g for g in groups if len(g) > 1]
    if not rings:
        return nothing(fabric)
    source = np.concatenate(rings)
    target = np.concatenate([np.roll(g, -1) for g in rings])
    counts = np.concatenate([np.full(len(g), moved_bytes(Collective.REDUCE_SCATTER, 1.0, len(g))) for g in rings])
    return rank_traffic(fabric, source, target, counts)


def _to_card(fabric: Fabric, card_ranks: int) -> PortTraffic:
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
    return MachineSum(groups, up.busy_s(), fabric.cluster.levels[host].latency_s, up + _ring(fabric, switches))


class ServerPlacement(StrEnum):
    """Placement of variables on servers: equal shards, or each on one server, the least loaded one or in turn."""

    EVEN = "even"
    GREEDY = "greedy"
    ROUND_ROBIN = "round-robin"


def through_servers(pulled: Content, optimizer: Group | None = None) -> Recipe:
    """The recipe of an exchange through servers: a scatter of gradients to them (push), a gather from them (pull).

    Args:
        pulled: gradients from servers that only sum, weights from servers that update.
        optimizer: who shards the optimizer state.
    """
    push = ExchangeStep(Collective.REDUCE_SCATTER, Content.GRADIENTS, group=Group.SERVERS)
    pull = ExchangeStep(Collective.ALL_GATHER, pulled, group=Group.SERVERS)
    return Recipe((push, pull), optimizer=optimizer)


SUMMED_ON_SERVERS = through_servers(Content.GRADIENTS)
"""The servers only sum; every rank updates its weights."""

UPDATED_ON_SERVERS = through_servers(Content.WEIGHTS, Group.SERVERS)
"""The servers hold the optimizer state and update the weights."""


def placements(sendings: Sequence[Bucket]) -> dict[str, tuple[float, ...]]:
    """The servers of each variable: the mean of its pieces' shares, weighted by bytes (equally when all are empty)."""
    pieces_of: dict[str, list[Bucket]] = {}
    for s in sendings:
        for name in s.variables:
            pieces_of.setdefault(name, []).append(s)
    return {name: _mean(pieces) for name, pieces in pieces_of.items()}


def _mean(pieces: list[Bucket]) -> tuple[float, ...]:
    if all(p.shares == pieces[0].shares for p in pieces):
        return pieces[0].shares
    weights = np.asarray([p.gradient_bytes for p in pieces])
    weights = weights / weights.sum() if weights.sum() > 0 else np.full(len(pieces), 1 / len(pieces))
    return tuple(float(x) for x in weights @ np.asarray([p.shares for p in pieces]))


def even(fabric: Fabric, first: int, count: int) -> tuple[float, ...]:
    """Equal shares for `count` endpoints, from `first` on."""
    shares = [0.0] * fabric.endpoints
    shares[first : first + count] = [1 / count] * count
    return tuple(shares)


def least_loaded(sizes: Sequence[float], servers: int) -> tuple[int, ...]:
    """The server of each size: largest size first, each to the server with the least load; ties to the lowest number.

    At most 4/3 - 1/(3k) times the best possible load (Graham, 1969). O(sizes * (log(sizes) + servers)).
    """
    loads = [0.0] * servers
    server_of = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        server_of[i] = min(range(servers), key=lambda s: loads[s])
        loads[server_of[i]] += sizes[i]
    return tuple(server_of)


def push_pull_bytes(recipe: Recipe, sizes: ElementBytes) -> tuple[float, float]:
    """Bytes that a machine pushes, and pulls, under a recipe of `through_servers`."""
    push, pull = (step.payload(sizes) for step in recipe.steps)
    return push, pull


def place_variables(
    fabric: Fabric, step: Step, recipe: Recipe, first: int, count: int, placement: str
) -> tuple[Bucket, ...]:
    """One message a variable to `count` servers, from endpoint `first` on, laid on them by `placement`."""
    arrivals = step.arrivals()
    if placement is ServerPlacement.EVEN:
        shares = [even(fabric, first, count)] * len(arrivals)
    else:
        loads = [float_sum(push_pull_bytes(recipe, v.sent)) for v in step.variables]
        numbers = least_loaded(loads, count) if placement is ServerPlacement.GREEDY else range(len(loads))
        server = {v.name: number % count for v, number in zip(step.variables, numbers, strict=True)}
        shares = [even(fabric, first + server[v.name], 1) for v in arrivals]
    return tuple(
        Bucket((v.name,), v.sent.gradient_bytes, step.ready_s(v), v.sent.weight_bytes, share)
        for v, share in zip(arrivals, shares, strict=True)
    )


def fullest(sendings: Sequence[Bucket], step: Step) -> float:
    """The fraction of all weights on the fullest server."""
    total = float_sum(v.pulled_bytes for v in step.variables)
    if total == 0 or not sendings:
        return 0.0
    sizes = {v.name: v.pulled_bytes for v in step.variables}
    loads = np.sum([np.asarray(shares) * sizes[name] for name, shares in placements(sendings).items()], axis=0)
    return float(loads.max() / total)


class ThroughServers(Scheme):
    """A scheme that sends every variable through servers. Subclasses are dataclasses of its options."""

    __slots__ = ()

    method = "ps"
    """Name of its transfers."""
    inside: Inside = Inside.SCATTER
    partition_bytes: float
    efficiency: float
    sum_byte_per_s: float = HOST_SUM_BYTE_PER_S

    @abstractmethod
    def pushes(self, fabric: Fabric, step: Step) -> Sequence[Bucket]:
        """The messages to the servers and back."""
        ...

    def ranks_at_card(self, fabric: Fabric) -> int:
        """Ranks of a machine beside its network cards, for `inside` by NVLink."""
        return 2

    def plan_messages(self, fabric: Fabric, step: Step) -> MessagePlan:
        """Push and pull each message; servers that only sum get sparse gradients in full."""
        plan = self.plan_pushes(fabric, self.pushes(fabric, step))
        return dataclasses.replace(plan, notes=dense_note(step)) if self.recipe is SUMMED_ON_SERVERS else plan

    def plan_pushes(self, fabric: Fabric, sendings: Sequence[Bucket]) -> MessagePlan:
        """Messages of four legs: sum inside, push, pull, spread inside.

        O(messages + kinds * ports), where messages of one kind have equal sizes and shares.
        """
        inside = machine_sum(fabric, self.inside, self.ranks_at_card(fabric))
        kinds: dict[tuple[tuple[float, ...], float, float], tuple[Leg, ...]] = {}
        totals: dict[tuple[float, ...], tuple[float, float]] = {}
        units = {shares: push_traffic(fabric, np.asarray(shares)) for shares in {s.shares for s in sendings}}
        messages = []
        for s in sendings:
            push, pull = push_pull_bytes(self.recipe, s)
            kind = (s.shares, push, pull)
            if kind not in kinds:
                kinds[kind] = self._legs(push, pull, units[s.shares], inside)
            pushed, pulled = totals.get(s.shares, (0.0, 0.0))
            totals[s.shares] = (pushed + push, pulled + pull)
            chunk = part_of(self.partition_bytes, max(push, pull))
            messages.append(Message(s.variables, self.method, push, s.ready_s, kinds[kind], chunk))
        total = nothing(fabric)
        for shares, (pushed, pulled) in totals.items():
            there = units[shares] + inside.traffic
            total = total + there * pushed + there.turned() * pulled
        return MessagePlan(tuple(messages), total, placements(sendings))

    def _legs(self, push: float, pull: float, unit: PortTraffic, inside: MachineSum) -> tuple[Leg, ...]:
        """The legs of a message, without those that keep no port busy."""
        before, after = inside.legs(push, pull)
        busy = (
            (unit * push).busy_s(self.efficiency, self.sum_byte_per_s),
            (unit.turned() * pull).busy_s(self.efficiency),
        )
        across = (Leg(b, unit.fabric.network_latency_s) for b in busy)
        return tuple(leg for leg in (before, *across, after) if leg.busy_s.any())


@dataclass(frozen=True, slots=True)
class ParameterServers(ThroughServers):
    """Servers that hold and update the weights.

    Attributes:
        key: its name.
        separate: whether they are the servers of the fabric, or one on every machine of the group.
        placement: how variables are laid on the servers.
        partition_bytes: size of the pieces that are pushed and pulled at the same time.
        efficiency: the fraction of the network's achievable bandwidth that the transport reaches.
        sum_byte_per_s: rate at which a machine of the group sums what it receives.
    """

    key: str
    separate: bool = field()
    placement: ServerPlacement = ServerPlacement.EVEN
    partition_bytes: float = 4e6
    efficiency: float = 1.0
    sum_byte_per_s: float = HOST_SUM_BYTE_PER_S

    recipe = UPDATED_ON_SERVERS

    def memory(self, fabric: Fabric, step: Step) -> MemoryFactors:
        """Weights and gradients on every rank, the optimizer state on the servers."""
        fullest_part = fullest(self.pushes(fabric, step), step)
        return dataclasses.replace(Scheme.memory(self, fabric, step), server_optimizer=fullest_part)

    def supports(self, fabric: Fabric) -> str:
        """Separate ones need a fabric with servers, which have a rate of their own."""
        if not self.separate:
            return ""
        if self.sum_byte_per_s != HOST_SUM_BYTE_PER_S:
            return "separate parameter servers sum at the rate of the fabric's servers, not at sum_byte_per_s"
        return "" if fabric.servers.count else "separate parameter servers need servers beside the group"

    def pushes(self, fabric: Fabric, step: Step) -> tuple[Bucket, ...]:
        """One message a variable; of a sparse one only the touched rows."""
        machines = len(fabric.machines)
        first, count = (machines, fabric.servers.count) if self.separate else (0, machines)
        return place_variables(fabric, step, self.recipe, first, count, self.placement)


COLOCATED = ParameterServers("ps-colocated", separate=False)
SCHEMES.register("ps-colocated", COLOCATED)
SCHEMES.register("ps-separate", ParameterServers("ps-separate", separate=True))
