"""Kept activations against what torch was measured to keep (per model and per block)."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from planner.graph import DType, Graph, TensorKind
from planner.importers import load_graph
from planner.operators import (
    SavedBytes,
    SavedOptions,
    Storages,
    element_bytes,
    graph_specs,
    rebatch,
    saved_for_backward,
    saved_notes,
    unique_bytes,
)
from tests.shared_data import shared_path

COMPOSITE_MASK_BYTES = 4.0
"""The measurements ran on a CPU, whose composite dropout keeps a mask as wide as the data."""

_BLOCK = re.compile(r"^(?:m\.)?((?:.*?\.)?(?:h|layer|layers)\.\d+|layer\d\.\d+)(?:\.|$)")


@functools.cache
def reference() -> Mapping[str, Any]:
    content: dict[str, Any] = json.loads(shared_path("onnx/saved_activations.json").read_text())
    return content


@functools.cache
def model(name: str, batch: int, seq: int = 0) -> Graph:
    path = shared_path(f"onnx/{name}.onnx")
    if seq:
        return load_graph(path, dims={"batch": batch, "seq": seq})
    return rebatch(load_graph(path), batch)


def block_of(module: str) -> str:
    found = _BLOCK.match(module)
    return found.group(1) if found else ""


def first_keepers(groups: Iterable[tuple[str, Iterable[SavedBytes]]]) -> dict[str, int]:
    """Bytes by name of a group, each storage counted with the first group that keeps it, as the measurement did."""
    seen: set[str] = set()
    found: dict[str, int] = {}
    for name, items in groups:
        for item in items:
            fresh = item.storage not in seen
            found[name] = found.get(name, 0) + (item.byte_count if fresh else 0)
            seen.add(item.storage)
    return found


def by_block(graph: Graph, saved: tuple[tuple[SavedBytes, ...], ...]) -> dict[str, int]:
    """Bytes by block of the model; "" for all nodes outside blocks."""
    return first_keepers((block_of(node.module), items) for node, items in zip(graph.nodes, saved, strict=True))


def measured(entry: str, batch: int, *, checkpointed: bool) -> dict[str, Any]:
    runs = reference()[entry]["runs"]
    return next(r for r in runs if r["batch"] == batch and r["checkpointed"] is checkpointed)


def measured_blocks(run: Mapping[str, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, size in run["by_block"].items():
        block = block_of(name)
        if block:
            found[block] = found.get(block, 0) + size
    return found


GPT2 = ("gpt2_124m_legacy_dyn", 512)
BERT = ("bert_base_dyn", 128)
VIT = ("vit_s16", 0)
RESNET = ("resnet50_legacy_initinputs", 0)
FOLDED = ("resnet50", 0)
ANONYMOUS = ("resnet50_legacy", 0)

# entry, model, batch, options, bytes an element, tolerance
CASES = [
    ("gpt2_124m_s512_sdpa_nodrop", GPT2, 1, {"fused_attention": True}, 4.0, 0.005),
    ("gpt2_124m_s512_sdpa_nodrop", GPT2, 2, {"fused_attention": True}, 4.0, 0.005),
    ("gpt2_124m_s512_sdpa_nodrop_bf16", GPT2, 1, {"fused_attention": True, "loss_bytes": 2.0}, 2.0, 0.005),
    ("gpt2_124m_s512_sdpa_nodrop_bf16", GPT2, 2, {"fused_attention": True, "loss_bytes": 2.0}, 2.0, 0.005),
    ("gpt2_124m_s512_eager_drop", GPT2, 1, {"fused_attention": False, "assume_dropout": True}, 4.0, 0.005),
    *(
        (
            "bert_base_s128_sdpa_drop",
            BERT,
            batch,
            {"fused_attention": False, "assume_dropout": True},
            4.0,
            0.005,
        )
        for batch in (2, 4, 8)
    ),
    *(("bert_base_s128_eager_nodrop", BERT, batch, {"fused_attention": False}, 4.0, 0.005) for batch in (2, 4, 8)),
    *(("vit_s16_eager", VIT, batch, {"fused_attention": False}, 4.0, 0.005) for batch in (2, 4)),
    *(("resnet50_outofplace", RESNET, batch, {}, 4.0, 0.005) for batch in (2, 4, 8)),
    *(("resnet50_outofplace", FOLDED, batch, {}, 4.0, 0.005) for batch in (2, 8)),
    ("resnet50_outofplace", ANONYMOUS, 4, {}, 4.0, 0.005),
]


def masks_of(entry: str, batch: int, width: float) -> int:
    """Bytes of a layer's mask in the measured runs: torch made one of floats out of GPT-2's boolean one in each layer.

    A causal kernel is told that it is causal, and has none.
    """
    return int(batch * 512 * 512 * width) if entry.startswith("gpt2_124m_s512_sdpa") else 0


def options_of(chosen: Mapping[str, Any]) -> SavedOptions:
    return SavedOptions(dropout_mask_bytes=COMPOSITE_MASK_BYTES, **chosen)


@pytest.mark.parametrize(("entry", "source", "batch", "chosen", "width", "tolerance"), CASES)
def test_whole_model(
    entry: str, source: tuple[str, int], batch: int, chosen: dict[str, Any], width: float, tolerance: float
) -> None:
    graph = model(source[0], batch, source[1])
    saved = saved_for_backward(graph, graph_specs(graph), width=width, options=options_of(chosen))
    expected = measured(entry, batch, checkpointed=False)["saved_bytes"] - 12 * masks_of(entry, batch, width)
    assert unique_bytes(saved) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize(("entry", "source", "batch", "chosen", "width", "tolerance"), CASES)
def test_each_block(
    entry: str, source: tuple[str, int], batch: int, chosen: dict[str, Any], width: float, tolerance: float
) -> None:
    graph = model(source[0], batch, source[1])
    saved = saved_for_backward(graph, graph_specs(graph), width=width, options=options_of(chosen))
    found = by_block(graph, saved)
    expected = measured_blocks(measured(entry, batch, checkpointed=False))
    assert len(expected) >= 12
    for name, size in expected.items():
        assert found[name] == pytest.approx(size - masks_of(entry, batch, width), rel=tolerance), name


def checkpoint_bytes(
    graph: Graph, nodes: Iterable[int], *, width: float | Mapping[DType, float] = 4.0
) -> tuple[SavedBytes, ...]:
    """What is kept of nodes that are computed again in the backward pass: the activations they read from outside.

    Args:
        graph: the graph.
        nodes: indices of the group.
        width: as in `saved_for_backward`.
    """
    sizes = width if isinstance(width, Mapping) else element_bytes(graph, width)
    inside = set(nodes)
    storages = Storages(graph)
    kept: dict[str, None] = {}
    for i in sorted(inside):
        for name in graph.nodes[i].inputs:
            if name and graph.producer.get(name, i) not in inside and name in graph.producer:
                kept[storages.root(name)] = None
    tensors = (graph.tensors[name] for name in kept)
    return tuple(
        SavedBytes(t.name, round(t.elements * sizes[t.dtype])) for t in tensors if t.kind is TensorKind.ACTIVATION
    )


CHECKPOINTED = [
    ("gpt2_124m_s512_sdpa_nodrop", GPT2, 1, {"fused_attention": True}, 4.0),
    ("gpt2_124m_s512_sdpa_nodrop", GPT2, 2, {"fused_attention": True}, 4.0),
    ("gpt2_124m_s512_sdpa_nodrop_bf16", GPT2, 2, {"fused_attention": True, "loss_bytes": 2.0}, 2.0),
    ("gpt2_124m_s512_eager_drop", GPT2, 1, {"fused_attention": False, "assume_dropout": True}, 4.0),
    ("bert_base_s128_sdpa_drop", BERT, 4, {"fused_attention": False, "assume_dropout": True}, 4.0),
    ("bert_base_s128_eager_nodrop", BERT, 8, {"fused_attention": False}, 4.0),
    ("vit_s16_eager", VIT, 4, {"fused_attention": False}, 4.0),
    ("resnet50_outofplace", RESNET, 2, {}, 4.0),
    ("resnet50_outofplace", RESNET, 8, {}, 4.0),
]


@pytest.mark.parametrize(("entry", "source", "batch", "chosen", "width"), CHECKPOINTED)
def test_checkpointing_each_block_leaves_its_input(
    entry: str, source: tuple[str, int], batch: int, chosen: dict[str, Any], width: float
) -> None:
    graph = model(source[0], batch, source[1])
    saved = saved_for_backward(graph, graph_specs(graph), width=width, options=options_of(chosen))
    blocks: dict[str, list[int]] = {}
    for i, node in enumerate(graph.nodes):
        blocks.setdefault(block_of(node.module), []).append(i)
    outside = [saved[i] for i in blocks.pop("")]
    kept = [checkpoint_bytes(graph, members, width=width) for members in blocks.values()]
    expected = measured(entry, batch, checkpointed=True)
    assert unique_bytes([*outside, *kept]) == pytest.approx(expected["saved_bytes"], rel=0.04)
    by_name = first_keepers(zip(blocks, kept, strict=True))
    for name, size in list(measured_blocks(expected).items())[
        2:
    ]:  # the mask is made in the first and read in the second
        assert by_name[name] == pytest.approx(size, rel=0.06), name


def test_vgg16_by_hand() -> None:
    """Convolutions keep the rectified input, which is the rectifier's own result; pools keep int64 indices."""
    maps = [  # channels, height, pooled after
        (64, 224, False), (64, 224, True), (128, 112, False), (128, 112, True), (256, 56, False), (256, 56, False),
        (256, 56, True), (512, 28, False), (512, 28, False), (512, 28, True), (512, 14, False), (512, 14, False),
        (512, 14, True),
    ]  # fmt: skip
    rectified = sum(channels * size * size for channels, size, _ in maps)
    pooled = sum(channels * (size // 2) ** 2 for channels, size, after in maps if after)
    linear = 25088 + 4096 + 4096
    expected = 4 * (rectified + pooled + linear) + 8 * pooled + 4 * 1000
    averaged = 4 * 25088  # the adaptive average pool's input is the last pool's result, its result a copy
    graph = model("vgg16", 1)
    found = unique_bytes(saved_for_backward(graph, graph_specs(graph)))
    assert found == pytest.approx(expected, rel=0.02)
    assert abs(found - expected) <= averaged


def test_training_export_keeps_a_dropout_mask_only_when_dropout_is_on() -> None:
    graph = load_graph(shared_path("onnx/gpt2_124m_loss_train.onnx"))
    specs = graph_specs(graph)
    on = saved_for_backward(graph, specs, options=SavedOptions(dropout=True))
    off = saved_for_backward(graph, specs, options=SavedOptions(dropout=False))
    masks = 25 * 1024 * 768  # one byte an element on a GPU
    assert unique_bytes(on) - unique_bytes(off) == masks


def test_training_export_without_dropout_keeps_as_much_as_the_inference_export() -> None:
    training = load_graph(shared_path("onnx/gpt2_124m_loss_train.onnx"))
    inference = load_graph(shared_path("onnx/gpt2_124m_metadata.onnx"))
    options = SavedOptions(dropout=False)
    first = unique_bytes(saved_for_backward(training, graph_specs(training), options=options))
    second = unique_bytes(saved_for_backward(inference, graph_specs(inference), options=options))
    assert first == pytest.approx(second, rel=0.02)


@pytest.mark.parametrize(
    ("fused", "expected"), [(True, 92_340_224 - 4 * 1024 * 1024), (False, 138_428_416)]
)  # published with the models: GPT-2 124M, sequence 1024, batch 1; with masks, which no causal kernel has
def test_gpt2_block_at_sequence_1024(fused: bool, expected: int) -> None:
    graph = load_graph(shared_path("onnx/gpt2_124m_metadata.onnx"))
    saved = saved_for_backward(graph, graph_specs(graph), options=SavedOptions(fused_attention=fused))
    found = by_block(graph, saved)
    assert {found[f"transformer.h.{k}"] for k in range(12)} == {expected}


def test_folded_batchnorm_is_unfolded() -> None:
    folded, plain = model("resnet50", 2), model("vgg16", 1)
    assert sum(node.op == "BatchNormalization" for node in folded.nodes) == 53
    assert all(node.op != "BatchNormalization" for node in plain.nodes)
    assert "folded-batchnorm" in {note.code for note in folded.report.notes}


def test_notes_say_what_is_assumed() -> None:
    codes = {note.code for note in saved_notes(model("resnet50", 2))}
    assert codes == {"no-dropout", "loss-added"}
    training = load_graph(shared_path("onnx/gpt2_124m_loss_train.onnx"))
    assert saved_notes(training) == ()


def test_expert_weights_are_not_activations() -> None:
    graph = load_graph(shared_path("onnx/mixtral_8x7b_batched.onnx"))
    saved = saved_for_backward(graph, graph_specs(graph), width=2.0)
    names = {item.storage for items in saved for item in items}
    assert unique_bytes(saved) < 4e9
    assert not names & {p.name for p in graph.parameters}
    assert "experts-grouped" in {note.code for note in saved_notes(graph)}


def test_llama_block_follows_the_closed_form() -> None:
    """LLaMA-2-7B, fused attention, by tensor: see the comments; s 2048, h 4096, f 11008, 32 heads."""
    graph = load_graph(shared_path("onnx/llama2_7b_opset23.onnx"))
    saved = saved_for_backward(graph, graph_specs(graph), width=2.0)
    s, h, f, heads = 2048, 4096, 11008, 32
    elements = (
        2 * s * h  # the two norms' inputs
        + 2 * s * h  # their results: inputs of the projections
        + 4 * s * h  # query, key (rotated), value, result
        + 3 * s * f  # gate before and after SiLU, up
        + s * f  # their product: input of the down projection
    )
    statistics = 2 * 4 * s + heads * s * 4  # two norms' and the softmax's, fp32
    found = by_block(graph, saved)
    assert found["model.layers.7"] == pytest.approx(2 * elements + statistics, rel=0.01)
