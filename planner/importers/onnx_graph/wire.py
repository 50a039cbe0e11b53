"""Copy an ONNX file without its large tensor data, by walking the protobuf wire format.

Weights embedded in a file may be gigabytes, more than a protobuf message may hold; only structure is needed here. A
message is a sequence of fields, each a varint key (number * 8 + wire type) and a payload; length-delimited fields that
hold tensor data are left out, messages that may contain such fields are entered, all else is copied as it is.
"""

from __future__ import annotations

from collections.abc import Callable

Buffer = bytes | memoryview

KEEP_BYTES = 1 << 16
"""Data fields up to this size are kept: they may hold a shape."""

_TENSOR_DATA = {4, 5, 7, 9, 10, 11}
_CHILDREN: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "function": {7: "node"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}


class WireError(ValueError):
    """The bytes are no well-formed message: cut off, or not protobuf at all."""


def strip_tensor_data(data: Buffer, message: str = "model") -> bytes:
    """The same message without tensor data fields above `KEEP_BYTES`.

    Linear in the number of fields of messages above that size; data that is left out is not even read from disk when
    `data` is a memory map.
    """
    return b"".join(_strip(memoryview(data), message))


def _strip(data: memoryview, message: str) -> list[Buffer]:
    if len(data) <= KEEP_BYTES:
        return [data]
    children = _CHILDREN.get(message, {})
    parts: list[Buffer] = []
    position = copied = 0
    while position < len(data):
        start = position
        key, position = _varint(data, position)
        number, wire_type = key >> 3, key & 7
        if wire_type != 2:
            position = _SKIP.get(wire_type, _unknown)(data, position)
            continue
        length, position = _varint(data, position)
        end = position + length
        if end > len(data):
            raise WireError("a field ends beyond the end of the file")
        if length > KEEP_BYTES and (number in children or (message == "tensor" and number in _TENSOR_DATA)):
            parts.append(data[copied:start])
            if number in children:
                inner = _strip(data[position:end], children[number])
                parts.append(_encode(key) + _encode(sum(len(part) for part in inner)))
                parts.extend(inner)
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


def _skip_bytes(count: int) -> Callable[[memoryview, int], int]:
    def skip(data: memoryview, position: int) -> int:
        if position + count > len(data):
            raise WireError("a field is cut off")
        return position + count

    return skip


def _unknown(data: memoryview, position: int) -> int:
    raise WireError("a field of an unknown kind")


_SKIP: dict[int, Callable[[memoryview, int], int]] = {
    0: lambda data, position: _varint(data, position)[1],
    1: _skip_bytes(8),
    5: _skip_bytes(4),
}
