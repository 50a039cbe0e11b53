"""What a plan says that it runs on takes its export; what frameworks refuse at their start is refused here."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

import planner
from planner import export
from planner.systems import BACKENDS, usual_backends
from planner.systems.backends import within_limits
from tests.export.plans import graph, plan

JOBS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("llama3.2-1b", {"precision": "bf16"}, ("deepspeed", "megatron")),
    ("llama3.2-1b", {"precision": "fp8"}, ("megatron",)),
    ("llama3.2-1b", {"precision": "fp8-cs", "zero": (0,)}, ()),
    ("llama3.2-1b", {"optimizer": "adafactor"}, ("torchtitan",)),
    ("llama3.2-1b", {"precision": "bf16-fp32grad", "zero": (1,), "pipeline_stages": (1,)}, ("megatron",)),
    (
        "llama3-8b",
        {"precision": "bf16", "zero": (1,), "pipeline_stages": (2,), "tensor_parallel": (1,), "schedules": ("1f1b",)},
        ("deepspeed", "megatron"),
    ),
    (
        "llama3-8b", {"precision": "bf16-fp32grad", "zero": (1,), "pipeline_stages": (2,), "tensor_parallel": (1,)},
        ("megatron", "torchtitan"),
    ),
    ("llama3-8b", {"precision": "bf16", "optimizer": "sgd", "zero": (1,)}, ("deepspeed",)),
    ("resnet50", {"precision": "bf16"}, ("deepspeed",)),
    (
        "gpt2", {"precision": "fp32", "zero": (1,), "pipeline_stages": (2,), "schedules": ("1f1b",)},
        ("deepspeed", "megatron"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model", "wishes", "takers"), JOBS, ids=lambda x: str(x).replace("'", ""))
def test_what_a_plan_runs_on_takes_its_export(model: str, wishes: dict[str, Any], takers: tuple[str, ...]) -> None:
    found = planner.plan(graph(model), planner.load_cluster("dgx-h100"), planner.Job(64, **wishes))
    assert found.runs_on == takers
    for name in usual_backends():
        needs = [gap.need for gap in export.lacking(found, name, graph(model))]
        assert (not needs) == (name in takers), (name, needs)


def test_a_framework_is_planned_for_in_its_own_precision() -> None:
    job = planner.Job(64, backends=("torchtitan",), pipeline_stages=(2,))
    found = planner.plan(graph("llama3-8b"), planner.load_cluster("dgx-h100"), job)
    assert found.options.precision == "bf16-fp32grad"
    assert found.configuration.zero == 1
    assert planner.plan(graph("gpt2"), planner.load_cluster("dgx-h100"), planner.Job(64)).options.precision == "bf16"


def test_pipelines_of_torchtitan_shard_the_optimizer_alone() -> None:
    found = plan("llama3-8b", pipeline=2, zero=1, precision="bf16-fp32grad")
    parallelism = tomllib.loads(str(export.export(found, "torchtitan").files["config.toml"]))["parallelism"]
    assert parallelism["data_parallel_shard_degree"] == 4
    assert parallelism["fsdp_reshard_after_forward"] == "never"
    always = '[parallelism]\npipeline_parallel_degree = 2\nfsdp_reshard_after_forward = "always"\n'
    read = export.read_job(always + "data_parallel_shard_degree = 4", "torchtitan")
    assert read.degrees.zero == 1
    assert any("fsdp_reshard_after_forward always" in line for line in read.ignored)


@pytest.mark.parametrize(
    ("name", "degrees", "need"),
    [
        ("megatron", {"model": "mixtral-8x7b", "expert": 8, "zero": 3}, "ZeRO-3"),
        ("megatron", {"model": "llama3-8b", "context": 8, "zero": 2}, "ZeRO-2"),
        ("megatron", {"model": "llama3-8b", "context": 8, "seq": 264, "zero": 1}, "264 steps for 8 context parallel"),
        (
            "megatron",
            {"model": "llama3.2-1b", "zero": 1, "repeats": ("layernorm",), "precision": "fp8"},
            "in fp8 (laye",
        ),
        ("megatron", {"model": "llama3.2-1b", "zero": 1, "precision": "fp8:last=1"}, "fp8:last=1: the last layers in"),
        ("megatron", {"model": "llama3.2-1b", "zero": 0, "precision": "fp8"}, "ZeRO-0 in fp8"),
        ("torchtitan", {"model": "llama3-8b", "pipeline": 2, "zero": 3, "precision": "fp32"}, "ZeRO-3 in a pipeline"),
        ("torchtitan", {"model": "llama3-8b", "pipeline": 2, "zero": 1}, "the precision bf16"),
        ("torchtitan", {"model": "llama3-8b", "pipeline": 2, "zero": 0, "precision": "fp32"}, "without shards (DDP)"),
        ("torchtitan", {"model": "llama3-8b", "context": 8, "zero": 0, "precision": "fp32"}, "they are FSDP ranks"),
        (
            "torchtitan",
            {"model": "llama3.2-1b", "tensor": 8, "precision": "bf16-fp32grad"},
            "mixed precision in tensor",
        ),
        (
            "torchtitan",
            {"model": "llama3-8b", "pipeline": 4, "zero": 1, "precision": "fp32", "global_batch": 4},
            "2 micro-batches in the schedule 1F1B of 4 stages",
        ),
        (
            "torchtitan",
            {"model": "llama3-8b", "seq": 260, "tensor": 4, "zero": 2, "precision": "fp32"},
            "260 steps for 4 tensor and 1",
        ),
        (
            "torchtitan",
            {
                "model": "mixtral-8x7b",
                "pipeline": 2,
                "chunks": 2,
                "schedule": "dualpipe-v",
                "expert": 2,
                "zero": 1,
                "recompute": True,
                "precision": "bf16-fp32grad",
            },
            "recomputation in DualPipeV with experts",
        ),
        ("torchtitan", {"model": "deepseek-v3-mtp", "expert": 8, "zero": 3}, "further tokens: mtp.layers.0"),
        ("galvatron", {"model": "deepseek-v3-mtp", "zero": 3}, "further tokens: mtp.layers.0"),
        ("galvatron", {"model": "deepseek-v2-lite", "zero": 3}, "layers of several kinds"),
        ("galvatron", {"model": "nemotron-3-nano", "zero": 3}, "layers of several kinds"),
        ("galvatron", {"model": "qwen3-next-80b-a3b", "zero": 3}, "layers of several kinds"),
        ("torchtitan", {"model": "vit-s16", "zero": 3}, "it reads no tokens"),
        ("megatron", {"model": "vit-s16", "zero": 1}, "it reads no tokens"),
        ("deepspeed", {"model": "gpt2", "zero": 1, "precision": "bf16-fp32grad"}, "ZeRO-1 in bf16-fp32grad"),
        ("deepspeed", {"model": "llama3.2-1b", "precision": "bf16", "context": 2, "zero": 1}, "context parallel"),
    ],
)
def test_what_a_framework_refuses_at_its_start_is_refused(name: str, degrees: dict[str, Any], need: str) -> None:
    needs = [gap.need for gap in export.lacking(plan(**degrees), name)]
    assert any(need in each for each in needs), needs


@pytest.mark.parametrize(
    ("name", "model", "degrees", "hint"),
    [
        ("torch", "resnet50", {"zero": 1}, "`shardplan plan --for fsdp` does without"),
        ("torch", "llama3-8b", {"zero": 1}, "`shardplan plan --for torchtitan` does without"),
        ("megatron", "resnet50", {"zero": 1}, "use `--to` deepspeed or jax or onnx or torch or transformers"),
        ("galvatron", "resnet50", {"zero": 3}, "use `--to` deepspeed or jax or onnx or torch or transformers"),
        ("transformers", "resnet50", {"zero": 1}, "`shardplan plan --for fsdp` does without"),
    ],
)
def test_what_avoids_a_refusal_can_plan_the_model(name: str, model: str, degrees: dict[str, Any], hint: str) -> None:
    gaps = export.lacking(plan(model, **degrees), name)
    assert gaps
    assert all(hint in gap.hint for gap in gaps), gaps


def test_stages_of_a_model_that_torchtitan_cannot_split_are_refused(tmp_path: Path) -> None:
    size = {"n_embd": 256, "n_head": 4, "n_layer": 4, "n_positions": 128, "vocab_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "tie_word_embeddings": False, **size}))
    own, cluster = planner.load_graph(tmp_path / "config.json", dims={"seq": 128}), planner.load_cluster("dgx-h100")
    job = planner.Job(64, precision="bf16-fp32grad")
    cut, whole = (
        planner.predict(own, cluster, job, planner.Degrees(pipeline=n, zero=1 if n > 1 else 2)) for n in (2, 1)
    )
    found = export.lacking(cut.plan, "torchtitan")
    # its splitter removes what no list of modules names (pipeline_module_split): the table of positions
    assert [gap.need for gap in found] == ["stages with modules beside tok_embeddings, norm, output (transformer.wpe)"]
    assert export.lacking(whole.plan, "torchtitan") == ()


def test_tied_weights_in_a_pipeline_are_refused_before_a_search() -> None:
    job = planner.Job(64, backends=("torchtitan",), pipeline_stages=(2,))
    with pytest.raises(
        planner.JobError, match=r"keeps tied weights in one stage \(model.embed_tokens.weight\)"
    ) as error:
        planner.plan(graph("llama3.2-1b"), planner.load_cluster("dgx-h100"), job)
    assert error.value.problem.hint.startswith("use --pp 1")


def test_what_torchtitan_does_otherwise_than_the_plan_is_on_its_page() -> None:
    def page(**degrees: Any) -> str:
        return str(export.export(plan("llama3-8b", **degrees), "torchtitan").files["EXPORT.md"])

    wide = "Gradients of 2 bytes: `mixed_precision_reduce` is float32 alone"
    assert wide in page(zero=3, precision="bf16-fp32grad:reduce=bf16")
    assert wide not in page(zero=3, precision="bf16-fp32grad")
    # 64 samples for 8 ranks, one at a time: 8 micro-batches a step
    again = "in each of the 8 micro-batches of a step, where the plan does so once"
    assert f"FSDP gathers them again {again}" in page(zero=2, precision="bf16-fp32grad")
    assert f"(DDP): torchtitan reduces them {again}" in page(zero=0, precision="bf16-fp32grad")
    assert again not in page(zero=2, precision="bf16-fp32grad", micro_batch=8) + page(zero=3, precision="bf16-fp32grad")


def test_tables_that_a_framework_keeps_whole_are_said() -> None:
    def page(name: str, model: str) -> str:
        job = planner.Job(64, precision="bf16", backends=(name,), pipeline_stages=(1,), tensor_parallel=(2,))
        found = planner.plan(graph(model), planner.load_cluster("dgx-h100"), job)
        return str(export.export(found, name).files["EXPORT.md"])

    # VocabParallelEmbedding holds words alone; positions are an nn.Embedding (language_model_embedding.py)
    assert "cut over a group (transformer.wpe): Megatron keeps them whole" in page("megatron", "gpt2")
    assert "Megatron keeps them whole" not in page("megatron", "llama3.2-1b")
    assert "Words of model.embed_tokens, lm_head cut over a group: AutoTP keeps" in page("deepspeed", "llama3-8b")


def test_a_head_that_megatrons_decoders_lack_needs_a_program_of_its_own() -> None:
    found = export.export(plan("bert-base", zero=1), "megatron")
    assert '"${PROGRAM:?}"' in str(found.files["launch.sh"])
    assert any("cls.predictions.transform.dense" in line for line in found.left_out)
    assert '"${PROGRAM:-pretrain_gpt.py}"' in str(export.export(plan("gpt2", zero=1), "megatron").files["launch.sh"])


def test_mixtures_are_said_to_galvatron() -> None:
    found = export.export(plan("mixtral-8x7b", zero=3), "galvatron")
    strategy = json.loads(found.files["strategy.json"])
    assert strategy["ep_sizes_enc"] == strategy["tp_of_ep_sizes_enc"] == ",".join(["1"] * 32)
    script = str(found.files["launch.sh"])
    assert "++runtime.model.is_moe_model=true" in script
    assert "++runtime.model.num_moe_experts=8" in script
    assert "++runtime.model.num_layers=32" in script
    dense = export.export(plan("llama3.2-1b", zero=3), "galvatron")
    assert "moe" not in str(dense.files["launch.sh"])
    assert "ep_sizes_enc" not in json.loads(dense.files["strategy.json"])


def test_experts_of_one_stage_are_dealt_by_the_configuration_of_deepspeed() -> None:
    for zero in (0, 1, 2, 3):
        found = export.export(plan("mixtral-8x7b", expert=4, zero=zero), "deepspeed")
        document = json.loads(found.files["ds_config.json"])
        assert document["expert_parallel"] == {"enabled": True, "autoep_size": 4}
    beside = export.export(plan("mixtral-8x7b", expert=2, pipeline=2, zero=1), "deepspeed")
    assert "expert_parallel" not in json.loads(beside.files["ds_config.json"])
    assert "MoE(ep_size=2)" in str(beside.files["EXPORT.md"])


def test_arguments_that_change_memory_or_time_are_written_for_megatron() -> None:
    def lines(**degrees: Any) -> set[str]:
        return set(str(export.export(plan(**degrees), "megatron").files["arguments.txt"]).splitlines())

    narrow = lines(model="llama3.2-1b", zero=1, precision="fp8-cs")
    assert {"--fp8-param-gather", "--grad-reduce-in-bf16"} <= narrow
    kept = lines(model="llama3.2-1b", zero=1, precision="fp8-cs:weights=bf16,grads=fp32")
    assert not {"--fp8-param-gather", "--grad-reduce-in-bf16"} & kept
    assert {"--optimizer sgd", "--sgd-momentum 0.9"} <= lines(model="gpt2", optimizer="momentum")
    assert "--sgd-momentum 0" in lines(model="gpt2", optimizer="sgd")
    assert {"--use-distributed-optimizer", "--overlap-grad-reduce"} <= lines(model="llama3-8b", context=8, zero=1)
    assert "--cp-comm-type all_gather" in lines(model="llama3-8b", context=8, zero=1)  # p2p without it


@pytest.mark.parametrize(
    ("arguments", "precision", "optimizer"),
    [
        ("--bf16 --fp8-format hybrid --optimizer sgd", "fp8:weights=bf16,grads=fp32", "momentum"),
        ("--bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather", "fp8-cs:grads=fp32", "adam"),
        ("--bf16 --grad-reduce-in-bf16 --optimizer sgd --sgd-momentum 0.0", "bf16", "sgd"),
        ("--bf16 --fp4-format e2m1 --fp4-recipe nvfp4 --grad-reduce-in-bf16", "nvfp4", "adam"),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", "fp16:grads=fp32", "adam"),
    ],
)
def test_megatrons_defaults_are_read_as_it_takes_them(arguments: str, precision: str, optimizer: str) -> None:
    read = export.read_job(arguments, "megatron")
    assert (read.precision, read.optimizer, read.ignored) == (precision, optimizer, ())


def test_stages_of_deepspeed_may_hold_layers_that_are_cut_by_themselves() -> None:
    job = planner.Job(64, precision="bf16", backends=("deepspeed",), pipeline_stages=(2,), tensor_parallel=(2,))
    found = planner.plan(graph("llama3-8b"), planner.load_cluster("dgx-h100"), job)
    written = export.export(found, "deepspeed", graph("llama3-8b"))
    assert "tensor_parallel" not in str(written.files["ds_config.json"])
    assert "num_pp=2, num_mp=2, num_dp=2" in str(written.files["pipeline.py"])
    assert any("cut over the model axis" in line for line in written.left_out)


def test_groups_of_other_sizes_are_searched_where_they_are_asked_for() -> None:
    backends = (BACKENDS.get("megatron"),)
    assert within_limits(planner.Job(64), backends).structure.powers_of_two
    assert not within_limits(planner.Job(64, expert_parallel=(10,)), backends).structure.powers_of_two
