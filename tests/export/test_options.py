"""Tables of options: whole, told apart, and what a file says is held against them."""

from __future__ import annotations

from pathlib import Path

import pytest

import planner
from planner import export
from planner.export.reading.options import Kind, Use
from tests.export.plans import graph

FRAMEWORKS = export.readable()


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_table_has_each_option_once_and_says_what_is_not_modelled(name: str) -> None:
    table = export.options_of(name)
    names = [each for row in table.rows for each in row.names]
    assert len(names) == len(set(names))
    assert "202" in table.source  # a date
    for row in table.rows:
        assert row.about or row.use is Use.READ, row
        if row.use is Use.SAID:
            assert row.effect, row
            assert not row.is_priced("something else of the user's"), row
        else:
            assert not row.effect, row
        if row.use is Use.SIZE and name != "torchtitan":
            assert row.kind in (Kind.COUNT, Kind.DEGREE), row


def test_options_are_counted_by_use() -> None:
    """Counts in docs/export.md; all options of Megatron-LM's parser at that version are 838, of torchtitan's three
    releases 175."""
    counts = {name: export.options_of(name).counts() for name in FRAMEWORKS}
    assert {name: sum(own.values()) for name, own in counts.items()} == {
        "deepspeed": 319, "megatron": 949, "torchtitan": 175,
    }  # fmt: skip
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    for name, own in counts.items():
        read = own["read"] + own["size"]
        row = f"| `{name}` | {read} | {own['none']} | {own['said']} | {own.get('gone', 0)} | {sum(own.values())} |"
        assert row in page, row


@pytest.mark.parametrize(
    ("name", "option", "use"),
    [
        ("megatron", "--tensor-model-parallel-size", Use.READ),
        ("megatron", "--sequence-parallel", Use.READ),
        ("megatron", "--hidden-size", Use.SIZE),
        ("megatron", "--lr", Use.NONE),
        ("megatron", "--data-path", Use.NONE),
        ("megatron", "--save-interval", Use.NONE),
        ("megatron", "--persistent-save-interval", Use.NONE),  # its other name
        ("megatron", "--cuda-graph-impl", Use.SAID),
        ("megatron", "--tp-comm-overlap", Use.SAID),
        ("megatron", "--cross-entropy-loss-fusion", Use.SAID),
        ("megatron", "--window-size", Use.SAID),
        ("megatron", "--model-parallel-size", Use.GONE),
        ("torchtitan", "training.enable_cpu_offload", Use.SAID),
        ("torchtitan", "parallelism.pipeline_parallel_layers_per_stage", Use.READ),
        ("torchtitan", "metrics.log_freq", Use.NONE),
        ("deepspeed", "zero_optimization.zero_hpz_partition_size", Use.SAID),
        ("deepspeed", "zero_optimization.mics_shard_size", Use.READ),
        ("deepspeed", "optimizer.params.betas", Use.NONE),  # of a table whose keys are free
        ("deepspeed", "tensorboard.output_path", Use.NONE),
    ],
)
def test_options_are_told_apart(name: str, option: str, use: Use) -> None:
    row = export.options_of(name).find(option)
    assert row is not None
    assert row.use is use


UNKNOWN = [
    ("megatron", "--tensor-model-parallel-sise 4", "--tensor-model-parallel-sise", "--tensor-model-parallel-size"),
    ("megatron", "--tensor_model_parallel_size 4", "--tensor_model_parallel_size", "--tensor-model-parallel-size"),
    ("megatron", "--bf16 --my-own-switch", "--my-own-switch", ""),
    ("megatron", "python pretrain_mine.py --sequence-paralel", "--sequence-paralel", "--sequence-parallel"),
    ("deepspeed", '{"zero_optimisation": {"stage": 3}, "train_batch_size": 8}', "zero_optimisation.stage", "zero_opt"),
    ("deepspeed", '{"zero_optimization": {"stag": 3}, "train_batch_size": 8}', "zero_optimization.stag", ".stage"),
    ("deepspeed", '{"fp16": {"enable": true}, "train_batch_size": 8}', "fp16.enable", "fp16.enabled"),
    ("deepspeed", '{"bf16": {"sth_else": 1}, "train_batch_size": 8}', "bf16.sth_else", "bf16"),
    ("deepspeed", '{"train_batchsize": 8}', "train_batchsize", "train_batch_size"),
    ("torchtitan", "[parallelism]\ntensor_parallel_size = 2", "parallelism.tensor_parallel_size", "_degree"),
    ("torchtitan", "[paralelism]\ntensor_parallel_degree = 2", "paralelism.tensor", "parallelism.tensor"),
    ("torchtitan", "[mine]\nkey = 1", "mine.key", ""),
]


@pytest.mark.parametrize(("name", "text", "option", "hint"), UNKNOWN, ids=lambda x: str(x)[:40])
def test_an_unknown_option_is_refused_by_name(name: str, text: str, option: str, hint: str) -> None:
    with pytest.raises(planner.UsageError) as error:
        export.read_job(text, name, "file")
    assert error.value.problem.message.startswith(option)
    assert hint in error.value.problem.hint
    assert error.value.problem.where == "file"


def test_all_unknown_options_are_named_at_once() -> None:
    with pytest.raises(planner.UsageError) as error:
        export.read_job("--bf17 --lrr 3 --seq-length 128", "megatron")
    assert [problem.message.split()[0] for problem in error.value.problems] == ["--bf17", "--lrr"]


def test_a_file_of_something_else_is_refused_soon() -> None:
    with pytest.raises(planner.UsageError) as error:
        export.read_job(" ".join(f"--option-number-{at} {at}" for at in range(3000)), "megatron")
    assert len(error.value.problems) == 21
    assert error.value.problems[-1].message == "3000 options are unknown to megatron"


@pytest.mark.parametrize(
    ("name", "text", "note"),
    [
        ("megatron", "torchrun mine.py --bf16 --vision-tower clip", "--vision-tower clip: an option of the program"),
        ("megatron", "torchrun mine.py --bf16 --out-seq-length 9", "--out-seq-length 9: an option of the program"),
        ("megatron", "--bf16 $EXTRA", "$EXTRA: a variable that has no value in the file"),
        ("deepspeed", '{"train_batch_size": 8, "my_notes": "x"}', "my_notes x: unknown to DeepSpeed, which passes"),
        (
            "torchtitan", '[job]\ncustom_config_module = "mine"\n[own]\nkey = 3',
            "own.key 3: an option of the program's own",
        ),
    ],
)  # fmt: skip
def test_options_of_the_users_own_are_said_where_the_framework_takes_them(name: str, text: str, note: str) -> None:
    assert any(line.startswith(note) for line in export.read_job(text, name).ignored)


NOTED = [
    ("megatron", "--attention-backend unfused", "more memory, slower"),
    ("megatron", "--cuda-graph-impl full_iteration", "faster, more memory"),
    ("megatron", "--tp-comm-overlap", "faster"),
    ("megatron", "--cross-entropy-loss-fusion", "less memory, faster"),
    ("megatron", "--window-size 1024,0", "faster, less memory"),
    ("megatron", "--fp32-residual-connection", "more memory, slower"),
    ("megatron", "--optimizer-cpu-offload", "less memory, slower"),
    ("megatron", "--cpu-offloading-num-layers 4", "less memory, slower"),
    ("megatron", "--moe-expert-capacity-factor 1.25", "other time and memory"),
    ("megatron", "--no-gradient-accumulation-fusion", "slower"),
    ("megatron", "--main-grads-dtype bf16", "less memory"),
    ("megatron", "--cp-comm-type a2a", "other time"),
    ("megatron", "--optimizer muon", "other time and memory"),
    ("megatron", "--use-precision-aware-optimizer --exp-avg-dtype fp8", "other memory"),
    ("torchtitan", "[training]\nenable_cpu_offload = true", "less memory, slower"),
    ("torchtitan", '[model]\nconverters = ["float8"]', "faster"),
    ("torchtitan", '[quantize.linear.float8]\nrecipe_name = "rowwise"', "faster"),
    ("torchtitan", "[compile]\nenable = true", "faster, less memory"),
    ("torchtitan", '[activation_checkpoint]\nmode = "selective"', "less memory, slower"),
    ("torchtitan", '[model]\nname = "llama3"\nflavor = "9B"', "not known here"),
    ("deepspeed", '{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}', "more memory, faster between"),
    ("deepspeed", '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}', "less memory, slower"),
    ("deepspeed", '{"zero_optimization": {"stage": 2, "zero_quantized_gradients": true}}', "faster"),
    ("deepspeed", '{"activation_checkpointing": {"cpu_checkpointing": true}}', "less memory, slower"),
    # 5e9 elements of 4 bytes, as nothing says bf16
    (
        "deepspeed",
        '{"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e9}}',
        "more memory; a buffer of up to 18.6",
    ),
    ("deepspeed", '{"zero_optimization": {"stage": 2, "allgather_bucket_size": 1000}}', "slower"),
]


@pytest.mark.parametrize(("name", "text", "effect"), NOTED, ids=lambda x: str(x)[:60])
def test_what_is_known_and_not_modelled_is_said_with_its_direction(name: str, text: str, effect: str) -> None:
    if name == "deepspeed":
        text = text.replace("{", '{"train_batch_size": 8, ', 1)
    plain = {"megatron": "--bf16", "torchtitan": "", "deepspeed": '{"train_batch_size": 8}'}[name]
    base = () if "mode = " in text else export.read_job(plain, name).ignored
    notes = [line for line in export.read_job(text, name).ignored if line not in base]
    assert len(notes) == 1, notes
    assert f": {effect}" in notes[0]


PASSED = [
    ("megatron", "--lr 3e-4 --train-iters 100 --data-path x --save y --log-interval 1 --use-flash-attn --swiglu"),
    ("megatron", "--attention-backend flash --moe-token-dispatcher-type alltoall"),
    ("megatron", "--attention-dropout 0 --hidden-dropout 0.0 --cp-comm-type p2p"),
    ("torchtitan", '[activation_checkpoint]\nmode = "none"\n[metrics]\nlog_freq = 5\n[optimizer]\nlr = 1e-4'),
    (
        "deepspeed",
        '{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "scheduler": {"type":'
        ' "WarmupLR", "params": {"warmup_num_steps": "auto"}}, "steps_per_print": 5, "gradient_clipping": "auto",'
        ' "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",'
        ' "offload_param": {"device": "none"}}}',
    ),
]


@pytest.mark.parametrize(("name", "text"), PASSED, ids=lambda x: x[:40])
def test_what_does_not_matter_is_not_said(name: str, text: str) -> None:
    assert export.read_job(text, name).ignored == ()


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("megatron", "--tensor-model-parallel-size 0", "--tensor-model-parallel-size is 0"),
        ("megatron", "--pipeline-model-parallel-size -2", "--pipeline-model-parallel-size is -2"),
        ("megatron", "--micro-batch-size 1.5", "--micro-batch-size is '1.5', no whole number"),
        ("megatron", "--global-batch-size 99999999999999999999", "--global-batch-size is 99999999999999999999"),
        ("megatron", "--context-parallel-size", "--context-parallel-size is True"),
        ("megatron", "--recompute-granularity selectiv", "--recompute-granularity is 'selectiv'"),
        ("megatron", "--recompute-granularity selective --recompute-modules layernom", "'layernom'"),
        ("megatron", "--fp8-format e5m2", "--fp8-format is 'e5m2'"),
        ("megatron", "--hidden-dropout none", "--hidden-dropout is 'none', no number"),
        ("megatron", "--num-layers 999999999 --pipeline-model-parallel-size 7", "--num-layers is 999999999"),
        ("megatron", "--bf16 true", "--bf16 takes no value"),
        ("megatron", "--model-parallel-size 2", "--model-parallel-size is refused by megatron"),
        ("torchtitan", "[parallelism]\ntensor_parallel_degree = 0", "parallelism.tensor_parallel_degree is 0"),
        ("torchtitan", "[parallelism]\ndata_parallel_shard_degree = -3", "data_parallel_shard_degree is -3"),
        ("torchtitan", "[training]\nglobal_batch_size = 0", "training.global_batch_size is 0"),
        ("torchtitan", '[activation_checkpoint]\nmode = "ful"', "activation_checkpoint.mode is 'ful'"),
        ("deepspeed", '{"train_batch_size": 0}', "train_batch_size is 0"),
        ("deepspeed", '{"train_batch_size": 8, "zero_optimization": {"stage": 4}}', "zero_optimization.stage is 4"),
        ("deepspeed", '{"train_batch_size": 8, "zero_optimization": 3}', "zero_optimization is 3, not a table"),
        ("deepspeed", '{"train_batch_size": 8, "bf16": {"enabled": 7}}', "bf16.enabled is 7"),
        ("deepspeed", '{"gradient_accumulation_steps": 2}', "neither train_batch_size nor train_micro_batch"),
    ],
)
def test_values_out_of_range_are_refused(name: str, text: str, named: str) -> None:
    with pytest.raises(planner.UsageError) as error:
        export.read_job(text, name)
    assert named in str(error.value)
    assert error.value.problem.hint


CONTRADICTIONS = [
    ("--num-layers 16", "--num-layers is 16, MODEL has 12 layers"),
    ("--hidden-size 1024", "--hidden-size is 1024, MODEL has a width between layers of 768"),
    ("--num-attention-heads 16", "--num-attention-heads is 16, MODEL has attention heads: 12"),
    ("--group-query-attention --num-query-groups 4", "--num-query-groups is 4, MODEL has key-value heads: 12"),
    ("--ffn-hidden-size 4096", "--ffn-hidden-size is 4096, MODEL has no matrix with such a dimension"),
    ("--vocab-size 32000", "--vocab-size is 32000, MODEL has no vocabulary of that size"),
    ("--num-experts 8", "--num-experts is 8, MODEL has 0 experts"),
    ("--mtp-num-layers 1", "--mtp-num-layers is 1, MODEL has 0 predictors"),
    ("--kv-channels 128", "--kv-channels is 128, MODEL has heads as wide as 64"),
]


@pytest.mark.parametrize(("text", "named"), CONTRADICTIONS)
def test_sizes_that_contradict_the_model_are_refused(text: str, named: str) -> None:
    with pytest.raises(planner.UsageError, match=named):
        export.read_job(text, "megatron", graph=graph("gpt2"))
    assert export.read_job(text, "megatron").degrees == planner.Degrees()  # without a model nothing is compared


def test_sizes_of_the_model_itself_are_taken() -> None:
    gpt2 = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --ffn-hidden-size 3072 --kv-channels 64"
    vocabularies = ("50257", "50304", "50432")  # as it is, padded to 128, and to 128 x 2
    for size in vocabularies:
        export.read_job(f"{gpt2} --vocab-size {size}", "megatron", graph=graph("gpt2"))
    llama = "--num-layers 16 --hidden-size 2048 --num-attention-heads 32 --num-query-groups 8 --ffn-hidden-size 8192"
    export.read_job(f"{llama} --vocab-size 128256", "megatron", graph=graph("llama3.2-1b"))
    experts = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 14336 --num-layers 32"
    export.read_job(experts, "megatron", graph=graph("mixtral-8x7b"))
    with pytest.raises(planner.UsageError, match="--moe-router-topk is 4, MODEL has 2 experts of a token"):
        export.read_job(experts.replace("topk 2", "topk 4"), "megatron", graph=graph("mixtral-8x7b"))


def test_sizes_without_effect_are_not_compared() -> None:
    """As in Megatron-LM's own scripts of Qwen3 (all layers are mixtures) and DeepSeek (latent attention)."""
    experts = "--num-experts 8 --moe-ffn-hidden-size 14336 --ffn-hidden-size 5000"
    export.read_job(experts, "megatron", graph=graph("mixtral-8x7b"))
    for dense in (
        f"{experts} --moe-layer-freq ([0]*1+[1]*31)",
        f"{experts} --moe-layer-freq 2",
        "--ffn-hidden-size 5000",
    ):
        with pytest.raises(planner.UsageError, match="--ffn-hidden-size is 5000, MODEL has no matrix"):
            export.read_job(dense, "megatron", graph=graph("mixtral-8x7b"))
    export.read_job("--kv-channels 128 --multi-latent-attention", "megatron", graph=graph("gpt2"))


def test_a_flavor_beside_another_model_is_refused() -> None:
    flavor = '[model]\nname = "llama3"\nflavor = "{}"'
    with pytest.raises(planner.UsageError, match="llama3 70B has 80 layers, MODEL has 16 layers"):
        export.read_job(flavor.format("70B"), "torchtitan", graph=graph("llama3.2-1b"))
    export.read_job(flavor.format("8B"), "torchtitan", graph=graph("llama3-8b"))
    with pytest.raises(planner.UsageError, match="llama3 debugmodel has 6 layers"):
        export.read_job(flavor.format("debugmodel"), "torchtitan", graph=graph("llama3-8b"))
