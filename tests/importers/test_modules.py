"""Module paths from metadata, from node names, and for nodes that say nothing."""

from __future__ import annotations

import pytest

from planner.importers import graph_from_proto
from planner.importers.onnx_graph.nodes import scope_of
from tests.importers.build import model, node, scoped, value


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("/m/transformer/h.0/attn/c_attn/Gemm", "m.transformer.h.0.attn.c_attn"),
        ("/layer1/layer1.0/conv1/Conv", "layer1.0.conv1"),
        ("/layer1/layer1.0/downsample/downsample.0/Conv", "layer1.0.downsample.0"),
        ("/features/features.0/Conv", "features.0"),
        ("/Constant_3", ""),
        ("bert/encoder/layer_0/MatMul", "bert.encoder.layer_0"),
        ("node_add_3", None),
        ("", None),
    ],
)
def test_paths_in_names(name: str, module: str | None) -> None:
    assert scope_of(node("Relu", ["x"], ["y"], name=name)).module == module


def test_metadata_names_the_owner_and_its_class() -> None:
    proto = scoped(node("Gemm", ["x"], ["y"]), "m", "m.fc", "addmm", classes=["Net", "Conv1D", "aten.addmm.default"])
    scope = scope_of(proto)
    assert (scope.module, scope.module_class, scope.torch_op) == ("m.fc", "Conv1D", "aten.addmm.default")


def test_operations_of_the_root_belong_to_the_root() -> None:
    assert scope_of(scoped(node("Add", ["x"], ["y"]), "add_1")).module == ""


def test_namespace_alone_is_enough() -> None:
    proto = node("Gemm", ["x"], ["y"])
    proto.metadata_props.add(key="namespace", value=": Net/m: Block/m.fc: Linear/addmm: aten.addmm.default")
    assert scope_of(proto).module == "m.fc"
    assert scope_of(proto).module_class == "Linear"


def test_nodes_without_a_scope_join_their_producer_else_their_reader() -> None:
    nodes = [
        node("Neg", ["x"], ["before"]), scoped(node("Relu", ["before"], ["r"]), "a", "relu"),
        node("Abs", ["r"], ["after"]), scoped(node("Exp", ["after"], ["y"]), "b", "exp"),
    ]  # fmt: skip
    graph = graph_from_proto(model(nodes, [value("x", [2])], [value("y", None)]))
    assert [n.module for n in graph.nodes] == ["a", "a", "a", "b"]


def test_a_file_without_any_names_has_no_modules() -> None:
    graph = graph_from_proto(model([node("Relu", ["x"], ["y"])], [value("x", [2])], [value("y", None)]))
    assert graph.nodes[0].module == ""
    assert graph.nodes[0].key == "y"
