"""True ties, merged equal vectors, broken ties, and labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest

from planner.graph import Graph
from planner.importers import graph_from_proto
from tests.importers.build import I64, absent, model, node, scoped, value


def labels(graph: Graph) -> list[str]:
    return [p.label for p in graph.parameters]


def codes(graph: Graph) -> set[str]:
    return {n.code for n in graph.report.notes}


def two_layers(modules: Sequence[str], weights: Sequence[str], *, names: bool = True) -> onnx.ModelProto:
    """LayerNorm and Gemm in each layer; all share one scale and one zero bias, as a fresh model's export has it."""
    nodes, last = [], "x"
    for i, (module, weight) in enumerate(zip(modules, weights, strict=True)):
        norm = node("LayerNormalization", [last, "ones", "zeros"], [f"n{i}"])
        linear = node("Gemm", [f"n{i}", weight, "zeros"], [f"g{i}"])
        if names:
            scoped(norm, module, f"{module}.ln", f"layer_norm_{i}")
            scoped(linear, module, f"{module}.fc", f"addmm_{i}", classes=["Block", "Conv1D", "aten.addmm.default"])
        nodes += [norm, linear]
        last = f"g{i}"
    stored = [absent("ones", [8]), absent("zeros", [8]), *(absent(w, [8, 8]) for w in dict.fromkeys(weights))]
    return model(nodes, [value("x", [2, 8])], [value(last, None)], stored)


def test_equal_vectors_of_different_modules_are_separated() -> None:
    graph = graph_from_proto(two_layers(["h.0", "h.1"], ["val_1", "val_2"]))
    assert labels(graph) == [
        "ones", "zeros", "h.0.fc.weight", "h.0.fc.bias", "h.1.ln.weight", "h.1.ln.bias", "h.1.fc.weight", "h.1.fc.bias",
    ]  # fmt: skip
    assert graph.parameter_count() == 2 * (8 + 8 + 64 + 8)
    note = next(n for n in graph.report.notes if n.code == "merged-parameters")
    assert "2 stored vectors" in note.message
    assert "4 parameters (32 elements)" in note.message
    used = [p for group in graph.node_parameters for p in group]
    assert sorted(used) == list(range(8))


def test_without_module_names_the_matrix_beside_a_vector_tells_the_module() -> None:
    graph = graph_from_proto(two_layers(["", ""], ["w1", "w2"], names=False))
    assert graph.parameter_count() == 2 * (8 + 8 + 64 + 8)


def test_a_module_applied_twice_keeps_one_set_of_parameters() -> None:
    graph = graph_from_proto(two_layers(["layer", "layer"], ["w", "w"]))
    assert graph.parameter_count() == 8 + 8 + 64 + 8
    unnamed = graph_from_proto(two_layers(["", ""], ["w", "w"], names=False))
    assert unnamed.parameter_count() == 8 + 8 + 64 + 8


def test_copies_that_identity_nodes_name_keep_those_names() -> None:
    nodes = [
        node("Identity", ["a.bias"], ["b.bias"]), node("Gemm", ["x", "a.weight", "a.bias"], ["h"], name="/a/Gemm"),
        node("Gemm", ["h", "b.weight", "b.bias"], ["y"], name="/b/Gemm"),
    ]  # fmt: skip
    stored = [absent("a.bias", [8]), absent("a.weight", [8, 8]), absent("b.weight", [8, 8])]
    graph = graph_from_proto(model(nodes, [value("x", [2, 8])], [value("y", None)], stored))
    assert [p.name for p in graph.parameters] == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert graph.parameters[3].module == "b"


def language_model(
    table: str, head: str, *, table_module: str = "wte", head_module: str = "lm_head", shared: bool = False
) -> onnx.ModelProto:
    nodes = [
        scoped(node("Gather", [table, "ids"], ["e"]), table_module, "embedding"),
        scoped(node("Transpose", [table], ["t"], perm=[1, 0]), head_module, "t"),
        scoped(node("MatMul", ["e", "t" if shared else head], ["logits"]), head_module, "linear"),
    ]
    stored = [absent(table, [512, 16])] + ([] if shared else [absent(head, [16, 512])])
    return model(nodes, [value("ids", [2, 4], I64)], [value("logits", None)], stored)


def test_one_tensor_for_embedding_and_head_is_a_tie() -> None:
    graph = graph_from_proto(language_model("wte.weight", "", shared=True))
    assert graph.parameter_count() == 512 * 16
    assert graph.node_parameters == ((0,), (0,))
    assert "tied-parameter" in codes(graph)


@pytest.mark.parametrize(
    ("table", "head", "table_module", "head_module", "tied"),
    [
        ("transformer.wte.weight", "onnx::MatMul_99", "transformer.wte", "lm_head", True),
        (
            "bert.embeddings.word_embeddings.weight",
            "val_7",
            "bert.embeddings.word_embeddings",
            "cls.predictions.decoder",
            True,
        ),
        ("electra.embeddings.word_embeddings.weight", "val_7", "electra.word_embeddings", "generator_lm_head", True),
        ("model.embeddings.tok_embeddings.weight", "val_7", "model.embeddings.tok_embeddings", "decoder", True),
        ("transformer.word_embedding.weight", "val_7", "transformer.word_embedding", "lm_loss", True),
        ("shared.weight", "val_7", "shared", "lm_head", True),
        ("model.decoder.embed_tokens.weight", "val_7", "model.decoder.embed_tokens", "lm_head", True),
        ("model.embed_tokens.weight", "val_7", "model.embed_tokens", "lm_head", False),
        ("gpt_neox.embed_in.weight", "val_7", "gpt_neox.embed_in", "embed_out", False),
        ("transformer.wte.weight", "lm_head.weight", "transformer.wte", "lm_head", False),
        ("a.weight", "val_7", "a", "b", False),
    ],
)
def test_broken_ties_by_convention(table: str, head: str, table_module: str, head_module: str, tied: bool) -> None:
    graph = graph_from_proto(language_model(table, head, table_module=table_module, head_module=head_module))
    assert graph.parameters[1].tied_to == (table if tied else "")
    assert graph.parameter_count() == 512 * 16 * (1 if tied else 2)
    assert codes(graph) & {"tie-restored", "tie-not-assumed"}


def test_a_copy_that_the_exporter_confesses() -> None:
    proto = language_model("a.weight", "val_7", table_module="a", head_module="b")
    entry = value("val_7", [16, 512])
    entry.metadata_props.add(key="pkg.onnxscript.optimizer.folded_from", value="['a.weight', 'val_3']")
    proto.graph.value_info.append(entry)
    graph = graph_from_proto(proto)
    assert graph.parameters[1].tied_to == "a.weight"


def test_a_module_that_is_applied_again_has_one_bias_though_its_matrix_is_stored_twice() -> None:
    classes = ["Net", "torch.nn.Linear", "aten.linear"]
    nodes = [
        scoped(node("MatMul", ["x", "val_1"], ["m"]), "", "layer", "mm", classes=classes),
        scoped(node("Add", ["m", "zeros"], ["a"]), "", "layer", "linear", classes=classes),
        scoped(node("MatMul", ["a", "val_2"], ["n"]), "", "layer", "mm", classes=classes),
        scoped(node("Add", ["n", "zeros"], ["b"]), "", "layer", "linear", classes=classes),
        scoped(node("MatMul", ["b", "val_3"], ["o"]), "", "head", "mm", classes=classes),
        scoped(node("Add", ["o", "zeros"], ["y"]), "", "head", "linear", classes=classes),
    ]
    stored = [absent(name, [8, 8]) for name in ("val_1", "val_2", "val_3")]
    proto = model(nodes, [value("x", [2, 8])], [value("y", None)], [*stored, absent("zeros", [8])])
    for copy in ("val_1", "val_2"):  # the exporter turned the layer's matrix for each product
        entry = value(copy, [8, 8])
        entry.metadata_props.add(key="pkg.onnxscript.optimizer.folded_from", value="['layer.weight']")
        proto.graph.value_info.append(entry)
    graph = graph_from_proto(proto)
    assert graph.parameter_count() == 2 * (8 * 8 + 8)
    assert [(read.stored, read.operator, read.operand) for read in graph.separated] == [("zeros", "y", 1)]


def test_equal_numbers_in_a_constant_that_torch_wrote_are_no_weight() -> None:
    literal = onnx.numpy_helper.from_array(np.zeros(8, np.float32))
    nodes = [
        onnx.helper.make_node("Constant", [], ["/norm/Constant_output_0"], value=literal),
        node("LayerNormalization", ["x", "norm.weight", "/norm/Constant_output_0"], ["y"]),
    ]
    graph = graph_from_proto(model(nodes, [value("x", [2, 8])], [value("y", None)], [absent("norm.weight", [8])]))
    assert [p.name for p in graph.parameters] == ["norm.weight"]


def test_a_table_that_weights_of_several_layers_multiply_is_one() -> None:
    nodes = [
        node("MatMul", ["onnx::MatMul_7", "left"], ["keys"], name="/layers.0/keys/MatMul"),
        node("MatMul", ["x", "keys"], ["a"], name="/layers.0/MatMul"),
        node("MatMul", ["onnx::MatMul_7", "right"], ["more"], name="/layers.1/keys/MatMul"),
        node("MatMul", ["a", "more"], ["y"], name="/layers.1/MatMul"),
    ]
    stored = [absent("onnx::MatMul_7", [6, 8]), absent("left", [8, 6]), absent("right", [8, 6])]
    proto = model(nodes, [value("x", [2, 6])], [value("y", None)], stored)
    proto.producer_name = "pytorch"
    assert graph_from_proto(proto).parameter_count() == 6 * 8 + 2 * 8 * 6


def test_labels_and_orientation_of_anonymous_weights() -> None:
    nodes = [
        scoped(
            node("MatMul", ["x", "val_3"], ["m"]),
            "mlp",
            "mlp.up",
            "mm",
            classes=["MLP", "torch.nn.Linear", "aten.linear"],
        ),
        scoped(node("Add", ["m", "val_4"], ["a"]), "mlp", "mlp.up", "linear"),
        scoped(node("Mul", ["a", "val_5"], ["y"]), "norm", "mul"),
    ]
    stored = [absent("val_3", [8, 6]), absent("val_4", [6]), absent("val_5", [6])]
    graph = graph_from_proto(model(nodes, [value("x", [2, 8])], [value("y", None)], stored))
    assert labels(graph) == ["mlp.up.weight", "mlp.up.bias", "norm.weight"]
    assert [p.transposed for p in graph.parameters] == [True, False, False]
    assert [p.module for p in graph.parameters] == ["mlp.up", "mlp.up", "norm"]


def test_signature_decides_over_guesses() -> None:
    proto = model(
        [node("Add", ["x", "p"], ["a"]), node("Mul", ["a", "b"], ["y"])],
        [value("x", [2, 8])], [value("y", None)], [absent("p", [2, 8]), absent("b", [8])],
    )  # fmt: skip
    for name, kind in (("p", "PARAMETER"), ("b", "BUFFER")):
        entry = value(name, None)
        entry.metadata_props.add(key="pkg.torch.export.graph_signature.InputSpec.kind", value=kind)
        proto.graph.value_info.append(entry)
    assert [p.name for p in graph_from_proto(proto).parameters] == ["p"]


def test_dropped_biases_are_suspected() -> None:
    proto = two_layers(["h.0", "h.1"], ["val_1", "val_2"])
    del proto.graph.node[1].input[2]
    graph = graph_from_proto(proto)
    assert any(n.code == "bias-dropped" and "1 linear layers" in n.message for n in graph.report.notes)
    assert "bias-dropped" not in codes(graph_from_proto(two_layers(["h.0", "h.1"], ["val_1", "val_2"])))


def test_batch_norm_statistics() -> None:
    nodes = [node("BatchNormalization", ["x", "s", "b", "m", "v"], ["y"])]
    stored = [absent(name, [4]) for name in "sbmv"]
    graph = graph_from_proto(model(nodes, [value("x", [2, 4, 5, 5])], [value("y", None)], stored))
    assert [(p.name, p.trainable) for p in graph.parameters] == [("s", True), ("b", True), ("m", False), ("v", False)]
    assert graph.parameter_count() == 8


def repeated(*, parts: bool) -> Graph:
    """A module applied twice, whose weight the exporter turned round and stored for each use; or two parts of one."""
    first = scoped(node("MatMul", ["x", "val_1"], ["a"]), "layer", "layer.fc", "matmul")
    second = scoped(node("MatMul", ["x" if parts else "a", "val_2"], ["b"]), "layer", "layer.fc", "matmul_1")
    kinds = [value("val_1", [8, 8]), value("val_2", [8, 8])]
    for kind in kinds:
        kind.metadata_props.add(key="pkg.onnxscript.optimizer.folded_from", value="['layer.fc.weight']")
    proto = model(
        [first, second, node("Add", ["a", "b"], ["y"])], [value("x", [2, 8])], [value("y", None)],
        [absent("val_1", [8, 8]), absent("val_2", [8, 8])], value_info=kinds,
    )  # fmt: skip
    return graph_from_proto(proto)


def test_a_weight_stored_again_for_each_use_of_its_module_is_one_weight() -> None:
    graph = repeated(parts=False)
    assert graph.parameter_count() == 64
    assert "tie-restored" in codes(graph)


def test_parts_of_one_weight_are_read_beside_each_other_and_stay_apart() -> None:
    assert repeated(parts=True).parameter_count() == 2 * 64
