"""Changing the batch of a graph whose shapes are fixed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from planner.api import load_graph as load_bundled
from planner.errors import ModelError, UsageError
from planner.graph import DType, Graph, Node, Parameter, Tensor, TensorKind
from planner.importers import load_graph
from planner.operators import call_classes, graph_specs, rebatch
from tests.shared_data import shared_path

SHARED = [
    "bert_base_dyn", "dlrm", "gnmt_lstm", "gpt2_124m_legacy_dyn", "gpt2_124m_loss_train", "gpt2_124m_metadata",
    "llama2_7b_opset23", "mixtral_8x7b_batched", "resnet50", "resnet50_legacy", "resnet50_legacy_initinputs", "t5_base",
    "vgg16", "vit_s16",
]  # fmt: skip
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def load_shared(name: str) -> Graph:
    dims = {"batch": 2, "seq": 128} if name.endswith("_dyn") else None
    return load_graph(shared_path(f"onnx/{name}.onnx"), dims=dims)


def matrix_flops(graph: Graph) -> float:
    return sum(s.matrix_flops for s in graph_specs(graph))


def check_linear_and_back(graph: Graph) -> None:
    larger = rebatch(graph, 3 * graph.batch)
    assert larger.batch == 3 * graph.batch
    assert larger.fingerprint == graph.fingerprint
    assert matrix_flops(larger) == 3 * matrix_flops(graph)
    back = rebatch(larger, graph.batch)
    assert (back.tensors, back.constants, back.nodes) == (graph.tensors, graph.constants, graph.nodes)
    single = rebatch(graph, 1)
    assert matrix_flops(single) * graph.batch == pytest.approx(matrix_flops(graph), rel=1e-12)
    assert rebatch(single, graph.batch).tensors == graph.tensors


@pytest.mark.parametrize("name", SHARED)
def test_real_exports_scale_linearly_and_back(name: str) -> None:
    check_linear_and_back(load_shared(name))


@pytest.mark.parametrize("path", sorted(LIGHT.glob("light_*.onnx")), ids=lambda p: p.stem)
def test_light_models_scale_linearly_and_back(path: Path) -> None:
    check_linear_and_back(load_graph(path))


def graph_of(
    nodes: Sequence[Node], shapes: dict[str, tuple[int, ...]], *, batch: int, **constants: tuple[int, ...]
) -> Graph:
    """A graph with input `x`; names in capitals are weights, keyword arguments constants."""
    written = {o for n in nodes for o in n.outputs}
    tensors = {}
    for name, shape in shapes.items():
        kind = TensorKind.ACTIVATION if name in written else TensorKind.INPUT
        tensors[name] = Tensor(name, shape, DType.FLOAT32, TensorKind.PARAMETER if name.isupper() else kind)
    for name, values in constants.items():
        tensors[name] = Tensor(name, (len(values),), DType.INT64, TensorKind.CONSTANT)
    weights = tuple(Parameter(n, n, s, DType.FLOAT32) for n, s in shapes.items() if n.isupper())
    return Graph(
        "g", "0", tuple(nodes), tensors, ("x",), (nodes[-1].outputs[0],), weights,
        {p.name: (p.name,) for p in weights}, constants, batch, 20,
    )  # fmt: skip


def node(op: str, inputs: str, output: str, **attributes: int | tuple[int, ...]) -> Node:
    return Node(output, op, tuple(inputs.split()), (output,), attributes)


def test_axes_that_are_computed_at_run_time() -> None:
    graph = graph_of([node("Unsqueeze", "x axes", "y")], {"x": (4, 3), "axes": (1,), "y": (4, 1, 3)}, batch=4)
    assert rebatch(graph, 8).tensors["y"].shape == (8, 1, 3)


def test_an_operator_without_its_first_result_is_named_where_it_stops_the_batch() -> None:
    last = Node("h", "LSTM", ("x", "W", "R"), ("", "h"), {"hidden_size": 2})
    graph = graph_of([last], {"x": (4, 5, 6), "W": (1, 8, 6), "R": (1, 8, 2), "h": (1, 5, 2)}, batch=6)
    with pytest.raises(ModelError, match="LSTM changes dimension 2, which follows the batch"):
        rebatch(replace(graph, outputs=("h",)), 12)


def test_merged_dimensions_and_shape_constants_follow() -> None:
    graph = graph_of(
        [node("Reshape", "x flat", "rows"), node("MatMul", "rows W", "hidden"), node("Reshape", "hidden back", "y")],
        {"x": (4, 6, 8), "rows": (24, 8), "W": (8, 16), "hidden": (24, 16), "y": (4, 6, 16)},
        batch=4, flat=(24, 8), back=(4, -1, 16),
    )  # fmt: skip
    larger = rebatch(graph, 5)
    assert {n: larger.tensors[n].shape for n in ("x", "rows", "hidden", "y", "W")} == {
        "x": (5, 6, 8), "rows": (30, 8), "hidden": (30, 16), "y": (5, 6, 16), "W": (8, 16),
    }  # fmt: skip
    assert larger.constants["flat"] == (30, 8)
    assert larger.constants["back"] == (5, -1, 16)


def test_a_constant_that_serves_two_purposes_becomes_two() -> None:
    """`(4, 8)` is a batch of 4 for one reshape, and 4 heads of 2 samples for none: the weight's reshape keeps it."""
    graph = graph_of(
        [
            node("Reshape", "x shape", "rows"),
            node("Reshape", "W shape", "weight"),
            node("MatMul", "rows V", "y"),
        ],
        {"x": (4, 2, 4), "rows": (4, 8), "W": (2, 16), "weight": (4, 8), "V": (8, 3), "y": (4, 3)},
        batch=4, shape=(4, 8),
    )  # fmt: skip
    larger = rebatch(graph, 6)
    values = [larger.constants[n.inputs[1]] for n in larger.nodes[:2]]
    assert values == [(6, 8), (4, 8)]
    assert larger.tensors["weight"].shape == (4, 8)
    assert larger.constants[larger.nodes[0].inputs[1]] == (6, 8)
    assert rebatch(larger, 4).tensors["rows"].shape == (4, 8)


def test_sequence_first_inputs_are_found_by_size() -> None:
    graph = graph_of(
        [node("Transpose", "x", "t", perm=(1, 0, 2)), node("MatMul", "t W", "y")],
        {"x": (50, 4, 8), "t": (4, 50, 8), "W": (8, 3), "y": (4, 50, 3)},
        batch=4,
    )
    assert rebatch(graph, 9).tensors["y"].shape == (9, 50, 3)


def test_a_repeated_class_token_follows_the_batch() -> None:
    graph = graph_of(
        [node("Concat", "TOKEN x", "y", axis=1)],
        {"x": (4, 9, 8), "TOKEN": (4, 1, 8), "y": (4, 10, 8)},
        batch=4,
    )
    larger = rebatch(graph, 2)
    assert larger.tensors["TOKEN"].shape == (2, 1, 8)
    assert larger.tensors["y"].shape == (2, 10, 8)


@pytest.mark.parametrize(
    ("nodes", "shapes", "constants", "reason"),
    [
        ([node("Slice", "x a b c", "y")], {"x": (4, 8), "y": (2, 8)}, {"a": (0,), "b": (2,), "c": (0,)}, "takes 2"),
        ([node("Gather", "x i", "y", axis=0)], {"x": (4, 8), "y": (1, 8)}, {"i": (0,)}, "picks fixed positions"),
        ([node("Reshape", "x s", "y")], {"x": (4, 6), "y": (3, 8)}, {"s": (3, 8)}, "mixes the batch"),
        ([node("Concat", "x W", "y", axis=0)], {"x": (4, 6), "W": (1, 6), "y": (5, 6)}, {}, "joins along the batch"),
        ([node("MatMul", "x W", "y")], {"x": (8, 4), "W": (4, 6), "y": (8, 6)}, {}, "sums over the batch"),
        ([node("vendor.Mystery", "x", "y")], {"x": (2, 4), "y": (2, 4)}, {}, "is not known"),
    ],
)  # fmt: skip
def test_what_stops_the_batch_is_named(
    nodes: list[Node], shapes: dict[str, tuple[int, ...]], constants: dict[str, tuple[int, ...]], reason: str
) -> None:
    graph = graph_of(nodes, shapes, batch=4, **constants)
    with pytest.raises(ModelError, match=reason) as caught:
        rebatch(graph, 8)
    assert caught.value.problem.where == "y"
    assert "batch size 4" in caught.value.problem.hint


def test_a_flattened_position_table_stops_the_batch() -> None:
    graph = graph_of(
        [node("Reshape", "x s", "rows"), node("Add", "rows TABLE", "y")],
        {"x": (1, 16, 8), "rows": (16, 8), "TABLE": (16, 8), "y": (16, 8)},
        batch=1, s=(16, 8),
    )  # fmt: skip
    with pytest.raises(ModelError, match="runs over all samples"):
        rebatch(graph, 2)


def test_no_input_with_the_batch() -> None:
    graph = graph_of([node("Relu", "x", "y")], {"x": (3, 5), "y": (3, 5)}, batch=4)
    with pytest.raises(ModelError, match="no input has"):
        rebatch(graph, 2)


def test_batches_are_positive() -> None:
    graph = graph_of([node("Relu", "x", "y")], {"x": (3, 5), "y": (3, 5)}, batch=3)
    with pytest.raises(UsageError):
        rebatch(graph, 0)
    assert rebatch(graph, 3) is graph


def test_recurrent_states_follow(tmp_path: Path) -> None:
    batch, steps, width = 4, 7, 16
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, (steps, batch, width))]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, (steps, 1, batch, width))]
    weights = [
        helper.make_tensor("w", TensorProto.FLOAT, (1, 4 * width, width), [0.0] * (4 * width * width)),
        helper.make_tensor("r", TensorProto.FLOAT, (1, 4 * width, width), [0.0] * (4 * width * width)),
        helper.make_tensor("h", TensorProto.FLOAT, (1, batch, width), [0.0] * (batch * width)),
    ]
    lstm = helper.make_node("LSTM", ["x", "w", "r", "", "", "h", "h"], ["y"], hidden_size=width)
    model = helper.make_model(helper.make_graph([lstm], "g", inputs, outputs, weights))
    onnx.save(model, tmp_path / "lstm.onnx")
    graph = load_graph(tmp_path / "lstm.onnx")
    sized = rebatch(Graph(**{**{f: getattr(graph, f) for f in graph.__dataclass_fields__}, "batch": batch}), 6)
    assert sized.tensors["x"].shape == (steps, 6, width)
    assert sized.tensors["y"].shape == (steps, 1, 6, width)
    state = sized.nodes[0].inputs[5]
    assert sized.tensors[state].shape == (1, 6, width)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(7, 11), st.integers(0, 3), st.data())
def test_a_reshape_keeps_the_batch_where_it_lies(dims: list[int], batch: int, at: int, data: st.DataObject) -> None:
    """Merging neighbours of a batch dimension and splitting them again never moves it."""
    at = min(at, len(dims))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(dims)), max_size=3)))

    def shapes(size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        shape = (*dims[:at], size, *dims[at:])
        return shape, tuple(math.prod(shape[i:j]) for i, j in zip([0, *cuts], [*cuts, len(shape)], strict=True))

    whole, merged = shapes(batch)
    nodes = [node("Reshape", "x to", "rows"), node("Relu", "rows", "same"), node("Reshape", "same back", "y")]
    sizes = {"x": whole, "rows": merged, "same": merged, "y": whole}
    larger = rebatch(graph_of(nodes, sizes, batch=batch, to=merged, back=whole), 3 * batch)
    assert (larger.tensors["y"].shape, larger.tensors["same"].shape) == shapes(3 * batch)
    assert (larger.constants["back"], larger.constants["to"]) == shapes(3 * batch)


BUNDLED = [
    "mixtral-8x7b", "qwen3-30b-a3b", "gshard-12.5b", "switch-base-128", "switch-xxl-128", "switch-c-2048",
    "gpt3-125m", "llama2-7b", "bert-base", "t5-small", "vit-s16", "gnmt-8", "dlrm", "resnet18", "vgg11",
    "deepseek-v2-lite", "gemma2-2b", "gpt-oss-20b", "llama4-scout", "nemotron-3-nano", "qwen3-next-80b-a3b",
]  # fmt: skip


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_models_at_another_batch_are_the_models_built_for_it(name: str) -> None:
    built = load_bundled(name, dims={"batch": 3})
    followed = rebatch(load_bundled(name), 3)
    assert followed.tensors == built.tensors
    assert [(n.op, n.inputs) for n in followed.nodes] == [(n.op, n.inputs) for n in built.nodes]
    assert graph_specs(followed) == graph_specs(built)
    assert rebatch(followed, 1).tensors == load_bundled(name).tensors


def test_rows_gathered_per_sample_follow_a_constant_table_of_indices() -> None:
    """[2, 5, 8] with [2, 3, 1] and batch_dims 1 picks three rows of each sample."""
    graph = graph_of(
        [node("GatherND", "x rows", "y", batch_dims=1)],
        {"x": (2, 5, 8), "rows": (2, 3, 1), "y": (2, 3, 8)},
        batch=2,
    )
    larger = rebatch(graph, 6)
    assert {n: larger.tensors[n].shape for n in ("rows", "y")} == {"rows": (6, 3, 1), "y": (6, 3, 8)}


def test_scattered_rows_follow_their_indices() -> None:
    """Slots of each sample, filled in a table that starts empty; the axis of the slots stays."""
    graph = graph_of(
        [
            node("Expand", "zero table", "empty"),
            node("ScatterElements", "empty x tokens", "y", axis=1),
        ],
        {"x": (1, 6), "zero": (1, 1), "empty": (1, 9), "tokens": (1, 6), "y": (1, 9)},
        batch=1, table=(1, 9),
    )  # fmt: skip
    larger = rebatch(graph, 4)
    assert {n: larger.tensors[n].shape for n in ("empty", "tokens", "y")} == {
        "empty": (4, 9), "tokens": (4, 6), "y": (4, 9),
    }  # fmt: skip
    assert larger.constants["table"] == (4, 9)


def test_slices_scattered_along_positions_keep_the_batch_of_their_tail() -> None:
    """Three of nine time steps replaced in a tensor [time, batch, width]."""
    graph = graph_of(
        [node("ScatterND", "memory steps x", "y")],
        {"memory": (9, 4, 8), "steps": (3, 1), "x": (3, 4, 8), "y": (9, 4, 8)},
        batch=4,
    )
    larger = rebatch(graph, 2)
    assert {n: larger.tensors[n].shape for n in ("memory", "steps", "y")} == {
        "memory": (9, 2, 8), "steps": (3, 1), "y": (9, 2, 8),
    }  # fmt: skip


def test_a_batch_of_one_goes_where_a_reshape_leaves_room() -> None:
    """[1, experts 4, places 6, 8] is laid out by expert: the open dimension grows, the experts stay."""
    graph = graph_of(
        [
            node("Transpose", "x", "t", perm=(1, 0, 2, 3)),
            node("Reshape", "t shape", "rows"),
            node("MatMul", "rows W", "y"),
        ],
        {"x": (1, 4, 6, 8), "t": (4, 1, 6, 8), "rows": (4, 6, 8), "W": (4, 8, 3), "y": (4, 6, 3)},
        batch=1, shape=(4, -1, 8),
    )  # fmt: skip
    larger = rebatch(graph, 5)
    assert larger.tensors["y"].shape == (4, 30, 3)
    assert larger.tensors["W"].shape == (4, 8, 3)


def test_heads_of_one_sample_are_not_its_places() -> None:
    """[places 6, sample 1, 8] is read as [6, 2 heads of each sample, 4]: the places stand where they stood."""
    graph = graph_of(
        [node("Transpose", "x", "t", perm=(1, 0, 2)), node("Reshape", "t shape", "rows"), node("Relu", "rows", "y")],
        {"x": (1, 6, 8), "t": (6, 1, 8), "rows": (6, 2, 4), "y": (6, 2, 4)},
        batch=1, shape=(6, 2, 4),
    )  # fmt: skip
    assert rebatch(graph, 5).tensors["y"].shape == (6, 2 * 5, 4)


@pytest.mark.parametrize("batch", [1, 3])
def test_queries_that_a_weight_repeats_follow_through_a_reshape(batch: int) -> None:
    """Queries [5, sample, 8] times a matrix, as [5, 2 heads of each sample, 4], meet keys that follow the batch."""
    graph = graph_of(
        [
            node("MatMul", "QUERIES W", "q"), node("Reshape", "q s", "rows"),
            node("Transpose", "rows", "t", perm=(1, 0, 2)), node("Reshape", "x u", "k"), node("MatMul", "t k", "y"),
        ],
        {
            "x": (batch, 2, 4, 7), "QUERIES": (5, batch, 8), "W": (8, 8), "q": (5, batch, 8), "rows": (5, 2 * batch, 4),
            "t": (2 * batch, 5, 4), "k": (2 * batch, 4, 7), "y": (2 * batch, 5, 7),
        },
        batch=batch, s=(5, 2 * batch, 4), u=(2 * batch, 4, 7),
    )  # fmt: skip
    larger = rebatch(graph, 4 * batch)
    assert larger.tensors["y"].shape == (8 * batch, 5, 7)
    assert larger.tensors["rows"].shape == (5, 8 * batch, 4)
    assert larger.tensors["QUERIES"].shape == (5, 4 * batch, 8)


def test_the_first_rows_of_all_samples_follow_the_batch() -> None:
    """The first 4 of 12 rows, 3 a sample, are as many as there are samples."""
    graph = graph_of(
        [node("Reshape", "x s", "rows"), node("Slice", "rows a b c", "y")],
        {"x": (4, 3, 8), "rows": (12, 8), "y": (4, 8)},
        batch=4, s=(12, 8), a=(0,), b=(4,), c=(0,),
    )  # fmt: skip
    assert rebatch(graph, 10).tensors["y"].shape == (10, 8)


def test_nodes_that_are_alike_at_one_size_only_are_told_apart() -> None:
    """Two sums over [1, 8]: one of a sample's row, one of a weight's; at four samples they differ."""
    graph = graph_of(
        [node("Add", "x b", "u"), node("Relu", "c", "v"), node("Relu", "u", "w"), node("MatMul", "w V", "y")],
        {"x": (1, 8), "b": (8,), "u": (1, 8), "v": (1, 8), "w": (1, 8), "V": (8, 3), "y": (1, 3), "c": (8,)},
        batch=1,
    )
    tensors = {**graph.tensors, "c": Tensor("c", (1, 8), DType.FLOAT32, TensorKind.ACTIVATION)}
    graph = replace(graph, tensors=tensors)
    assert call_classes(graph).index.tolist() == [0, 1, 1, 2]
    larger = rebatch(graph, 4)
    assert call_classes(larger).index.tolist() == [0, 1, 2, 3]
    assert [s.vector_flops for s in graph_specs(larger)[1:3]] == [8.0, 32.0]
    assert graph_specs(larger) == graph_specs(replace(larger))


def test_a_guess_that_a_weight_contradicts_is_revised() -> None:
    """The target says 4 x 6 x 8 in full: only the product with four experts' weights shows that places grow."""
    graph = graph_of(
        [
            node("Transpose", "x", "t", perm=(1, 0, 2, 3)),
            node("Reshape", "t shape", "rows"),
            node("MatMul", "rows W", "y"),
        ],
        {"x": (1, 4, 6, 8), "t": (4, 1, 6, 8), "rows": (4, 6, 8), "W": (4, 8, 3), "y": (4, 6, 3)},
        batch=1, shape=(4, 6, 8),
    )  # fmt: skip
    larger = rebatch(graph, 5)
    assert larger.tensors["y"].shape == (4, 30, 3)
    assert larger.constants["shape"] == (4, 30, 8)


def test_what_no_guess_explains_is_said_of_the_first() -> None:
    graph = graph_of(
        [node("Reshape", "x shape", "rows"), node("MatMul", "rows W", "y"), node("Slice", "y a b c", "z")],
        {"x": (1, 4, 6), "rows": (4, 6), "W": (6, 3), "y": (4, 3), "z": (2, 1)},
        batch=1, shape=(4, 6), a=(0, 0), b=(2, 1), c=(0, 1),
    )  # fmt: skip
    with pytest.raises(ModelError, match="takes 2 of 4 along dimension 0"):
        rebatch(graph, 5)


def test_a_quantised_product_follows_its_second_matrix() -> None:
    graph = graph_of(
        [node("QLinearMatMul", "x s z W s z s z", "y")],
        {"x": (4, 6, 8), "s": (), "z": (), "W": (8, 3), "y": (4, 6, 3)},
        batch=4,
    )
    assert rebatch(graph, 2).tensors["y"].shape == (2, 6, 3)


def test_constant_indices_that_pick_every_place_follow_the_batch() -> None:
    """A mask [2, 6], flattened, is laid out as [2, 1, 6] by picking its places in order."""
    graph = graph_of(
        [node("Flatten", "x", "flat", axis=2), node("Gather", "flat i", "z"), node("MatMul", "z W", "y")],
        {"x": (2, 6), "flat": (12, 1), "z": (2, 1, 6, 1), "W": (1, 3), "y": (2, 1, 6, 3), "i": (2, 1, 6)},
        batch=2,
    )
    larger = rebatch(graph, 5)
    assert larger.tensors["i"].shape == (5, 1, 6)
    assert larger.tensors["y"].shape == (5, 1, 6, 3)


@pytest.mark.parametrize(("positions", "follows"), [((1, 0, 3, 2), True), ((0, 0, 1, 2), False)])
def test_known_indices_follow_the_batch_where_they_pick_all_samples(positions: tuple[int, ...], follows: bool) -> None:
    graph = graph_of(
        [node("Gather", "x i", "z"), node("MatMul", "z W", "y")],
        {"x": (4, 6), "z": (4, 6), "W": (6, 3), "y": (4, 3)},
        batch=4, i=positions,
    )  # fmt: skip
    if follows:
        assert rebatch(graph, 3).tensors["y"].shape == (3, 3)
    else:
        with pytest.raises(ModelError, match="picks fixed positions along dimension 0"):
            rebatch(graph, 3)


def test_a_fixed_sample_that_all_others_share_does_not_stop_the_batch() -> None:
    graph = graph_of(
        [node("Gather", "x first", "shared"), node("Add", "x shared", "z"), node("MatMul", "z W", "y")],
        {"x": (4, 6), "shared": (1, 6), "z": (4, 6), "W": (6, 3), "y": (4, 3)},
        batch=4, first=(0,),
    )  # fmt: skip
    larger = rebatch(graph, 3)
    assert larger.tensors["shared"].shape == (1, 6)
    assert larger.tensors["y"].shape == (3, 3)
