"""Schemes of collectives: all-reduces of gradients and ZeRO; and the steps of a recipe on the actual topology, with
seconds from the hardware's cost models and bytes by counting every flow.

All-reduces run by one algorithm, by the cheapest for each bucket, or by switches that add:

- ring: every rank passes shards to the next, once around to add and once around to spread: 2(n-1)/n M through every
  port, each direction, in 2(n-1) steps (Patarasuk and Yuan, JPDC 2009);
- tree: sums go up a tree and results down it, in two trees that share the work; the payload passes every port once up
  and down, start-up grows with log(n) (Sanders, Speck and Traeff, 2009);
- hierarchical: scatter inside each machine, all-reduce the shards across, gather inside. With g ranks a machine and m
  machines, 2(g-1)/g M pass a device's port inside and 2(m-1)/m M a machine's, less than in one ring over all ranks;
  start-up is that of 2(g-1) steps inside and 2(m-1) across. Every machine needs the same number of ranks;
- all-reduce: the cheapest for each bucket, as collective libraries choose by size;
- in-network: the switches add, so a port passes the payload once each way for any number of machines. Devices of a
  machine scatter first and gather afterwards, or with `inside` their own switch adds as well. On a network of several
  levels each switch passes one sum upward (Graham et al., SHARP, COMHPC 2016). No hardware profile says whether its
  switches can add: whoever asks for this scheme has some that do.

ZeRO holds model state in shards over the ranks, gathered and scattered while the step runs:

- ZeRO-1 shards the optimizer state. Gradients are scattered, each rank updates its shard, weights are gathered. The
  bytes are those of an all-reduce, 2(n-1)/n M (Rajbhandari et al., SC 2020). Gradients accumulate in full and travel
  once a step;
- ZeRO-2 shards optimizer state and gradients: 2(n-1)/n M in a step of one micro-batch (Rajbhandari et al., SC 2020). A
  rank has no room for full gradients, so every micro-batch scatters its own: m micro-batches move (m+1)(n-1)/n M;
- ZeRO-3 (FSDP) shards weights, gradients and optimizer state; weights are gathered unit by unit when needed: 3(n-1)/n M
  in a step of one micro-batch (Rajbhandari et al., SC 2020; Zhao et al., PyTorch FSDP, VLDB 2023). Every micro-batch
  gathers weights in the forward and again in the backward, and scatters gradients. A unit is gathered while the one
  before it computes, which takes the memory of two.

Gathers and scatters of ZeRO run within the passes, so they are priced where passes are: jobs choose a stage by number.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np

from planner.exchange import SCHEMES
from planner.exchange.fabric import Fabric, PortTraffic, nothing, rank_traffic
from planner.exchange.recipe import SUMMED, Content, ExchangeStep, Group, Phase, Recipe, groups_of, step_terms
from planner.exchange.scheme import MEGABYTE, Bucket, Leg, Message, MessagePlan, Scheme, dense_note, pack, part_of
from planner.exchange.servers import Inside, MachineSum, machine_sum
from planner.exchange.types import Step
from planner.hardware import COLUMNS, DIRECT, MEASURED, Cluster, Collective, Terms
from planner.hardware.collectives import ALGORITHMS
from planner.sums import float_sum

CHEAPEST = ""
"""In place of an algorithm: whichever is cheapest for the payload."""


def unmeasured(cluster: Cluster) -> Cluster:
    """The cluster without its measured collectives, which do not apply to algorithms that were not measured."""
    return dataclasses.replace(cluster, levels=tuple(dataclasses.replace(v, fits=()) for v in cluster.levels))


def affine(fabric: Fabric, step: ExchangeStep, algorithm: str) -> tuple[float, float] | None:
    """Start-up seconds and seconds a byte of one algorithm; None where the group cannot use it.

    Measured collectives replace the algorithms that libraries run at large sizes. On a single level some algorithms
    are the same as another one.
    """
    equivalent = (ALGORITHMS[algorithm].alone if _single_level(fabric) else "") or algorithm
    measured = ALGORITHMS[equivalent].measured
    cluster = fabric.cluster if measured else unmeasured(fabric.cluster)
    terms = step_terms(cluster, step, fabric.ranks)
    for name in (MEASURED, equivalent, DIRECT):
        column = COLUMNS.index(name)
        if np.isfinite(terms.latency_s[column]):
            return float(terms.latency_s[column]), float(terms.s_per_byte[column])
    return None


def priced(
    fabric: Fabric, step: ExchangeStep, payload_bytes: float, algorithm: str = CHEAPEST, efficiency: float = 1.0
) -> tuple[str, float]:
    """The algorithm that runs a step (the cheapest one by default), and its seconds.

    A measured collective goes by the name of the first algorithm.

    Raises:
        ValueError: the ranks cannot use the algorithm.
    """
    if algorithm == CHEAPEST:
        cost = step_terms(fabric.cluster, step, fabric.ranks)
        terms = Terms(cost.latency_s, cost.s_per_byte / efficiency)
        name = terms.algorithm(payload_bytes)
        return (next(iter(ALGORITHMS)) if name == MEASURED else name), float(terms.seconds(payload_bytes))
    costs = affine(fabric, step, algorithm)
    if costs is None:
        raise ValueError(f"{algorithm} cannot serve this group")
    latency_s, s_per_byte = costs
    return algorithm if len(fabric.ranks) > 1 else DIRECT, latency_s + s_per_byte / efficiency * payload_bytes


def _single_level(fabric: Fabric) -> bool:
    return sum(len(np.unique(row)) > 1 for row in fabric.rank_ports) <= 1


def step_traffic(
    fabric: Fabric, step: ExchangeStep, algorithm: str = "ring", members: np.ndarray | None = None
) -> PortTraffic:
    """Bytes through every port when a step moves one byte of payload; a scatter or a gather is half an all-reduce.

    Args:
        fabric: the ranks and their ports.
        step: the step of a recipe.
        algorithm: the collective algorithm.
        members: positions of the ranks that exchange, ascending; all of the fabric's when None.
    """
    positions = np.arange(len(fabric.ranks)) if members is None else members
    groups = groups_of(np.asarray(fabric.ranks)[positions] // fabric.node_size, positions, step.group)
    traffic = nothing(fabric)
    if groups.shape[1] > 1:
        hops = ALGORITHMS[algorithm].hops
        if hops is None:
            raise ValueError(f"{algorithm} serves no all-reduce")
        sizes = [fabric.child_size(level) for level in range(fabric.top + 2)]
        for group in groups:
            traffic = traffic + rank_traffic(fabric, *hops(fabric.ranks, sizes, group))
    return traffic * ((1.0 if step.collective is Collective.ALL_REDUCE else 0.5) / step.shares(groups))


def plan_recipe(
    fabric: Fabric,
    step: Step,
    recipe: Recipe,
    bucket_bytes: float,
    *,
    algorithm: str = CHEAPEST,
    efficiency: float = 1.0,
) -> MessagePlan:
    """One message a bucket, a leg for each step of a recipe, by one algorithm or the cheapest for each leg.

    A message passes each step once; the traffic is that of all micro-batches of a training step. Transfers are named
    after the algorithm. O(buckets * steps + ranks * levels).
    """
    buckets = pack(step, bucket_bytes)
    moved: dict[tuple[str, ExchangeStep], float] = {}
    messages = []
    for bucket in buckets:
        name_of_transfer, legs = "", []
        for part in recipe.steps:
            payload = part.payload(bucket)
            name, seconds = priced(fabric, part, payload, algorithm, efficiency)
            times = 1 if part.phase is Phase.END else step.micro_batches
            moved[name, part] = moved.get((name, part), 0.0) + payload * times
            legs += [Leg(fabric.busy_everywhere(seconds))] if seconds > 0 else []
            name_of_transfer = name_of_transfer or name
        messages.append(Message(bucket.variables, name_of_transfer, bucket.gradient_bytes, bucket.ready_s, tuple(legs)))
    traffic = nothing(fabric)
    for (name, part), size in moved.items():
        traffic = traffic + step_traffic(fabric, part, name) * size
    return MessagePlan(tuple(messages), traffic, notes=dense_note(step))


@dataclass(frozen=True, slots=True)
class Collectives(Scheme):
    """The collectives of a recipe, bucket by bucket.

    Attributes:
        key: its name.
        algorithm: one ring over all ranks, two binary trees along the levels of the topology, or a ring on each level;
            by default the cheapest of them for each bucket.
        zero: the ZeRO stage by which jobs choose it.
        recipe: what it scatters and gathers when, and what it shards.
        bucket_bytes: size of a bucket of gradients; 0 sends each gradient by itself.
        efficiency: the fraction of the hardware profile's achievable bandwidth that the transport reaches.
    """

    key: str
    algorithm: str
    zero: int | None = field()
    recipe: Recipe = field()
    bucket_bytes: float = 25 * MEGABYTE
    efficiency: float = 1.0

    @property
    def per_tensor(self) -> bool:
        """False for the stages of ZeRO, which shard all state alike."""
        return not self.zero

    def supports(self, fabric: Fabric) -> str:
        """Refuses ranks that the algorithm does not serve; all for a stage of ZeRO, which is part of the step."""
        if self.zero:
            return f"ZeRO gathers and scatters within the step: choose it by its stage, --zero {self.zero}"
        if self.algorithm and affine(fabric, self.recipe.steps[0], self.algorithm) is None:
            return f"a {self.key} all-reduce needs the same number of ranks in every part of the topology"
        return ""

    def plan_messages(self, fabric: Fabric, step: Step) -> MessagePlan:
        """One message a bucket, with the traffic of all steps of an iteration; O(variables + ranks * levels)."""
        return plan_recipe(
            fabric, step, self.recipe, self.bucket_bytes, algorithm=self.algorithm, efficiency=self.efficiency
        )


@dataclass(frozen=True, slots=True)
class InNetwork(Scheme):
    """An all-reduce by switches that add.

    Attributes:
        inside: whether the switch inside a machine adds too.
        bucket_bytes: gradients that travel together; 0 sends each by itself.
        partition_bytes: size of the pieces in which a bucket passes all its legs at the same time.
        efficiency: the fraction of the levels' achievable bandwidth that the switches reach.
    """

    inside: bool = False
    bucket_bytes: float = 25 * MEGABYTE
    partition_bytes: float = 4 * MEGABYTE
    efficiency: float = 1.0

    key = "in-network"
    assumes = "switches that add what passes them"

    def supports(self, fabric: Fabric) -> str:
        """Requires a switch on every level that is crossed; a mesh has none."""
        levels = [fabric.cluster.levels[i] for i in self._switched(fabric)]
        wired = [level.name for level in levels if level.peer_byte_per_s is not None]
        return f"level {wired[0]} is wired point to point, so no switch can add" if wired else ""

    def _switched(self, fabric: Fabric) -> list[int]:
        """The levels that the group crosses and whose switches add."""
        crossed = [i for i in range(fabric.top + 1) if len(np.unique(fabric.rank_ports[i])) > 1]
        return [i for i in crossed if self.inside or fabric.cluster.group_sizes()[i] > fabric.node_size]

    def plan_messages(self, fabric: Fabric, step: Step) -> MessagePlan:
        """One message a bucket: scatter inside the machine, through the switches and back, gather inside."""
        buckets = pack(step, self.bucket_bytes)
        unit = self._through_switches(fabric)
        inside = machine_sum(fabric, Inside.SCATTER)
        messages = tuple(self._message(b, unit, inside) for b in buckets)
        traffic = unit if self.inside else unit + inside.traffic + inside.traffic.turned()
        return MessagePlan(messages, traffic * step.gradient_bytes, notes=dense_note(step))

    def _through_switches(self, fabric: Fabric) -> PortTraffic:
        """Traffic of one byte out and in through every port of a level whose switches add."""
        traffic = nothing(fabric)
        for level in self._switched(fabric):
            used = np.unique(fabric.rank_ports[level])
            traffic.out_bytes[used] = traffic.in_bytes[used] = 1.0
        return traffic

    def _message(self, bucket: Bucket, unit: PortTraffic, inside: MachineSum) -> Message:
        """The message of a bucket: one copy through the ports of each level, a start-up time up and one down."""
        levels = unit.fabric.cluster.levels
        latency_s = float_sum(2 * levels[i].latency_s for i in self._switched(unit.fabric))
        across = Leg((unit * bucket.gradient_bytes).busy_s() / self.efficiency, latency_s)
        before, after = inside.legs(bucket.gradient_bytes, bucket.gradient_bytes)
        legs = (across,) if self.inside else (before, across, after)
        busy_legs = tuple(leg for leg in legs if leg.busy_s.any())
        chunk = part_of(self.partition_bytes, bucket.gradient_bytes)
        return Message(bucket.variables, "in-network", bucket.gradient_bytes, bucket.ready_s, busy_legs, chunk)


SCHEMES.register("in-network", InNetwork())


_ALL = Group.REPLICAS
_SCATTER_ONCE = ExchangeStep(Collective.REDUCE_SCATTER, Content.GRADIENTS)
_SCATTER = ExchangeStep(Collective.REDUCE_SCATTER, Content.GRADIENTS, Phase.BACKWARD)
_GATHER_ONCE = ExchangeStep(Collective.ALL_GATHER, Content.WEIGHTS)
_GATHER = ExchangeStep(Collective.ALL_GATHER, Content.WEIGHTS, Phase.FORWARD)
_GATHER_AGAIN = ExchangeStep(Collective.ALL_GATHER, Content.WEIGHTS, Phase.BACKWARD)

SCHEMES.register("all-reduce", Collectives("all-reduce", CHEAPEST, 0, SUMMED))
for _key in ("ring", "tree", "hierarchical"):
    SCHEMES.register(_key, Collectives(_key, _key, None, SUMMED))
for _zero, _recipe in enumerate(
    (
        Recipe((_SCATTER_ONCE, _GATHER_ONCE), optimizer=_ALL),
        Recipe((_SCATTER, _GATHER_ONCE), gradients=_ALL, optimizer=_ALL),
        Recipe((_GATHER, _GATHER_AGAIN, _SCATTER), _ALL, _ALL, _ALL),
    ),
    start=1,
):
    SCHEMES.register(f"zero{_zero}", Collectives(f"zero{_zero}", CHEAPEST, _zero, _recipe))
