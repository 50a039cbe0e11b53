"""Frameworks' own configurations are read back: as exported, as people write them, and refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import planner
from planner import export
from planner.export import readings
from planner.plans import Plan
from tests.cli.plan_files import run
from tests.export.plans import graph, plan
from tests.runtime import cases

TITLES = {"megatron": "Megatron", "torchtitan": "torchtitan"}
CONFIGURATION = {"megatron": "arguments.txt", "torchtitan": "config.toml", "deepspeed": "ds_config.json"}


def again(found: Plan, name: str, model: str, nodes: int = 1) -> Plan:
    """The plan of what the exported configuration says."""
    read = export.read_job(export.export(found, name).files[CONFIGURATION[name]], name, graph=graph(model))
    assert read.ignored == ()  # what is written is read, and read alone
    job = planner.Job(
        global_batch=read.global_batch or 0, precision=read.precision, optimizer=read.optimizer, overlap=read.overlap,
        backends=(name,), structure=read.structure,
    )  # fmt: skip
    cluster = planner.load_cluster("dgx-h100", nodes=nodes)
    return planner.predict(graph(model), cluster, job, read.degrees, fewest_weights=True).plan


PLANS: list[tuple[str, str, dict[str, Any]]] = [
    ("megatron", "llama3-8b", {"tensor": 2, "pipeline": 2, "zero": 1, "micro_batch": 2, "recompute": True}),
    ("megatron", "llama3-8b", {"pipeline": 4, "chunks": 2, "zero": 1}),
    ("megatron", "llama3-8b", {"pipeline": 2, "layout": "Et*15|t*17L", "micro_batch": 4}),
    ("megatron", "llama3.2-1b", {"zero": 1, "repeats": ("layernorm",)}),
    ("megatron", "llama3.2-1b", {"tensor": 4, "precision": "bf16-fp32grad"}),
    ("megatron", "llama3-8b", {"tensor": 2, "pipeline": 2, "zero": 1, "precision": "fp8-cs:first=1,last=2"}),
    ("megatron", "llama3-8b", {"pipeline": 2, "adjacent": False}),
    ("megatron", "llama3.2-1b", {"context": 2, "zero": 1}),
    ("megatron", "mixtral-8x7b", {"expert": 4, "tensor": 2, "zero": 1}),
    ("megatron", "llama3-8b", {"zero": 1, "precision": "fp8-blockwise:grads=fp32"}),
    ("megatron", "llama3-8b", {"zero": 1, "precision": "fp8-cs:weights=bf16"}),
    ("megatron", "llama3-8b", {"zero": 1, "precision": "bf16:grads=fp32,reduce=bf16"}),
    (
        "torchtitan", "llama3-8b",
        {"tensor": 2, "pipeline": 2, "micro_batch": 2, "recompute": True, "zero": 1, "precision": "bf16-fp32grad"},
    ),
    ("megatron", "llama3-8b", {"zero": 1, "offload": ("core_attn", "attn_proj"), "repeats": ("layernorm",)}),
    (
        "torchtitan", "llama3-8b",
        {"pipeline": 2, "chunks": 2, "schedule": "zb-v", "zero": 1, "precision": "bf16-fp32grad"},
    ),
    ("torchtitan", "llama3-8b", {"pipeline": 4, "chunks": 2, "zero": 1, "precision": "fp32"}),
    ("torchtitan", "llama3-8b", {"pipeline": 2, "chunks": 4, "zero": 1, "precision": "bf16-fp32grad"}),
    ("torchtitan", "llama3-8b", {"context": 8, "zero": 2, "precision": "bf16-fp32grad"}),
    ("torchtitan", "llama3-8b", {"context": 4, "zero": 3, "precision": "bf16-fp32grad"}),
    ("torchtitan", "llama3-8b", {"zero": 3, "micro_batch": 2, "precision": "bf16-fp32grad"}),
    ("torchtitan", "llama3-8b", {"zero": 2, "tensor": 2, "precision": "fp32"}),
    ("deepspeed", "llama3.2-1b", {"zero": 3, "micro_batch": 2}),
    ("deepspeed", "llama3.2-1b", {"zero": 1, "precision": "bf16-deepspeed"}),
    ("deepspeed", "gpt2", {"zero": 2, "precision": "fp16"}),
    ("deepspeed", "gpt2", {"zero": 2, "precision": "bf16-fp32grad"}),
    ("deepspeed", "mixtral-8x7b", {"expert": 4, "zero": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "model", "degrees"), PLANS, ids=lambda x: str(x).replace("'", ""))
def test_what_was_exported_reads_back_as_the_same_configuration(name: str, model: str, degrees: dict[str, Any]) -> None:
    found = plan(model, **degrees)
    read = again(found, name, model)
    assert read.configuration == found.configuration
    assert read.options.precision == found.options.precision
    assert read.micro_batches == found.micro_batches


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("megatron", {"tensor_parallel": (4,), "pipeline_stages": (2,)}),
        ("megatron", {"tensor_parallel": (2,), "pipeline_stages": (1,), "zero": (1,)}),
        ("torchtitan", {"tensor_parallel": (2,), "zero": (3,), "precision": "bf16-fp32grad"}),
        ("deepspeed", {"pipeline_stages": (1,), "zero": (3,)}),
    ],
)
def test_a_plan_for_a_framework_is_predicted_alike_from_its_files(name: str, limits: dict[str, Any]) -> None:
    job = planner.Job(64, **{"precision": "bf16", "backends": (name,), **limits})
    found = planner.plan(graph("llama3.2-1b"), planner.load_cluster("dgx-h100"), job)
    read = again(found, name, "llama3.2-1b")
    assert read.predictions.reached_s == pytest.approx(found.predictions.reached_s, rel=1e-3)
    weights = [stage.rank_parameters for stage in found.stages]
    assert [stage.rank_parameters for stage in read.stages] == weights


def test_what_layers_of_frameworks_split_otherwise_is_named() -> None:
    cluster, job, degrees = (
        planner.load_cluster("dgx-h100"),
        planner.Job(64, precision="bf16"),
        planner.Degrees(tensor=2),
    )
    named, unusual = set(), set()
    for way in range(10, 17):
        with cases.only(way):
            found = planner.predict(graph("llama3.2-1b"), cluster, job, degrees).plan
        unusual.update(readings.split_otherwise(found))
        needs = [gap.need for gap in export.lacking(found, "megatron", graph("llama3.2-1b"))]
        assert bool(readings.split_otherwise(found)) == any("along another dimension" in need for need in needs)
        takers = [each for each in ("megatron", "torchtitan") if not export.lacking(found, each)]
        for name, title in zip(takers, map(TITLES.get, takers), strict=True):
            lines = [line for line in export.export(found, name).left_out if f"layers of {title} cut" in line]
            assert len(lines) < 2
            named.update(line.removeprefix("Weights cut as ").split(":")[0] for line in lines)
    assert named == {"model.embed_tokens by columns"}
    assert "model.layers.0.self_attn.q_proj by rows" in unusual
    assert not any("o_proj" in module or "down_proj" in module for module in unusual)


@pytest.mark.parametrize("name", TITLES)
def test_plans_for_a_framework_split_weights_as_its_layers_do(name: str) -> None:
    job = planner.Job(64, backends=(name,), tensor_parallel=(2,), pipeline_stages=(1,))
    found = planner.plan(graph("llama3.2-1b"), planner.load_cluster("dgx-h100"), job)
    assert {style for _, style in readings.module_styles(found)} >= {"colwise", "rowwise", "embedding rows"}
    assert readings.split_otherwise(found) == ()
    assert export.lacking(found, name, graph("llama3.2-1b")) == ()


SCRIPT = """#!/bin/bash
# a comment
torchrun --nproc-per-node 8 pretrain_gpt.py \\
  --tensor-model-parallel-size 4 --pipeline-model-parallel-size=2 \\
  --num-layers 32 --num-layers-per-virtual-pipeline-stage 4 \\
  --micro-batch-size 1 --global-batch-size 128 --bf16 --recompute-activations \\
  --optimizer-cpu-offload --lr 3e-4 --fp8-margin 1
"""


def test_a_launch_script_is_read_and_says_what_is_not_taken_over() -> None:
    read = export.read_job(SCRIPT, "megatron")
    assert read.degrees == planner.Degrees(tensor=4, pipeline=2, chunks=4, repeats=("core_attn",))
    assert (read.global_batch, read.precision, read.optimizer, read.overlap) == (128, "bf16-fp32grad", "adam", 0.0)
    assert [line.split(":")[0] for line in read.ignored] == ["--fp8-margin 1", "--optimizer-cpu-offload"]


def test_variables_and_arrays_of_a_script_are_read() -> None:
    script = """#!/bin/bash
TP=${TP_SIZE:-4}
export SEQ=8192
MODEL_ARGS="--num-layers 80 --seq-length $SEQ --hidden-size 8192"
PARALLEL=(
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size 2
)
torchrun ${NODES[@]} pretrain_gpt.py ${MODEL_ARGS} "${PARALLEL[@]}" --num-layers-per-virtual-pipeline-stage 10 --bf16
"""
    read = export.read_job(script, "megatron")
    assert (read.degrees.tensor, read.degrees.pipeline, read.degrees.chunks) == (4, 2, 4)
    assert read.sequence == 8192
    assert export.read_job("[training]\nseq_len = 4096", "torchtitan").sequence == 4096


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("megatron", "train my model", "there is no argument in it"),
        ("megatron", "--num-layers-per-virtual-pipeline-stage 4", "without --num-layers"),
        ("nosuch", "{}", "use deepspeed or megatron or torchtitan"),
        ("megatron", "--tensor-model-parallel-size $TP", "--tensor-model-parallel-size is '$TP'"),
        ("megatron", "--lr '3", "cannot be read as shell text"),
        ("torchtitan", "[parallelism", "not TOML"),
        ("torchtitan", '[parallelism]\ntensor_parallel_degree = "two"', "tensor_parallel_degree is 'two'"),
        ("torchtitan", "parallelism = 3", "parallelism is 3, not a table"),
        ("torchtitan", "[parallelism]\ndata_parallel_replicate_degree = 2", "HSDP"),
        (
            "torchtitan", '[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "Mine"',
            "the schedule Mine has no name here",
        ),
        ("deepspeed", "{", "not JSON"),
        ("deepspeed", "[]", "holds no JSON object"),
        ("deepspeed", '{"train_micro_batch_size_per_gpu": "auto"}', "train_micro_batch_size_per_gpu is 'auto'"),
        ("jax", "{}", "configurations of jax cannot be read"),
        ("megatorn", "", "megatron"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_over_is_refused_by_name(name: str, text: str, named: str) -> None:
    with pytest.raises(planner.UsageError) as error:
        export.read_job(text, name)
    assert named in str(error.value)


def test_predict_takes_a_frameworks_configuration_and_options_win(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT.replace("--recompute-activations", "--seq-length 4096"))
    common = ("predict", "llama3-8b", "-H", "dgx-h100", "--dim", "seq=256")
    output = tmp_path / "plan.json"
    assert run(*common, "--from", "megatron", tmp_path / "run.sh", "--pp", 1, "--interleave", 1, "-o", output) == 0
    said = capsys.readouterr().err
    assert "note: ignored in" in said
    assert "run.sh trains sequences of 4096, and 256 is priced: --dim seq=4096 prices those" in said
    found = planner.read_plan(output)
    assert len(found.stages) == 1
    assert found.stages[0].group_ranks == 4
    assert found.micro_batches.global_batch == 128
    assert found.options.precision == "bf16-fp32grad"
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    assert run(*common, "--from", "deepspeed", tmp_path / "ds.json") == 0
    assert "global batch 8 = 8 micro-batches of 1; DP 8" in capsys.readouterr().out  # DeepSpeed's own rule: 1 x 1 x 8
    assert run(*common, "--from", "deepspeed", tmp_path / "absent.json") == 7
    assert "name a configuration of deepspeed" in capsys.readouterr().err
