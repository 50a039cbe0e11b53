"""Files that hold a batch or a size in constants, at another batch and under ranks that share operators."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

torch = pytest.importorskip("torch", reason="torch is not installed")

import planner  # noqa: E402
from planner import runtime  # noqa: E402
from planner.runtime.layouts import RankMesh, parse  # noqa: E402
from planner.runtime.local_operators import CutOperator, local_form  # noqa: E402
from planner.runtime.model_file import Step  # noqa: E402
from planner.runtime.trainer import model_of  # noqa: E402
from tests.importers.build import ints, model, node, value  # noqa: E402

DRAW = np.random.default_rng(1)


def floats(name: str, *shape: int) -> onnx.TensorProto:
    return numpy_helper.from_array(DRAW.normal(size=shape).astype(np.float32), name)


def array(name: str, values: Any) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(values), name)


def written(
    folder: Path, nodes: Sequence[onnx.NodeProto], stored: Sequence[onnx.TensorProto], shape: Sequence[int] = (2, 8)
) -> Path:
    proto = model(nodes, [value("x", shape)], [value("y", None)], stored)
    onnx.save(onnx.shape_inference.infer_shapes(proto), folder / "model.onnx")
    return folder / "model.onnx"


def planned(file: Path, *, stages: int = 1, ranks: int = 1, size: int = 4, keep: Sequence[tuple[str, int]] = ()) -> Any:
    limits = {"pipeline_stages": (stages,), "tensor_parallel": (ranks,), "data_parallel": (1,)}
    job = planner.Job(2 * size, precision="fp32", micro_batches=(size,), backends=("any",), keep=tuple(keep), **limits)
    return planner.plan(planner.load_graph(file), planner.load_cluster("dgx-h100", devices=stages * ranks), job)


def test_a_state_expanded_to_the_batch_that_it_has_is_as_large_as_another_batch(tmp_path: Path) -> None:
    weight, state = floats("w", 8, 8), array("state", np.full((2, 8), 0.5, np.float32))
    nodes = [
        node("MatMul", ["x", "w"], ["h"]), node("Shape", ["h"], ["size"]), node("Expand", ["state", "size"], ["start"]),
        node("Add", ["h", "start"], ["y"]),
    ]  # fmt: skip
    file = written(tmp_path, nodes, [weight, state])
    x = torch.randn(4, 8, dtype=torch.float64)
    made = runtime.run_graph(model_of(planned(file), runtime.read_model(file)), {"x": x}, torch.float64)["y"]
    expected = x @ torch.from_numpy(numpy_helper.to_array(weight).astype(np.float64)) + 0.5
    assert torch.allclose(made, expected)


def flat_places(*last: int) -> list[onnx.TensorProto]:
    places = np.arange(16).reshape(2, 8)
    places[1, 6:] = last
    return [floats("w", 8, 8), ints("flat", [-1]), array("places", places)]


FLATTENED = [
    node("MatMul", ["x", "w"], ["h"]), node("Reshape", ["h", "flat"], ["all"]),
    node("Gather", ["all", "places"], ["y"], axis=0),
]  # fmt: skip


def test_places_in_a_flattened_batch_go_on_from_sample_to_sample(tmp_path: Path) -> None:
    stored = flat_places(14, 15)
    file = written(tmp_path, FLATTENED, stored)
    x = torch.randn(4, 8, dtype=torch.float64)
    made = runtime.run_graph(model_of(planned(file), runtime.read_model(file)), {"x": x}, torch.float64)["y"]
    assert torch.allclose(made, x @ torch.from_numpy(numpy_helper.to_array(stored[0]).astype(np.float64)))


def test_places_that_do_not_go_on_evenly_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path, FLATTENED, flat_places(15, 14))
    plan = planned(file)
    with pytest.raises(planner.ModelError, match="holds another entry for each sample"):
        runtime.run(plan, file)


def convolutions(*between: onnx.NodeProto) -> list[onnx.NodeProto]:
    return [
        node("Conv", ["x", "first", "first_bias"], ["a"], kernel_shape=[3, 3], pads=[1] * 4), *between,
        node("Conv", ["b", "second", "second_bias"], ["c"], kernel_shape=[3, 3], pads=[1] * 4),
        node("GlobalAveragePool", ["c"], ["d"]), node("Flatten", ["d"], ["e"]), node("Gemm", ["e", "w", "v"], ["y"]),
    ]  # fmt: skip


def test_ranks_share_a_model_that_resizes_by_stored_scales(tmp_path: Path) -> None:
    resize = node("Resize", ["a", "", "scales"], ["b"], mode="linear")
    stored = [
        floats("first", 16, 3, 3, 3), floats("second", 16, 16, 3, 3), floats("first_bias", 16),
        floats("second_bias", 16), array("scales", np.array([1, 1, 2, 2], np.float32)), floats("w", 16, 4),
        floats("v", 4),
    ]  # fmt: skip
    file = written(tmp_path, convolutions(resize), stored, (2, 3, 8, 8))
    check = runtime.run(planned(file, ranks=2), file, check=True).check
    assert check is not None
    assert not check.wrong


@pytest.mark.parametrize(
    ("op", "weight", "cut", "alike"),
    [
        ("Conv", (4, 8, 3, 3), ("S1", "S1"), True), ("Conv", (4, 8, 3, 3), ("S1", "R"), False),
        ("Conv", (4, 8, 3, 3), ("R", "S1"), False), ("Gemm", (8, 4), ("S1", "S0"), True),
        ("Gemm", (8, 4), ("S1", "R"), False),
    ],
)  # fmt: skip
def test_products_of_pieces_need_the_summed_dimension_cut_on_both_sides(
    op: str, weight: tuple[int, ...], cut: tuple[str, str], alike: bool
) -> None:
    shapes = {"x": (2, 8, 4, 4)[: len(weight)], "w": weight, "y": (2, 4, 4, 4)[: len(weight)]}
    reads, partial = tuple(parse(text, 1) for text in cut), (parse("P", 1),)
    product = CutOperator(Step(op, ("x", "w"), ("y",), {}, 20), reads, partial, shapes, RankMesh((2,)))
    pieces = [torch.ones(shapes[name]) for name in "xw"]
    assert (local_form(product, pieces) is not None) == alike


def test_rows_laid_over_a_constant_follow_the_batch(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["h"]), node("Greater", ["h", "zero"], ["positive"]),
        node("NonZero", ["positive"], ["at"]), node("Transpose", ["at"], ["rows"]),
        node("GatherND", ["h", "rows"], ["taken"]), node("Exp", ["taken"], ["grown"]),
        node("ScatterND", ["base", "rows", "grown"], ["laid"]), node("MatMul", ["laid", "u"], ["m"]),
        node("Add", ["x", "m"], ["y"]),
    ]  # fmt: skip
    stored = [
        floats("w", 8, 8), floats("u", 8, 8), array("zero", np.float32(0)), array("base", np.zeros((2, 8), np.float32)),
    ]  # fmt: skip
    file = written(tmp_path, nodes, stored)
    check = runtime.run(planned(file), file, check=True).check
    assert check is not None
    assert not check.wrong


def test_a_stage_knows_the_shape_of_a_tensor_that_another_stage_has(tmp_path: Path) -> None:
    layers = [node("MatMul", [f"h{k}", f"w{k}"], [f"h{k + 1}"], name=f"/layer{k}/MatMul") for k in range(1, 6)]
    nodes = [
        node("MatMul", ["x", "w0"], ["h1"]), node("Shape", ["h1"], ["width"], start=1), *layers,
        node("Concat", ["rest", "width", "one"], ["size"], axis=0), node("Reshape", ["h6", "size"], ["r"]),
        node("MatMul", ["r", "last"], ["y"]),
    ]  # fmt: skip
    weights = [floats(f"w{k}", 8, 8) for k in range(6)]
    file = written(tmp_path, nodes, [*weights, floats("last", 1, 4), ints("rest", [-1]), ints("one", [1])])
    plan = planned(file, stages=2, keep=(("layer4", 1),))
    assert "h3" in plan.stage_nodes(0)
    assert "r" in plan.stage_nodes(1)
    check = runtime.run(plan, file, check=True).check
    assert check is not None
    assert not check.wrong


def test_a_weight_stored_once_is_expanded_to_the_size_of_another_tensor_for_each_module(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["h"], name="/a/MatMul"), node("Shape", ["h"], ["size"], name="/a/Shape"),
        node("Expand", ["bias", "size"], ["e"], name="/a/Expand"), node("Add", ["h", "e"], ["a"], name="/a/Add"),
        node("Relu", ["a"], ["b"], name="/b/Relu"), node("MatMul", ["b", "u"], ["k"], name="/b/MatMul"),
        node("Expand", ["bias", "size"], ["f"], name="/b/Expand"), node("Add", ["k", "f"], ["y"], name="/b/Add"),
    ]  # fmt: skip
    file = written(tmp_path, nodes, [floats("w", 8, 8), floats("u", 8, 8), floats("bias", 1, 8)])
    plan = planned(file)
    assert len(plan.model.separated) == 1
    check = runtime.run(plan, file, check=True).check
    assert check is not None
    assert {name for _, name, _ in check.errors} == {"w", "u", "bias", plan.model.separated[0].weight}
    assert not check.wrong
