"""An ONNX file that was exported at one batch, written for another: its constants that hold the batch are replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from planner.errors import ModelError
from planner.importers.formats import ImportOptions, load_graph
from planner.importers.onnx_graph.order import live_nodes
from planner.operators import batch_constants, rebatch

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True)
class RebatchedFile:
    """A model file at another batch.

    Attributes:
        model: the file's content; external data are where they were.
        external: names of the files beside it that hold its weights, as far as they are there.
        operands: operands that have other values.
        repeated: constants with an entry for each sample, of which the first is taken for all samples.
    """

    model: onnx.ModelProto
    external: tuple[str, ...]
    operands: int
    repeated: tuple[str, ...]


def rebatched_file(path: str | Path, batch: int, *, dims: Mapping[str, int] | None = None) -> RebatchedFile:
    """Read an ONNX file that is fixed at one batch as one that is fixed at another.

    Args:
        path: the file.
        batch: samples, at least 1.
        dims: sizes of its symbolic axes by name; they stay symbolic.

    Raises:
        ModelError: the file cannot be read, or an operator stops the batch (it is named).
    """
    import onnx
    from onnx.inliner import inline_local_functions

    graph = load_graph(path, dims=dims, options=ImportOptions(as_written=True))
    if graph.source is None:
        raise ModelError("is no ONNX file", where=str(path), hint="only ONNX files have constants that hold a batch")
    change, after = batch_constants(graph, batch), rebatch(graph, batch)
    model = onnx.load(str(path), load_external_data=False)
    model = inline_local_functions(model) if model.functions else model
    makers = {name: node for node in model.graph.node for name in node.output}
    for (reader, operand), values in change.operands.items():
        name = f"{reader}#{operand}@batch"
        makers[reader].input[operand] = name
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(values, dtype=np.int64), name))
    for name in graph.identities:
        if name in makers:
            makers[name].CopyFrom(onnx.helper.make_node("Identity", makers[name].input[:1], makers[name].output[:1]))
    for name, sizes in change.samples.items():
        _resize(model.graph, name, graph.tensors[name].shape, sizes)
    live = live_nodes(model.graph.node, [value.name for value in model.graph.output])
    del model.graph.node[:]
    model.graph.node.extend(live)
    del model.graph.value_info[:]
    for value in (*model.graph.input, *model.graph.output):
        shape = after.tensors[value.name].shape if value.name in after.tensors else ()
        for dim, size in zip(value.type.tensor_type.shape.dim, shape, strict=False):
            if dim.HasField("dim_value"):
                dim.dim_value = size
    stored = {e.value: None for tensor in model.graph.initializer for e in tensor.external_data if e.key == "location"}
    external = tuple(name for name in stored if (Path(path).parent / name).exists())
    return RebatchedFile(model, external, len(change.operands), tuple(change.samples) if batch > graph.batch else ())


def _resize(graph: onnx.GraphProto, name: str, shape: tuple[int, ...], sizes: Mapping[int, int]) -> None:
    """Resize the batch dimensions of a constant for all its readers.

    A smaller batch takes the first entries; a larger one repeats the first entry.
    """
    from onnx import helper, numpy_helper

    axes = list(sizes)
    more = any(size > shape[d] for d, size in sizes.items())
    wanted = [sizes.get(d, size) for d, size in enumerate(shape)]
    cut, resized = f"{name}@first", f"{name}@batch"
    operands = {"starts": [0] * len(axes), "ends": [1 if more else sizes[d] for d in axes], "axes": axes, "to": wanted}
    for word, values in operands.items():
        graph.initializer.append(numpy_helper.from_array(np.array(values, dtype=np.int64), f"{name}@{word}"))
    for node in graph.node:
        for place, read in enumerate(node.input):
            if read == name:
                node.input[place] = resized
    made = next((i + 1 for i, node in enumerate(graph.node) if name in node.output), 0)
    graph.node.insert(
        made, helper.make_node("Slice", [name, *(f"{name}@{w}" for w in ("starts", "ends", "axes"))], [cut])
    )
    graph.node.insert(made + 1, helper.make_node("Expand", [cut, f"{name}@to"], [resized]))
