"""A sketch of a cluster: a few figures, from which a profile is made.

Figures that are not given have defaults, which the profile marks as such.
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
"""By kind of link, the default latency of a message in seconds and fraction of the bandwidth that is achievable."""

_OTHER = (20e-6, 0.8)
"""Defaults of links of another name."""


@dataclass(frozen=True, slots=True)
class LinkSketch:
    """One tier of links.

    Attributes:
        name: name of the tier, usually a key of `USUAL_LINKS`.
        byte_per_s: bandwidth of one port, one direction.
        ports: number of equal ports of a device, or of a node for links between nodes.
        size: number of devices or groups that it joins; None for the outermost tier between nodes.
        latency_s: start-up time of a message; None for the default.
        efficiency: achievable fraction of the bandwidth; None for the default.
        peer_byte_per_s: bandwidth between two single devices, one direction, in a mesh; None behind a switch.
        source: where the figures come from; "" for the user.
        measured: measured collectives, as `measured` of a profile.
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
        """The tier as an entry of a profile, with defaults marked."""
        kind = next((known for known in USUAL_LINKS if self.name.lower().startswith(known)), "")
        latency_s, efficiency = USUAL_LINKS.get(kind, _OTHER)
        note = f"usual for {kind or 'a link'}, not measured here"
        cited = {"source": self.source} if self.source else {}
        port = {"value": render(self.byte_per_s, Dimension.BYTE_RATE), "direction": "per-direction"}
        entry: dict[str, Any] = {"level": self.name}
        entry |= {"size": self.size} if self.size is not None else {}
        entry["port"] = port | ({"count": self.ports} if self.ports > 1 else {}) | cited
        if self.peer_byte_per_s is not None:
            rate = render(self.peer_byte_per_s, Dimension.BYTE_RATE)
            entry["peer"] = {"value": rate, "direction": "per-direction", **cited}
        for key, value, usual, dimension in (
            ("latency", self.latency_s, latency_s, Dimension.SECONDS),
            ("efficiency", self.efficiency, efficiency, Dimension.FRACTION),
        ):
            text = render(usual if value is None else value, dimension)
            assumed = {"source": "estimate", "verified": False, "note": note}
            entry[key] = {"value": text, **(assumed if value is None else cited)}
        return entry | ({"measured": dict(self.measured)} if self.measured else {})


@dataclass(frozen=True, slots=True)
class ClusterSketch:
    """A sketch of a cluster.

    Attributes:
        name: name of the cluster.
        device: name of a bundled device, or of one in `device_types`.
        inside: links inside a node, innermost first; the product of their sizes is the devices of a node.
        between: links that join nodes, innermost first.
        nodes: number of nodes.
        device_types: by name, further devices as in a profile.
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
        profile: dict[str, Any] = {"cluster": self.name}
        profile |= {"about": self.about} if self.about else {}
        profile["devices"] = self.device
        profile |= {"nodes": self.nodes} if self.nodes > 1 else {}
        for key, links in (("node", self.inside), ("network", self.between)):
            profile |= {key: [link.entry() for link in links]} if links else {}
        return profile | ({"device_types": dict(self.device_types)} if self.device_types else {})


_OPTIONS = {"ports": "a whole number", "size": "a whole number", "latency": "a time", "efficiency": "a fraction"}


def read_link(text: str, *, where: str = "") -> LinkSketch:
    """Read `nvlink:450GB/s`, or `infiniband:400Gbit/s,ports=8,latency=10us,efficiency=90%,size=32`.

    Args:
        text: name, bandwidth of one port in one direction, and further figures.
        where: the command-line option, for errors.

    Raises:
        UsageError: the text is no link.
    """
    head, *options = [part.strip() for part in text.split(",")]
    name, colon, rate = head.partition(":")
    if not (name and colon and rate):
        raise UsageError(f"{text!r} is no link", where=where, hint="write NAME:BANDWIDTH, such as nvlink:450GB/s")
    figures: dict[str, str] = {}
    for option in options:
        key, sign, value = (part.strip() for part in option.partition("="))
        if key not in _OPTIONS or not sign or key in figures:
            raise UsageError(f"{option!r} is no figure of a link", where=where, hint=did_you_mean(key, _OPTIONS))
        if key in ("ports", "size") and not re.fullmatch(r"0*[1-9]\d*", value):
            raise UsageError(f"{option!r} is not {_OPTIONS[key]}", where=where, hint=f"such as {key}=8")
        figures[key] = value
    return LinkSketch(
        name.strip(),
        parse(rate.strip(), Dimension.BYTE_RATE),
        int(figures.get("ports", 1)),
        int(figures["size"]) if "size" in figures else None,
        parse(figures["latency"], Dimension.SECONDS) if "latency" in figures else None,
        parse(figures["efficiency"], Dimension.FRACTION) if "efficiency" in figures else None,
    )


def sized(links: Sequence[LinkSketch], joined: int, *, where: str) -> tuple[LinkSketch, ...]:
    """Links with all sizes, whose product is `joined`; a last link without a size gets what is left.

    Raises:
        UsageError: the product of the sizes is not `joined`.
    """
    complete, left = [], joined
    for number, link in enumerate(links):
        size = link.size or (left if number == len(links) - 1 else 0)
        if not size or left % size:
            hint = "give each but the last a size, such as nvlink:50GB/s,size=2"
            raise UsageError(f"the links do not join {joined}", where=where, hint=hint)
        complete.append(dataclasses.replace(link, size=size))
        left //= size
    if left > 1:
        raise UsageError(f"the links join {joined // left} of {joined}", where=where, hint="let the sizes multiply")
    return tuple(complete)
