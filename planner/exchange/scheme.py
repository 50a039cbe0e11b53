"""The interface of an exchange scheme. The defaults given here hold for synchronous schemes with full replicas.

A scheme plans messages; this module schedules them on the ports and turns the result into an `Exchange`.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from planner.errors import UsageError
from planner.exchange.fabric import Fabric, Servers, Traffic, nothing
from planner.exchange.messages import Message, play
from planner.exchange.recipe import SUMMED, Recipe, rank_part
from planner.exchange.types import Exchange, MemoryFactors, Placement, Staleness, Step, Transfer
from planner.registry import name_with_options

MEGABYTE = 1e6

POSITIVE_OPTIONS = ("efficiency", "sum_byte_per_s", "partition_bytes")
"""Options that must be above 0 in every scheme that has them."""

COUNT_OPTIONS = ("clock_distance", "prefetch", "partitions")
"""Options that must not be negative in any scheme that has them."""


@dataclass(frozen=True)
class MessagePlan:
    """Messages of one step before they are scheduled on the ports, and what follows from them without times.

    Attributes:
        messages: what is sent, each from its ready time on.
        traffic: bytes through every port.
        methods: by variable, how it travels.
        placements: by variable, which servers hold it; empty without servers.
        notes: what the model leaves out in this case.
    """

    messages: tuple[Message, ...]
    traffic: Traffic
    methods: Mapping[str, str]
    placements: tuple[Placement, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SchemeSummary:
    """The row of a scheme in the table of schemes.

    Attributes:
        decides: what it decides, in a few words.
        time: seconds of M bytes on n machines (or ranks) with links of B bytes/s each way.
        traffic: bytes a machine sends, and receives.
        source: where it was published.
        memory: what a rank keeps.
    """

    decides: str
    time: str
    traffic: str
    source: str
    memory: str = "all of it"


class Scheme(Protocol):
    """One way to exchange gradients and weights: a frozen dataclass of its options, registered in `SCHEMES`.

    A scheme must say which messages it sends (`plan_messages`); it overrides other answers where they differ.
    """

    __slots__ = ()

    key: ClassVar[str]
    """The name it is registered by."""
    facts: ClassVar[SchemeSummary]
    """Its row in the table of schemes."""
    zero: ClassVar[int | None] = None
    """The ZeRO stage by which jobs and plans choose the scheme; None where they cannot."""
    per_tensor: ClassVar[bool] = True
    """Whether some variables can travel by this scheme and others by another."""
    assumes: ClassVar[str] = ""
    """Hardware features that the scheme requires and no profile states; empty for none."""

    @property
    def name(self) -> str:
        """The name users choose it by, with the options that differ from the defaults (`byteps:inside=pcie`)."""
        return name_with_options(self, self.key)

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
    transfers = play(plan.messages, ports)
    at_once = play([dataclasses.replace(m, ready_s=0.0) for m in plan.messages], ports)
    end_s = max((t.end_s for t in transfers), default=0.0)
    seconds = max((t.end_s for t in at_once), default=0.0)
    return exchange_of(scheme, step, plan, seconds, end_s - step.backward_s, transfers)


def exchange_of(
    scheme: Scheme,
    step: Step,
    plan: MessagePlan,
    seconds: float,
    exposed_s: float,
    transfers: tuple[Transfer, ...] = (),
) -> Exchange:
    """The exchange of a message plan whose times are known; negative exposed time counts as 0."""
    return Exchange(
        scheme=scheme.name,
        seconds=seconds,
        exposed_s=max(0.0, exposed_s),
        traffic=plan.traffic,
        memory=scheme.memory(plan.traffic.fabric, step),
        staleness=scheme.staleness(step),
        transfers=transfers,
        methods=plan.methods,
        placements=plan.placements,
        notes=plan.notes,
    )


def merge(fabric: Fabric, plans: Sequence[MessagePlan]) -> MessagePlan:
    """Several message plans as one, whose messages share the ports."""
    methods: dict[str, str] = {}
    placements: list[Placement] = []
    notes: dict[str, None] = {}
    traffic = nothing(fabric)
    for plan in plans:
        methods.update(plan.methods)
        placements += plan.placements
        notes.update(dict.fromkeys(plan.notes))
        traffic = traffic + plan.traffic
    return MessagePlan(tuple(m for p in plans for m in p.messages), traffic, methods, tuple(placements), tuple(notes))


def dense_note(step: Step) -> tuple[str, ...]:
    """A note that sparse gradients travel in full, when the step has any."""
    count = sum(v.sparse and v.touched < 1 for v in step.variables)
    return (f"{count} sparse gradients travel whole, zeros included",) if count else ()
