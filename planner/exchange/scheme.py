"""What a scheme answers; the answers given here hold for synchronous schemes over whole copies.

A scheme says what it sends as a draft: messages, which are then laid in time.
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
from planner.exchange.recipe import SUMMED, Recipe
from planner.exchange.types import Exchange, MemoryFactors, Placement, Staleness, Step, Transfer
from planner.registry import name_with_options

MEGABYTE = 1e6


@dataclass(frozen=True)
class Draft:
    """What a scheme wants to send: messages not yet laid in time, and all that follows from them alone."""

    messages: tuple[Message, ...]
    traffic: Traffic
    methods: Mapping[str, str]
    placements: tuple[Placement, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """What the table of schemes says about one.

    Attributes:
        decides: what it decides, in a few words.
        time: seconds of M bytes on n machines (or ranks) with links of B bytes/s each way.
        traffic: bytes a machine sends, and receives.
        memory: what a rank keeps.
        source: where it was published.
    """

    decides: str
    time: str
    traffic: str
    memory: str
    source: str


class Scheme(Protocol):
    """One way to exchange gradients and weights: a frozen dataclass of its options, registered in `SCHEMES`.

    A scheme says what it sends (`draft`), the rest where it differs from the answers below.
    """

    __slots__ = ()

    key: ClassVar[str]
    """The name it is registered by."""
    facts: ClassVar[Facts]
    """What the table of schemes says."""
    zero: ClassVar[int | None] = None
    """The ZeRO stage by which jobs and plans choose the scheme; None where they cannot."""
    per_tensor: ClassVar[bool] = True
    """Whether some variables can travel this way and others another."""
    assumes: ClassVar[str] = ""
    """What it needs of the hardware that no profile says, empty for nothing."""

    @property
    def name(self) -> str:
        """The name users choose it by, with the options that differ from the usual (`byteps:inside=pcie`)."""
        return name_with_options(self, self.key)

    @property
    def recipe(self) -> Recipe:
        """What is exchanged; all else that is said of the scheme follows from it, and from how messages travel."""
        return SUMMED

    def staleness(self, step: Step) -> Staleness:
        """Of the weights that gradients are computed with."""
        return Staleness()

    def memory(self, fabric: Fabric, step: Step) -> MemoryFactors:
        """What a rank keeps."""
        return MemoryFactors()

    def supports(self, fabric: Fabric) -> str:
        """Why the fabric cannot run it, empty when it can."""
        return ""

    def added_servers(self, machines: int) -> Servers:
        """Machines without accelerators that it adds to a group of so many machines.

        Raises:
            UsageError: an option that says how many cannot be read.
        """
        return Servers(0)

    @abstractmethod
    def draft(self, fabric: Fabric, step: Step) -> Draft:
        """The messages of one step; `fabric` must be supported."""
        ...

    def price(self, fabric: Fabric, step: Step) -> Exchange:
        """What one step's exchange costs; the gradients of the last micro-batch overlap with its backward.

        Raises:
            UsageError: the fabric cannot run the scheme, or an option makes no sense.
        """
        require(self, fabric)
        return settle(self, fabric, step, self.draft(fabric, step))


def require(scheme: Scheme, fabric: Fabric) -> None:
    """Refuse a fabric that the scheme cannot run on.

    Raises:
        UsageError: says why.
    """
    reason = scheme.supports(fabric)
    if reason:
        raise UsageError(reason, where=scheme.name, hint="change the scheme, the ranks or the servers")


def settle(scheme: Scheme, fabric: Fabric, step: Step, draft: Draft) -> Exchange:
    """Lay the messages of a draft in time: all at once, and as the backward makes them."""
    ports = len(fabric.ports)
    transfers = play(draft.messages, ports)
    at_once = play([dataclasses.replace(m, ready_s=0.0) for m in draft.messages], ports)
    end_s = max((t.end_s for t in transfers), default=0.0)
    seconds = max((t.end_s for t in at_once), default=0.0)
    return priced_exchange(scheme, fabric, step, draft, seconds, end_s - step.backward_s, transfers)


def priced_exchange(
    scheme: Scheme,
    fabric: Fabric,
    step: Step,
    draft: Draft,
    seconds: float,
    exposed_s: float,
    transfers: tuple[Transfer, ...] = (),
) -> Exchange:
    """An exchange whose draft was laid in time; what is exposed is not below 0."""
    return Exchange(
        scheme=scheme.name,
        seconds=seconds,
        exposed_s=max(0.0, exposed_s),
        traffic=draft.traffic,
        memory=scheme.memory(fabric, step),
        staleness=scheme.staleness(step),
        transfers=transfers,
        methods=draft.methods,
        placements=draft.placements,
        notes=draft.notes,
    )


def merge(fabric: Fabric, drafts: Sequence[Draft]) -> Draft:
    """Several drafts as one: their messages share the ports."""
    methods: dict[str, str] = {}
    placements: list[Placement] = []
    notes: dict[str, None] = {}
    traffic = nothing(fabric)
    for draft in drafts:
        methods.update(draft.methods)
        placements += draft.placements
        notes.update(dict.fromkeys(draft.notes))
        traffic = traffic + draft.traffic
    return Draft(tuple(m for d in drafts for m in d.messages), traffic, methods, tuple(placements), tuple(notes))


def dense_note(step: Step) -> tuple[str, ...]:
    """Says that sparse gradients travel whole, when there are any."""
    count = sum(v.sparse and v.touched < 1 for v in step.variables)
    return (f"{count} sparse gradients travel whole, zeros included",) if count else ()


def positive(scheme: Scheme, *options: str) -> None:
    """Refuse values of these options (fields of the scheme) that are not above 0.

    Raises:
        UsageError: names the option.
    """
    for option in options:
        value = getattr(scheme, option)
        if not value > 0:
            raise UsageError(f"option {option} is {value}", where=scheme.name, hint="use a value above 0")
