"""Changed figures of a profile, as the user writes them: `network.bandwidth=200Gbit/s`.

A change names a field by its path: of the cluster's file (`nodes`, `node_price`), of a tier of links (`network` or
`node` for all tiers there, or a tier by its name: `infiniband.latency`), of the devices (`device.memory`) or of the
software (`stack.launch`). The changed profile is checked as a file is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from planner.errors import HardwareError, UsageError
from planner.hardware.document import Document, parse_document
from planner.registry import did_you_mean

if TYPE_CHECKING:
    from planner.hardware.validate import ProfileFile

DEVICE, STACK = "device", "stack"
TIERS = ("node", "network")
BANDWIDTH, PORT = "bandwidth", "port"
"""The name by which a change means the ports of a tier, and the field."""
_NAMES = ("cluster", "device", "stack", "base", "about", "sources", "devices", "level")
"""Fields that identify a profile; they cannot be changed."""


@dataclass(frozen=True, slots=True)
class Change:
    """One changed figure.

    Attributes:
        path: path of the field: `("network", "bandwidth")`.
        value: the YAML value: a number, text with a unit, a list.
        text: the change as the user wrote it.
    """

    path: tuple[str, ...]
    value: Any
    text: str


def read_changes(texts: Sequence[str]) -> tuple[Change, ...]:
    """Changes written as `path.to.field=value`.

    Raises:
        UsageError: a text is not of that form, or names a field twice.
    """
    changes: dict[tuple[str, ...], Change] = {}
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
        changes[names] = Change(names, document.data["value"], f"{'.'.join(names)}={value.strip()}")
    return tuple(changes.values())


def changed_profile(document: Document, changes: Sequence[Change]) -> ProfileFile:
    """The profile in a document with some of its figures changed.

    Raises:
        UsageError: there is no such field; the hint names the closest.
        HardwareError: a changed figure is wrong: its unit, size or range.
    """
    from planner.hardware.validate import validate

    changed = copy.copy(document)
    changed.data = copy.deepcopy(document.data)
    for change in changes:
        _set(changed.data, change)
    spec, problems = validate(changed)
    if spec is None:
        texts = ", ".join(change.text for change in changes)
        raise HardwareError(problems[0].message, where=texts, hint=problems[0].hint)
    return spec


def changes_of(changes: Sequence[Change], root: str) -> tuple[Change, ...]:
    """The changes of the devices (`DEVICE`), the software (`STACK`) or the cluster (""), with paths from there on."""
    if not root:
        return tuple(change for change in changes if change.path[0] not in (DEVICE, STACK))
    return tuple(replace(change, path=change.path[1:]) for change in changes if change.path[0] == root)


def _set(data: dict[str, Any], change: Change) -> None:
    """Write a change into the data of a profile.

    Raises:
        UsageError: there is no such field.
    """
    owners = _tiers(data, change.path[0])
    names = change.path[1:] if owners else change.path
    if names and names[0].isdecimal() and owners:
        owners, names = owners[int(names[0]) : int(names[0]) + 1], names[1:]
    for owner in owners or [data]:
        if owners and names[:1] in ((BANDWIDTH,), (PORT,), ("latency",), ("efficiency",), ("peer",)):
            owner.pop("measured", None)  # measured collectives would hide the change
        path = tuple(PORT if name == BANDWIDTH and owners else name for name in names)
        if not path or path[0] not in _fields(data, tier=bool(owners)):
            raise UsageError(f"no field {change.text.partition('=')[0]!r}", hint=_near(data, change))
        _put(owner, path, change.value)


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


def _near(data: dict[str, Any], change: Change) -> str:
    """A hint with the fields closest to an unknown one."""
    wanted, _, _ = change.text.partition("=")
    head = wanted.removesuffix(".".join(change.path))
    return did_you_mean(wanted, [head + name for name in _field_paths(data)])


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
