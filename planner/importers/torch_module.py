"""A torch module as a graph, without a file: exported in memory by torch's exporter, and imported."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import ModelError, UsageError
from planner.graph import Graph
from planner.importers.formats import in_file
from planner.importers.onnx import graph_from_proto

if TYPE_CHECKING:
    import onnx
    import onnx_ir
    import torch

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
        raise UsageError(f"{_NEEDS}: {error}", hint="pip install 'shardplan[torch]'") from None
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
