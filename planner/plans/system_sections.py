"""What a published system says of a plan: its rules for a backend, and how its gradients travel tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SystemSection:
    """The published system whose rules chose the plan.

    Attributes:
        name: the name users choose it by.
        title: as published.
        source: where it was published.
        tells: what a backend must know to run the plan faithfully, by topic.
        notes: what was assumed for this plan.
    """

    name: str
    title: str
    source: str
    tells: dict[str, str]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorExchange:
    """Weights whose gradients travel alike.

    Attributes:
        tensors: names of the weights.
        method: how.
        bytes: of all their gradients on one rank.
        shares: the part of each that every server holds: the machines of the group in line, then servers beside them;
            left out where there are no servers.
    """

    tensors: tuple[str, ...]
    method: str
    bytes: int
    shares: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class FusedMessage:
    """Gradients, or parts of them, that travel together: names of the weights, bytes on one rank."""

    tensors: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """Bytes of one iteration over the links of a level: the busiest port out and in, and all ports together."""

    level: str
    out_bytes: int
    in_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class ExchangeSection:
    """How gradients are exchanged once an iteration.

    Attributes:
        scheme: its name, with options.
        seconds: what it takes when nothing else runs.
        exposed_s: what it adds to the iteration beside forward and backward.
        tensors: by method and servers.
        links: bytes by level, innermost first.
        messages: in the order in which they are sent; left out where every tensor is a message.
        notes: what the price leaves out.
    """

    scheme: str
    seconds: float
    exposed_s: float
    tensors: tuple[TensorExchange, ...]
    links: tuple[LinkBytes, ...]
    messages: tuple[FusedMessage, ...] = ()
    notes: tuple[str, ...] = ()
