"""Real exports: parameter counts, matrix work and report against figures counted outside this program."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import onnx
import pytest

from planner.graph import Graph, TensorKind
from planner.importers import load_graph
from tests.importers.work import matrix_flops
from tests.shared_data import ROOT, shared_path

DIMS = {"gpt2_124m_legacy_dyn": {"batch": 2, "seq": 128}, "bert_base_dyn": {"batch": 2, "seq": 64}}
MODELS = [
    "bert_base_dyn", "dlrm", "gnmt_lstm", "gpt2_124m_legacy_dyn", "gpt2_124m_loss_train", "gpt2_124m_metadata",
    "llama2_7b_opset23", "mixtral_8x7b_batched", "resnet50", "resnet50_legacy", "resnet50_legacy_initinputs", "t5_base",
    "vgg16", "vit_s16",
]  # fmt: skip
FOLDED_BATCH_NORM = 26_560
"""ResNet-50's 53 batch norms have 26,560 scales and as many shifts; folding leaves one bias of the two."""
DIFFERENCES = {"resnet50": -FOLDED_BATCH_NORM, "resnet50_legacy": -FOLDED_BATCH_NORM}
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
LIGHT_PARAMETERS = {
    "bvlc_alexnet": 60_965_224,
    "resnet50": 25_557_032,
    "squeezenet": 1_235_496,
    "vgg19": 143_667_240,
    "inception_v1": 6_998_552,
}
"""Published parameter counts of these networks."""


@functools.cache
def imported(name: str) -> Graph:
    return load_graph(shared_path(f"onnx/{name}.onnx"), dims=DIMS.get(name))


@functools.cache
def reference() -> dict[str, dict[str, int]]:
    return dict(json.loads((ROOT / "onnx" / "reference.json").read_text()))


@pytest.mark.parametrize("name", MODELS)
def test_parameters_equal_the_reference_or_the_difference_is_said(name: str) -> None:
    graph = imported(name)
    difference = graph.parameter_count() - reference()[name]["params"]
    assert difference == DIFFERENCES.get(name, 0)
    if difference:
        codes = {note.code for note in graph.report.notes}
        assert codes & {"batch-norm-folded", "weight-became-constant"}


@pytest.mark.parametrize("name", MODELS)
def test_matrix_work_equals_the_reference(name: str) -> None:
    assert matrix_flops(imported(name)) == pytest.approx(reference()[name]["fwd_flops"], rel=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_report_accounts_for_every_node_of_the_file(name: str) -> None:
    graph = imported(name)
    report = graph.report
    gone = report.merged_nodes + report.plumbing_nodes + report.folded_nodes + report.dead_nodes
    assert report.total_nodes == len(graph.nodes) + gone
    assert report.total_nodes == reference()[name]["nodes_with_subgraphs"]


@pytest.mark.parametrize("name", MODELS)
def test_batch_and_closure(name: str) -> None:
    graph = imported(name)
    assert graph.batch == reference()[name]["batch"]
    written = {out for node in graph.nodes for out in node.outputs if out}
    for node in graph.nodes:
        assert node.key
        for tensor in (*node.inputs, *node.outputs):
            assert not tensor or tensor in graph.tensors
        for tensor in node.inputs:
            if tensor and graph.tensors[tensor].kind is TensorKind.ACTIVATION:
                assert tensor in written
            if tensor and graph.tensors[tensor].kind is TensorKind.PARAMETER:
                assert graph.sources[tensor]
    used = {p for group in graph.node_parameters for p in group}
    assert used == {i for i, p in enumerate(graph.parameters) if not p.tied_to}


@pytest.mark.parametrize("file", sorted(LIGHT.glob("light_*.onnx")), ids=lambda f: f.stem)
def test_light_models_import(file: Path) -> None:
    graph = load_graph(file)
    name = file.stem.removeprefix("light_")
    assert graph.batch == 1
    assert graph.parameter_count() == LIGHT_PARAMETERS.get(name, graph.parameter_count())
    assert "Softmax" not in {node.op for node in graph.nodes}


def test_light_resnet_does_a_32nd_of_the_work_at_batch_32() -> None:
    graph = load_graph(LIGHT / "light_resnet50.onnx")
    assert matrix_flops(graph) * 32 == pytest.approx(261_707_792_384, rel=1e-9)


def test_gpt2_has_the_same_parameters_in_every_export() -> None:
    labels = [
        sorted(
            p.label
            for p in imported(name).parameters
            if not p.tied_to and "lm_head" not in p.label and "wte" not in p.label
        )
        for name in ("gpt2_124m_metadata", "gpt2_124m_loss_train", "gpt2_124m_legacy_dyn")
    ]
    assert labels[0] == labels[1] == labels[2]
    assert len(labels[0]) == 147
    assert labels[0][0] == "m.transformer.h.0.attn.c_attn.bias"


@pytest.mark.parametrize(
    ("name", "op", "module", "count"),
    [
        ("gpt2_124m_metadata", "Gemm", "m.transformer.h.7.mlp.c_fc", 1),
        ("gpt2_124m_legacy_dyn", "Gemm", "m.transformer.h.7.mlp.c_fc", 1),
        ("llama2_7b_opset23", "Attention", "m.model.layers.31.self_attn", 1),
        ("resnet50_legacy", "Conv", "layer2.1.conv3", 1),
        ("resnet50", "Conv", "layer2.1.conv3", 1),
        ("t5_base", "Attention", "m.decoder.block.2.layer.1.EncDecAttention", 1),
        ("gnmt_lstm", "LSTM", "enc.0", 1),
    ],
)
def test_modules_are_those_of_the_framework(name: str, op: str, module: str, count: int) -> None:
    assert sum(node.op == op and node.module == module for node in imported(name).nodes) == count


def test_ties_by_model() -> None:
    legacy = [p for p in imported("gpt2_124m_legacy_dyn").parameters if p.tied_to]
    assert [(p.label, p.tied_to) for p in legacy] == [("m.lm_head.weight", "m.transformer.wte.weight")]
    for name in ("llama2_7b_opset23", "mixtral_8x7b_batched", "gnmt_lstm", "dlrm", "t5_base", "bert_base_dyn"):
        assert not [p for p in imported(name).parameters if p.tied_to]
    t5 = {p.label: i for i, p in enumerate(imported("t5_base").parameters)}
    users = sum(t5["m.lm_head.weight"] in group for group in imported("t5_base").node_parameters)
    assert users == 3  # two embeddings and the head


def test_running_statistics_are_not_trained() -> None:
    graph = imported("resnet50_legacy_initinputs")
    frozen = [p for p in graph.parameters if not p.trainable]
    assert len(frozen) == 2 * 53
    assert all(p.label.endswith(("running_mean", "running_var")) for p in frozen)
    assert sum(p.elements for p in graph.parameters if not p.tied_to) == 25_557_032 + 2 * FOLDED_BATCH_NORM


def test_fingerprint_depends_on_dims_and_on_nothing_else() -> None:
    path = shared_path("onnx/bert_base_dyn.onnx")
    first = load_graph(path, dims={"batch": 2, "seq": 64})
    again = load_graph(path, dims={"seq": 64, "batch": 2})
    other = load_graph(path, dims={"batch": 4, "seq": 64})
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert first.nodes == again.nodes
