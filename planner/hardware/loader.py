"""Loads profiles: finds one by name or path, checks it, changes figures, and builds the machine or software in it.

Users write a change as `network.bandwidth=200Gbit/s`. It names a field by its path: of the cluster's file (`nodes`,
`node_price`), of a tier of links (`network` or `node` for all tiers there, or a tier by its name:
`infiniband.latency`), of the devices (`device.memory`) or of the software (`stack.launch`). The changed profile is
checked as a file is.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from planner.errors import HardwareError, Problem, UsageError
from planner.hardware.document import (
    BEGINNING,
    YAML_SUFFIXES,
    Document,
    bundled_path,
    cluster_names,
    device_names,
    looks_like_path,
    parse_document,
    read_document,
    stack_names,
)
from planner.hardware.types import NO_STACK, Cluster, Device, Stack
from planner.registry import did_you_mean

if TYPE_CHECKING:
    from planner.hardware.schema import ClusterFile, DeviceFile, StackFile
    from planner.hardware.validate import ProfileFile


DEVICE, STACK = "device", "stack"
TIERS = ("node", "network")
BANDWIDTH, PORT = "bandwidth", "port"
"""The name by which a change means the ports of a tier, and the field."""
_PRICED = (BANDWIDTH, PORT, "latency", "efficiency", "peer", "oversubscription")
"""Figures of a tier that measured collectives would hide."""
_NAMES = ("cluster", "device", "stack", "base", "about", "sources", "devices", "level")
"""Fields that identify a profile; they cannot be changed."""


Changes = Mapping[tuple[str, ...], tuple[Any, str]]
"""By path of a field (`("network", "bandwidth")`): its new YAML value, and the change as the user wrote it."""


def read_changes(texts: Sequence[str]) -> Changes:
    """Changes written as `path.to.field=value`.

    Raises:
        UsageError: a text is not of that form, or names a field twice.
    """
    changes: dict[tuple[str, ...], tuple[Any, str]] = {}
    for text in texts:
        path, sign, value = text.partition("=")
        names = tuple(name.strip() for name in path.split("."))
        if not sign or not all(names) or not value.strip():
            raise UsageError(f"{text!r} is no change", hint="write a field and a value: network.bandwidth=200Gbit/s")
        if names in changes:
            raise UsageError(f"{path} is changed twice", hint="leave one of them out")
        document = parse_document(f"value: {value.strip()}", text)
        if document.problems:
            raise UsageError(f"{value!r} is no value", where=text, hint=document.problems[0].message)
        changes[names] = document.data["value"], f"{'.'.join(names)}={value.strip()}"
    return changes


def changed_profile(document: Document, changes: Changes) -> ProfileFile:
    """The profile in a document with some of its figures changed.

    Raises:
        UsageError: there is no such field; the hint names the closest.
        HardwareError: a changed figure is wrong: its unit, size or range.
    """
    from planner.hardware.validate import validate

    changed = copy.copy(document)
    changed.data = copy.deepcopy(document.data)
    for path, (value, text) in changes.items():
        _set(changed.data, path, value, text)
    spec, problems = validate(changed)
    if spec is None:
        texts = ", ".join(text for _, text in changes.values())
        raise HardwareError(problems[0].message, where=texts, hint=problems[0].hint)
    return spec


def changes_of(changes: Changes, root: str) -> Changes:
    """The changes of the devices (`DEVICE`), the software (`STACK`) or the cluster (""), with paths from there on."""
    if not root:
        return {path: change for path, change in changes.items() if path[0] not in (DEVICE, STACK)}
    return {path[1:]: change for path, change in changes.items() if path[0] == root}


def _set(data: dict[str, Any], path: tuple[str, ...], value: Any, text: str) -> None:  # noqa: ANN401
    """Write a change into the data of a profile; `text` is the change as the user wrote it.

    Raises:
        UsageError: there is no such field.
    """
    owners = _tiers(data, path[0])
    names = path[1:] if owners else path
    if names and names[0].isdecimal() and owners:
        owners, names = owners[int(names[0]) : int(names[0]) + 1], names[1:]
    for owner in owners or [data]:
        if owners and names and names[0] in _PRICED:
            owner.pop("measured", None)  # measured collectives would hide the change
        inside = tuple(PORT if name == BANDWIDTH and owners else name for name in names)
        if not inside or inside[0] not in _fields(data, tier=bool(owners)):
            wanted = text.partition("=")[0]
            head = wanted.removesuffix(".".join(path))
            hint = did_you_mean(wanted, [head + name for name in _field_paths(data)])
            raise UsageError(f"no field {wanted!r}", hint=hint)
        _put(owner, inside, value)


def _tiers(data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The tiers of links that a name means: all tiers of a section, or the tier of that name."""
    sections = {section: data.get(section, []) for section in TIERS}
    if name in sections:
        return list(sections[name])
    return [tier for tiers in sections.values() for tier in tiers if tier["level"] == name]


def _put(owner: dict[str, Any], path: Sequence[str], value: Any) -> None:  # noqa: ANN401
    """Set a field; of a figure with a source only its value."""
    for name in path[:-1]:
        inner = owner.get(name)
        owner[name] = dict(inner) if isinstance(inner, dict) else {} if inner is None else {"value": inner}
        owner = owner[name]
    old = owner.get(path[-1])
    if isinstance(old, dict) and "value" in old and not isinstance(value, dict):
        kept = {key: old[key] for key in old if key not in ("source", "note", "verified")}
        value = {**kept, "value": value, "source": "changed by hand"}
    owner[path[-1]] = value


def _fields(data: dict[str, Any], *, tier: bool) -> list[str]:
    """Fields that can be changed, of a tier of links or of the profile itself."""
    from planner.hardware.schema import LevelEntry
    from planner.hardware.validate import kind_of

    model = LevelEntry if tier else kind_of(data)
    return [name for name in model.model_fields if name not in (*_NAMES, *TIERS)]


def _field_paths(data: dict[str, Any]) -> Iterator[str]:
    """Paths of all fields that can be changed."""
    yield from _fields(data, tier=False)
    names = [*(section for section in TIERS if data.get(section))]
    names += [tier["level"] for section in TIERS for tier in data.get(section, [])]
    fields = [BANDWIDTH, *_fields(data, tier=True)]
    yield from (f"{name}.{field}" for name in names for field in fields)
    if "cluster" in data:
        from planner.hardware.schema import DeviceBody, StackFile

        for root, model in ((DEVICE, DeviceBody), (STACK, StackFile)):
            yield from (f"{root}.{name}" for name in model.model_fields if name not in _NAMES)


Profile = TypeVar("Profile", "DeviceFile", "StackFile")

DEFAULT_STACK = "megatron-2025"
"""Stack of current practice."""


def load_cluster(
    name_or_path: str | Path,
    *,
    nodes: int | str | None = None,
    devices: int | None = None,
    stack: str | Path | Stack = "",
    changes: Sequence[str] = (),
) -> Cluster:
    """Load a bundled cluster by name, or one from a YAML file; a device makes a cluster of one.

    Args:
        name_or_path: `dgx-a100`, or the path of a profile.
        nodes: number of nodes, by default that of the profile; `4x64` for 64 devices of each of 4 nodes.
        devices: number of devices in place of nodes: equally many of each of as few nodes as possible.
        stack: the software that trains: a `Stack`, or an argument of `load_stack`.
        changes: changed figures, such as `network.bandwidth=200Gbit/s`. The name of the cluster lists them.

    Raises:
        HardwareError: no such profile, errors in its file (`problems` lists all of them), a number of nodes or devices
            that the profile cannot have, or a wrong changed figure.
        UsageError: a change names no field.

    >>> load_cluster("dgx-a100", nodes=2).device_count
    16
    >>> load_cluster("gb200-nvl72", devices=256).node_size
    64
    """
    read = read_changes(changes)
    on_links, on_devices, on_stack = (changes_of(read, root) for root in ("", DEVICE, STACK))
    inline = getattr(read_profile(name_or_path), "device_types", ())
    inlined = {("device_types", name, *path): change for name in inline for path, change in on_devices.items()}
    spec = _changed(name_or_path, {**on_links, **inlined})
    from planner.hardware import resolve
    from planner.hardware.schema import DeviceFile, StackFile

    software = stack if isinstance(stack, Stack) else load_stack(stack)
    if on_stack:
        file: Any = changed_profile(Document("changed stack", [], {"stack": software.name}), on_stack)
        software = resolve.build_stack(file, software)
    if isinstance(spec, StackFile):
        raise HardwareError(f"{spec.stack!r} is a stack, not a cluster", hint=f"give it as --stack {spec.stack}")
    if isinstance(spec, DeviceFile):
        if nodes not in (None, 1) or devices not in (None, 1):
            hint = "take a cluster profile, or write one with `shardplan hardware init`"
            raise HardwareError(f"{spec.device!r} is a single device, not a cluster", hint=hint)
        device: Any = _changed(name_or_path, on_devices)
        cluster = resolve.single_device(device.device, resolve.build_device(device.device, device, software))
    else:
        types = device_types(spec, on_devices)
        cluster = resolve.build_cluster(spec, types, resolve.nodes_of(spec, nodes, devices), software)
    suffix = "".join(f", {text}" for _, text in read.values())
    return replace(cluster, name=cluster.name + suffix)


def load_stack(name_or_path: str | Path = "") -> Stack:
    """Load the software that trains: a bundled stack by name, or one from a YAML file; `DEFAULT_STACK` without a name.

    Raises:
        HardwareError: no such stack, errors in its file, a base beyond the file's folder, or stacks that are based on
            each other.

    >>> load_stack("megatron-2021").launch_s
    6e-05
    """
    from planner.hardware.resolve import build_stack
    from planner.hardware.schema import StackFile

    specs: list[StackFile] = []
    wanted: str | Path | None = name_or_path or DEFAULT_STACK
    while wanted:
        spec = _of_kind(wanted, StackFile, stack_names())
        if spec in specs:
            raise HardwareError(f"the stack {spec.stack!r} is based on itself", where=str(wanted), hint="change `base`")
        specs.append(spec)
        wanted = spec.base and named_stack(spec.base, where=f"{wanted}: base", folder=profile_path(wanted).parent)
    stack = NO_STACK
    for spec in reversed(specs):
        stack = build_stack(spec, stack)
    return stack


def named_stack(name: str, *, where: str = "", folder: Path | None = None) -> str | Path:
    """The stack that a document names, as an argument of `load_stack`: a bundled one, or a file near the document.

    A document may come from anybody, and must not make its reader open any file of the machine.

    Args:
        name: the name; "" for the default stack.
        where: the place of the name, for errors.
        folder: the document's folder: paths begin there, and end there or in a folder inside. None for no paths.

    Raises:
        HardwareError: no such stack, or a path that is not allowed.
    """
    if not name or name in stack_names():
        return name
    if folder is None:
        raise HardwareError(f"no bundled stack is called {name!r}", where=where, hint="give its file as --stack FILE")
    if not looks_like_path(name):
        raise HardwareError(f"unknown stack {name!r}", where=where, hint=did_you_mean(name, stack_names()))
    hint = "name a bundled stack, or a .yaml file in the folder of this one"
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()) or path.suffix not in YAML_SUFFIXES:
        raise HardwareError(f"{name!r} is not allowed as a base", where=where, hint=hint)
    if not path.is_file():
        raise HardwareError(f"there is no file {name!r}", where=where, hint=hint)
    return folder / name


def load_device(name_or_path: str | Path, *, stack: str | Path = "") -> Device:
    """Load a bundled device by name, or one from a YAML file, driven by a stack as in `load_stack`.

    Raises:
        HardwareError: no such device, or errors in its file.
    """
    from planner.hardware import resolve
    from planner.hardware.schema import DeviceFile

    spec = _of_kind(name_or_path, DeviceFile, device_names())
    return resolve.build_device(spec.device, spec, load_stack(stack))


def _of_kind(name_or_path: str | Path, kind: type[Profile], known: Sequence[str]) -> Profile:
    """The checked content of a profile file of a kind.

    Raises:
        HardwareError: no such profile, errors in its file, or it is of another kind.
    """
    spec = read_profile(name_or_path, kind.kind.removeprefix("a "), known)
    if not isinstance(spec, kind):
        raise HardwareError(f"{name_or_path!s} is {spec.kind}, not {kind.kind}", hint=f"known: {', '.join(known)}")
    return spec


def device_types(spec: ClusterFile, changes: Changes = MappingProxyType({})) -> dict[str, Any]:
    """By name, each device type that a cluster uses: of its own file, or of another one.

    Raises:
        UsageError: a change names no field of a device.
        HardwareError: a changed figure is wrong.
    """
    own = spec.device_types
    return {part.type: own.get(part.type) or _changed(part.type, changes) for part in spec.devices}


def _changed(name_or_path: str | Path, changes: Changes) -> ProfileFile:
    """The checked content of a profile file, with some figures changed."""
    spec = read_profile(name_or_path)
    return changed_profile(read_document(profile_path(name_or_path)), changes) if changes else spec


def lint(path: str | Path) -> list[Problem]:
    """All errors in a profile file, in the order of the file; empty when it can be loaded.

    Raises:
        HardwareError: the file cannot be read.
    """
    return _check(Path(path), asked=True)[1]


def warnings(path: str | Path) -> list[Problem]:
    """Implausible figures of a valid profile file, in the order of the file; empty for a file with errors.

    Raises:
        HardwareError: the file cannot be read.
    """
    from planner.hardware.validate import doubts, validate

    document = read_document(Path(path))
    spec, _ = validate(document)
    return doubts(document, spec) if spec is not None else []


def profile_json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 7, which editors read) of profile files: it accepts what `lint` accepts.

    Names of sources and devices, and figures that must agree with each other, are only checked by `lint`.
    """
    from pydantic.json_schema import models_json_schema

    from planner.hardware.schema import ClusterFile, DeviceCount, DeviceFile, StackFile

    kinds = [(kind, "validation") for kind in (ClusterFile, DeviceFile, StackFile, DeviceCount)]
    _, body = models_json_schema(kinds, ref_template="#/definitions/{model}")  # type: ignore[arg-type]
    draft7: dict[str, Any] = _draft7(
        {
            "title": "shardplan hardware profile",
            "oneOf": [{"$ref": f"#/definitions/{kind}"} for kind in ("ClusterFile", "DeviceFile", "StackFile")],
            "definitions": body["$defs"],
        }
    )
    text = json.dumps({"$schema": "http://json-schema.org/draft-07/schema#", **draft7})
    for name, entry in body["$defs"].items():
        text = text.replace(f'{name}"', f'{entry["title"]}"')
    schema: dict[str, Any] = json.loads(text)
    return schema


def _draft7(schema: Any) -> Any:  # noqa: ANN401
    """A schema of draft 2020-12 as draft 7: lists of fixed length are `items`."""
    if isinstance(schema, list):
        return [_draft7(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    renamed = {"items" if key == "prefixItems" else key: _draft7(value) for key, value in schema.items()}
    return renamed | ({"additionalItems": False} if "prefixItems" in schema else {})


def profile_path(name_or_path: str | Path, kind: str = "hardware", known: Sequence[str] = ()) -> Path:
    """The file of a profile.

    Args:
        name_or_path: name of a bundled profile, or the path of one.
        kind: what errors call it.
        known: bundled names that fit where it is asked for; by default those of clusters and devices.

    Raises:
        HardwareError: there is no such profile; the hint names the closest ones.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or looks_like_path(text):
        if not os.path.isfile(text):
            raise HardwareError("no such hardware profile file", where=text, hint="see `shardplan hardware list`")
        return Path(text)
    path = bundled_path(text)
    if path is None:
        hint = did_you_mean(text, known or (*cluster_names(), *device_names()))
        if not hint.startswith("did"):
            hint = f"see `shardplan hardware list{_LISTED.get(kind, '')}`"
        raise HardwareError(f"unknown {kind} {text!r}", hint=hint)
    return path


_LISTED = {"device": " --devices", "stack": " --stacks"}
"""Options of `hardware list` that list a kind of profile."""


def read_profile(name_or_path: str | Path, kind: str = "hardware", known: Sequence[str] = ()) -> ProfileFile:
    """The checked content of a profile file; arguments as of `profile_path`.

    Raises:
        HardwareError: no such profile, or errors in its file.
    """
    path = profile_path(name_or_path, kind, known)
    if path == bundled_path(str(name_or_path)):
        return _bundled(path)
    return _checked(path)


@lru_cache(maxsize=256)
def _bundled(path: Path) -> ProfileFile:
    return _checked(path)


def _checked(path: Path) -> ProfileFile:
    spec, problems = _check(path)
    if spec is None:
        first = problems[0]
        count = f"{len(problems)} errors in the profile" if len(problems) > 1 else first.message
        raise HardwareError(count, where=str(path) if len(problems) > 1 else first.where, problems=problems)
    return spec


def _check(path: Path, *, asked: bool = False) -> tuple[ProfileFile | None, list[Problem]]:
    """The checked content of a file, and its errors, which quote nothing but profiles.

    Another document may have named the file, to see what is in it: of a file that is none of ours no word is shown.

    Args:
        path: the file.
        asked: true where the user wants to see what is wrong with this file; a YAML file is quoted then, too.
    """
    from planner.hardware.validate import validate

    document = read_document(path)
    spec, problems = validate(document)
    if problems and not (document.is_profile or (asked and path.suffix in YAML_SUFFIXES and not path.is_symlink())):
        return None, [Problem("no hardware profile", f"{path}:1:1", BEGINNING)]
    return spec, problems
