"""A cluster in a few figures, as a person knows it, and the profile that they make.

What is not given has a default, which the profile says beside the figure.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.errors import UsageError
from planner.hardware.document import device_names
from planner.registry import did_you_mean
from planner.units import Dimension, parse, render

USUAL_LINKS: Mapping[str, tuple[float, float]] = {
    "nvlink": (5e-6, 0.8),
    "xgmi": (8e-6, 0.75),
    "pcie": (10e-6, 0.75),
    "infiniband": (15e-6, 0.85),
    "roce": (15e-6, 0.85),
    "ethernet": (50e-6, 0.8),
}
"""Latency of a message in seconds and achievable part of the bandwidth, by kind of link, where none are given."""

_OTHER = (20e-6, 0.8)
"""The same for links of another name."""


@dataclass(frozen=True, slots=True)
class LinkSketch:
    """One tier of links.

    Attributes:
        name: of the tier, mostly a kind of `USUAL_LINKS`.
        byte_per_s: of one port, one direction.
        ports: equal ports of a device, or of a node for links between nodes.
        size: devices or groups that it joins; None for the outermost between nodes.
        latency_s: of a message; None for the usual one.
        efficiency: achievable part of the bandwidth; None for the usual one.
        peer_byte_per_s: of the wire between two single devices, one direction, in a mesh; None behind a switch.
        source: where the figures come from, "" for the user.
        measured: collectives that were measured on it, as `measured` of a profile has them.
    """

    name: str
    byte_per_s: float
    ports: int = 1
    size: int | None = None
    latency_s: float | None = None
    efficiency: float | None = None
    peer_byte_per_s: float | None = None
    source: str = ""
    measured: Mapping[str, Any] = field(default_factory=dict)

    def entry(self) -> dict[str, Any]:
        """The tier as a profile has it, with defaults said."""
        kind = next((known for known in USUAL_LINKS if self.name.lower().startswith(known)), "")
        latency_s, efficiency = USUAL_LINKS.get(kind, _OTHER)
        note = f"usual for {kind or 'a link'}, not measured here"
        told = {"source": self.source} if self.source else {}
        port = {"value": render(self.byte_per_s, Dimension.BYTE_RATE), "direction": "per-direction"}
        found: dict[str, Any] = {"level": self.name}
        found |= {"size": self.size} if self.size is not None else {}
        found["port"] = port | ({"count": self.ports} if self.ports > 1 else {}) | told
        if self.peer_byte_per_s is not None:
            rate = render(self.peer_byte_per_s, Dimension.BYTE_RATE)
            found["peer"] = {"value": rate, "direction": "per-direction", **told}
        for key, value, usual, dimension in (
            ("latency", self.latency_s, latency_s, Dimension.SECONDS),
            ("efficiency", self.efficiency, efficiency, Dimension.FRACTION),
        ):
            said = render(usual if value is None else value, dimension)
            assumed = {"source": "estimate", "verified": False, "note": note}
            found[key] = {"value": said, **(assumed if value is None else told)}
        return found | ({"measured": dict(self.measured)} if self.measured else {})


@dataclass(frozen=True, slots=True)
class ClusterSketch:
    """A cluster in a few figures.

    Attributes:
        name: of the cluster.
        device: name of a bundled device, or of one in `device_types`.
        inside: links inside a node, innermost first; their sizes multiply to the devices of a node.
        between: links that join nodes, innermost first.
        nodes: how many nodes there are.
        device_types: devices of one's own as a profile writes them, by name.
        about: one line on what it is.
    """

    name: str
    device: str
    inside: tuple[LinkSketch, ...] = ()
    between: tuple[LinkSketch, ...] = ()
    nodes: int = 1
    device_types: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""

    def document(self) -> dict[str, Any]:
        """The profile as plain data.

        Raises:
            UsageError: no bundled device has the name.
        """
        if self.device not in (*device_names(), *self.device_types):
            hint = f"{did_you_mean(self.device, device_names())}; `shardplan hardware list --devices` has all"
            raise UsageError(f"there is no device {self.device!r}", hint=hint)
        found: dict[str, Any] = {"cluster": self.name}
        found |= {"about": self.about} if self.about else {}
        found["devices"] = self.device
        found |= {"nodes": self.nodes} if self.nodes > 1 else {}
        for key, links in (("node", self.inside), ("network", self.between)):
            found |= {key: [link.entry() for link in links]} if links else {}
        return found | ({"device_types": dict(self.device_types)} if self.device_types else {})


_OPTIONS = {"ports": "a whole number", "size": "a whole number", "latency": "a time", "efficiency": "a fraction"}


def read_link(text: str, *, where: str = "") -> LinkSketch:
    """Read `nvlink:450GB/s`, or `infiniband:400Gbit/s,ports=8,latency=10us,efficiency=90%,size=32`.

    Args:
        text: name and bandwidth of one port and direction, and what else is known.
        where: the option that it was given to.

    Raises:
        UsageError: it reads otherwise.
    """
    head, *options = [part.strip() for part in text.split(",")]
    name, colon, rate = head.partition(":")
    if not (name and colon and rate):
        raise UsageError(f"{text!r} is no link", where=where, hint="write NAME:BANDWIDTH, such as nvlink:450GB/s")
    said: dict[str, str] = {}
    for option in options:
        key, sign, value = (part.strip() for part in option.partition("="))
        if key not in _OPTIONS or not sign or key in said:
            raise UsageError(f"{option!r} is no figure of a link", where=where, hint=did_you_mean(key, _OPTIONS))
        if key in ("ports", "size") and not re.fullmatch(r"0*[1-9]\d*", value):
            raise UsageError(f"{option!r} is not {_OPTIONS[key]}", where=where, hint=f"such as {key}=8")
        said[key] = value
    return LinkSketch(
        name.strip(),
        parse(rate.strip(), Dimension.BYTE_RATE),
        int(said.get("ports", 1)),
        int(said["size"]) if "size" in said else None,
        parse(said["latency"], Dimension.SECONDS) if "latency" in said else None,
        parse(said["efficiency"], Dimension.FRACTION) if "efficiency" in said else None,
    )


def sized(links: Sequence[LinkSketch], joined: int, *, where: str) -> tuple[LinkSketch, ...]:
    """Links whose sizes multiply to what they join; the last without a size takes the rest.

    Raises:
        UsageError: they do not.
    """
    found, left = [], joined
    for number, link in enumerate(links):
        size = link.size or (left if number == len(links) - 1 else 0)
        if not size or left % size:
            hint = "give each but the last a size, such as nvlink:50GB/s,size=2"
            raise UsageError(f"the links do not join {joined}", where=where, hint=hint)
        found.append(dataclasses.replace(link, size=size))
        left //= size
    if left > 1:
        raise UsageError(f"the links join {joined // left} of {joined}", where=where, hint="let the sizes multiply")
    return tuple(found)
