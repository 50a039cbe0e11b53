"""ONNX models: files without their weights, or models in memory, as graphs; a file of one batch written for another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from planner.errors import ModelError
from planner.graph import Graph, SourceFile
from planner.importers.formats import FORMATS, Format, load_graph
from planner.importers.onnx_graph.attributes import assign_modules
from planner.importers.onnx_graph.freeze import freeze
from planner.importers.onnx_graph.order import live_nodes, require_bounded
from planner.importers.onnx_graph.read import check_model, looks_like_onnx, read_model
from planner.importers.onnx_graph.resolve import Resolver
from planner.importers.onnx_graph.simplify import (
    collapse_aliases,
    drop_final_softmax,
    fold_constant_regions,
    remove_dead,
)
from planner.importers.onnx_graph.suspicions import (
    note_folded_batch_norms,
    note_lost_weights,
    note_missing_biases,
    note_missing_rules,
    note_possible_tables,
)
from planner.importers.onnx_graph.ties import note_ties, order_weights, restore_ties, separate_merged
from planner.importers.onnx_graph.weights import find_weights
from planner.importers.onnx_graph.work import WorkGraph
from planner.operators import batch_constants, rebatch, rewritten

if TYPE_CHECKING:
    import onnx


PASSES: tuple[Callable[[WorkGraph], None], ...] = (
    fold_constant_regions,
    collapse_aliases,
    drop_final_softmax,
    remove_dead,
    assign_modules,
    find_weights,
    separate_merged,
    order_weights,
    note_ties,
    restore_ties,
    note_folded_batch_norms,
    note_lost_weights,
    note_possible_tables,
    note_missing_biases,
    note_missing_rules,
)
"""What happens between resolving shapes and freezing, in order; each pass changes the working graph in place."""


def graph_from_proto(
    model: onnx.ModelProto,
    *,
    name: str = "",
    dims: Mapping[str, int] | None = None,
    as_written: bool = False,
) -> Graph:
    """An ONNX model in memory as a graph; the model is not changed.

    Args:
        model: the model; its weights may be absent (external) or empty.
        name: what to call it; the graph's own name when empty.
        dims: sizes of symbolic axes, and trip counts of loops that do not say theirs, by name.
        as_written: keep the operators that the file has; else those that an exporter wrote out as many become one.

    Raises:
        ModelError: an axis without a size, contradicting shapes, a needed shape that cannot be found, or functions
            without end.
    """
    check_model(model)
    require_bounded(model)
    work = Resolver(model, name, dims or {}).run()
    for transform in PASSES:
        transform(work)
    if not work.nodes:
        raise ModelError(
            "no operator is left that depends on the inputs and costs anything, so there is nothing to plan",
            hint="check the outputs of the export",
        )
    frozen = freeze(work)
    return frozen if as_written else rewritten(frozen)


def _load(path: Path, dims: Mapping[str, int], as_written: bool) -> Graph:
    model = read_model(path)
    written = graph_from_proto(model, name=path.stem, dims=dims, as_written=True)
    open_sizes = {
        value.name: frozenset(d for d, size in enumerate(value.type.tensor_type.shape.dim) if not size.dim_value)
        for value in model.graph.input
    }
    graph = written if as_written else rewritten(written)
    return replace(graph, source=SourceFile(path, written, open_sizes))


FORMATS.register("onnx", Format("ONNX", (".onnx", ".pb"), looks_like_onnx, _load))


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

    graph = load_graph(path, dims=dims, as_written=True)
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
