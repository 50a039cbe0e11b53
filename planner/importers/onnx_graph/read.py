"""An ONNX file to a `ModelProto` without weights, or an error that says what is wrong with the file.

Weights embedded in a file may be gigabytes, more than a protobuf message may hold; only structure is needed here. So
the file is copied without its large tensor data first, by walking the wire format: a message is a sequence of fields,
each a varint key (number * 8 + wire type) and a payload; length-delimited fields that hold tensor data are left out,
messages that may contain such fields are entered, all else is copied as it is.
"""

from __future__ import annotations

import functools
import math
import mmap
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import ModelError
from planner.importers.formats import in_file
from planner.importers.onnx_graph.nodes import MOST_VERSION, newest_version, string_list
from planner.importers.onnx_graph.work import MAX_CONSTANT_ELEMENTS

if TYPE_CHECKING:
    import onnx
    from google.protobuf.descriptor import Descriptor  # type: ignore[import-untyped]
    from google.protobuf.message import Message  # type: ignore[import-untyped]

_INTEGER_BYTES = {6: 4, 7: 8, 9: 1}
_FLOAT_BYTES = {1: 4, 10: 2}
_SMALL_BYTES = 8 * MAX_CONSTANT_ELEMENTS
_OFFSET_DIGITS = 19
"""Decimal digits that no offset in a file has."""
_AGAIN = "copy or export it again"


def looks_like_onnx(head: bytes) -> bool:
    """Whether a file may be ONNX: it starts with the field `ir_version` (key 8) and a plausible version."""
    return len(head) > 1 and head[0] == 8 and 1 <= head[1] <= 64


def read_model(path: Path) -> onnx.ModelProto:
    """The model of a file, large tensor data left out, external data untouched.

    Raises:
        ModelError: the file is cut off, holds text or something else, or has no graph.
    """
    import onnx
    from google.protobuf.message import DecodeError

    with in_file(path):
        try:
            with path.open("rb") as stream:
                mapped = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
            _refuse_text(bytes(mapped[:512]))
            model: onnx.ModelProto = onnx.ModelProto.FromString(strip_tensor_data(mapped))
        except (WireError, DecodeError) as error:
            what = "is cut off or damaged" if _starts_as_onnx(path) else "is not an ONNX file"
            raise ModelError(f"the file {what}: {error}", hint=_AGAIN) from None
        if garbled := _garbled(model):
            raise ModelError(f"the file is damaged: {garbled} holds a text that is not UTF-8", hint=_AGAIN)
        check_model(model)
        _read_small_data(model.graph, path)
        return model


def _garbled(message: Message) -> str:
    """The kind of the first message with a text that is not UTF-8 ("" where there is none): protobuf lets it through.

    O(fields of the message and those inside).
    """
    from google.protobuf.message import Message

    inner, texts = _field_numbers(message.DESCRIPTOR)
    for field, content in message.ListFields():
        if field.number in texts:
            kind = type(content)
            if kind is bytes or (kind is not str and bytes in map(type, content)):
                return f"{message.DESCRIPTOR.name}.{field.name}"
        elif field.number in inner:
            for child in (content,) if isinstance(content, Message) else content:
                if garbled := _garbled(child):
                    return garbled
    return ""


@functools.cache
def _field_numbers(kind: Descriptor) -> tuple[frozenset[int], frozenset[int]]:
    """Numbers of the fields of a kind of message that hold messages, and of those that hold texts."""
    inner = frozenset(field.number for field in kind.fields if field.message_type is not None)
    return inner, frozenset(field.number for field in kind.fields if field.type == field.TYPE_STRING)


def _read_small_data(graph: onnx.GraphProto, path: Path) -> None:
    """Fetch what an exporter put into the data file, as far as it is there, that may say what a model is.

    That is shapes and axes, and tables in which it repeated entries of weights; weights stay where they are.
    """
    computed = {
        value.name
        for value in graph.value_info
        for entry in value.metadata_props
        if entry.key.endswith("folded_from") and len(string_list(entry.value)) > 1
    }
    for tensor in graph.initializer:
        integers = tensor.data_type in _INTEGER_BYTES
        widths = _FLOAT_BYTES if tensor.name in computed and not integers else _INTEGER_BYTES
        size, most = math.prod(tensor.dims) * widths.get(tensor.data_type, 0), _SMALL_BYTES if integers else KEEP_BYTES
        if tensor.data_location != 1 or min(tensor.dims, default=0) < 0 or not 0 < size <= most:
            continue
        entry = {item.key: item.value for item in tensor.external_data}
        data = _external_bytes(path, tensor.name, entry.get("location", ""), entry.get("offset", "0"), size)
        if len(data) == size:
            tensor.raw_data = data
            tensor.data_location = 0


def _external_bytes(path: Path, tensor: str, location: str, offset: str, size: int) -> bytes:
    """Bytes of a data file in the model's folder; none where there is no such file.

    Raises:
        ModelError: the offset is not a position in a file, or the file cannot be read.
    """
    where = f"{path}: external data of {tensor!r}"
    if not (offset.isascii() and offset.isdecimal() and len(offset) < _OFFSET_DIGITS):
        raise ModelError(f"the offset {offset!r} is no position in a file", where=where, hint=_AGAIN)
    try:
        file = (path.parent / location).resolve()
        if not file.is_relative_to(path.parent.resolve()) or not file.is_file():
            return b""
        with file.open("rb") as stream:
            stream.seek(int(offset))
            return stream.read(size)
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelError(f"{location!r} cannot be read: {reason}", where=where, hint=_AGAIN) from None


def check_model(model: onnx.ModelProto) -> None:
    """Refuse a model that has nothing to plan.

    Raises:
        ModelError: no graph, no nodes, no outputs or one without a name, or an operator set version that is impossible
            or newer than the onnx package knows.
    """
    if not model.HasField("graph") or not model.ir_version:
        raise ModelError("the file is not an ONNX model: it holds no graph", hint=_AGAIN)
    if not 1 <= model.ir_version <= MOST_VERSION:
        raise ModelError(f"the file has the ONNX version {model.ir_version}", hint=_AGAIN)
    if not model.graph.node:
        raise ModelError("the model's graph has no operators", hint=_AGAIN)
    if not model.graph.output:
        raise ModelError("the model's graph has no outputs, so every operator is dead", hint="export it with outputs")
    if not all(value.name for value in model.graph.output):
        raise ModelError("an output of the model's graph has no name", hint=_AGAIN)
    for holder in (model, *model.functions):
        for entry in holder.opset_import:
            least = 1 if entry.domain in ("", "ai.onnx") else 0
            if not least <= entry.version <= MOST_VERSION:
                name = entry.domain or "ai.onnx"
                raise ModelError(f"operator set {name!r} has the version {entry.version}", hint=_AGAIN)
            newest = newest_version(entry.domain)
            if newest and entry.version > newest:
                name = entry.domain or "ai.onnx"
                raise ModelError(
                    f"operator set {name!r} has the version {entry.version}, newer than {newest}, the newest that the "
                    "installed onnx knows",
                    hint=f"update onnx, or export for operator set {newest}",
                )


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model with its own functions written out; the model itself where it has none.

    Raises:
        ModelError: they cannot be.
    """
    from onnx.inliner import inline_local_functions

    if not model.functions:
        return model
    try:
        return inline_local_functions(model)
    except Exception as error:  # of onnx's C++ alone, which raises a bare RuntimeError among others
        reason = " ".join(str(error).split())
        raise ModelError(f"the model's functions cannot be written out: {reason}", hint=_AGAIN) from None


def _starts_as_onnx(path: Path) -> bool:
    with path.open("rb") as stream:
        return looks_like_onnx(stream.read(2))


_LFS = "version https://git-lfs"
"""What the text begins with that Git LFS leaves in place of a file."""


def _refuse_text(head: bytes) -> None:
    if looks_like_onnx(head):
        return
    text = head.decode("utf-8", errors="replace")[:256].rstrip("\ufffd")
    if "\ufffd" not in text and all(c.isprintable() or c.isspace() for c in text):
        pointer = text.startswith(_LFS)
        hint = "fetch it by `git lfs pull`" if pointer else "give the binary .onnx file"
        raise ModelError("the file is a Git LFS pointer" if pointer else "the file is text, not ONNX", hint=hint)


Buffer = bytes | memoryview

KEEP_BYTES = 1 << 20
"""Data fields up to this size are kept: they may hold a shape, or a table that an exporter computed."""

_TENSOR_DATA = {4, 5, 7, 9, 10, 11}
"""Numbers of the fields of a `TensorProto` that hold its data."""


class WireError(ValueError):
    """The bytes are no well-formed message: cut off, or not protobuf at all."""


def strip_tensor_data(data: Buffer) -> bytes:
    """The same model without tensor data fields above `KEEP_BYTES`.

    Linear in the number of fields of messages above that size; data that is left out is not even read from disk when
    `data` is a memory map.
    """
    from onnx import ModelProto

    return b"".join(_strip(memoryview(data), ModelProto.DESCRIPTOR))


def _strip(data: memoryview, kind: Descriptor) -> list[Buffer]:
    if len(data) <= KEEP_BYTES:
        return [data]
    parts: list[Buffer] = []
    position = copied = 0
    while position < len(data):
        start = position
        key, position = _varint(data, position)
        field = kind.fields_by_number.get(key >> 3)
        inner = None if field is None else field.message_type
        position, end = _content(data, position, key & 7)
        holds_data = kind.name == "TensorProto" and key >> 3 in _TENSOR_DATA
        if end - position > KEEP_BYTES and (inner is not None or holds_data):
            parts.append(data[copied:start])
            if inner is not None:
                content = _strip(data[position:end], inner)
                parts.append(_encode(key) + _encode(sum(len(part) for part in content)))
                parts.extend(content)
            copied = end
        position = end
    parts.append(data[copied:])
    return parts


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(data) and shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise WireError("a number is cut off")


def _encode(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _content(data: memoryview, position: int, wire_type: int) -> tuple[int, int]:
    """First and last byte of the content of a field of a wire type, the last excluded."""
    if wire_type == 0:
        return position, _varint(data, position)[1]
    if wire_type == 2:
        length, position = _varint(data, position)
    elif wire_type in _FIXED_BYTES:
        length = _FIXED_BYTES[wire_type]
    else:
        raise WireError("a field of an unknown kind")
    if position + length > len(data):
        raise WireError("a field ends beyond the end of the file")
    return position, position + length


_FIXED_BYTES = {1: 8, 5: 4}
