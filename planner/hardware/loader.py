"""Loads profiles: finds one by name or path, checks it, changes figures, and builds the machine or software in it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from planner.errors import HardwareError, Problem
from planner.hardware.changes import DEVICE, STACK, Change, changed_profile, changes_of, read_changes
from planner.hardware.document import (
    Document,
    bundled_path,
    cluster_names,
    device_names,
    looks_like_path,
    read_document,
    stack_names,
)
from planner.hardware.types import NO_STACK, Cluster, Device, Stack
from planner.registry import did_you_mean

if TYPE_CHECKING:
    from planner.hardware.schema import ClusterFile, DeviceFile, StackFile
    from planner.hardware.validate import ProfileFile


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
        changes: changed figures, such as `network.bandwidth=200Gbit/s` (`planner.hardware.changes`). The name of the
            cluster lists them.

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
    on_links += tuple(
        dataclasses.replace(change, path=("device_types", name, *change.path))
        for name in inline
        for change in on_devices
    )
    spec = _changed(name_or_path, on_links)
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
    suffix = "".join(f", {change.text}" for change in read)
    return dataclasses.replace(cluster, name=cluster.name + suffix)


def load_stack(name_or_path: str | Path = "") -> Stack:
    """Load the software that trains: a bundled stack by name, or one from a YAML file; `DEFAULT_STACK` without a name.

    Raises:
        HardwareError: no such stack, errors in its file, or stacks that are based on each other.

    >>> load_stack("megatron-2021").launch_s
    6.5e-05
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
        wanted = spec.base
    stack = NO_STACK
    for spec in reversed(specs):
        stack = build_stack(spec, stack)
    return stack


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
    spec = read_profile(name_or_path)
    if not isinstance(spec, kind):
        raise HardwareError(f"{name_or_path!s} is {spec.kind}, not {kind.kind}", hint=f"known: {', '.join(known)}")
    return spec


def device_types(spec: ClusterFile, changes: Sequence[Change] = ()) -> dict[str, Any]:
    """By name, each device type that a cluster uses: of its own file, or of another one.

    Raises:
        UsageError: a change names no field of a device.
        HardwareError: a changed figure is wrong.
    """
    own = spec.device_types
    return {part.type: own.get(part.type) or _changed(part.type, changes) for part in spec.devices}


def _changed(name_or_path: str | Path, changes: Sequence[Change]) -> ProfileFile:
    """The checked content of a profile file, with some figures changed."""
    spec = read_profile(name_or_path)
    return changed_profile(read_document(profile_path(name_or_path)), changes) if changes else spec


def lint(path: str | Path) -> list[Problem]:
    """All errors in a profile file, in the order of the file; empty when it can be loaded.

    Raises:
        HardwareError: the file cannot be read.
    """
    return _check(Path(path))[1]


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


def profile_path(name_or_path: str | Path) -> Path:
    """The file of a profile.

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
        hint = did_you_mean(text, (*cluster_names(), *device_names(), *stack_names()))
        if not hint.startswith("did"):
            hint = "see `shardplan hardware list`"
        raise HardwareError(f"unknown hardware {text!r}", hint=hint)
    return path


def read_profile(name_or_path: str | Path) -> ProfileFile:
    """The checked content of a profile file.

    Raises:
        HardwareError: no such profile, or errors in its file.
    """
    path = profile_path(name_or_path)
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


def _check(path: Path) -> tuple[ProfileFile | None, list[Problem]]:
    from planner.hardware.validate import validate

    return validate(read_document(path))
