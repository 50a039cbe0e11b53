"""Files that cannot be planned: one line that says what is wrong and what to do, exit code 3."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from planner.errors import ModelError
from planner.importers import graph_from_proto, load_graph
from tests.importers.build import I64, absent, ints, model, node, value
from tests.shared_data import shared_path


def refusal(path: Path, content: bytes | None = None) -> ModelError:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load_graph(path)
    error = caught.value
    assert error.exit_code == 3
    assert "\n" not in str(error)
    assert str(path) in str(error)
    assert error.problem.hint
    return error


def small_model() -> onnx.ModelProto:
    return model([node("Relu", ["x"], ["y"])], [value("x", [2, 3])], [value("y", [2, 3])])


@pytest.mark.parametrize("keep", [0.999, 0.9, 0.5, 0.1, 0.001])
def test_truncated(tmp_path: Path, keep: float) -> None:
    data = shared_path("onnx/vgg16.onnx").read_bytes()
    error = refusal(tmp_path / "cut.onnx", data[: int(len(data) * keep)])
    assert "cut off or damaged" in str(error)


@pytest.mark.parametrize("content", [b"hello world\n", b"def forward(x):\n    return x\n", "Größe\n".encode() * 50])
def test_text(tmp_path: Path, content: bytes) -> None:
    assert "text, not ONNX" in str(refusal(tmp_path / "model.onnx", content))


def test_empty(tmp_path: Path) -> None:
    assert "empty" in str(refusal(tmp_path / "model.onnx", b""))


def test_missing(tmp_path: Path) -> None:
    assert "no such model file" in str(refusal(tmp_path / "model.onnx"))


def test_folder(tmp_path: Path) -> None:
    assert "folder" in str(refusal(tmp_path))


@pytest.mark.parametrize("content", [b"PK\x03\x04" + bytes(100), bytes(range(256)), b"\x80\x02}q\x00" * 20])
def test_something_else(tmp_path: Path, content: bytes) -> None:
    assert "not an ONNX" in str(refusal(tmp_path / "model.onnx", content))


def test_unknown_format_lists_the_known_ones(tmp_path: Path) -> None:
    error = refusal(tmp_path / "model.xyz", b"\x00\x01\x02\x03")
    assert "ONNX" in error.problem.hint


def test_a_protobuf_message_without_a_graph(tmp_path: Path) -> None:
    assert "no graph" in str(refusal(tmp_path / "m.onnx", onnx.ModelProto(ir_version=9).SerializeToString()))


def test_no_nodes_and_no_outputs(tmp_path: Path) -> None:
    bare = small_model()
    del bare.graph.node[:]
    assert "no operators" in str(refusal(tmp_path / "a.onnx", bare.SerializeToString()))
    bare = small_model()
    del bare.graph.output[:]
    assert "no outputs" in str(refusal(tmp_path / "b.onnx", bare.SerializeToString()))


def test_nothing_depends_on_inputs() -> None:
    constant = model([node("Relu", ["w"], ["y"])], [value("x", [2])], [value("y", None)], [ints("w", [1, 2])])
    with pytest.raises(ModelError, match="no operator is left"):
        graph_from_proto(constant)


def test_input_without_shape() -> None:
    open_model = model([node("Relu", ["x"], ["y"])], [value("x", None)], [value("y", None)])
    with pytest.raises(ModelError, match="input 'x' has no shape"):
        graph_from_proto(open_model)


def test_sequence_input() -> None:
    element = onnx.helper.make_tensor_type_proto(1, [2])
    kind = onnx.helper.make_sequence_type_proto(element)
    entry = onnx.helper.make_value_info("s", kind)
    with pytest.raises(ModelError, match="input 's' is a sequence"):
        graph_from_proto(model([node("SequenceLength", ["s"], ["n"])], [entry], [value("n", [], I64)]))


def test_a_name_that_nothing_defines() -> None:
    broken = model([node("Add", ["x", "ghost"], ["y"])], [value("x", [2])], [value("y", None)])
    with pytest.raises(ModelError, match=r"Add 'y' reads 'ghost', which no operator computes"):
        graph_from_proto(broken)


def test_cycle() -> None:
    nodes = [node("Add", ["x", "b"], ["a"]), node("Relu", ["a"], ["b"]), node("Relu", ["b"], ["y"])]
    with pytest.raises(ModelError, match="cycle"):
        graph_from_proto(model(nodes, [value("x", [2])], [value("y", None)]))


def test_shapes_that_contradict_each_other() -> None:
    broken = model(
        [node("MatMul", ["x", "w"], ["y"], name="fc")],
        [value("x", ["b", 7])],
        [value("y", None)],
        [absent("w", [8, 4])],
    )
    with pytest.raises(ModelError, match="shapes do not fit at MatMul 'fc'"):
        graph_from_proto(broken, dims={"b": 3})


def test_unknown_shape_at_an_operator_whose_cost_depends_on_it() -> None:
    nodes = [node("Mystery", ["x"], ["z"], domain="other"), node("MatMul", ["z", "w"], ["y"], name="fc")]
    broken = model(nodes, [value("x", [2, 8])], [value("y", None)], [absent("w", [8, 8])], domains={"other": 1})
    with pytest.raises(ModelError, match=r"the cost of MatMul 'fc' depends on the output shape of other\.Mystery 'z'"):
        graph_from_proto(broken)


def test_a_shape_in_an_absent_data_file_is_asked_for_by_name() -> None:
    broken = model(
        [node("Reshape", ["x", "target"], ["y"])],
        [value("x", [2, 8])],
        [value("y", None)],
        [absent("target", [2], I64)],
    )
    with pytest.raises(ModelError, match=r"needs the value of 'target'.*data file"):
        graph_from_proto(broken)


def test_a_dead_operator_cannot_stop_an_import() -> None:
    nodes = [
        node("Relu", ["x"], ["y"]),
        node("Mystery", ["x"], ["z"], domain="other"),
        node("MatMul", ["z", "w"], ["v"]),
    ]
    graph = graph_from_proto(
        model(nodes, [value("x", [2, 8])], [value("y", None)], [absent("w", [8, 8])], domains={"other": 1})
    )
    assert [n.op for n in graph.nodes] == ["Relu"]
    assert graph.report.dead_nodes == 2
