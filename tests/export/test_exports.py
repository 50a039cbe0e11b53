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

ALONE = ("jax", "transformers")
"""Exporters without pipelines."""
SHARDED = {"torchtitan": 1}
OWN = "bf16-fp32grad"
"""In which torchtitan trains."""

FORMAT = dict.fromkeys(export.names(), "bf16") | {"torchtitan": OWN}
"""ZeRO stage and precision of a pipeline that each takes, others than 0 and bf16."""


def files(found: Plan, name: str) -> dict[str, str]:
    return {file: content for file, content in export.export(found, name).files.items() if isinstance(content, str)}


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
    mixture = plan("mixtral-8x7b", expert=4, tensor=2, zero=1, repeats=("layernorm", "moe_act"), precision="fp8-cs")
    lines = files(mixture, "megatron")["arguments.txt"].splitlines()
    assert lines[:7] == [
        "--tensor-model-parallel-size 2",
        "--sequence-parallel",
        "--expert-model-parallel-size 8",  # two experts' axes: the 4 ranks with samples of their own, and the 2 beside
        "--expert-tensor-parallel-size 1",
        "--moe-token-dispatcher-type alltoall",
        "--pipeline-model-parallel-size 1",
        "--micro-batch-size 1",
    ]
    assert "--recompute-modules layernorm moe_act" in lines
    assert {"--bf16", "--fp8-format hybrid", "--fp8-recipe tensorwise", "--num-experts 8"} <= set(lines)
    moving = plan("mixtral-8x7b", expert=4, tensor=2, zero=1, repeats=("moe_act",), offload=("expert_fc1", "moe_act"))
    lines = files(moving, "megatron")["arguments.txt"].splitlines()
    assert lines[lines.index("--recompute-modules moe_act") :][1:3] == [
        "--fine-grained-activation-offloading", "--offload-modules expert_fc1 moe_act"
    ]  # fmt: skip
    assert "--moe-grouped-gemm" in lines
    # activations of experts are kept in the host's memory by their grouped product alone (moe/experts.py)
    kept = plan("mixtral-8x7b", expert=8, zero=1, offload=("expert_fc1",))
    assert "--moe-grouped-gemm" in files(kept, "megatron")["arguments.txt"].splitlines()
    assert "export NVTE_CPU_OFFLOAD_V1=1\n" in files(moving, "megatron")["launch.sh"]
    with pytest.raises(PlanError, match="attn_proj in the host's memory without core_attn"):
        files(plan("llama3.2-1b", zero=1, offload=("attn_proj",)), "megatron")
    with pytest.raises(PlanError, match=r"torchtitan lacks activations in the host's memory \(core_attn\)"):
        files(plan("llama3.2-1b", zero=2, offload=("core_attn",), precision=OWN), "torchtitan")
    context = files(plan("llama3-8b", context=2, tensor=2, zero=0), "megatron")["arguments.txt"].splitlines()
    assert "--context-parallel-size 2" in context
    assert "--use-distributed-optimizer" not in context


def test_ranks_are_in_megatrons_order_or_said() -> None:
    inside = plan("llama3-8b", tensor=2, pipeline=2, zero=1, adjacent=False)
    assert [stage.replicas for stage in inside.stages] == [((0, 1), (4, 5)), ((2, 3), (6, 7))]
    written = files(inside, "megatron")
    assert "--use-tp-pp-dp-mapping" in written["arguments.txt"]
    assert "hosts.csv" not in written  # one machine, in the plan's order
    outside = files(plan("llama3-8b", tensor=2, pipeline=2, zero=1), "megatron")
    assert "--use-tp-pp-dp-mapping" not in outside["arguments.txt"]
    assert "hosts.csv" not in outside
    # torchtitan counts pipeline ranks slowest: its ranks 2 and 3 are the second replica of stage 0, devices 4 and 5
    titan = files(plan("llama3-8b", tensor=2, pipeline=2, zero=1, adjacent=False, precision="fp32"), "torchtitan")
    assert titan["hosts.csv"].splitlines()[:5] == [
        "rank,plan_rank,machine,device", "0,0,node0,0", "1,1,node0,1", "2,4,node0,4", "3,5,node0,5"
    ]  # fmt: skip
    assert "`CUDA_VISIBLE_DEVICES=0,1,4,5,2,3,6,7`" in titan["EXPORT.md"]


def test_launchers_place_ranks_on_the_machines_of_the_plan() -> None:
    plain = files(plan("llama3-8b", nodes=2, tensor=8, pipeline=2, zero=0), "megatron")
    assert plain["hostfile"] == "node0 slots=8\nnode1 slots=8\n"
    assert plain["slurm.hosts"] == "node0\n" * 8 + "node1\n" * 8
    assert "`node0`, `node1`." in plain["EXPORT.md"]
    # a replica a machine, two stages on it: torchtitan counts the first stages of both machines before the second ones
    apart = files(
        plan("llama3-8b", nodes=2, tensor=4, pipeline=2, zero=1, adjacent=False, precision="fp32"), "torchtitan"
    )
    assert apart["slurm.hosts"].split() == [f"node{n}" for n in (0, 1, 0, 1) for _ in range(4)]
    assert apart["hosts.csv"].splitlines()[5] == "4,8,node1,0"
    assert "hostfile" not in apart
    assert "torchrun and host files cannot place these ranks" in apart["EXPORT.md"]


def test_torchtitan_configuration() -> None:
    found = plan("llama3-8b", tensor=2, pipeline=2, zero=1, micro_batch=2, recompute=True, precision="bf16-fp32grad")
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
    found = plan(
        "llama3-8b", pipeline=2, zero=1, chunks=2, schedule="interleaved:group=3", global_batch=24, precision="fp32"
    )
    written = files(found, "torchtitan")
    parallelism = tomllib.loads(written["config.toml"])["parallelism"]
    # 6 micro-batches a replica: torch would take 2 ranks' groups of 2
    assert parallelism["pipeline_parallel_schedule"] == "PipelineScheduleMulti"
    assert parallelism["pipeline_parallel_schedule_csv"] == "schedule.csv"
    assert '--parallelism.pipeline_parallel_schedule_csv "${here}/schedule.csv"' in written["launch.sh"]
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
    written = files(plan("llama3-8b", tensor=2, pipeline=2, zero=1, micro_batch=16), "torch")
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
    assert "offload" not in document
    moving = files(plan("llama3.2-1b", zero=3, recompute=True, offload=("layer_input",)), "jax")
    assert json.loads(moving["sharding.json"])["offload"] == ["layer_input"]
    first = json.loads(files(plan("llama3-8b", tensor=2, zero=1, micro_batch=2), "jax")["sharding.json"])["parameters"]
    assert first["model.layers.3.mlp.up_proj.weight"] == {
        "value": ["tensor", None], "gradient": ["tensor", None], "optimizer": ["tensor", "data"],
    }  # fmt: skip
    ast.parse(written["sharding.py"])


def test_transformers_rules_and_training_arguments() -> None:
    # a sample of odd length cannot be cut, so that tensors between layers are whole on both ranks
    written = files(plan("qwen3-8b", seq=257, tensor=2, zero=3, recompute=True), "transformers")
    document = json.loads(written["distributed_config.json"])
    assert {key: value for key, value in document.items() if not key.endswith("_plan")} == {
        "tp_size": 2, "fsdp_size": 4, "dp_replicate_size": 1, "pp_size": 1, "fsdp_mixed_precision": True,
    }  # fmt: skip
    layer = {
        "self_attn.q_proj": "colwise", "self_attn.k_proj": "colwise", "self_attn.v_proj": "colwise",
        "self_attn.q_norm": "replicated_with_grad_allreduce", "self_attn.k_norm": "replicated_with_grad_allreduce",
        "self_attn.o_proj": "rowwise",
        "mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise",
    }  # fmt: skip
    ends = {"model.embed_tokens": "embedding_colwise", "lm_head": "colwise_gather_output"}
    assert document["tp_plan"] == ends | {f"model.layers.*.{name}": style for name, style in layer.items()}
    modules = ("model.embed_tokens", "model.layers.*", "model.norm", "lm_head")
    assert document["fsdp_plan"] == dict.fromkeys(modules, "free_full_weight")
    # 64 samples = 1 a micro-batch x 16 micro-batches x 4 data parallel ranks
    assert json.loads(written["training_arguments.json"]) == {
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 16, "activation_checkpointing": True,
        "optim": "adamw_torch", "bf16": True,
    }  # fmt: skip
    whole = json.loads(files(plan("llama3-8b", zero=0), "transformers")["distributed_config.json"])
    assert (whole["fsdp_size"], whole["dp_replicate_size"]) == (1, 8)
    assert set(whole["fsdp_plan"].values()) == {"keep_full_weight"}


def test_galvatron_strategy_has_an_entry_for_each_layer() -> None:
    found = plan("llama3-8b", tensor=2, pipeline=2, zero=3, micro_batch=2, first_layers=14)
    document = json.loads(files(found, "galvatron")["strategy.json"])
    lists = {key: value for key, value in document.items() if key.endswith(("_enc", "_flags")) or key == "use_sp"}
    assert {key: value.split(",") for key, value in lists.items()} == {
        "tp_sizes_enc": 32 * ["2"], "tp_consecutive_flags": 32 * ["1"], "cp_sizes_enc": 32 * ["1"],
        "dp_types_enc": 32 * ["1"], "use_sp": 32 * ["0"],
    }  # fmt: skip
    assert document["pp_division"] == "14,18"
    # 64 samples = 2 a micro-batch x 16 micro-batches x 2 data parallel ranks
    assert (document["pp_deg"], document["global_bsz"], document["chunks"]) == (2, 64, 16)
    assert (document["pipeline_type"], document["default_dp_type"]) == ("pipedream_flush", "zero3")
    assert (document["vtp"], document["vsp"], document["vcp"], document["vocab_sdp"]) == (2, 0, 1, 1)
    script = files(plan("llama3.2-1b", context=2, zero=0, recompute=True), "galvatron")
    document = json.loads(script["strategy.json"])
    assert (document["cp_sizes_enc"], document["checkpoint"]) == (",".join(16 * "2"), ",".join(16 * "1"))
    assert "++runtime.model.untie_embeddings_and_output_weights=false" in script["launch.sh"]


@pytest.mark.parametrize("name", [name for name in export.names() if export.EXPORTERS.get(name).files_of_model is None])
def test_the_page_says_what_was_mapped_and_what_not(name: str) -> None:
    deep = 1 if name in ALONE else 2
    found = export.export(plan("llama3-8b", pipeline=deep, zero=SHARDED.get(name, 0), precision=FORMAT[name]), name)
    page = str(found.files["EXPORT.md"])
    assert "llama3-8b on dgx-h100" in page
    assert all(f"\n- {text}\n" in page for text in found.left_out)
    assert all(f"| {part} |" in page for part in found.mapped)
    assert any("overlap" in text for text in found.left_out)
    assert str(found.files["launch.sh"]).startswith("#!/usr/bin/env bash\nset -euo pipefail\n")


@pytest.mark.parametrize(
    ("name", "degrees", "need"),
    [
        ("megatron", {"model": "resnet50", "pipeline": 2}, "no decoder between an embedding and a loss"),
        ("megatron", {"model": "llama3-8b", "zero": 3}, "Megatron lacks ZeRO-3"),
        ("megatron", {"model": "llama3-8b", "repeats": ("act",)}, "Megatron lacks modules recomputed alone (act)"),
        ("megatron", {"model": "llama3-8b", "pipeline": 2, "schedule": "zb-h1"}, "the schedule zb-h1"),
        ("megatron", {"model": "llama3-8b", "pipeline": 2, "starts": ("model.layers.15[2/2]",)}, "layers divided"),
        ("torchtitan", {"model": "llama3-8b", "zero": 1}, "torchtitan lacks ZeRO-1"),
        ("torchtitan", {"model": "llama3.2-1b", "pipeline": 2}, "tied parameters"),
        ("torchtitan", {"model": "mixtral-8x7b", "expert": 4, "precision": OWN}, "no FSDP ranks"),
        ("torchtitan", {"model": "llama3-8b", "repeats": ("layernorm",)}, "lacks modules recomputed alone (layernorm)"),
        ("deepspeed", {"model": "llama3-8b", "pipeline": 2, "zero": 2}, "ZeRO-2 in a pipeline"),
        ("deepspeed", {"model": "llama3-8b", "tensor": 2}, "cut by the sequence"),
        ("deepspeed", {"model": "llama3-8b", "pipeline": 2, "chunks": 2}, "several stages on a rank"),
        ("torch", {"model": "llama3.2-1b", "pipeline": 2}, "weights tied over stages (model.embed_tokens.weight)"),
        ("torch", {"model": "gpt2", "tensor": 2}, "whole on all ranks of a group"),
        ("torch", {"model": "qwen3-8b", "tensor": 2}, "a parallel style for how modules"),
        ("torch", {"model": "llama3-8b", "pipeline": 2, "schedule": "chimera"}, "the schedule chimera"),
        ("jax", {"model": "llama3-8b", "pipeline": 2}, "JAX lacks a pipeline of stages"),
        ("torch", {"model": "qwen3-8b", "seq": 257, "tensor": 2}, "(model.layers.0.self_attn.q_norm"),
        ("transformers", {"model": "llama3-8b", "pipeline": 2}, "transformers lacks a pipeline of stages"),
        ("transformers", {"model": "llama3-8b", "tensor": 2}, "cut by the sequence"),
        ("transformers", {"model": "llama3-8b", "zero": 1}, "ZeRO-1"),
        ("transformers", {"model": "mixtral-8x7b", "expert": 4, "zero": 0}, "expert parallel ranks that are no FSDP"),
        ("transformers", {"model": "llama3-8b", "precision": "fp8"}, "the precision fp8"),
        ("galvatron", {"model": "llama3-8b", "pipeline": 2, "chunks": 2}, "several stages on a rank"),
        ("galvatron", {"model": "mixtral-8x7b", "expert": 4, "zero": 0}, "Galvatron lacks expert parallel"),
        ("galvatron", {"model": "llama3-8b", "zero": 1}, "ZeRO-1"),
        ("galvatron", {"model": "resnet50", "pipeline": 2}, "no decoder between an embedding and a loss"),
        ("galvatron", {"model": "llama3-8b", "nodes": 3, "pipeline": 3, "layout": "E|t*16|t*16L"}, "without a layer"),
        ("onnx", {"model": "llama3-8b", "pipeline": 2, "schedule": "pipedream"}, "weights that are updated while"),
    ],
)
def test_what_a_framework_cannot_express_is_refused_by_name(name: str, degrees: dict[str, object], need: str) -> None:
    with pytest.raises(PlanError) as caught:
        export.export(plan(**degrees), name)
    assert any(need in problem.message for problem in caught.value.problems), caught.value.problems
    assert all(problem.hint for problem in caught.value.problems)


def test_ranks_that_do_not_divide_the_heads_are_refused_with_the_model() -> None:
    found = plan("llama3-8b", tensor=8, zero=0, backends=("torchtitan",))
    needs = [lack.need for lack in export.lacking(found, "torchtitan", graph("llama3-8b"))]
    assert not any("heads" in need or "dimension" in need for need in needs)
    wide = plan("llama3-8b", nodes=2, tensor=16, zero=0)
    needs = [lack.need for lack in export.lacking(wide, "torchtitan", graph("llama3-8b"))]
    assert "16 ranks for 8 key-value heads" in needs


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'megatron'"):
        export.export(plan("llama3.2-1b"), "megatrom")


def test_predictors_of_further_tokens_are_no_layers_to_megatron() -> None:
    found = plan(
        "deepseek-v3-mtp", nodes=8, pipeline=2, expert=8, zero=1, layout="Et*31|t*30mL", backends=("megatron",)
    )
    script = next(text for name, text in export.export(found, "megatron").files.items() if name.endswith(".sh"))
    assert f'"E{31 * "t"}|{30 * "t"}mL"' in script
    assert "--num-layers 61 " in script
    assert "--mtp-num-layers 1 " in script
