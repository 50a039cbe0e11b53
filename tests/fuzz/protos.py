"""Mutations of protobuf messages by their own description, so that every field of a format is reached."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

INTEGERS = (-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 4, 7, 8, 64, 4097, 2**20, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1)
FLOATS = (0.0, -1.0, 0.5, 1e-38, 1e38, float("inf"), float("nan"))
WORDS = ("", "x", "y", "ghost", "axis", "1", "-1", "0", "9" * 400, "1e3", "a b", "/", "..", "\x00", "é", "n" * 6000,
         "['a', 'b']", "MatMul", "Reshape", "Loop", "SequenceAt", "com.microsoft", "ai.onnx", "data.bin",
         "inf")  # fmt: skip
_WHOLE = {FieldDescriptor.CPPTYPE_INT32: 31, FieldDescriptor.CPPTYPE_INT64: 63}
_NATURAL = {FieldDescriptor.CPPTYPE_UINT32: 32, FieldDescriptor.CPPTYPE_UINT64: 64}

Place = tuple[Message, Any]


def mutate_message(root: Message, rng: random.Random) -> None:
    """Change one field of a message or of any message inside it."""
    places = _places(root)
    groups: dict[str, list[Place]] = {}
    for message, field in places:
        groups.setdefault(f"{message.DESCRIPTOR.name}.{field.name}", []).append((message, field))
    # Half of the time a field by its kind: rare ones (the operator set) would else drown in the frequent ones.
    chosen = groups[rng.choice(sorted(groups))] if rng.random() < 0.5 else places
    message, field = rng.choice(chosen)
    if _repeated(field):
        _change_list(root, message, field, rng)
    else:
        _change_single(root, message, field, rng)


def _repeated(field: Any) -> bool:
    return bool(field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED)


def _places(message: Message) -> list[Place]:
    """All fields that are set, and now and then one that is not, of a message and of those inside."""
    found: list[Place] = [(message, field) for field in message.DESCRIPTOR.fields if field.message_type is None]
    for field, content in message.ListFields():
        if field.message_type is None:
            continue
        found.append((message, field))
        for inner in content if _repeated(field) else [content]:
            found.extend(_places(inner))
    return found


def _messages(root: Message, name: str) -> list[Message]:
    """All messages of a type inside another one."""
    found = [root] if root.DESCRIPTOR.full_name == name else []
    for field, content in root.ListFields():
        if field.message_type is not None:
            for inner in content if _repeated(field) else [content]:
                found.extend(_messages(inner, name))
    return found


def _change_single(root: Message, message: Message, field: Any, rng: random.Random) -> None:
    if field.message_type is not None:
        others = _messages(root, field.message_type.full_name)
        if rng.random() < 0.5:
            message.ClearField(field.name)
        else:
            getattr(message, field.name).CopyFrom(_copy(rng.choice(others)))
    elif rng.random() < 0.1:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _scalar(root, field, getattr(message, field.name), rng))


def _change_list(root: Message, message: Message, field: Any, rng: random.Random) -> None:
    entries = getattr(message, field.name)
    at = rng.randrange(len(entries)) if entries else 0
    actions: list[Callable[[], object]] = [lambda: _append(root, entries, field, rng)]
    if entries:
        actions += [lambda: entries.pop(at), lambda: message.ClearField(field.name), lambda: entries.pop(at)]
        if field.message_type is None:
            actions += [lambda: entries.__setitem__(at, _scalar(root, field, entries[at], rng))] * 3
        else:
            actions += [lambda: entries[at].CopyFrom(_copy(rng.choice(list(entries))))]
    rng.choice(actions)()


def _append(root: Message, entries: Any, field: Any, rng: random.Random) -> None:
    if field.message_type is None:
        entries.append(rng.choice(list(entries)) if entries and rng.random() < 0.3 else _scalar(root, field, None, rng))
    else:
        others = _messages(root, field.message_type.full_name)
        entries.add().CopyFrom(_copy(rng.choice(others))) if others else entries.add()


def _copy(message: Message) -> Message:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def _scalar(root: Message, field: Any, old: Any, rng: random.Random) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice([entry.number for entry in field.enum_type.values])
    if kind in _WHOLE or kind in _NATURAL:
        bits = _WHOLE.get(kind) or _NATURAL[kind]
        low, high = (-(1 << bits) if kind in _WHOLE else 0), (1 << bits) - 1
        near = [old + 1, old - 1, old * 2, -old] if isinstance(old, int) else []
        return min(high, max(low, rng.choice([*INTEGERS, *near, *near, rng.randrange(32)])))
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _octets(old or b"", rng)
    return rng.choice([*WORDS, *_names(root)])


def _octets(old: bytes, rng: random.Random) -> bytes:
    cut = rng.randrange(len(old) + 1)
    return rng.choice([b"", old[:cut], old + old[cut:], rng.randbytes(rng.randrange(1, 40)), b"\xff" * len(old)])


def _names(root: Message) -> list[str]:
    """Texts that stand in a message already: names that mean something there."""
    found: list[str] = []
    for field, content in root.ListFields():
        if field.message_type is not None:
            for inner in content if _repeated(field) else [content]:
                found.extend(_names(inner))
        elif field.type == FieldDescriptor.TYPE_STRING:
            found.extend(content if _repeated(field) else [content])
    return found
