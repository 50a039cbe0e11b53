"""The files of each framework, held against sums and orders that are written out here."""

from __future__ import annotations

import ast
import json
import tomllib

import pytest

from planner import export
from planner.errors import PlanError, UsageError
from planner.graph import build_chain
from planner.plans import Plan
from planner.space.named import layout_edges, read_layout
from tests.export.plans import graph, plan


def files(found: Plan, name: str) -> dict[str, str]:
    return dict(export.export(found, name).files)


def layers(first: int, last: int, prefix: str = "layers.") -> list[str]:
    return [f"{prefix}{number}" for number in range(first, last + 1)]


def test_megatron_arguments_of_a_pipeline_with_groups() -> None:
    found = plan("llama3-8b", tensor=2, pipeline=2, zero=1, micro_batch=2, recompute=True)
    assert files(found, "megatron")["arguments.txt"].splitlines() == [
        "--tensor-model-parallel-size 2",
        "--sequence-parallel",
        "--pipeline-model-parallel-size 2",
        f'--pipeline-model-parallel-layout "E{16 * "t"}|{16 * "t"}L"',
        "--micro-batch-size 2",
        "--global-batch-size 64",
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--recompute-granularity full",
        "--recompute-method uniform",
        "--recompute-num-layers 1",
        "--bf16",
        "--grad-reduce-in-bf16",
        "--optimizer adam",
        "--num-layers 32",
        "--seq-length 256",
        "--max-position-embeddings 256",
        "--untie-embeddings-and-output-weights",
    ]


@pytest.mark.parametrize(
    ("layout", "workers"),
    [
        ("Et*3|(t*4|)*6t*5L", 2),
        ("Et*15|t*17L", 2),
        ("Et*8|t*8|t*8|t*8|L", 5),
        ("Et|(t|)*30tL", 8),
        ("E|t*16|t*16|L", 2),
    ],
)
def test_a_layout_goes_to_megatron_as_it_came(layout: str, workers: int) -> None:
    found = plan("llama3-8b", nodes=workers, global_batch=320, pipeline=workers, zero=1, layout=layout)
    text = files(found, "megatron")["arguments.txt"].partition('layout "')[2].partition('"')[0]
    assert read_layout(text) == read_layout(layout)
    starts = [stage.blocks[0] for stage in found.stages]
    assert list(layout_edges(build_chain(graph("llama3-8b")), text)[:-1]) == starts


def test_tied_weights_experts_modules_and_formats_for_megatron() -> None:
    tied = files(plan("llama3.2-1b", zero=1), "megatron")["arguments.txt"]
    assert "--untie" not in tied
    mixture = plan("mixtral-8x7b", expert=4, tensor=2, zero=1, repeats=("layernorm", "moe_act"), precision="fp8")
    lines = files(mixture, "megatron")["arguments.txt"].splitlines()
    assert lines[:6] == [
        "--tensor-model-parallel-size 2",
        "--sequence-parallel",
        "--expert-model-parallel-size 8",  # two experts' axes: the 4 ranks with samples of their own, and the 2 beside
        "--expert-tensor-parallel-size 1",
        "--pipeline-model-parallel-size 1",
        "--micro-batch-size 1",
    ]
    assert "--recompute-modules layernorm moe_act" in lines
    assert {"--bf16", "--fp8-format hybrid", "--fp8-recipe delayed", "--num-experts 8"} <= set(lines)
    context = files(plan("llama3-8b", context=2, tensor=2, zero=0), "megatron")["arguments.txt"].splitlines()
    assert "--context-parallel-size 2" in context
    assert "--use-distributed-optimizer" not in context


def test_ranks_are_in_megatrons_order_or_said() -> None:
    inside = plan("llama3-8b", tensor=2, pipeline=2, zero=1, adjacent=False)
    assert [stage.replicas for stage in inside.stages] == [((0, 1), (4, 5)), ((2, 3), (6, 7))]
    written = files(inside, "megatron")
    assert "--use-tp-pp-dp-mapping" in written["arguments.txt"]
    assert "ranks.json" not in written
    outside = files(plan("llama3-8b", tensor=2, pipeline=2, zero=1), "megatron")
    assert "--use-tp-pp-dp-mapping" not in outside["arguments.txt"]
    assert "ranks.json" not in outside
    # torchtitan counts pipeline ranks slowest: its ranks 2 and 3 are the second replica of stage 0, devices 4 and 5
    titan = files(plan("llama3-8b", tensor=2, pipeline=2, zero=2, adjacent=False), "torchtitan")
    assert json.loads(titan["ranks.json"]) == {"device_of_rank": [0, 1, 4, 5, 2, 3, 6, 7]}


def test_torchtitan_configuration() -> None:
    found = plan("llama3-8b", tensor=2, pipeline=2, zero=2, micro_batch=2, recompute=True)
    written = files(found, "torchtitan")
    configuration = tomllib.loads(written["config.toml"])
    assert configuration["parallelism"] == {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": 2,
        "fsdp_reshard_after_forward": "never",
        "tensor_parallel_degree": 2,
        "context_parallel_degree": 1,
        "expert_parallel_degree": 1,
        "pipeline_parallel_degree": 2,
        "module_fqns_per_model_part": [
            ["tok_embeddings", *layers(0, 15)],
            [*layers(16, 31), "norm", "output"],
        ],
        "pipeline_parallel_schedule": "1F1B",
        "pipeline_parallel_microbatch_size": 2,
    }
    # 64 samples for 2 data parallel ranks: 32 each, in 16 micro-batches of 2
    training = configuration["training"]
    assert (training["local_batch_size"], training["global_batch_size"], training["seq_len"]) == (32, 64, 256)
    assert configuration["activation_checkpoint"] == {"mode": "full"}
    assert "schedule.csv" not in written


def test_torchtitan_has_chunks_and_orders_by_csv_where_torchs_own_differ() -> None:
    found = plan("llama3-8b", pipeline=2, zero=0, chunks=2, schedule="interleaved:group=3", global_batch=24)
    written = files(found, "torchtitan")
    parallelism = tomllib.loads(written["config.toml"])["parallelism"]
    # 6 micro-batches a replica: torch would take 2 ranks' groups of 2
    assert parallelism["pipeline_parallel_schedule"] == "PipelineScheduleMulti"
    assert parallelism["pipeline_parallel_schedule_csv"] == "schedule.csv"
    assert [len(part) for part in parallelism["module_fqns_per_model_part"]] == [9, 8, 8, 10]
    assert [row.split(",")[:4] for row in written["schedule.csv"].splitlines()] == [
        ["0F0", "0F1", "0F2", "2F0"],
        ["1F0", "1F1", "1F2", "3F0"],
    ]


def test_deepspeed_configuration_and_partition() -> None:
    written = files(plan("llama3-8b", pipeline=2, zero=1, micro_batch=2, recompute=True), "deepspeed")
    document = json.loads(written["ds_config.json"])
    # 64 samples = 2 a micro-batch x 8 micro-batches x 4 data parallel ranks
    assert document["train_batch_size"] == 64
    assert document["train_micro_batch_size_per_gpu"] == 2
    assert document["gradient_accumulation_steps"] == 8
    assert document["zero_optimization"]["stage"] == 1
    assert document["bf16"] == {"enabled": True}
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(written["pipeline.py"]).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert values["PARTS"] == (0, 17, 35)  # the embedding and 16 layers, 16 layers with norm and logits
    assert list(values["MODULES"]) == ["model.embed_tokens", *layers(0, 31, "model.layers."), "model.norm", "lm_head"]
    assert "num_pp=2, num_mp=1, num_dp=4" in written["pipeline.py"]
    assert "activation_checkpoint_interval=1" in written["pipeline.py"]
    alone = files(plan("llama3-8b", zero=3, micro_batch=2), "deepspeed")
    assert "pipeline.py" not in alone
    assert json.loads(alone["ds_config.json"])["gradient_accumulation_steps"] == 4


def test_torch_stages_styles_and_orders() -> None:
    written = files(plan("llama3-8b", tensor=2, pipeline=2, zero=2, micro_batch=16), "torch")
    document = json.loads(written["parallel.json"])
    assert document["stages"][1] == [*layers(16, 31, "model.layers."), "model.norm", "lm_head"]
    assert document["mesh"] == {"axes": ["pipeline", "data", "tensor"], "shape": [2, 2, 2], "ranks": list(range(8))}
    assert document["micro_batches"] == {"size": 16, "count": 2}
    styles = {name: style for name, style in document["parallelize"].items() if name.startswith("model.layers.20.")}
    inside = {
        "input_layernorm": "sequence", "post_attention_layernorm": "sequence",
        "self_attn.q_proj": "colwise", "self_attn.k_proj": "colwise", "self_attn.v_proj": "colwise",
        "self_attn.o_proj": "rowwise",
        "mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise",
    }  # fmt: skip
    assert styles == {f"model.layers.20.{name}": style for name, style in inside.items()}
    assert document["parallelize"]["lm_head"] == "logits"
    assert written["schedule.csv"] == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    ast.parse(written["parallelize.py"])


def test_torch_takes_split_backwards_in_a_v() -> None:
    written = files(plan("llama3-8b", pipeline=2, chunks=2, schedule="zb-v", zero=0, micro_batch=2), "torch")
    document = json.loads(written["parallel.json"])
    assert document["stages_of_worker"] == [[0, 3], [1, 2]]
    rows = [row.split(",") for row in written["schedule.csv"].splitlines()]
    # 8 micro-batches a replica, F, I and W of each, of two stages
    for row, own in zip(rows, ("03", "12"), strict=True):
        assert sorted(row) == sorted(f"{stage}{kind}{m}" for stage in own for kind in "FIW" for m in range(8))


def test_jax_specs_of_parameters() -> None:
    written = files(plan("llama3-8b", tensor=2, zero=3, micro_batch=2), "jax")
    document = json.loads(written["sharding.json"])
    assert document["mesh"] == {"axes": ["data", "tensor"], "shape": [4, 2], "ranks": list(range(8))}
    assert document["inputs"] == {"input_ids": ["data", None]}
    # products by columns and rows of the torch weight [out, in]; the replicas cut what is left: ZeRO-3
    parameters = document["parameters"]
    assert parameters["model.layers.3.mlp.up_proj.weight"]["value"] == ["tensor", "data"]
    assert parameters["model.layers.3.mlp.down_proj.weight"]["value"] == ["data", "tensor"]
    assert parameters["model.norm.weight"]["value"] == ["data"]
    assert len(parameters) == 32 * 9 + 3
    first = json.loads(files(plan("llama3-8b", tensor=2, zero=1, micro_batch=2), "jax")["sharding.json"])["parameters"]
    assert first["model.layers.3.mlp.up_proj.weight"] == {
        "value": ["tensor", None], "gradient": ["tensor", None], "optimizer": ["tensor", "data"],
    }  # fmt: skip
    ast.parse(written["sharding.py"])


@pytest.mark.parametrize("name", export.names())
def test_the_page_says_what_was_mapped_and_what_not(name: str) -> None:
    found = export.export(plan("llama3-8b", pipeline=1 if name == "jax" else 2, zero=0), name)
    page = found.files["EXPORT.md"]
    assert "llama3-8b on dgx-h100" in page
    assert all(f"\n- {text}\n" in page for text in found.left_out)
    assert all(f"| {one.part} |" in page for one in found.mapped)
    assert any("overlap" in text for text in found.left_out)
    assert found.files["launch.sh"].startswith("#!/usr/bin/env bash\nset -euo pipefail\n")


@pytest.mark.parametrize(
    ("name", "degrees", "need"),
    [
        ("megatron", {"model": "resnet50", "pipeline": 2}, "no decoder between an embedding and a loss"),
        ("megatron", {"model": "llama3-8b", "zero": 3}, "Megatron lacks ZeRO-3"),
        ("megatron", {"model": "llama3-8b", "repeats": ("act",)}, "Megatron lacks modules recomputed alone (act)"),
        ("megatron", {"model": "llama3-8b", "pipeline": 2, "schedule": "zb-h1"}, "the schedule zb-h1"),
        ("megatron", {"model": "llama3-8b", "pipeline": 2, "starts": ("model.layers.15[2/2]",)}, "layers divided"),
        ("torchtitan", {"model": "llama3-8b", "zero": 1}, "torchtitan lacks ZeRO-1"),
        ("torchtitan", {"model": "llama3.2-1b", "pipeline": 2}, "weights tied over stages"),
        ("torchtitan", {"model": "mixtral-8x7b", "expert": 4}, "no FSDP ranks"),
        ("torchtitan", {"model": "llama3-8b", "repeats": ("layernorm",)}, "lacks modules recomputed alone (layernorm)"),
        ("deepspeed", {"model": "llama3-8b", "pipeline": 2, "zero": 2}, "ZeRO-2 in a pipeline"),
        ("deepspeed", {"model": "llama3-8b", "tensor": 2}, "cut by the sequence"),
        ("deepspeed", {"model": "llama3-8b", "pipeline": 2, "chunks": 2}, "several stages on a rank"),
        ("torch", {"model": "llama3.2-1b", "pipeline": 2}, "weights tied over stages (model.embed_tokens.weight)"),
        ("torch", {"model": "gpt2", "tensor": 2}, "whole on all ranks of a group"),
        ("torch", {"model": "qwen3-8b", "tensor": 2}, "a parallel style for how modules"),
        ("torch", {"model": "llama3-8b", "pipeline": 2, "schedule": "chimera"}, "the schedule chimera"),
        ("jax", {"model": "llama3-8b", "pipeline": 2}, "JAX lacks a pipeline of stages"),
    ],
)
def test_what_a_framework_cannot_express_is_refused_by_name(name: str, degrees: dict[str, object], need: str) -> None:
    with pytest.raises(PlanError) as caught:
        export.export(plan(**degrees), name)
    assert any(need in problem.message for problem in caught.value.problems), caught.value.problems
    assert all(problem.hint for problem in caught.value.problems)


def test_ranks_that_do_not_divide_the_heads_are_refused_with_the_model() -> None:
    found = plan("llama3-8b", tensor=8, zero=0)
    assert export.lacking(found, "torchtitan", graph("llama3-8b")) == ()
    wide = plan("llama3-8b", nodes=2, tensor=16, zero=0)
    needs = [lack.need for lack in export.lacking(wide, "torchtitan", graph("llama3-8b"))]
    assert "16 ranks for 8 key-value heads" in needs


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'megatron'"):
        export.export(plan("llama3.2-1b"), "megatrom")
