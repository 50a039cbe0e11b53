"""Replace the symbolic axes of a model's inputs by sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from planner.errors import ModelError
from planner.importers.onnx_graph.work import ELEMENT_TYPES, TensorType
from planner.registry import did_you_mean

if TYPE_CHECKING:
    import onnx

BATCH_NAMES = ("batch", "batch_size", "batchsize", "n", "bs", "b")
"""Lower-case axis names that mean the batch dimension, the least ambiguous first."""


def model_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Inputs that are fed at each step: old files list initializers among the inputs too."""
    initializers = {tensor.name for tensor in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    return [value for value in graph.input if value.name not in initializers]


def axis_names(inputs: Iterable[onnx.ValueInfoProto]) -> dict[str, tuple[str, ...]]:
    """For each input, its axes' symbolic names; "" for a fixed axis, `input.axis` for an open axis without a name.

    Raises:
        ModelError: an input is no tensor, has no shape at all, or has no elements.
    """
    names: dict[str, tuple[str, ...]] = {}
    for value in inputs:
        kind = value.type.WhichOneof("value")
        if kind != "tensor_type":
            what = {None: "has no type", "sequence_type": "is a sequence", "map_type": "is a map"}.get(
                kind, f"is {kind}"
            )
            raise ModelError(
                f"input {value.name!r} {what}; only tensors can be planned", hint="export with tensor inputs"
            )
        tensor = value.type.tensor_type
        if not tensor.HasField("shape") or tensor.elem_type not in ELEMENT_TYPES:
            raise ModelError(
                f"input {value.name!r} has no shape", hint="export the model with input shapes or named axes"
            )
        if value.name in names:
            raise ModelError(f"two inputs are called {value.name!r}", hint="export the model again")
        if any(dim.HasField("dim_value") and not dim.dim_value for dim in tensor.shape.dim):
            shape = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in tensor.shape.dim]
            raise ModelError(
                f"input {value.name!r} of shape {shape} has a dimension of size 0, so it holds nothing",
                hint="export the model with an example that has elements, or with named axes",
            )
        names[value.name] = tuple(
            "" if dim.HasField("dim_value") and dim.dim_value > 0 else dim.dim_param or f"{value.name}.{i}"
            for i, dim in enumerate(tensor.shape.dim)
        )
    return names


def bind(
    inputs: Iterable[onnx.ValueInfoProto],
    names: Mapping[str, tuple[str, ...]],
    dims: Mapping[str, int],
    loops: Iterable[str],
) -> dict[str, TensorType]:
    """Types of the inputs with every symbolic axis replaced by its size.

    Raises:
        ModelError: an axis has no size (all are listed), a size is not positive, or a name belongs to no axis or loop.
    """
    axes = dict.fromkeys(name for group in names.values() for name in group if name)
    known = {*axes, *loops}
    for name, size in dims.items():
        if name not in known:
            hint = did_you_mean(name, known) if known else "all axes of this model are fixed; leave the option out"
            raise ModelError(f"the model has no symbolic axis {name!r}", hint=hint)
        if size < 1:
            raise ModelError(f"axis {name!r} cannot have size {size}", hint="give a positive number")
    unbound = [name for name in axes if name not in dims]
    if unbound:
        shown = ", ".join(repr(name) for name in unbound)
        example = " ".join(f"--dim {name}=128" for name in unbound)
        raise ModelError(
            f"symbolic axes without a size: {shown}", hint=f"say how large they are, for example {example}"
        )
    return {
        value.name: TensorType(
            tuple(
                dims[name] if name else dim.dim_value
                for name, dim in zip(names[value.name], value.type.tensor_type.shape.dim, strict=True)
            ),
            value.type.tensor_type.elem_type,
        )
        for value in inputs
    }


def batch_size(
    names: Mapping[str, tuple[str, ...]], types: Mapping[str, TensorType], outputs: Iterable[str] = ()
) -> int:
    """Size of the batch dimension: the axis so named, else a leading one; 0 when there is none.

    Of the inputs' leading axes the first that leads an output too, or else the first.
    """
    sizes = {
        axis.lower(): types[name].shape[i] for name, group in names.items() for i, axis in enumerate(group) if axis
    }
    named = next((axis for axis in sizes if is_batch(axis)), None)
    best = next((name for name in BATCH_NAMES if name in sizes), named)
    if best is not None:
        return sizes[best]
    leading = [types[name].shape[0] for name in names if types[name].shape]
    result_sizes = {types[name].shape[0] for name in outputs if types[name].shape}
    return next((size for size in leading if size in result_sizes), leading[0] if leading else 0)


def is_batch(axis: str) -> bool:
    """Whether an axis is called like a batch."""
    plain = axis.lower()
    return plain in BATCH_NAMES or plain.startswith("batch") or plain.endswith("batch")


def assumed_batch(names: Mapping[str, tuple[str, ...]], dims: Mapping[str, int]) -> dict[str, int]:
    """Sizes for symbolic batch axes that nobody gave a size: 1, since plans search the batch that they run.

    An axis is the batch when it is called so; where none is, when it is the only symbolic one and leads its inputs.
    """
    symbolic = dict.fromkeys(axis for group in names.values() for axis in group if axis)
    called = [axis for axis in symbolic if is_batch(axis)]
    if not called and len(symbolic) == 1 and not any(set(group[1:]) & symbolic.keys() for group in names.values()):
        called = list(symbolic)
    return {axis: 1 for axis in called if axis not in dims}
