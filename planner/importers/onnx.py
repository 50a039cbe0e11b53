"""ONNX models: files without their weights, or models in memory, as graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import ModelError
from planner.graph import Graph, SourceFile
from planner.importers.formats import FORMATS, Format, ImportOptions
from planner.importers.onnx_graph.attributes import assign_modules
from planner.importers.onnx_graph.freeze import freeze
from planner.importers.onnx_graph.order import require_bounded
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
from planner.operators import rewritten

if TYPE_CHECKING:
    import onnx

PASSES: tuple[Callable[[WorkGraph, ImportOptions], None], ...] = (
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
    options: ImportOptions | None = None,
) -> Graph:
    """An ONNX model in memory as a graph; the model is not changed.

    Args:
        model: the model; its weights may be absent (external) or empty.
        name: what to call it; the graph's own name when empty.
        dims: sizes of symbolic axes, and trip counts of loops that do not say theirs, by name.
        options: choices that the model leaves open.

    Raises:
        ModelError: an axis without a size, contradicting shapes, a needed shape that cannot be found, or functions
            without end.
        UsageError: options that name no parameter.
    """
    check_model(model)
    require_bounded(model)
    work = Resolver(model, name, dims or {}).run()
    for transform in PASSES:
        transform(work, options or ImportOptions())
    if not work.nodes:
        raise ModelError(
            "no operator is left that depends on the inputs and costs anything, so there is nothing to plan",
            hint="check the outputs of the export",
        )
    frozen = freeze(work)
    return frozen if options and options.as_written else rewritten(frozen)


def _load(path: Path, dims: Mapping[str, int], options: ImportOptions) -> Graph:
    model = read_model(path)
    as_written = replace(options, as_written=True)
    written = graph_from_proto(model, name=path.stem, dims=dims, options=as_written)
    open_sizes = {
        value.name: frozenset(d for d, size in enumerate(value.type.tensor_type.shape.dim) if not size.dim_value)
        for value in model.graph.input
    }
    graph = written if options.as_written else rewritten(written)
    return replace(graph, source=SourceFile(path, written, open_sizes))


FORMATS.register("onnx", Format("ONNX", (".onnx", ".pb"), looks_like_onnx, _load))
