"""ONNX models: files without their weights, or models in memory, as graphs; a file of one batch written for another; a
torch module, exported in memory by torch's exporter.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.errors import ModelError, UsageError
from planner.graph import Graph, SourceFile
from planner.importers.formats import FORMATS, Format, in_file, load_graph
from planner.importers.onnx_graph import passes
from planner.importers.onnx_graph.freeze import freeze
from planner.importers.onnx_graph.nodes import assign_modules, live_nodes, require_bounded
from planner.importers.onnx_graph.read import check_model, inlined, looks_like_onnx, read_model
from planner.importers.onnx_graph.resolve import Resolver
from planner.importers.onnx_graph.ties import note_ties, order_weights, restore_ties, separate_merged, tie_copies
from planner.importers.onnx_graph.weights import find_weights, restore_biases
from planner.importers.onnx_graph.work import WorkGraph
from planner.operators import batch_constants, rebatch, rewritten

if TYPE_CHECKING:
    import onnx
    import onnx_ir
    import torch


PASSES: tuple[Callable[[WorkGraph], None], ...] = (
    passes.fold_constant_regions,
    passes.collapse_aliases,
    passes.drop_final_softmax,
    passes.remove_dead,
    assign_modules,
    restore_biases,
    find_weights,
    tie_copies,
    separate_merged,
    order_weights,
    note_ties,
    restore_ties,
    passes.note_folded_batch_norms,
    passes.note_lost_weights,
    passes.note_missing_parameters,
    passes.note_possible_tables,
    passes.note_missing_biases,
    passes.note_missing_rules,
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

    graph = load_graph(path, dims=dims, as_written=True)
    if graph.source is None:
        raise ModelError("is no ONNX file", where=str(path), hint="only ONNX files have constants that hold a batch")
    change, after = batch_constants(graph, batch), rebatch(graph, batch)
    model = inlined(onnx.load(str(path), load_external_data=False))
    makers = {name: node for node in model.graph.node for name in node.output}
    stored = {tensor.name for tensor in model.graph.initializer}
    absent = [key for key, _ in change.operands if key not in makers]
    absent += [name for name in change.samples if name not in makers and name not in stored]
    if absent:
        message = f"the batch is also in {absent[0]!r}, which is written as other operators in the file"
        raise ModelError(message, where=str(path), hint=f"export the model at batch {batch}")
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
    beside = {e.value: None for tensor in model.graph.initializer for e in tensor.external_data if e.key == "location"}
    external = tuple(name for name in beside if (Path(path).parent / name).exists())
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


_NEEDS = "importing a torch module needs torch and onnxscript"


def from_torch(
    module: torch.nn.Module,
    example_inputs: torch.Tensor | Sequence[Any] | Mapping[str, Any],
    *,
    name: str = "",
) -> Graph:
    """A torch module as a graph; names of parameters and modules are the module's own.

    Neither data of weights nor a device is needed: a module and inputs that were built under `torch.device("meta")`
    will do. The module is exported in the mode that it is in: dropout counts where `module.training` is true. The batch
    of the example is no limit: the micro-batch is searched.

    Args:
        module: the module; it is not changed.
        example_inputs: what its `forward` takes: a tensor, a sequence of positional arguments, or arguments by name.
        name: what to call the graph; the class of the module when empty.

    Raises:
        UsageError: torch or onnxscript is not installed.
        ModelError: torch cannot export the module, or the graph cannot be priced; says why.
    """
    try:
        import onnxscript  # noqa: F401 - torch's exporter needs it
        import torch
    except ModuleNotFoundError as error:
        raise UsageError(f"{_NEEDS}: {error}", hint="pip install torch onnxscript (shardplan[torch])") from None
    title = name or type(module).__name__
    by_name = isinstance(example_inputs, Mapping)
    by_place = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else example_inputs
    try:
        with _quiet():
            program = torch.onnx.export(
                module,
                () if by_name else tuple(by_place),
                kwargs=dict(example_inputs) if by_name else None,
                dynamo=True,
                optimize=False,
                verbose=False,
            )
    except Exception as error:  # the exporter runs the user's code
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        hint = "mend what torch.export refuses, or export it another way and load that file"
        raise ModelError(f"torch cannot export the module: {reason}", where=title, hint=hint) from error
    if program is None:
        raise ModelError("torch's exporter returned no model", where=title, hint="use another release of torch")
    with in_file(Path(title)):
        graph = graph_from_proto(_without_data(program.model, module), name=title)
    buffers = {buffer for buffer, _ in module.named_buffers()}
    parameters = tuple(replace(p, trainable=False) if p.name in buffers else p for p in graph.parameters)
    return replace(graph, parameters=parameters, report=replace(graph.report, format="torch"))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the exporter warns of and logs off the terminal."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(disabled)


def _without_data(model: onnx_ir.Model, module: torch.nn.Module) -> onnx.ModelProto:
    """The exported model with the shapes of parameters, but not their data, each under its first name in the module.

    Buffers keep their data, which may say what a graph computes (a mask that is causal), where they have any.
    """
    import onnx_ir

    first = {id(weight): name for name, weight in module.named_parameters()}
    names = {name: first[id(weight)] for name, weight in module.named_parameters(remove_duplicate=False)}
    empty = {name for name, buffer in module.named_buffers() if buffer.is_meta}
    offset = 0
    for value in list(model.graph.initializers.values()):
        tensor: Any = value.const_value
        exported = value.name or ""
        if tensor is None or (exported not in names and exported not in empty):
            continue
        value.name = name = names.get(exported, exported)
        shape: Any = onnx_ir.Shape(tensor.shape)
        value.const_value = onnx_ir.ExternalTensor(
            "weights", offset, tensor.nbytes, tensor.dtype, shape=shape, name=name
        )
        offset += tensor.nbytes
    proto: onnx.ModelProto = onnx_ir.to_proto(model)
    return proto
