"""Profiles as text: resolved profiles, templates of new ones, and profiles that are made of a few figures (a sketch).

Figures that a sketch does not give have defaults, which the profile marks as such.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import HardwareError, UsageError
from planner.escaping import shell, visible
from planner.hardware.document import citations, cluster_names, device_names, looks_like_path, stack_names
from planner.hardware.loader import device_types, profile_path, read_profile
from planner.hardware.types import Collective
from planner.registry import did_you_mean
from planner.units import Dimension, parse, render

if TYPE_CHECKING:
    from pydantic import BaseModel

    from planner.hardware.schema import DeviceFile


USUAL_LINKS: Mapping[str, tuple[float, float]] = {
    "nvlink": (5e-6, 0.8),
    "xgmi": (8e-6, 0.75),
    "pcie-phb": (15e-6, 0.6),
    "pcie-node": (15e-6, 0.5),
    "pcie-sys": (20e-6, 0.5),
    "pcie": (10e-6, 0.75),
    "infiniband": (15e-6, 0.85),
    "roce": (15e-6, 0.85),
    "ethernet": (50e-6, 0.8),
}
"""By kind of link, the default latency of a message in seconds and fraction of the bandwidth that is achievable."""

ASSUMED = "assumed"
"""Source of figures that no measurement or data sheet stands behind."""

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
        source: where the figures come from; "" for the user, `ASSUMED` for a usual figure of the bandwidth.
        verified: false where the source speaks of another machine, or of none.
        measured: measured collectives, as `measured` of a profile.
        note: what to know about the bandwidth.
        nodes_of: by name of links, the tier as the devices with these links have it.
        oversubscription: what the children can send at once over what the tier carries.
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
    note: str = ""
    verified: bool = True
    nodes_of: Mapping[str, LinkSketch] = field(default_factory=dict)
    oversubscription: float = 1.0

    def entry(self) -> dict[str, Any]:
        """The tier as an entry of a profile, with defaults marked."""
        kind = next((known for known in USUAL_LINKS if self.name.lower().startswith(known)), "")
        latency_s, efficiency = USUAL_LINKS.get(kind, _OTHER)
        note = f"usual for {kind or 'a link'}, not measured here"
        cited: dict[str, Any] = {"source": self.source} if self.source else {}
        cited |= {} if self.verified else {"verified": False}
        cited |= {"note": self.note} if self.note else {}
        port: dict[str, Any] = {"value": render(self.byte_per_s, Dimension.BYTE_RATE), "direction": "per-direction"}
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
            assumed = {"source": ASSUMED, "verified": False, "note": note}
            entry[key] = {"value": text, **(assumed if value is None else cited)}
        if self.oversubscription > 1:
            entry["oversubscription"] = f"{self.oversubscription:.6g}:1"
        if self.nodes_of:
            entry["nodes_of"] = {name: link.figures() for name, link in self.nodes_of.items()}
        return entry | ({"measured": dict(self.measured)} if self.measured else {})

    def figures(self) -> dict[str, Any]:
        """The tier's figures alone, as `nodes_of` of a profile has them."""
        entry = self.entry()
        return {key: entry[key] for key in ("port", "peer", "latency", "efficiency") if key in entry}


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
        links: names of the links of a node's devices (`LinkSketch.nodes_of`), in the order of the ranks, "" for those
            that have what all have; empty where all devices have equal links.
        order: numbers of a node's devices in the order of the ranks; empty for 0, 1, 2, ...
        notes: what the profile leaves out of the text that it was made from.
        sources: citations by short name, of the device types.
    """

    name: str
    device: str
    inside: tuple[LinkSketch, ...] = ()
    between: tuple[LinkSketch, ...] = ()
    nodes: int = 1
    device_types: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""
    links: tuple[str, ...] = ()
    order: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """The profile as plain data.

        Raises:
            UsageError: no bundled device has the name.
        """
        if self.device not in (*device_names(), *self.device_types):
            raise _no_device(self.device)
        profile: dict[str, Any] = {"cluster": self.name}
        profile |= {"about": self.about} if self.about else {}
        runs = [(name, len(list(run))) for name, run in itertools.groupby(self.links)]
        listed = [{"type": self.device, "count": n} | ({"links": name} if name else {}) for name, n in runs]
        profile["devices"] = listed if any(self.links) else self.device
        profile |= {"order": list(self.order)} if self.order else {}
        profile |= {"nodes": self.nodes} if self.nodes > 1 else {}
        for key, links in (("node", self.inside), ("network", self.between)):
            profile |= {key: [link.entry() for link in links]} if links else {}
        profile |= {"device_types": dict(self.device_types)} if self.device_types else {}
        return profile | ({"sources": dict(self.sources)} if self.sources else {})


def _no_device(name: str) -> UsageError:
    hint = f"{did_you_mean(name, device_names())}; `shardplan hardware list --devices` has all"
    return UsageError(f"there is no device {name!r}", hint=hint)


def device_file(name_or_path: str) -> tuple[DeviceFile, dict[str, Any], dict[str, str]]:
    """A device by name or file, and what a cluster's profile must say of it: its type by name, with its sources.

    Raises:
        UsageError: there is no device of the name.
        HardwareError: there is no such file, it has errors, or describes no device.
    """
    from planner.hardware.schema import DeviceFile

    is_path = looks_like_path(name_or_path)
    if not is_path and name_or_path not in device_names():
        raise _no_device(name_or_path)
    spec = read_profile(name_or_path)
    if not isinstance(spec, DeviceFile):
        hint = "give a file that begins with `device: NAME`"
        raise HardwareError(f"{name_or_path!r} is {spec.kind}, not a device", hint=hint)
    return spec, {spec.device: _plain(spec)} if is_path else {}, dict(spec.sources) if is_path else {}


_OPTIONS = {
    "ports": "a whole number", "size": "a whole number", "latency": "a time", "efficiency": "a fraction",
    "oversubscription": "a ratio",
}  # fmt: skip


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
    ratio = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)(?::1)?", figures.get("oversubscription", "1"))
    if ratio is None or float(ratio[1]) < 1:
        raise UsageError("the oversubscription is no ratio", where=where, hint="such as oversubscription=2:1")
    return LinkSketch(
        name.strip(),
        parse(rate.strip(), Dimension.BYTE_RATE),
        int(figures.get("ports", 1)),
        int(figures["size"]) if "size" in figures else None,
        parse(figures["latency"], Dimension.SECONDS) if "latency" in figures else None,
        parse(figures["efficiency"], Dimension.FRACTION) if "efficiency" in figures else None,
        oversubscription=float(ratio[1]),
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
        complete.append(replace(link, size=size))
        left //= size
    if left > 1:
        raise UsageError(f"the links join {joined // left} of {joined}", where=where, hint="let the sizes multiply")
    return tuple(complete)


_HEADER = """\
# A hardware profile for shardplan. Check it:  shardplan hardware lint {file}
#
# Quantities are strings with units: 80 GB, 25 Gbit/s, 312 TFLOP/s, 5 us, 87%. A figure is written short (`80 GB`) or
# with its source: {{value: 80 GB, source: mleng}}; add `verified: false` and a `note` where they help. Short names of
# sources are those of the bundled profiles or your own under `sources:`.
#
#   devices    a device name, or a list of {{type, count}} in the order of the ranks for a mixed pool; `links: NAME` too
#              where devices of one type have unlike links, whose figures stand under `nodes_of: {{NAME: ..}}`
#   order      numbers of a node's devices in the order of the ranks, where neighbours of the driver are not linked
#   node       levels of links inside a node, innermost first; `size` is how many devices, then groups, each joins
#   network    levels that join nodes; the outermost has no size, it grows with --nodes
#   port       what joins ONE device (or group, or node) to the level: value, count of equal ports, and direction:
#              `per-direction`, or `bidirectional` when the figure sums both, as vendors' NVLink figures do
#   peer       only in a mesh or torus: the wire between two single devices
#   torus      dimensions of the torus as which devices or nodes are wired: limits what an all-to-all takes
#   latency    start-up time of one message;  efficiency: achievable fraction of the port's bandwidth
#   oversubscription  2:1 where the children can send twice what the level carries: bandwidths are divided by it
#   measured   collectives that were measured here; they replace the model where the number of ranks agrees
#
# For completion in an editor:  shardplan hardware schema > hardware.schema.json, and as the first line of this file
#   # yaml-language-server: $schema=hardware.schema.json
"""


def _header(name: str) -> str:
    """The comments before a profile."""
    return _HEADER.format(file=visible(shell(f"{name}.yaml")))


def resolved_profile(
    name_or_path: str | Path, nodes: int | str | None = None, *, known: Sequence[str] = ()
) -> dict[str, Any]:
    """A self-contained profile: devices written out, defaults filled in, sources cited in full.

    Read back, it gives the same cluster with the same fingerprint.

    Args:
        name_or_path: name of a bundled profile, or a file.
        nodes: number of nodes; by default the profile's.
        known: names that an error may suggest; by default those of all bundled profiles.

    Raises:
        HardwareError: as `load_cluster`.
    """
    from planner.hardware.resolve import nodes_of, part_of_nodes, with_defaults
    from planner.hardware.schema import DeviceFile, StackFile

    spec = read_profile(name_or_path, known=known or _names())
    if isinstance(spec, StackFile):
        return _with_sources({"stack": spec.stack, **_plain(spec)}, spec.sources)
    if isinstance(spec, DeviceFile):
        if nodes not in (None, 1):
            raise HardwareError(
                f"{spec.device!r} is a single device, not a cluster", hint="leave out the number of nodes"
            )
        content = {"device": spec.device, **_plain(with_defaults(spec))}
        return _with_sources(content, spec.sources)
    types = device_types(spec)
    count, used = nodes_of(spec, nodes)
    spec = part_of_nodes(spec, used)
    content = _plain(spec)
    content["nodes"] = count
    if len(spec.devices) == 1 and spec.devices[0].count == 1:
        content["devices"] = spec.devices[0].type
    content["device_types"] = {name: _plain(with_defaults(body)) for name, body in types.items()}
    sources = dict(spec.sources)
    for body in types.values():
        sources.update(getattr(body, "sources", {}))
    return _with_sources(content, sources)


def _with_sources(content: dict[str, Any], own_sources: Mapping[str, str]) -> dict[str, Any]:
    """The content with the citations that it uses at its end."""
    content.pop("sources", None)
    known = {**citations(), **own_sources}
    used = sorted({name for name in _sources_in(content) if name in known})
    return {**content, "sources": {name: known[name] for name in used}} if used else content


def _sources_in(content: object) -> list[str]:
    if isinstance(content, list):
        return [name for item in content for name in _sources_in(item)]
    if not isinstance(content, dict):
        return []
    names = [content["source"]] if isinstance(content.get("source"), str) else []
    return names + [name for item in content.values() for name in _sources_in(item)]


def _plain(model: BaseModel) -> dict[str, Any]:
    """A model as plain data in the notation of profile files, without its name."""
    return model.model_dump(exclude={"device", "stack", "sources"})


def profile_yaml(content: Mapping[str, Any]) -> str:
    """A profile as YAML text, one line a figure."""
    from ruamel.yaml import YAML

    writer = YAML()
    writer.width = 4096
    writer.indent(mapping=2, sequence=4, offset=2)
    stream = io.StringIO()
    writer.dump(_styled(content), stream)
    return stream.getvalue()


def _styled(content: Any) -> Any:  # noqa: ANN401
    """The content in the types of ruamel.yaml, with mappings of scalars and lists of numbers on one line."""
    from ruamel.yaml.comments import CommentedMap, CommentedSeq

    if isinstance(content, Mapping):
        styled = CommentedMap({key: _styled(value) for key, value in content.items()})
        if {"value", "type", "ranks"} & content.keys() or all(str(v).endswith("%") for v in content.values()):
            styled.fa.set_flow_style()
        return styled
    if isinstance(content, list):
        listed = CommentedSeq(_styled(item) for item in content)
        if all(isinstance(item, int) for item in content):
            listed.fa.set_flow_style()
        return listed
    return content


def profile_text(name_or_path: str | Path) -> str:
    """The text of a profile file, comments included.

    Raises:
        HardwareError: there is no such profile, or the file has errors.
    """
    known = _names()
    read_profile(name_or_path, known=known)
    return profile_path(name_or_path, known=known).read_text(encoding="utf-8")


def _names() -> tuple[str, ...]:
    """Names of all bundled profiles: clusters, devices and stacks."""
    return (*cluster_names(), *device_names(), *stack_names())


def profile_template(name_or_path: str | Path, name: str) -> str:
    """A commented template called `name`: another cluster's profile with its devices and all defaults written out.

    Raises:
        HardwareError: there is no such profile, it has errors, or it is no cluster.
    """
    content = resolved_profile(name_or_path, known=cluster_names())
    if "cluster" not in content:
        kind = read_profile(name_or_path).kind
        hint = "start from one of `shardplan hardware list`"
        raise HardwareError(f"{str(name_or_path)!r} is {kind}, not a cluster", hint=hint)
    return _header(name) + profile_yaml({**content, "cluster": name})


def sketch_text(sketch: ClusterSketch) -> str:
    """A commented profile of a cluster sketch.

    Raises:
        UsageError: no bundled device has the name of its device.
    """
    left_out = "".join(f"# not taken: {visible(note)}\n" for note in sketch.notes)
    return _header(sketch.name) + left_out + profile_yaml(sketch.document())


def with_measured(name_or_path: str | Path, level: str, rows: Mapping[Collective, Mapping[str, Any]], name: str) -> str:
    """A profile called `name`: another one, resolved, with new measured collectives of a level.

    Args:
        name_or_path: the profile.
        level: name of the level.
        rows: by collective, the row of `measured`.
        name: name of the new profile.

    Raises:
        HardwareError: there is no such profile or level.
    """
    content = resolved_profile(name_or_path)
    levels = [entry for place in ("node", "network") for entry in content.get(place, [])]
    entry = next((entry for entry in levels if entry["level"] == level), None)
    if entry is None:
        known = ", ".join(other["level"] for other in levels) or "none"
        raise HardwareError(f"no level {level!r}", where=str(name_or_path), hint=f"it has {known}")
    measured = entry.setdefault("measured", {})
    for kind, row in rows.items():
        kept = [other for other in measured.get(str(kind), []) if other["ranks"] != row["ranks"]]
        measured[str(kind)] = sorted([*kept, dict(row)], key=lambda other: other["ranks"])
    return profile_yaml({**content, "cluster": name})
