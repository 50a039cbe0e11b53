"""Models of one operator call, with random operands, as `measured` runs them alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.graph import DType, Tensor
from planner.operators.entry import OpCall
from planner.sums import float_sum

_NUMPY = {
    DType.FLOAT64: np.float64, DType.INT64: np.int64, DType.INT32: np.int32, DType.INT16: np.int16,
    DType.INT8: np.int8, DType.UINT64: np.uint64, DType.UINT32: np.uint32, DType.UINT16: np.uint16,
    DType.UINT8: np.uint8, DType.BOOL: np.bool_,
}  # fmt: skip


_RANDOM_ELEMENTS = 1 << 20
"""Larger operands repeat a sample of this many random numbers."""


def call_bytes(call: OpCall) -> float:
    """Bytes of all operands and results when floats are fp32."""
    return float_sum(t.elements * _bytes(t.dtype) for t in (*call.inputs, *call.outputs) if t is not None)


def _bytes(dtype: DType) -> float:
    return 4.0 if dtype.is_float and dtype is not DType.FLOAT64 else max(dtype.bits / 8, 1.0)


def _numpy_type(dtype: DType) -> Any:  # noqa: ANN401
    return _NUMPY.get(dtype, np.float32)


def one_node_model(call: OpCall) -> tuple[bytes, dict[str, np.ndarray]]:
    """A model of that one call, floats in fp32, and random operands for it; known constants are stored inside.

    Returns:
        The serialized model and the operands by name.
    """
    import onnx
    from onnx import helper, numpy_helper

    rng = np.random.default_rng(0)
    inputs, initializers, feeds = [], [], {}
    names = []
    for position, tensor in enumerate(call.inputs):
        name = f"x{position}" if tensor is not None else ""
        names.append(name)
        if tensor is None:
            continue
        constant = call.constants[position] if position < len(call.constants) else None
        if constant is not None:
            array = np.asarray(constant, dtype=_numpy_type(tensor.dtype)).reshape(tensor.shape)
            initializers.append(numpy_helper.from_array(array, name))
            continue
        feeds[name] = _random(rng, call, position, tensor)
        kind = helper.np_dtype_to_tensor_dtype(feeds[name].dtype)
        inputs.append(helper.make_tensor_value_info(name, kind, tensor.shape))
    outputs = [f"y{p}" if t is not None else "" for p, t in enumerate(call.outputs)]
    domain, _, op = call.op.rpartition(".")
    opset, known = _schema(op, domain, call.opset or onnx.defs.onnx_opset_version())
    attributes: dict[str, Any] = {k: _plain(v) for k, v in call.attributes.items() if known is None or k in known}
    node = helper.make_node(op, names, outputs, domain=domain, **attributes)
    declared = [helper.make_empty_tensor_value_info(n) for n in outputs if n]
    graph = helper.make_graph([node], "one", inputs, declared, initializers)
    opsets = [helper.make_opsetid("", opset)]
    if domain:
        opsets.append(helper.make_opsetid(domain, 1))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    if not domain:
        model = onnx.shape_inference.infer_shapes(model)
    return model.SerializeToString(), feeds


def _schema(op: str, domain: str, opset: int) -> tuple[int, frozenset[str] | None]:
    """The operator set to run in, newer than the model's where the operator is, and the attributes it has there."""
    import onnx

    if domain or not onnx.defs.has(op):
        return opset, None
    schema = onnx.defs.get_schema(op)
    if not onnx.defs.has(op, opset):
        opset = schema.since_version
    return opset, frozenset(schema.attributes)


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _random(rng: np.random.Generator, call: OpCall, position: int, tensor: Tensor) -> np.ndarray:
    """Operands of a type: indices inside what they index, floats around zero."""
    kind = _numpy_type(tensor.dtype)
    if np.issubdtype(kind, np.floating):
        sample = rng.standard_normal(min(tensor.elements, _RANDOM_ELEMENTS), dtype=np.float32)
        return np.resize(sample, tensor.shape).astype(kind, copy=False)
    if kind is np.bool_:
        return rng.random(tensor.shape) < 0.5
    data = call.inputs[0]
    limit = 2
    if position == 1 and data is not None and data.shape:
        axis = call.attributes.get("axis", 0)
        depth = data.shape[int(axis) % len(data.shape)] if isinstance(axis, int) else data.shape[0]
        limit = min(data.shape) if call.op == "GatherND" else depth
    return rng.integers(0, max(limit, 1), tensor.shape).astype(kind)
