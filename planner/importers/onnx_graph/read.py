"""An ONNX file to a `ModelProto` without weights, or an error that says what is wrong with the file."""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import ModelError
from planner.importers.onnx_graph.wire import WireError, strip_tensor_data
from planner.importers.onnx_graph.work import MAX_CONSTANT_ELEMENTS

if TYPE_CHECKING:
    import onnx

_INTEGER_BYTES = {6: 4, 7: 8, 9: 1}
_SMALL_BYTES = 8 * MAX_CONSTANT_ELEMENTS
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
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        with path.open("rb") as stream:
            mapped = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
        _refuse_text(path, bytes(mapped[:512]))
        model: onnx.ModelProto = onnx.ModelProto.FromString(strip_tensor_data(mapped))
    except (WireError, DecodeError) as error:
        what = "is cut off or damaged" if _starts_as_onnx(path) else "is not an ONNX file"
        raise ModelError(f"the file {what}: {error}", where=str(path), hint=_AGAIN) from None
    check_model(model, str(path))
    _read_small_integers(model.graph, path.parent)
    return model


def _read_small_integers(graph: onnx.GraphProto, folder: Path) -> None:
    """Fetch shapes and axes that an exporter put into the data file; weights stay where they are, absent is fine."""
    for tensor in graph.initializer:
        size = math.prod(tensor.dims) * _INTEGER_BYTES.get(tensor.data_type, 0)
        if tensor.data_location != 1 or not 0 < size <= _SMALL_BYTES:
            continue
        entry = {item.key: item.value for item in tensor.external_data}
        file = (folder / entry.get("location", "")).resolve()
        if not file.is_relative_to(folder.resolve()) or not file.is_file():
            continue
        with file.open("rb") as stream:
            stream.seek(int(entry.get("offset", "0")))
            data = stream.read(size)
        if len(data) == size:
            tensor.raw_data = data
            tensor.data_location = 0


def check_model(model: onnx.ModelProto, where: str) -> None:
    """Refuse a model that has nothing to plan.

    Raises:
        ModelError: no graph, no nodes, or no outputs.
    """
    if not model.HasField("graph") or not model.ir_version:
        raise ModelError("the file is not an ONNX model: it holds no graph", where=where, hint=_AGAIN)
    if not model.graph.node:
        raise ModelError("the model's graph has no operators", where=where, hint=_AGAIN)
    if not model.graph.output:
        raise ModelError(
            "the model's graph has no outputs, so every operator is dead", where=where, hint="export it with outputs"
        )


def _starts_as_onnx(path: Path) -> bool:
    with path.open("rb") as stream:
        return looks_like_onnx(stream.read(2))


def _refuse_text(path: Path, head: bytes) -> None:
    if looks_like_onnx(head):
        return
    text = head.decode("utf-8", errors="replace")[:256].rstrip("\ufffd")
    if "\ufffd" not in text and all(c.isprintable() or c.isspace() for c in text):
        shown = text.strip().splitlines()[0][:40] if text.strip() else ""
        raise ModelError(
            f"the file is text, not ONNX (it begins {shown!r})", where=str(path), hint="give the binary .onnx file"
        )
