"""What torch's two exporters say of stored tensors, by names, Identity nodes and the signature: parameter or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from planner.graph import Graph
from planner.importers import graph_from_proto
from tests.importers.build import absent, ints, model, node, scoped, value


def floats(name: str, values: object) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, dtype=np.float32), name)


def of_torch(
    nodes: Sequence[onnx.NodeProto], stored: Sequence[onnx.TensorProto], *, signature: Mapping[str, str] | None = None,
    folded: Mapping[str, Sequence[str]] | None = None, inputs: Sequence[onnx.ValueInfoProto] = (),
) -> Graph:  # fmt: skip
    """The graph of a file of torch's with the input `x` [2, 8] and the output `y`.

    Args:
        nodes: its operators.
        stored: its initializers.
        signature: of the second exporter: kind of each tensor of the module, by name.
        folded: names of what each stored tensor was computed from.
        inputs: in place of `x`.
    """
    infos = []
    for name, origins in (folded or {}).items():
        tensor = next(t for t in stored if t.name == name)
        infos.append(value(name, list(tensor.dims)))
        infos[-1].metadata_props.add(key="pkg.onnxscript.optimizer.folded_from", value=repr(list(origins)))
    proto = model(nodes, inputs or [value("x", [2, 8])], [value("y", None)], stored, value_info=infos)
    proto.producer_name = "pytorch"
    if signature:
        lines = [f"p_{k}: {kind} target='{name}'" for k, (name, kind) in enumerate(signature.items())]
        text = "\n# inputs\n" + "\n".join(lines) + "\nx: USER_INPUT\n\n# outputs\ny: USER_OUTPUT\n"
        proto.graph.metadata_props.add(key="pkg.torch.export.ExportedProgram.graph_signature", value=text)
    return graph_from_proto(proto)


def trained(graph: Graph) -> dict[str, tuple[int, ...]]:
    return {p.name: p.shape for p in graph.parameters if p.trainable and not p.tied_to}


def test_running_statistics_stored_with_scale_and_shift_are_not_trained() -> None:
    image = value("x", [2, 8, 4, 4])
    norm = node(
        "BatchNormalization", ["x", "n.weight", "n.bias", "n.running_mean", "n.running_var"], ["y"], name="/n/B"
    )
    nodes = [
        node("Identity", ["n.weight"], ["n.running_var"]), node("Identity", ["n.bias"], ["n.running_mean"]), norm,
    ]  # fmt: skip
    graph = of_torch(nodes, [absent("n.weight", [8]), absent("n.bias", [8])], inputs=[image])
    assert trained(graph) == {"n.weight": (8,), "n.bias": (8,)}
    assert {p.name for p in graph.parameters} == {"n.weight", "n.bias", "n.running_mean", "n.running_var"}


def test_a_bias_of_a_module_applied_again_is_one() -> None:
    nodes = [
        node("Gemm", ["x", "m.weight", "m.bias"], ["h"], name="/m/Gemm"),
        node("Gemm", ["h", "m.weight", "m.bias"], ["y"], name="/m_1/Gemm"),
    ]
    graph = of_torch(nodes, [absent("m.weight", [8, 8]), absent("m.bias", [8])])
    assert trained(graph) == {"m.weight": (8, 8), "m.bias": (8,)}


def products(second: str) -> list[onnx.NodeProto]:
    return [
        node("MatMul", ["x", "a.weight"], ["h"], name="/a/MatMul"),
        node("MatMul", ["h", second], ["y"], name="/b/MatMul"),
    ]


def test_a_matrix_that_an_identity_names_is_the_modules_own() -> None:
    nodes = [node("Identity", ["a.weight"], ["b.weight"]), *products("b.weight")]
    assert trained(of_torch(nodes, [absent("a.weight", [8, 8])])) == {"a.weight": (8, 8), "b.weight": (8, 8)}


def test_a_matrix_read_under_one_name_is_shared() -> None:
    assert trained(of_torch(products("a.weight"), [absent("a.weight", [8, 8])])) == {"a.weight": (8, 8)}


@pytest.mark.parametrize(("second", "count"), [("/l.1/MatMul", 2), ("/l.0_1/MatMul", 1)], ids=["copied", "again"])
def test_nameless_matrices_of_copied_layers_are_apart(second: str, count: int) -> None:
    nodes = [
        node("Identity", ["onnx::MatMul_7"], ["onnx::MatMul_9"]),
        node("MatMul", ["x", "onnx::MatMul_7"], ["h"], name="/l.0/MatMul"),
        node("MatMul", ["h", "onnx::MatMul_9"], ["y"], name=second),
    ]
    graph = of_torch(nodes, [absent("onnx::MatMul_7", [8, 8])])
    assert graph.parameter_count() == count * 64


def test_parameters_of_the_outermost_module_have_names_without_dots() -> None:
    nodes = [node("Mul", ["x", "gate"], ["h"]), node("Add", ["h", "onnx::Add_3"], ["y"])]
    graph = of_torch(nodes, [absent("gate", [2, 8]), absent("onnx::Add_3", [2, 8])])
    assert trained(graph) == {"gate": (2, 8)}


@pytest.mark.parametrize(
    "values",
    [[0, 1, 0, 1, 1, 1, 0, 0], [-1, -0.5, 0, 0.5, 1, 1.5, 2, 2.5], [-1e9, 0, 0, 0, 0, 0, 0, 0]],
    ids=["a mask of factors", "places", "a mask of terms"],
)
def test_what_a_model_works_out_is_no_parameter(values: list[float]) -> None:
    graph = of_torch([node("Add", ["x", "m.table"], ["y"])], [floats("m.table", values)])
    assert trained(graph) == {}


def test_a_nameless_divisor_is_no_parameter() -> None:
    nodes = [node("Sub", ["x", "onnx::Sub_1"], ["h"]), node("Div", ["h", "onnx::Div_2"], ["y"])]
    assert trained(of_torch(nodes, [absent("onnx::Sub_1", [8]), absent("onnx::Div_2", [8])])) == {}


def test_weights_that_are_standardised_first_are_weights() -> None:
    nodes = [
        node("BatchNormalization", ["onnx::Norm_1", "g", "b", "mean", "var"], ["w", "m", "v"], training_mode=1),
        node("Reshape", ["w", "shape"], ["k"]), node("Conv", ["x", "k"], ["y"], name="/c/Conv"),
    ]  # fmt: skip
    stored = [
        absent("onnx::Norm_1", [1, 4, 27]), *(absent(n, [4]) for n in ("g", "b", "mean", "var")),
        ints("shape", [4, 3, 3, 3]),
    ]  # fmt: skip
    graph = of_torch(nodes, stored, inputs=[value("x", [2, 3, 8, 8])])
    assert trained(graph)["onnx::Norm_1"] == (1, 4, 27)


SIGNATURE = {"scale": "PARAMETER", "mask": "BUFFER", "m.weight": "PARAMETER", "m.coordinates": "BUFFER"}


def test_the_signature_tells_parameters_from_buffers() -> None:
    nodes = [
        node("Mul", ["x", "select"], ["a"]), node("Mul", ["a", "exp"], ["b"]), node("Add", ["b", "val_1"], ["c"]),
        node("MatMul", ["c", "val_2"], ["y"]),
    ]  # fmt: skip
    stored = [
        absent("select", [8]), absent("exp", [8]), floats("val_1", [[0.0] * 8] * 2), absent("val_2", [8, 8]),
    ]  # fmt: skip
    folded = {"select": ["mask", "val_0"], "exp": ["scale", "val_0"], "val_2": ["m.weight"]}
    graph = of_torch(nodes, stored, signature=SIGNATURE, folded=folded)
    assert {p.label: p.shape for p in graph.parameters} == {"scale": (8,), "m.weight": (8, 8)}


def test_products_with_buffers_are_no_weights_and_parameters_that_are_missing_are_named() -> None:
    stored = [absent("linear", [2, 8])]
    folded = {"linear": ["m.weight", "m.coordinates"]}
    graph = of_torch([node("Add", ["x", "linear"], ["y"])], stored, signature=SIGNATURE, folded=folded)
    assert trained(graph) == {}
    note = next(n for n in graph.report.notes if n.code == "parameters-missing")
    assert "scale, m.weight" in note.message


def test_a_scale_that_an_exporter_filled_in_is_not_trained() -> None:
    norms = [
        scoped(node("LayerNormalization", ["x", "a.weight"], ["h"]), "a", "layer_norm"),
        scoped(node("LayerNormalization", ["h", "a.weight"], ["y"]), "b", "layer_norm_1"),
    ]
    graph = of_torch(norms, [absent("a.weight", [8])], signature={"a.weight": "PARAMETER"})
    assert graph.parameter_count() == 8
    both = of_torch(norms, [absent("a.weight", [8])], signature={"a.weight": "PARAMETER", "b.weight": "PARAMETER"})
    assert both.parameter_count() == 16


def test_packed_weights_of_two_directions_are_not_repeated_for_each_sample() -> None:
    stored = [absent("val_1", [2, 32, 8]), absent("val_2", [2, 32, 8])]
    signature = {"r.weight_ih_l0": "PARAMETER", "r.weight_ih_l0_reverse": "PARAMETER"} | {
        "r.weight_hh_l0": "PARAMETER", "r.weight_hh_l0_reverse": "PARAMETER",
    }  # fmt: skip
    names = list(signature)
    lstm = node("LSTM", ["x", "val_1", "val_2"], ["y"], hidden_size=8, direction="bidirectional")
    graph = of_torch(
        [lstm], stored, signature=signature, folded={"val_1": names[:2], "val_2": names[2:]},
        inputs=[value("x", [2, 2, 8])],
    )  # fmt: skip
    assert graph.parameter_count() == 2 * 2 * 32 * 8
