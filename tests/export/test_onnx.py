"""The annotated model: valid, runs as before, and each device's pieces give its piece of every result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

import models
import planner
from planner import export
from planner.importers import graph_from_proto
from planner.plans import Plan
from tests.cli.plan_files import run, written
from tests.models.graphs import gpt

SEQ = 8
SIZES = {
    "gpt": gpt(2, 16, 4, 32, SEQ),
    "llama": models.size_of(
        model_type="llama", num_hidden_layers=2, hidden_size=16, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=24, vocab_size=32,
    ),
}  # fmt: skip
"""Small models; GPT's joint projection of queries, keys and values is cut third by third."""

CASES: dict[str, tuple[str, dict[str, int]]] = {
    "stages": ("gpt", {"pipeline": 2}),
    "groups": ("llama", {"tensor": 2}),
    "fused projection in groups of stages": ("gpt", {"pipeline": 2, "tensor": 2}),
    "replicas of groups": ("llama", {"tensor": 2, "zero": 3}),
}

Values = Mapping[str, np.ndarray[Any, Any]]


def built(name: str) -> onnx.ModelProto:
    """A small model with weights."""
    return models.build_custom(SIZES[name], batch=2, seq=SEQ, seed=1)


def exported(name: str) -> tuple[Plan, onnx.ModelProto, onnx.ModelProto]:
    """Plan, model and annotated model of a case."""
    kind, degrees = CASES[name]
    model = built(kind)
    graph = graph_from_proto(model, name=kind)
    cluster, job = planner.load_cluster("dgx-h100"), planner.Job(global_batch=16, micro_batches=(2,), precision="fp32")
    chosen = planner.Degrees(micro_batch=2, **degrees)
    plan = planner.predict(graph, cluster, job, chosen, fewest_weights=True).plan
    written = export.export(plan, "onnx", graph, model).files["model.onnx"]
    assert isinstance(written, bytes)
    return plan, model, onnx.load_model_from_string(written)


def all_values(model: onnx.ModelProto) -> Values:
    """Every tensor of a pass over made-up tokens."""
    every = onnx.ModelProto()
    every.CopyFrom(model)
    del every.graph.output[:]
    names = [name for node in model.graph.node for name in node.output if name]
    every.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    fed = {entry.name: np.arange(2 * SEQ).reshape(2, SEQ) % 32 for entry in model.graph.input}
    found = dict(zip(names, ReferenceEvaluator(every).run(None, fed), strict=True))
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return {**weights, **fed, **found}


def pieces(spec: onnx.ShardingSpecProto, whole: np.ndarray[Any, Any]) -> dict[int, np.ndarray[Any, Any]]:
    """What each device has of a tensor, as the specification of the annotations says."""
    parts = [whole]
    for cut in spec.sharded_dim:
        blocks = cut.simple_sharding[0].dim_value if len(cut.simple_sharding) > 1 else 1
        shards = cut.simple_sharding[-1].num_shards
        parts = [piece for part in parts for piece in _cut(part, cut.axis, blocks, shards)]
    groups = {entry.key: list(entry.value) for entry in spec.index_to_device_group_map}
    assert len(parts) == len(spec.device)
    return {device: part for key, part in zip(spec.device, parts, strict=True) for device in groups.get(key, [key])}


def _cut(whole: np.ndarray[Any, Any], axis: int, blocks: int, shards: int) -> Iterator[np.ndarray[Any, Any]]:
    for shard in range(shards):
        each = [np.split(block, shards, axis)[shard] for block in np.split(whole, blocks, axis)]
        yield np.concatenate(each, axis)


@pytest.mark.parametrize("name", CASES)
def test_the_annotated_model_is_valid_and_computes_what_it_did(name: str) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    _, model, annotated = exported(name)
    onnx.checker.check_model(annotated, full_check=True)
    assert annotated.ir_version == max(11, model.ir_version)
    fed = {entry.name: np.arange(2 * SEQ).reshape(2, SEQ) % 32 for entry in model.graph.input}
    before, after = (
        runtime.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, fed)
        for m in (model, annotated)
    )
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_devices_and_stages_are_those_of_the_plan(name: str) -> None:
    plan, _, annotated = exported(name)
    (configuration,) = annotated.configuration
    ranks = [rank for stage in plan.stages for rank in stage.replicas[0]]
    assert list(configuration.device) == [f"rank {rank}" for rank in ranks]
    assert configuration.num_devices == len(ranks)
    stage_of = {node: stage.index for stage in plan.stages for node in plan.stage_nodes(stage.index)}
    for node in annotated.graph.node:
        (written,) = node.device_configurations
        assert written.configuration_id == configuration.name
        assert written.pipeline_stage == stage_of.get(node.output[0], written.pipeline_stage)
        assert written.pipeline_stage < len(plan.stages)


@pytest.mark.parametrize("name", [name for name, (_, degrees) in CASES.items() if "tensor" in degrees])
def test_each_devices_pieces_give_its_piece_of_every_result(name: str) -> None:
    plan, model, annotated = exported(name)
    weights = {tensor.name for tensor in model.graph.initializer}
    values, cuts, made_as = all_values(model), 0, dict[str, onnx.ShardingSpecProto]()
    for node in annotated.graph.node:
        said = {spec.tensor_name: spec for spec in node.device_configurations[0].sharding_spec}
        specs = {name: made_as[name] for name in node.input if name in made_as} | said
        made_as |= {name: specs[name] for name in node.output if name in specs}
        inferred = {name for name in node.input if name and name not in specs}
        if inferred - weights:
            continue  # results inside what the planner reads as one operator follow from what this reads
        if node.op_type not in ("MatMul", "Add", "Mul", "Gelu", "LayerNormalization", "RMSNormalization", "Softmax"):
            continue
        if node.output[0] not in specs:
            continue
        held = {tensor: pieces(spec, values[tensor]) for tensor, spec in specs.items()}
        wanted = held[node.output[0]]
        alone = onnx.helper.make_model(
            onnx.helper.make_graph(
                [node],
                "one",
                [onnx.ValueInfoProto(name=tensor) for tensor in node.input if tensor],
                [onnx.ValueInfoProto(name=node.output[0])],
            ),
            opset_imports=model.opset_import,
        )
        run = ReferenceEvaluator(alone)
        made = {
            device: run.run(None, {t: held[t][device] if t in held else values[t] for t in node.input if t})[0]
            for device in wanted
        }
        if any("P" in text for text in _writes(plan, node.output[0])):
            total = sum(made.values())
            assert np.allclose(total, values[node.output[0]], atol=1e-5), node.output[0]
            continue
        for device, piece in wanted.items():
            assert np.allclose(made[device], piece, atol=1e-5), (node.output[0], device)
        cuts += any(piece.shape != values[node.output[0]].shape for piece in wanted.values())
    assert cuts > 10


def _writes(plan: Plan, operator: str) -> tuple[str, ...]:
    """Layouts in which an operator of the plan writes."""
    for stage in plan.stages:
        for _, entry, names in plan.sharded_blocks(stage.index):
            for split in entry.operators:
                if names[split.operator] == operator:
                    return split.writes
    return ()


def test_the_command_writes_the_annotated_model(tmp_path: Path) -> None:
    plan, model, annotated = exported("stages")
    onnx.save(model, tmp_path / "gpt.onnx")
    arguments = ("--to", "onnx", "--model", tmp_path / "gpt.onnx", "-o", tmp_path / "out")
    assert run("export", written(plan, tmp_path), *arguments) == 0
    assert onnx.load(tmp_path / "out" / "model.onnx") == annotated
    assert "| `model.onnx` |" in (tmp_path / "out" / "EXPORT.md").read_text()


def test_the_model_is_asked_for() -> None:
    plan, _, _ = exported("stages")
    with pytest.raises(planner.UsageError, match="--model"):
        export.export(plan, "onnx")


def test_another_model_is_refused() -> None:
    plan, model, _ = exported("stages")
    other = built("llama")
    with pytest.raises(planner.ShardplanError, match="has no operator"):
        export.export(plan, "onnx", graph_from_proto(model), other)
