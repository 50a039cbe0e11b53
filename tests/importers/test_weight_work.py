"""Work on weights alone, weights that exporters computed into constants, and weights of operators without a rule."""

from __future__ import annotations

import pytest

from planner import Job, ModelError, load_cluster, plan
from planner.graph import NO_RULE, Graph, TensorKind
from planner.importers import graph_from_proto
from planner.operators import graph_specs, rebatch
from tests.importers.build import absent, ints, model, node, scoped, value


def product_of_weights() -> Graph:
    nodes = [
        node("MatMul", ["a", "b"], ["ab"]),
        node("Transpose", ["ab"], ["abt"], perm=[1, 0]),
        node("MatMul", ["x", "abt"], ["y"]),
    ]
    stored = [absent("a", [64, 4096]), absent("b", [4096, 64])]
    return graph_from_proto(model(nodes, [value("x", [4, 64])], [value("y", None)], stored))


@pytest.mark.parametrize("batch", [4, 8])
def test_a_product_of_weights_is_work_that_does_not_follow_the_batch(batch: int) -> None:
    graph = rebatch(product_of_weights(), batch)
    specs = graph_specs(graph)
    weights, data = 2 * 64 * 4096 * 64, 2 * batch * 64 * 64
    assert [n.op for n in graph.nodes] == ["MatMul", "Transpose", "MatMul"]
    assert sum(s.matrix_flops for s in specs) == weights + data
    assert specs[0].weight_grad_matrix_flops == 2 * weights
    assert graph.parameter_count() == 2 * 64 * 4096


def test_the_report_counts_a_node_that_came_back_as_kept() -> None:
    graph = product_of_weights()
    report = graph.report
    assert (report.total_nodes, len(graph.nodes), report.folded_nodes) == (3, 3, 0)


def test_work_on_what_is_no_weight_stays_folded() -> None:
    nodes = [
        node("Einsum", ["positions", "rates"], ["angles"], equation="i,j->ij"), node("Sin", ["angles"], ["sines"]),
        node("Add", ["x", "sines"], ["t"]), node("MatMul", ["t", "w"], ["y"]),
    ]  # fmt: skip
    stored = [absent("positions", [5]), absent("rates", [8]), absent("w", [8, 4])]
    graph = graph_from_proto(model(nodes, [value("x", [2, 5, 8])], [value("y", None)], stored))
    assert [n.op for n in graph.nodes] == ["Add", "MatMul"]
    assert graph.parameter_count() == 8 * 4


def test_an_initial_state_is_no_weight_and_follows_the_batch() -> None:
    nodes = [
        node("MatMul", ["zeros", "hidden"], ["h"]), node("MatMul", ["x", "w"], ["i"]), node("Add", ["h", "i"], ["y"]),
    ]  # fmt: skip
    stored = [absent("zeros", [2, 16]), absent("hidden", [16, 16]), absent("w", [8, 16])]
    graph = rebatch(graph_from_proto(model(nodes, [value("x", [2, 8])], [value("y", None)], stored)), 6)
    assert graph.parameter_count() == 16 * 16 + 8 * 16
    assert graph.tensors["zeros"].kind is TensorKind.CONSTANT
    assert [graph.tensors[name].shape for name in ("zeros", "h", "y")] == [(6, 16)] * 3


def test_a_table_of_weights_repeated_for_every_sample_follows_the_batch() -> None:
    nodes = [
        node("LayerNormalization", ["table.weight", "scale"], ["norm"]),
        node("Tile", ["norm", "twice"], ["repeated"]),
        node("MatMul", ["x", "repeated"], ["y"]),
    ]
    stored = [absent("table.weight", [4, 8, 8]), absent("scale", [8]), ints("twice", [2, 1, 1])]
    read = model(
        [node("Reshape", ["input", "rows"], ["x"]), *nodes],
        [value("input", [2, 4, 5, 8])],
        [value("y", None)],
        [*stored, ints("rows", [-1, 5, 8])],
    )
    graph = rebatch(graph_from_proto(read), 3)
    assert graph.tensors["norm"].shape == (4, 8, 8)
    assert graph.tensors["repeated"].shape == (12, 8, 8)


def folded_table(origins: list[str], shape: list[int]) -> Graph:
    table = value("embedding_1", shape)
    table.metadata_props.add(key="pkg.onnxscript.optimizer.folded_from", value=repr(origins))
    nodes = [node("Add", ["x", "embedding_1"], ["t"]), node("MatMul", ["t", "w"], ["y"])]
    stored = [absent("embedding_1", shape), absent("w", [8, 8])]
    proto = model(nodes, [value("x", [2, 5, 8])], [value("y", None)], stored, value_info=[table])
    return graph_from_proto(proto)


@pytest.mark.parametrize(
    ("origins", "shape", "elements"),
    [
        (["alias", "m.position_embeddings.weight", "m.position_ids"], [1, 5, 8], 40),
        (["m.class_embedding", "val_3"], [2, 1, 8], 8),
        (["m.rotary.inv_freq", "val_3"], [1, 5, 8], 0),
        (["m.embed_positions.weights", "val_3"], [1, 5, 8], 0),
    ],
)
def test_a_table_computed_at_export_counts_as_trained_where_it_was_a_parameter(
    origins: list[str], shape: list[int], elements: int
) -> None:
    assert folded_table(origins, shape).parameter_count() == 64 + elements


def fused(*, beside: int) -> Graph:
    nodes = [
        scoped(node("FusedMLP", ["x", "w1", "w2"], ["h"], domain="my.ops", name="mlp"), "mlp", "op"),
        node("MatMul", ["h", "w"], ["y"]),
    ]
    stored = [absent("w1", [64, 256]), absent("w2", [256, 64]), absent("w", [64, beside])]
    shapes = [value("h", [8, 64])]
    return graph_from_proto(
        model(nodes, [value("x", [8, 64])], [value("y", None)], stored, domains={"my.ops": 1}, value_info=shapes)
    )


def test_an_operator_without_a_rule_counts_its_weights_and_has_a_backward() -> None:
    graph = fused(beside=10)
    assert graph.parameter_count() == 2 * 64 * 256 + 640
    assert graph_specs(graph)[0].backward.byte_count > 0
    note = next(note for note in graph.report.notes if note.code == NO_RULE)
    assert note.level == "warning"
    assert note.where == "mlp"
    assert "98.1% of the weights" in note.message


def test_a_small_operator_without_a_rule_is_not_said_first() -> None:
    assert all(note.code != NO_RULE for note in fused(beside=1 << 22).report.notes)


def test_a_graph_of_frozen_weights_is_no_training_job() -> None:
    nodes = [node("DequantizeLinear", ["q", "s"], ["w"]), node("MatMul", ["x", "w"], ["y"])]
    stored = [absent("q", [64, 64], 3), absent("s", [64])]
    graph = graph_from_proto(model(nodes, [value("x", [8, 64])], [value("y", None)], stored))
    with pytest.raises(ModelError, match="none of its 2 weights can be trained") as caught:
        plan(graph, load_cluster("dgx-a100"), Job(global_batch=8))
    assert "before quantising" in caught.value.problem.hint
