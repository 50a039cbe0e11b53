"""What most schemes share: options in the name, one whole copy of everything, a draft laid in time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from planner.errors import UsageError
from planner.exchange.fabric import Fabric, Servers, nothing
from planner.exchange.messages import play
from planner.exchange.recipe import SUMMED, Recipe
from planner.exchange.types import Draft, Exchange, Facts, MemoryFactors, Placement, Scheme, Staleness, Step
from planner.registry import name_with_options

MEGABYTE = 1e6


class Defaults(Scheme):
    """Answers that hold for a synchronous scheme over whole copies; a scheme is a frozen dataclass of its options.

    A scheme says what it sends (`draft`), the rest where it differs.
    """

    __slots__ = ()

    key: ClassVar[str]
    facts: ClassVar[Facts]
    zero: ClassVar[int | None] = None
    per_tensor: ClassVar[bool] = True
    assumes: ClassVar[str] = ""

    @property
    def recipe(self) -> Recipe:
        """Gradients summed on every rank, once an iteration."""
        return SUMMED

    @property
    def name(self) -> str:
        """The name users choose it by, with the options that differ from the usual (`byteps:inside=pcie`)."""
        return name_with_options(self, self.key)

    def staleness(self, step: Step) -> Staleness:
        """None: every gradient is of the weights that it is applied to."""
        return Staleness()

    def memory(self, fabric: Fabric, step: Step) -> MemoryFactors:
        """All of it on every rank."""
        return MemoryFactors()

    def supports(self, fabric: Fabric) -> str:
        """Any fabric."""
        return ""

    def added_servers(self, machines: int) -> Servers:
        """None: the machines of the group do it all."""
        return Servers(0)

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
    return Exchange(
        scheme=scheme.name,
        seconds=max((t.end_s for t in at_once), default=0.0),
        exposed_s=max(0.0, end_s - step.backward_s),
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
