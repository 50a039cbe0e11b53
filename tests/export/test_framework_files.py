"""What files of frameworks divide: stages as the frameworks cut them, sequence parallelism, batches, "auto"."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

import planner
from planner import export
from planner.graph import Graph
from planner.plans.readings import layer_name
from tests.cli.plan_files import run
from tests.export.plans import graph
from tests.shared_data import shared_path

SMALL = {
    "model_type": "llama", "num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1024,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 4096, "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}  # fmt: skip


@cache
def small(folder: Path, layers: int = 8) -> Graph:
    path = folder / f"{layers}.json"
    path.write_text(json.dumps({**SMALL, "num_hidden_layers": layers}))
    return planner.load_graph(path, dims={"seq": 256})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def layers_by_stage(text: str, name: str, model: Graph) -> list[int]:
    """Layers of each stage of the plan of a file."""
    read = export.read_job(text, name, graph=model).on(8)
    job = planner.Job(read.global_batch or 0, precision=read.precision, backends=(name,), structure=read.structure)
    found = planner.predict(model, planner.load_cluster("dgx-h100"), job, read.degrees, fewest_weights=True).plan
    stages = ({layer_name(block) for block in found.stage_blocks(stage.index)} for stage in found.stages)
    return [sum(name[-1].isdigit() for name in names) for names in stages]


MEGATRON = "--bf16 --micro-batch-size 1 --global-batch-size 16 --pipeline-model-parallel-size"
TITAN = "[training]\nlocal_batch_size = 8\nglobal_batch_size = 16\n[parallelism]\npipeline_parallel_degree = 4\n"

SPLITS = [
    ("megatron", 8, f"{MEGATRON} 4", [2, 2, 2, 2]),
    ("megatron", 8, f"{MEGATRON} 2 --num-virtual-stages-per-pipeline-rank 2", [2, 2, 2, 2]),
    ("megatron", 8, f"{MEGATRON} 2 --num-layers-per-virtual-pipeline-stage 1 --num-layers 8", [1] * 8),
    ("megatron", 7, f"{MEGATRON} 4 --account-for-embedding-in-pipeline-split", [1, 2, 2, 2]),
    ("megatron", 7, f"{MEGATRON} 4 --account-for-loss-in-pipeline-split", [2, 2, 2, 1]),
    (
        "megatron", 6, f"{MEGATRON} 4 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        [1, 2, 2, 1],
    ),
    (
        "megatron", 6,
        f"{MEGATRON} 2 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
        " --num-virtual-stages-per-pipeline-rank 2",
        [1, 2, 2, 1],
    ),
    ("megatron", 8, f"{MEGATRON} 4 --decoder-first-pipeline-num-layers 2", [2, 2, 2, 2]),
    ("megatron", 7, f"{MEGATRON} 4 --decoder-last-pipeline-num-layers 1", [2, 2, 2, 1]),
    ("megatron", 7, f'{MEGATRON} 4 --pipeline-model-parallel-layout "Et|tt|tt|ttL"', [1, 2, 2, 2]),
    # 8 layers and two ends are 10 for 4 stages: 3, 3, 2 and 2 of them
    ("torchtitan", 8, TITAN, [2, 3, 2, 1]),
    ("torchtitan", 8, TITAN + "pipeline_parallel_last_stage_less_layers = 0", [2, 2, 2, 2]),
    (
        "torchtitan", 8,
        TITAN + "pipeline_parallel_first_stage_less_layers = 0\npipeline_parallel_last_stage_less_layers = 0",
        [2, 2, 2, 2],
    ),
    # interleaved: two stages a rank, 10 for 8: 2, 2 and 1 of each further one
    ("torchtitan", 8, TITAN.replace("= 4", "= 2") + 'pipeline_parallel_schedule = "Interleaved1F1B"', [2, 3, 2, 1]),
    (
        "torchtitan", 8,
        TITAN.replace("= 4", "= 2") + 'pipeline_parallel_schedule = "Interleaved1F1B"\n'
        "pipeline_parallel_layers_per_stage = 2\npipeline_parallel_first_stage_less_layers = 0\n"
        "pipeline_parallel_last_stage_less_layers = 0",
        [2, 2, 2, 2],
    ),
    ("torchtitan", 8, TITAN + "pipeline_parallel_layers_per_stage = 3", [2, 3, 2, 1]),
    (
        "torchtitan", 8,
        TITAN + 'pipeline_parallel_split_points = ["layers.1", "layers.3", "layers.6"]',
        [1, 2, 3, 2],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layers", "text", "counts"), SPLITS, ids=lambda x: str(x)[-60:])
def test_stages_are_those_that_the_framework_cuts(
    name: str, layers: int, text: str, counts: list[int], folder: Path
) -> None:
    assert layers_by_stage(text, name, small(folder, layers)) == counts


REFUSED = [
    ("megatron", 30, f"{MEGATRON} 4", "30 layers are not divided by PP 4, and Megatron refuses that"),
    (
        "megatron", 40, f"{MEGATRON} 8 --num-layers-per-virtual-pipeline-stage 2",
        "5 layers of a worker (40 over PP 8) are not divided by the 2 of --num-layers-per-virtual-pipeline-stage",
    ),
    (
        "megatron", 8, f"{MEGATRON} 2 --num-virtual-stages-per-pipeline-rank 3",
        "4 layers of a worker (8 layers over PP 2) are not divided by 3 chunks",
    ),
    (
        "megatron", 8, f"{MEGATRON} 4 --account-for-embedding-in-pipeline-split",
        "8 layers and embedding, 9 in all, are not divided by PP 4",
    ),
    (
        "megatron", 8, f"{MEGATRON} 2 --num-layers-per-virtual-pipeline-stage 1 --decoder-first-pipeline-num-layers 3",
        "--num-layers-per-virtual-pipeline-stage beside uneven ends",
    ),
    ("megatron", 8, f"{MEGATRON} 1 --num-virtual-stages-per-pipeline-rank 2", "2 chunks of one worker"),
    (
        "torchtitan", 8, TITAN + "pipeline_parallel_layers_per_stage = 1",
        "makes 10 stages of 8 layers on 4 workers, and torchtitan refuses others than one stage a worker",
    ),
    (
        "torchtitan", 8, TITAN + "pipeline_parallel_first_stage_less_layers = 4",
        "8 layers with ends that count as 4 and 1 make 3 a stage of 4",
    ),
    ("torchtitan", 8, TITAN.replace("local_batch_size = 8", "local_batch_size = 7")
     + "pipeline_parallel_microbatch_size = 2", "micro-batches of 2 do not divide training.local_batch_size 7"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layers", "text", "named"), REFUSED, ids=lambda x: str(x)[-60:])
def test_stages_that_the_framework_refuses_are_refused(
    name: str, layers: int, text: str, named: str, folder: Path
) -> None:
    with pytest.raises(planner.UsageError) as error:
        export.read_job(text, name, graph=small(folder, layers))
    assert named in str(error.value)
    assert error.value.problem.hint


CHUNKED = f"{MEGATRON} 8 --num-layers-per-virtual-pipeline-stage 2"
LAYOUT = f'--pipeline-model-parallel-layout "E{"t" * 7}|{"t" * 8}|{"t" * 8}|{"t" * 7}L"'
REMEDIES = [
    (30, f"{MEGATRON} 4", "--decoder-first-pipeline-num-layers 6", [6, 8, 8, 8]),
    (30, f"{MEGATRON} 4", "--decoder-last-pipeline-num-layers 6", [8, 8, 8, 6]),
    (30, f"{MEGATRON} 4", "--pipeline-model-parallel-size 5", [6] * 5),
    (30, f"{MEGATRON} 4", LAYOUT, [7, 8, 8, 7]),
    (40, CHUNKED, "--num-layers-per-virtual-pipeline-stage 1", [1] * 40),
    (40, CHUNKED, "--num-layers-per-virtual-pipeline-stage 5", [5] * 8),
]  # fmt: skip


@pytest.mark.parametrize(("layers", "text", "remedy", "counts"), REMEDIES, ids=lambda x: str(x)[-60:])
def test_a_remedy_of_a_refusal_is_taken(layers: int, text: str, remedy: str, counts: list[int], folder: Path) -> None:
    with pytest.raises(planner.UsageError) as error:
        export.read_job(text, "megatron", graph=small(folder, layers))
    option, _, value = remedy.partition(" ")
    hint = error.value.problem.hint
    named = option in hint and (value in hint or "layout" in option)
    assert named or ("PP 3 or 5" in hint and option.endswith("model-parallel-size"))
    batch = text.replace("size 16", "size 40") + f" {remedy}"
    assert layers_by_stage(batch, "megatron", small(folder, layers)) == counts


def activations(text: str, model: Graph) -> tuple[float, str]:
    """Bytes of activations of a rank, and how tensors lie between layers."""
    read = export.read_job(text, "megatron", graph=model).on(8)
    job = planner.Job(
        read.global_batch or 0, precision=read.precision, optimizer=read.optimizer, overlap=read.overlap,
        backends=("megatron",), structure=read.structure,
    )  # fmt: skip
    found = planner.predict(model, planner.load_cluster("dgx-h100"), job, read.degrees, fewest_weights=True)
    sharding = found.plan.sharding_of(0)
    return found.workers[0].memory.activations, sharding.boundaries[0] if sharding else ""


def test_without_sequence_parallelism_norms_and_residuals_are_whole_on_each_rank(folder: Path) -> None:
    model, text = small(folder), "--bf16 --tensor-model-parallel-size 8 --micro-batch-size 2 --global-batch-size 16"
    whole, between = activations(text, model)
    cut, cut_between = activations(f"{text} --sequence-parallel", model)
    assert (between, cut_between) == ("replicated", "sequence")
    # inputs of two norms of 8 layers and of the last norm, of 2 bytes, 2 x 256 tokens of width 512: 7/8 of them more
    inputs = (2 * 8 + 1) * 2 * 2 * 256 * 512 * 7 / 8
    assert whole - cut == pytest.approx(inputs, rel=0.1)


def test_masks_of_dropout_are_said_with_their_bytes(folder: Path) -> None:
    text = "--bf16 --micro-batch-size 4 --seq-length 256 --hidden-size 512"
    # 2 masks of 1 byte in 8 layers, of 4 x 256 tokens of width 512: 8 MiB
    notes = export.read_job(text, "megatron", graph=small(folder)).ignored
    assert any(line.startswith("--hidden-dropout 0.1 (the default): more memory") for line in notes)
    assert any("about 8 MiB on a rank" in line for line in notes)
    assert export.read_job(f"{text} --hidden-dropout 0 --attention-dropout 0.0", "megatron").ignored == ()
    shared = export.read_job(
        f"{text} --tensor-model-parallel-size 4 --sequence-parallel", "megatron", graph=small(folder)
    )
    assert any("about 2 MiB on a rank" in line for line in shared.ignored)


def test_experts_beside_tensor_parallel_ranks_want_sequence_parallelism() -> None:
    text = "--bf16 --tensor-model-parallel-size 2 --expert-model-parallel-size 2"
    with pytest.raises(planner.UsageError, match="without --sequence-parallel, which Megatron refuses"):
        export.read_job(text, "megatron")
    assert export.read_job(f"{text} --sequence-parallel", "megatron").degrees.expert == 2


@pytest.mark.parametrize(
    ("text", "zero", "shard_over"),
    [
        ("--use-distributed-optimizer", 1, 0),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 2", 1, 4),
        ("--use-torch-fsdp2", 3, 0),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", 2, 0),
        ("--use-megatron-fsdp", 3, 0),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", 2, 0),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy no_shard", 0, 0),
    ],
)
def test_what_replicas_share_in_megatron(text: str, zero: int, shard_over: int) -> None:
    degrees = export.read_job(f"--bf16 {text}", "megatron").on(8).degrees
    assert (degrees.zero, degrees.shard_over) == (zero, shard_over)


@pytest.mark.parametrize(
    ("keys", "beside", "batch", "micro"),
    [
        ({"train_micro_batch_size_per_gpu": 2}, {}, 16, 2),  # 2 x 1 x 8 ranks
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, {}, 64, 2),
        ({"train_batch_size": 64}, {}, 64, 8),  # one micro-batch a rank
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, {}, 64, 2),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, {}, 64, 2),
        ({"train_batch_size": 64, "gradient_accumulation_steps": "auto"}, {"micro_batch": 4}, 64, 1),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 3}, {"micro_batch": 4}, 64, 1),
    ],
)
def test_batches_follow_from_the_ranks_as_in_deepspeed(
    keys: dict[str, object], beside: dict[str, object], batch: int, micro: int
) -> None:
    read = export.read_job(json.dumps(keys), "deepspeed", beside=beside).on(8)
    assert (read.global_batch, read.degrees.micro_batch) == (batch, micro)


def test_batches_that_contradict_each_other_are_refused() -> None:
    keys = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}
    with pytest.raises(planner.UsageError) as error:
        export.read_job(json.dumps(keys), "deepspeed").on(8)
    named = "train_micro_batch_size_per_gpu 2 x gradient_accumulation_steps 8 x 8 data-parallel ranks are 128"
    assert f"train_batch_size is 64, and {named}" in str(error.value)
    with pytest.raises(planner.UsageError, match="12 is not divided by 8 data-parallel ranks x 1"):
        export.read_job('{"train_batch_size": 12}', "deepspeed").on(8)


def test_batches_that_a_file_leaves_to_the_ranks() -> None:
    assert export.read_job("--bf16 --micro-batch-size 2", "megatron").on(8).global_batch == 16
    assert export.read_job("[training]\nlocal_batch_size = 4", "torchtitan").on(8).global_batch == 32
    piped = "[training]\nlocal_batch_size = 4\n[parallelism]\npipeline_parallel_degree = 2"
    assert export.read_job(piped, "torchtitan").on(8).global_batch == 16  # 4 a rank, of 4 data-parallel ranks
    assert export.read_job("", "torchtitan").on(8).degrees.micro_batch == 8  # torchtitan's default
    ranks = "[parallelism]\ndata_parallel_shard_degree = 16"
    with pytest.raises(planner.UsageError, match="over 16 ranks, and there are 8 devices"):
        export.read_job(ranks, "torchtitan").on(8)


def test_every_second_layer_is_recomputed_as_half_of_each_stage(folder: Path) -> None:
    """torchtitan's default: selective, of every second layer."""
    read = export.read_job(TITAN, "torchtitan", graph=small(folder)).degrees
    assert (read.recompute, read.recompute_layers) == (True, 1)  # 8 layers in 4 stages, of 2 one
    third = '[activation_checkpoint]\nselective_ac_option = "3"'
    read = export.read_job(third, "torchtitan", graph=small(folder)).degrees
    assert (read.recompute, read.recompute_layers) == (True, 3)  # 8 / 3
    none = export.read_job('[activation_checkpoint]\nmode = "none"', "torchtitan", graph=small(folder)).degrees
    assert (none.recompute, none.recompute_layers) == (False, 0)
    with pytest.raises(planner.UsageError, match="selective_ac_option is 'sometimes'"):
        export.read_job('[activation_checkpoint]\nselective_ac_option = "sometimes"', "torchtitan")


def test_groups_of_mics_share_the_state() -> None:
    text = '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "mics_shard_size": 4}}'
    assert export.read_job(text, "deepspeed").degrees.shard_over == 4


AUTO = [
    ({"train_micro_batch_size_per_gpu": "auto", "train_batch_size": 64}, "micro_batch", 2, "--micro-batch"),
    ({"train_micro_batch_size_per_gpu": 2, "train_batch_size": "auto"}, "global_batch", 64, "-b"),
    ({"train_batch_size": 64, "bf16": {"enabled": "auto"}}, "precision", "bf16", "--precision"),
    ({"train_batch_size": 64, "fp16": {"enabled": "auto", "loss_scale": 0}}, "precision", "fp16", "--precision"),
    ({"train_batch_size": 64, "optimizer": {"type": "auto"}}, "optimizer", "adamw", "--optimizer"),
    ({"train_batch_size": 64, "zero_optimization": {"stage": "auto"}}, "zero", 3, "--zero"),
    ({"train_batch_size": 64, "tensor_parallel": {"autotp_size": "auto"}}, "tensor", 2, "--tp"),
]


@pytest.mark.parametrize(("keys", "field", "value", "option"), AUTO, ids=lambda x: str(x)[:50])
def test_an_option_beside_auto_wins(keys: dict[str, object], field: str, value: object, option: str) -> None:
    export.read_job(json.dumps(keys), "deepspeed", beside={field: value}).on(8)
    with pytest.raises(planner.UsageError, match="is 'auto'") as error:
        export.read_job(json.dumps(keys), "deepspeed")
    assert error.value.problem.hint == f"add {option}"


def test_a_file_of_transformers_is_read_with_options_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    own = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}
    enabled = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "gradient_clipping": "auto"}
    (tmp_path / "ds.json").write_text(json.dumps({**auto, **enabled, "optimizer": own, "zero_optimization": zero}))
    command = ("predict", "gpt2", "-H", "dgx-h100", "--dim", "seq=128", "--from", "deepspeed", tmp_path / "ds.json")
    for added, missing in (
        ((), "--micro-batch"), (("--micro-batch", 2), "-b"), (("--micro-batch", 2, "-b", 64), "--precision"),
    ):  # fmt: skip
        assert run(*command, *added) == 2
        assert f"(add {missing})" in capsys.readouterr().err  # and the next round follows it
    assert run(*command, "--micro-batch", 2, "-b", 64, "--precision", "bf16") == 0
    captured = capsys.readouterr()
    assert "global batch 64 = 32 micro-batches of 2" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize(
    ("added", "code", "said"),
    [
        ("", 0, ""),
        ("--tensor-model-parallel-sise 4", 2, "did you mean '--tensor-model-parallel-size'?"),
        ("--num-layers 16 --hidden-size 8192", 2, "--hidden-size is 8192"),
        ("--attention-backend unfused", 0, "note: ignored in t.sh: --attention-backend unfused: more memory, slower"),
        ("--mtp-num-layers 1", 2, "--mtp-num-layers is 1"),
    ],
)
def test_predict_says_what_it_does_with_megatrons_options(
    added: str,
    code: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.sh").write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {MEGATRON} 2 --seq-length 128 {added}")
    assert run("predict", "gpt2", "-H", "dgx-h100", "--dim", "seq=128", "--from", "megatron", "t.sh") == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert bool(captured.err) == bool(said)
    assert ("tokens/s" in captured.out) == (code == 0)


def test_cuts_on_the_command_line_win_over_those_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    small(folder)
    (tmp_path / "c.toml").write_text(TITAN + "data_parallel_shard_degree = -1")
    command = ("predict", folder / "8.json", "-H", "dgx-h100", "--dim", "seq=256", "--from", "torchtitan")
    for added, stages in (
        ((), 4),
        (("--pipeline-layout", "Et*2|t*2|t*2|t*2L"), 4),
        (("--pp", 2), 2),
        (("--pp", 1, "-b", 64), 1),
    ):
        output = tmp_path / "plan.json"
        assert run(*command, tmp_path / "c.toml", *added, "-o", output) == 0
        assert len(planner.read_plan(output).stages) == stages
    capsys.readouterr()


def test_the_measured_peaks_without_sequence_parallelism(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron-LM pull request 482: 28.8 GiB at TP 8 (`max_memory_allocated`), 7 % below as its rows of TP 1."""
    path = shared_path("cases/bug-01/without.sh")
    command = ("predict", "llama2-7b", "-H", "h800-8", "--from", "megatron", path, "--dim", "seq=2048")
    assert run(*command, "--format", "json") == 0
    captured = capsys.readouterr()
    fullest = json.loads(captured.out)["workers"][0]["memory"]
    gibibytes = sum(value for key, value in fullest.items() if key != "total") / 2**30
    assert gibibytes == pytest.approx(28.8, rel=0.075)
    assert "--hidden-dropout 0.1 (the default): more memory" in captured.err


def test_sizes_of_bundled_models_are_told() -> None:
    from planner.export.reading.sizes import sizes_of

    found = sizes_of(graph("llama3.2-1b"))
    assert (found.layers, found.predictors, found.experts, found.chosen) == (16, 0, 0, 0)
    assert (found.hidden, found.heads, found.groups, found.head) == ({2048}, {32}, {8}, {64})
    assert {8192, 512} <= found.inner
    assert 128256 in found.vocabulary


TIGHT = "[training]\nlocal_batch_size = 3\nglobal_batch_size = 24\n[parallelism]\npipeline_parallel_degree = 2\n"
CONTRARY = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}
FOLLOWED = [
    (
        "deepspeed", '{"gradient_accumulation_steps": 2}', "give -b and --micro-batch", "",
        ("-b", 64, "--micro-batch", 2),
    ),
    ("deepspeed", '{"gradient_accumulation_steps": 2}', "add one of them", '{"train_batch_size": 64}', ()),
    ("deepspeed", '{"train_batch_size": 12}', "give --micro-batch and -b", "", ("-b", 16, "--micro-batch", 2)),
    ("deepspeed", json.dumps(CONTRARY), "give -b and --micro-batch", "", ("-b", 128, "--micro-batch", 2)),
    (
        "deepspeed", json.dumps(CONTRARY), "take one of the three out",
        '{"train_batch_size": 64, "gradient_accumulation_steps": 8}', (),
    ),
    ("torchtitan", "[parallelism]\ndata_parallel_shard_degree = 4", "use --devices 4", "", ("--devices", 4)),
    (
        "torchtitan", TIGHT + "pipeline_parallel_microbatch_size = 2", "use --micro-batch", "", ("--micro-batch", 3),
    ),
    (
        "torchtitan", TIGHT + "pipeline_parallel_microbatch_size = 2",
        "change parallelism.pipeline_parallel_microbatch_size", TIGHT + "pipeline_parallel_microbatch_size = 3", (),
    ),
    (
        "megatron", "--bf16 --micro-batch-size 1 --use-distributed-optimizer --num-distributed-optimizer-instances 3",
        "use a number that does", "--bf16 --use-distributed-optimizer --num-distributed-optimizer-instances 2", (),
    ),
    (
        "megatron", f"{MEGATRON} 2 --num-layers-per-virtual-pipeline-stage 1 --decoder-first-pipeline-num-layers 4",
        "use --num-virtual-stages-per-pipeline-rank",
        f"{MEGATRON} 2 --num-virtual-stages-per-pipeline-rank 2 --decoder-first-pipeline-num-layers 4", (),
    ),
    ("megatron", f"{MEGATRON} 5", "PP 4 or 6", f"{MEGATRON} 4", ()),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "remedy", "mended", "added"), FOLLOWED, ids=lambda x: str(x)[:50])
def test_remedies_of_files_do_not_end_in_another_refusal(
    name: str, text: str, remedy: str, mended: str, added: tuple[object, ...], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "file").write_text(text)
    (tmp_path / "mended").write_text(mended or text)
    command = ("predict", "gpt2", "-H", "dgx-h100", "--dim", "seq=128", "--from", name)
    assert run(*command, tmp_path / "file") == 2
    assert remedy in capsys.readouterr().err
    assert run(*command, tmp_path / "mended", *added) == 0
    capsys.readouterr()
