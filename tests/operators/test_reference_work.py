"""Work of real exports against torch's own counter, per model and per module."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import onnx
import pytest

from planner.graph import Graph
from planner.importers import load_graph
from planner.operators import Origin, graph_specs
from tests.shared_data import shared_path

MODELS = (
    "gpt2_124m_metadata", "gpt2_124m_loss_train", "gpt2_124m_legacy_dyn", "bert_base_dyn", "resnet50",
    "resnet50_legacy", "resnet50_legacy_initinputs", "vgg16", "vit_s16", "t5_base", "gnmt_lstm", "dlrm",
    "llama2_7b_opset23", "mixtral_8x7b_batched",
)  # fmt: skip


def _load(name: str) -> tuple[Graph, dict[str, float]]:
    path = shared_path(f"onnx/{name}.onnx")
    reference = json.loads(shared_path("onnx/reference.json").read_text())[name]
    dims = {"batch": reference["batch"], "seq": reference["seq"]} if name.endswith("_dyn") else None
    return load_graph(path, dims=dims), reference


@pytest.mark.parametrize("name", MODELS)
def test_matrix_work_is_torchs(name: str) -> None:
    graph, reference = _load(name)
    specs = graph_specs(graph)
    forward = sum(s.matrix_flops for s in specs)
    backward = sum(s.input_grad_matrix_flops + s.weight_grad_matrix_flops for s in specs)
    assert forward == reference["fwd_flops"]
    assert forward + backward == reference["fwd_bwd_flops"]
    assert not [n.op for n, s in zip(graph.nodes, specs, strict=True) if s.origin is Origin.FALLBACK]


# s steps, hidden h, feed-forward f: 2 s (projections) + 4 s s h
MODULES = {
    "gpt2_124m_metadata": {
        "m.transformer.h.7": 24 * 1024 * 768**2 + 4 * 1024**2 * 768,
        "m.lm_head": 2 * 1024 * 768 * 50257,
    },
    "gpt2_124m_legacy_dyn": {"m.transformer.h.7": 24 * 256 * 768**2 + 4 * 2 * 128**2 * 768},
    "bert_base_dyn": {"m.bert.encoder.layer.3": 24 * 128 * 768**2 + 4 * 2 * 64**2 * 768},
    "llama2_7b_opset23": {
        "m.model.layers.31": 2 * 2048 * (4 * 4096**2 + 3 * 4096 * 11008) + 4 * 2048**2 * 4096,
        "m.lm_head": 2 * 2048 * 4096 * 32000,
    },
    "mixtral_8x7b_batched": {
        "m.model.layers.5": 2 * 256 * (2 * 4096**2 + 2 * 4096 * 1024 + 4096 * 8 + 2 * 3 * 4096 * 14336)
        + 4 * 256**2 * 4096
    },
    "t5_base": {"m.encoder.block.2": 2 * 4 * 512 * (4 * 768**2 + 2 * 768 * 3072) + 4 * 4 * 512**2 * 768},
    "vit_s16": {"m.vit.layers.4": 24 * 8 * 197 * 384**2 + 4 * 8 * 197**2 * 384},
    "resnet50": {
        "conv1": 2 * 32 * 64 * 3 * 49 * 112**2,
        "layer1.1": 2 * 32 * 56**2 * (256 * 64 + 9 * 64 * 64 + 64 * 256),
    },
    "vgg16": {"features.2": 2 * 32 * 64 * 64 * 9 * 224**2},
    "gnmt_lstm": {"enc.0": 2 * 50 * 64 * 2 * (4 * 1024 * 1024 * 2), "enc.3": 2 * 50 * 64 * (4 * 1024 * 1024 * 2)},
    "dlrm": {"top.2": 2 * 2048 * 1024 * 1024},
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_matrix_work_per_module(name: str) -> None:
    graph, _ = _load(name)
    found: Counter[str] = Counter()
    for node, spec in zip(graph.nodes, graph_specs(graph), strict=True):
        numbered = re.match(r".*?\.\d+(?=\.|$)", node.module)
        found[numbered.group() if numbered else node.module] += spec.matrix_flops
    assert {module: found[module] for module in MODULES[name]} == MODULES[name]


def test_a_bundled_resnet_is_one_image_of_the_reference() -> None:
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    if not (folder / "light_resnet50.onnx").exists():
        pytest.skip("the onnx package has no light models here")
    specs = graph_specs(load_graph(folder / "light_resnet50.onnx"))
    assert sum(s.matrix_flops for s in specs) == pytest.approx(261707792384 / 32, rel=1e-3)


def test_bundled_models_have_no_fallback() -> None:
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    files = sorted(folder.glob("light_*.onnx"))
    if not files:
        pytest.skip("the onnx package has no light models here")
    for file in files:
        graph = load_graph(file)
        fallen = {n.op for n, s in zip(graph.nodes, graph_specs(graph), strict=True) if s.origin is Origin.FALLBACK}
        assert fallen == set(), file.name
