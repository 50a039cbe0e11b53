"""Profiles as text: resolved profiles, and templates of new ones."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import HardwareError
from planner.hardware.document import citations
from planner.hardware.loader import device_types, profile_path, read_profile
from planner.hardware.sketch import ClusterSketch
from planner.hardware.types import Collective

if TYPE_CHECKING:
    from pydantic import BaseModel

_HEADER = """\
# A hardware profile for shardplan. Check it:  shardplan hardware lint {file}
#
# Quantities are strings with units: 80 GB, 25 Gbit/s, 312 TFLOP/s, 5 us, 87%. A figure is written short (`80 GB`) or
# with its source: {{value: 80 GB, source: mleng}}; add `verified: false` and a `note` where they help. Short names of
# sources are those of the bundled profiles or your own under `sources:`.
#
#   devices    a device name, or a list of {{type, count}} in the order of the ranks for a mixed pool
#   node       levels of links inside a node, innermost first; `size` is how many devices, then groups, each joins
#   network    levels that join nodes; the outermost has no size, it grows with --nodes
#   port       what joins ONE device (or group, or node) to the level: value, count of equal ports, and direction:
#              `per-direction`, or `bidirectional` when the figure sums both, as vendors' NVLink figures do
#   peer       only in a mesh or torus: the wire between two single devices
#   torus      dimensions of the torus as which devices or nodes are wired: limits what an all-to-all takes
#   latency    start-up time of one message;  efficiency: achievable fraction of the port's bandwidth
#   measured   collectives that were measured here; they replace the model where the number of ranks agrees
#
# For completion in an editor:  shardplan hardware schema > hardware.schema.json, and as the first line of this file
#   # yaml-language-server: $schema=hardware.schema.json
"""


def resolved_profile(name_or_path: str | Path, nodes: int | str | None = None) -> dict[str, Any]:
    """A self-contained profile: devices written out, defaults filled in, sources cited in full.

    Read back, it gives the same cluster with the same fingerprint.

    Raises:
        HardwareError: as `load_cluster`.
    """
    from planner.hardware.resolve import nodes_of, part_of_nodes, with_defaults
    from planner.hardware.schema import DeviceFile, StackFile

    spec = read_profile(name_or_path)
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
    """The content in the types of ruamel.yaml, with mappings of scalars on one line."""
    from ruamel.yaml.comments import CommentedMap, CommentedSeq

    if isinstance(content, Mapping):
        styled = CommentedMap({key: _styled(value) for key, value in content.items()})
        if {"value", "type", "ranks"} & content.keys() or all(str(v).endswith("%") for v in content.values()):
            styled.fa.set_flow_style()
        return styled
    if isinstance(content, list):
        return CommentedSeq(_styled(item) for item in content)
    return content


def profile_text(name_or_path: str | Path) -> str:
    """The text of a profile file, comments included.

    Raises:
        HardwareError: there is no such profile.
    """
    return profile_path(name_or_path).read_text(encoding="utf-8")


def profile_template(name_or_path: str | Path, name: str) -> str:
    """A commented template called `name`: another cluster's profile with its devices and all defaults written out.

    Raises:
        HardwareError: there is no such profile, it has errors, or it is no cluster.
    """
    content = resolved_profile(name_or_path)
    if "cluster" not in content:
        kind = read_profile(name_or_path).kind
        hint = "start from one of `shardplan hardware list`"
        raise HardwareError(f"{str(name_or_path)!r} is {kind}, not a cluster", hint=hint)
    return _HEADER.format(file=f"{name}.yaml") + profile_yaml({**content, "cluster": name})


def sketch_text(sketch: ClusterSketch) -> str:
    """A commented profile of a cluster sketch.

    Raises:
        UsageError: no bundled device has the name of its device.
    """
    return _HEADER.format(file=f"{sketch.name}.yaml") + profile_yaml(sketch.document())


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
