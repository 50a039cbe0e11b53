"""The interface of an exchange scheme. The defaults given here hold for synchronous schemes with full replicas.

A scheme plans messages; this module schedules them on the ports and turns the result into an `Exchange`.

Gradients are packed in the order in which the backward completes them. A message passes its legs in turn; every port
serves messages first come, first served. A leg keeps each port it uses busy for its own time. The next leg of a message
may begin when the first chunk has arrived (a tensor cut in partitions is pushed and pulled at the same time), and
cannot end before the last chunk has passed. If all messages use the same ports alike, the ports act as a single link
that serves one message after the other.

`choose` takes the cheapest allowed scheme for each tensor.
"""

from __future__ import annotations

import dataclasses
import heapq
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np

from planner.errors import UsageError
from planner.exchange.fabric import Fabric, PortTraffic, Servers, nothing
from planner.exchange.recipe import SUMMED, Recipe, rank_part
from planner.exchange.types import Exchange, MemoryFactors, Staleness, Step, Variable
from planner.registry import name_with_options
from planner.sums import float_sum


@dataclass(frozen=True, slots=True)
class Leg:
    """One leg of a message.

    Attributes:
        busy_s: seconds that it keeps every port busy, float64 [2 ports].
        latency_s: seconds from there until its end has arrived; the ports are free again.
    """

    busy_s: np.ndarray
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Message:
    """Gradients that travel together.

    Attributes:
        variables: names of the variables whose gradients, or parts of them, it holds.
        method: how it travels.
        payload_bytes: bytes that each machine contributes.
        ready_s: when the last of its gradients is complete.
        legs: its legs, in order.
        chunk: fraction of the payload that must have passed a leg before the next leg can begin, 0..1.
    """

    variables: tuple[str, ...]
    method: str
    payload_bytes: float
    ready_s: float
    legs: tuple[Leg, ...]
    chunk: float = 1.0


def play(messages: Sequence[Message], ports: int) -> tuple[float, ...]:
    """When each message has arrived, in seconds, in the order given.

    Args:
        messages: each is sent from its ready time on.
        ports: number of ports; legs have an entry for each direction of each port (outgoing, then incoming).

    O(legs * (log(legs) + ports)), and deterministic: equal times in message order.
    """
    free = np.zeros(2 * ports)
    ends = [m.ready_s for m in messages]
    queue = [(m.ready_s, i, 0) for i, m in enumerate(messages) if m.legs]
    heapq.heapify(queue)
    while queue:
        ready, i, leg = heapq.heappop(queue)
        current, chunk = messages[i].legs[leg], messages[i].chunk
        used = current.busy_s > 0
        longest = float(current.busy_s.max(initial=0.0))
        end = first = ready
        if used.any():
            busy = current.busy_s[used]
            start_s = np.maximum(free[used], ready)
            free[used] = start_s + busy
            end, first = float((start_s + busy).max()), float((start_s + chunk * busy).max())
        if leg:
            end = max(end, ends[i] + chunk * longest)
        ends[i] = end + current.latency_s
        if leg + 1 < len(messages[i].legs):
            heapq.heappush(queue, (first + current.latency_s, i, leg + 1))
    return tuple(ends)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are sent as one.

    Attributes:
        variables: names of the variables whose gradients, or parts of them, it holds.
        gradient_bytes: bytes of these gradients.
        ready_s: when the last of them is complete, from the start of the backward.
        weight_bytes: bytes of the weights of the same variables.
        shares: the part of it that each endpoint serves, which sum to 1; empty where it goes through no servers.
    """

    variables: tuple[str, ...]
    gradient_bytes: float
    ready_s: float
    weight_bytes: float
    shares: tuple[float, ...] = ()


def _bucket(step: Step, members: list[Variable]) -> Bucket:
    return Bucket(
        tuple(v.name for v in members),
        float_sum(v.gradient_bytes for v in members),
        max(step.ready_s(v) for v in members),
        float_sum(v.pulled_bytes for v in members),
    )


def pack(step: Step, bucket_bytes: float) -> tuple[Bucket, ...]:
    """Buckets of uncut gradients in order of arrival; the gradient that fills a bucket closes it. 0: one gradient each.

    O(variables log variables). After PyTorch's DistributedDataParallel (Li et al., VLDB 2020), without its smaller
    first bucket.

    Raises:
        UsageError: a negative size.
    """
    if bucket_bytes < 0:
        raise UsageError(f"buckets of {bucket_bytes} bytes", hint="use a size of 0 or more")
    buckets: list[Bucket] = []
    members: list[Variable] = []
    filled = 0.0
    for v in step.arrivals():
        members.append(v)
        filled += v.gradient_bytes
        if filled >= bucket_bytes:
            buckets.append(_bucket(step, members))
            members, filled = [], 0.0
    return (*buckets, _bucket(step, members)) if members else tuple(buckets)


def fuse(step: Step, buffer_bytes: float) -> tuple[Bucket, ...]:
    """Buffers of one exact size, filled with gradients in order of arrival; a gradient is cut where a buffer is full.

    After Herring's balanced fusion buffers (Thangakrishnan et al., SC 2020). O(variables + buffers).

    Raises:
        UsageError: a size that is not above 0.
    """
    if not buffer_bytes > 0:
        raise UsageError(f"fusion buffers of {buffer_bytes} bytes", hint="use a size above 0")
    buffers: list[Bucket] = []
    names: list[str] = []
    filled = pulled = ready = 0.0
    for v in step.arrivals():
        left = v.gradient_bytes
        while left > 0:
            part = min(left, buffer_bytes - filled)
            names.append(v.name)
            filled, left, ready = filled + part, left - part, step.ready_s(v)
            pulled += v.pulled_bytes * part / v.gradient_bytes
            if filled >= buffer_bytes:
                buffers.append(Bucket(tuple(names), filled, ready, pulled))
                names, filled, pulled = [], 0.0, 0.0
    return (*buffers, Bucket(tuple(names), filled, ready, pulled)) if names else tuple(buffers)


MEGABYTE = 1e6

POSITIVE_OPTIONS = ("efficiency", "sum_byte_per_s", "partition_bytes")
"""Options that must be above 0 in every scheme that has them."""

COUNT_OPTIONS = ("clock_distance", "partitions")
"""Options that must not be negative in any scheme that has them."""


@dataclass(frozen=True)
class MessagePlan:
    """Messages of one step before they are scheduled on the ports, and what follows from them without times.

    Attributes:
        messages: what is sent, each from its ready time on.
        traffic: bytes through every port.
        placements: by variable, the share of each endpoint; empty without servers.
        notes: what the model leaves out in this case.
    """

    messages: tuple[Message, ...]
    traffic: PortTraffic
    placements: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def methods(self) -> dict[str, str]:
        """By variable, how it travels."""
        return {name: message.method for message in self.messages for name in message.variables}


class Scheme(Protocol):
    """One way to exchange gradients and weights: a frozen dataclass of its options, registered in `SCHEMES`.

    A scheme must say which messages it sends (`plan_messages`); it overrides other answers where they differ.
    """

    __slots__ = ()

    key: str
    """The name it is registered by."""
    zero: int | None = None
    """The ZeRO stage by which jobs and plans choose the scheme; None where they cannot."""
    assumes: ClassVar[str] = ""
    """Hardware features that the scheme requires and no profile states; empty for none."""

    @property
    def name(self) -> str:
        """The name users choose it by, with the options that differ from the defaults (`byteps:inside=pcie`)."""
        return name_with_options(self, self.key)

    @property
    def per_tensor(self) -> bool:
        """Whether some variables can travel by this scheme and others by another."""
        return True

    @property
    def recipe(self) -> Recipe:
        """The collectives of the exchange; seconds, bytes and memory are read off it."""
        return SUMMED

    def staleness(self, step: Step) -> Staleness:
        """Staleness of the weights that gradients are computed with."""
        return Staleness()

    def memory(self, fabric: Fabric, step: Step) -> MemoryFactors:
        """The part of the model state that a rank keeps, read off the recipe."""
        return MemoryFactors(*(rank_part(fabric.cluster, fabric.ranks, group) for group in self.recipe.held))

    def supports(self, fabric: Fabric) -> str:
        """Why the fabric cannot run it; empty when it can."""
        return ""

    def added_servers(self, machines: int) -> Servers:
        """The machines without accelerators that it adds to a group of `machines` machines.

        Raises:
            UsageError: an option that says how many cannot be read.
        """
        return Servers(0)

    @abstractmethod
    def plan_messages(self, fabric: Fabric, step: Step) -> MessagePlan:
        """The messages of one step; the fabric must be supported and the options checked."""
        ...

    def price(self, fabric: Fabric, step: Step) -> Exchange:
        """The cost of the exchange of one step; the gradients of the last micro-batch overlap with its backward.

        Raises:
            UsageError: the fabric cannot run the scheme, or an option makes no sense.
        """
        require(self, fabric)
        return scheduled(self, step, self.plan_messages(fabric, step))


def require(scheme: Scheme, fabric: Fabric) -> None:
    """Refuse a fabric that the scheme cannot run on, and options that are out of range.

    Raises:
        UsageError: says why.
    """
    reason = scheme.supports(fabric)
    if reason:
        raise UsageError(reason, where=scheme.name, hint="change the scheme, the ranks or the servers")
    for option in (*POSITIVE_OPTIONS, *COUNT_OPTIONS):
        value, positive = getattr(scheme, option, 1), option in POSITIVE_OPTIONS
        if not (value > 0 or (value == 0 and not positive)):
            hint = "use a value above 0" if positive else "use 0 or more"
            raise UsageError(f"option {option} is {value}", where=scheme.name, hint=hint)


def scheduled(scheme: Scheme, step: Step, plan: MessagePlan) -> Exchange:
    """Schedule a plan's messages on the ports twice: all ready at once (`seconds`), and as the backward makes them."""
    ports = len(plan.traffic.fabric.ports)
    ends_s = play(plan.messages, ports)
    at_once = play([dataclasses.replace(m, ready_s=0.0) for m in plan.messages], ports)
    return Exchange(
        scheme=scheme.name,
        seconds=max(at_once, default=0.0),
        exposed_s=max(0.0, max(ends_s, default=0.0) - step.backward_s),
        traffic=plan.traffic,
        memory=scheme.memory(plan.traffic.fabric, step),
        staleness=scheme.staleness(step),
        transfers=tuple(zip(plan.messages, ends_s, strict=True)),
        methods=plan.methods,
        placements=plan.placements,
        notes=plan.notes,
    )


def part_of(partition_bytes: float, payload_bytes: float) -> float:
    """The fraction of a payload in one of the partitions that it is cut in."""
    return min(1.0, partition_bytes / payload_bytes) if payload_bytes > 0 else 1.0


def merge(fabric: Fabric, plans: Sequence[MessagePlan]) -> MessagePlan:
    """Several message plans as one, whose messages share the ports."""
    placements: dict[str, tuple[float, ...]] = {}
    notes: dict[str, None] = {}
    traffic = nothing(fabric)
    for plan in plans:
        placements.update(plan.placements)
        notes.update(dict.fromkeys(plan.notes))
        traffic = traffic + plan.traffic
    return MessagePlan(tuple(m for p in plans for m in p.messages), traffic, placements, tuple(notes))


def dense_note(step: Step) -> tuple[str, ...]:
    """A note that sparse gradients travel in full, when the step has any."""
    count = sum(v.sparse and v.touched < 1 for v in step.variables)
    return (f"{count} sparse gradients travel whole, zeros included",) if count else ()


def choose(
    fabric: Fabric, step: Step, allowed: Sequence[str] | None = None, bucket_bytes: float = 25 * MEGABYTE
) -> Exchange:
    """Take the cheapest scheme for each variable, and keep the mixture if no single scheme beats it.

    A variable is priced by itself on idle ports; one below `bucket_bytes` as its part of a bucket, since it will not
    travel alone. The mixture and each allowed scheme are then scheduled for the full step, and the one with the least
    exposed time is taken (then the fewest seconds, then the order of `allowed`), so the result is never worse than any
    allowed scheme.

    Args:
        fabric: the ranks, with servers where there are any.
        step: the training step.
        allowed: schemes, with options; None for all that exchange tensor by tensor, fit the fabric, and assume nothing
            about the hardware that its profile does not state.
        bucket_bytes: size from which a variable is priced by itself.

    Returns:
        The exchange; where schemes are mixed, its methods are theirs by variable. Its notes say which allowed schemes
        the fabric cannot run.

    Raises:
        UsageError: an unknown scheme, one that changes what training means, or none that the fabric can run.
    """
    schemes, notes = _usable(fabric, step, allowed)
    tensor_schemes = [s for s in schemes if s.per_tensor]
    candidates = [s.price(fabric, step) for s in schemes]
    if len(tensor_schemes) > 1 and step.variables:
        candidates += _mixture(fabric, step, tensor_schemes, bucket_bytes)
    best = min(candidates, key=lambda exchange: (exchange.exposed_s, exchange.seconds))
    return dataclasses.replace(best, notes=(*best.notes, *notes))


def _usable(fabric: Fabric, step: Step, allowed: Sequence[str] | None) -> tuple[list[Scheme], list[str]]:
    from planner.exchange import SCHEMES, get

    if allowed is None:
        named = [scheme for _, scheme in SCHEMES.items() if scheme.per_tensor and not scheme.assumes]
    else:
        named = [get(name) for name in dict.fromkeys(allowed)]
    stale = [s.name for s in named if not s.staleness(step).synchronous]
    if stale:
        raise UsageError(f"{stale[0]} lets weights be stale, so it is no choice beside synchronous schemes",
                         hint="price it by itself")  # fmt: skip
    reasons = {s.name: s.supports(fabric) for s in named}
    usable = [s for s in named if not reasons[s.name]]
    if not usable:
        raise UsageError("no allowed scheme can run on these ranks: " + "; ".join(reasons.values()),
                         hint="allow another, such as ring")  # fmt: skip
    return usable, [f"not {name}: {reason}" for name, reason in reasons.items() if reason]


def _prices(fabric: Fabric, step: Step, scheme: Scheme, bucket_bytes: float) -> dict[str, float]:
    """Seconds of each variable by itself; equal variables are priced once."""
    priced: dict[Variable, float] = {}
    seconds = {}
    for v in step.variables:
        size = max(v.gradient_bytes, v.pulled_bytes)
        scale = max(1.0, bucket_bytes / size) if size > 0 else 1.0
        alone = dataclasses.replace(
            v,
            name="",
            ready_s=0.0,
            gradient_bytes=v.gradient_bytes * scale,
            weight_bytes=v.pulled_bytes * scale,
        )
        if alone not in priced:
            priced[alone] = scheme.price(fabric, Step((alone,))).seconds
        seconds[v.name] = priced[alone] / scale
    return seconds


def _mixture(fabric: Fabric, step: Step, schemes: list[Scheme], bucket_bytes: float) -> list[Exchange]:
    """Every variable by the scheme with its lowest price, all on the same ports; none if one scheme has all."""
    prices = {s.name: _prices(fabric, step, s, bucket_bytes) for s in schemes}
    scheme_of = {v.name: min(prices, key=lambda name: prices[name][v.name]) for v in step.variables}
    variables_of: dict[str, list[Variable]] = {}
    for v in step.variables:
        variables_of.setdefault(scheme_of[v.name], []).append(v)
    if len(variables_of) < 2:
        return []
    used = [s for s in schemes if s.name in variables_of]
    parts = [dataclasses.replace(step, variables=tuple(variables_of[s.name])) for s in used]
    plan = merge(fabric, [s.plan_messages(fabric, part) for s, part in zip(used, parts, strict=True)])
    exchange = scheduled(used[0], step, plan)
    memories = [s.memory(fabric, part) for s, part in zip(used, parts, strict=True)]
    memory = _mean_memory(memories, parts, step)
    return [dataclasses.replace(exchange, scheme="+".join(s.name for s in used), memory=memory, methods=scheme_of)]


def _mean_memory(memories: list[MemoryFactors], parts: list[Step], step: Step) -> MemoryFactors:
    """Memory factors weighted by the bytes of each scheme; the fullest servers are taken to be the same machine."""
    total = float_sum(v.pulled_bytes for v in step.variables)
    if total == 0:
        return MemoryFactors()
    weights = [float_sum(v.pulled_bytes for v in part.variables) / total for part in parts]
    names = ("weights", "gradients", "optimizer", "server_optimizer")
    mean = {n: float_sum(w * getattr(m, n) for w, m in zip(weights, memories, strict=True)) for n in names}
    return MemoryFactors(**mean, transient_bytes=max(m.transient_bytes for m in memories))
