"""The standard's own test cases of single operators: each is described, and each of its splits is executed.

The standard's reference evaluator runs the pieces. Where a piece must know its place in the whole (an index into a
table, a causal mask, a count) running it on its own proves nothing; such operators are listed, with the reason.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from planner.graph import DType, Tensor, TensorKind
from planner.operators import OpCall, OpSpec, Origin, spec
from planner.sharding import PARTIAL
from tests.operators.calls import Split, splits_of

DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "string", 9: "bool",
    10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bfloat16",
    17: "float8", 18: "float8", 19: "float8", 20: "float8", 21: "uint4", 22: "int4", 23: "float4", 24: "float8",
    25: "uint2", 26: "int2",
}  # fmt: skip

PLACED = {
    "Gather", "GatherElements", "GatherND", "OneHot", "Scatter", "ScatterElements", "ScatterND",  # index of a row
    "Range", "EyeLike", "ConstantOfShape", "BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix",  # count
    "Pad", "Tile", "Expand", "Slice", "CenterCropPad", "Resize", "Upsample",  # extents in another operand
    "Dropout", "Bernoulli", "RandomUniformLike", "RandomNormalLike", "Multinomial",  # random numbers
    "GRU", "LSTM", "RNN",  # number of directions in an attribute
    "ConvInteger",  # zero points a channel
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One operator with arrays."""

    name: str
    model: onnx.ModelProto
    arrays: dict[str, np.ndarray]
    call: OpCall


def _attributes(node: onnx.NodeProto) -> dict[str, object]:
    found: dict[str, object] = {}
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        if isinstance(value, bytes):
            value = value.decode()
        elif isinstance(value, (list, tuple)) or type(value).__name__.startswith("Repeated"):
            value = tuple(v.decode() if isinstance(v, bytes) else v for v in value)
        if isinstance(value, (int, float, str, tuple)):
            found[attribute.name] = value
    return found


def _array(value: object) -> np.ndarray:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def _case(name: str, model: onnx.ModelProto, data: list) -> Case | None:
    values = [*model.graph.input, *model.graph.output]
    if len(model.graph.node) != 1 or not data or model.graph.node[0].domain:
        return None
    if not all(v.type.HasField("tensor_type") for v in values):
        return None
    node = model.graph.node[0]
    arrays = {v.name: _array(a) for v, a in zip(values, [*data[0][0], *data[0][1]], strict=True)}
    kinds = {v.name: DType(DTYPES[v.type.tensor_type.elem_type]) for v in values}

    def tensor(name: str) -> Tensor | None:
        return Tensor(name, arrays[name].shape, kinds[name], TensorKind.ACTIVATION) if name in arrays else None

    constants = tuple(
        tuple(arrays[n].ravel().tolist()) if n in arrays and arrays[n].ndim < 2 and arrays[n].size < 65 else None
        for n in node.input
    )
    opset = next(o.version for o in model.opset_import if not o.domain)
    call = OpCall(
        node.op_type,
        opset,
        tuple(map(tensor, node.input)),
        tuple(map(tensor, node.output)),
        _attributes(node),
        constants,
    )
    return Case(name, model, arrays, call)


@functools.cache
def _cases() -> tuple[Case, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from onnx.backend.test.case.node import collect_testcases
        except ImportError as error:
            pytest.skip(f"the onnx package has no test cases here: {error}")
        collected = collect_testcases(None)
    found = [_case(c.name, c.model, c.data_sets) for c in collected if c.model is not None and c.data_sets]
    return tuple(case for case in found if case is not None)


def _pieces(case: Case, split: Split, parts: int) -> list[list[np.ndarray]]:
    node = case.model.graph.node[0]
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    for value in [*model.graph.input, *model.graph.output]:
        value.type.tensor_type.ClearField("shape")
    if split.dim in ("g", "r"):
        counts = {"q_num_heads", "num_heads", "group", "num_groups"} | ({"kv_num_heads"} if split.dim == "g" else set())
        for attribute in model.graph.node[0].attribute:
            if attribute.name in counts:
                attribute.i //= parts
    evaluator = ReferenceEvaluator(model)
    results = []
    for rank in range(parts):
        feeds = {}
        for position, name in enumerate(node.input):
            part = split.reads.get(position)
            if not name:
                continue
            array = case.arrays[name]
            if part is not None and part.cuts:
                array = np.split(array, parts, axis=part.dim)[rank]
            elif part == PARTIAL and rank:
                array = np.zeros_like(array)
            feeds[name] = array
        results.append(evaluator.run(None, feeds))
    return results


def _agrees(case: Case, split: Split, parts: int) -> bool:
    pieces = _pieces(case, split, parts)
    scale = parts if case.call.op in ("ReduceMean", "GlobalAveragePool") else 1
    names = [v.name for v in case.model.graph.output]
    for position, name in enumerate(case.model.graph.node[0].output):
        part = split.writes.get(position)
        if not name or part is None:
            continue
        mine = [results[names.index(name)] for results in pieces]
        joined = mine[0]
        if part.cuts:
            joined = np.concatenate(mine, axis=part.dim)
        elif part == PARTIAL:
            joined = sum(mine[1:], mine[0]) / scale
        whole = case.arrays[name].astype(np.float64)
        if not np.allclose(joined.astype(np.float64), whole, rtol=1e-3, atol=1e-4, equal_nan=True):
            return False
    return True


def _alone(case: Case, split: Split) -> bool:
    """Whether a piece computes the right thing without being told where it stands."""
    attributes = case.call.attributes
    if case.call.op == "Attention" and split.dim == "s":
        windows = ("is_causal", "left_window_size", "right_window_size")
        return not any(attributes.get(name, 0) for name in windows)
    if case.call.op in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"):
        return attributes.get("reduction") in ("none", "sum") and split.dim != "c"
    return case.call.op not in PLACED and not split.windowed


def _parts(case: Case, split: Split) -> int:
    """Smallest number of parts that divides every tensor dimension concerned; 0 when there is none."""
    sizes = [t.shape[part.dim] for p, part in split.reads.items() if (t := case.call.inputs[p]) and part.cuts]
    return next((n for n in range(2, split.size + 1) if not any(size % n for size in [*sizes, split.size])), 0)


def test_every_case_is_described_and_its_splits_hold() -> None:
    described: set[str] = set()
    executed = 0
    wrong = []
    for case in _cases():
        found: OpSpec = spec(case.call)
        described.add(case.call.op)
        assert found.forward.byte_count >= 0
        if found.view or found.origin is not Origin.RULE:
            continue
        for split in splits_of(case.call):
            parts = _parts(case, split)
            if not parts or not _alone(case, split):
                continue
            executed += 1
            with np.errstate(all="ignore"):
                if not _agrees(case, split, parts):
                    wrong.append(f"{case.name}: {split.dim}")
    assert wrong == []
    assert len(described) > 150
    assert executed > 1500
