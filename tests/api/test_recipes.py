"""Published recipes: what a row states, factors, jobs left out, pairs and ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recipe_rows import MODELS, RECIPES, Recipe, read_recipes
from benchmarks.recipes import Prediction, factor, left_out_errors, main, pair_rows, predict, ranking
from tests.shared_data import shared_path

ROW: dict[str, Any] = {
    "id": "own", "source": "Megatron-Bridge performance summary", "release": "NeMo 1", "model": "llama3-8b",
    "system": {"device": "H100-SXM", "gpus": 16}, "precision": "bf16", "gbs": 128, "mbs": 1, "seq": 4096,
    "tp": 2, "pp": 2, "cp": 1, "vp": 1, "ep": 1, "dp": 4, "fsdp": 0, "recompute": {"modules": []},
    "schedule": "1f1b", "overlap": ["tp_comm"], "cuda_graphs": {},
    "optimizer": {"name": "adam", "distributed": True, "main_grads": "bf16", "moments": "fp32"},
    "measured": {"iteration_s": 2.0, "tokens_per_s_per_gpu": 16384, "tflops_per_gpu": 790},
}  # fmt: skip


def recipe(folder: Path, **changes: Any) -> Recipe:
    """A row of a file of its own."""
    (folder / RECIPES).write_text(json.dumps({"rows": [{**ROW, **changes}]}))
    (folder / MODELS).write_text('{"models": {"deepseek-v3": {"train_gflops_per_token": {"4096": 260.6}}}}')
    return read_recipes(folder)[0][0]


def test_a_row_becomes_a_job_and_degrees(tmp_path: Path) -> None:
    found = recipe(tmp_path).statement
    assert found is not None
    (degrees,) = found.tried
    assert (found.model, found.seq, found.cluster, found.devices) == ("llama3-8b", 4096, "dgx-h100", 16)
    assert (found.job.global_batch, found.job.precision, found.job.optimizer) == (128, "bf16", "adam")
    assert (degrees.tensor, degrees.pipeline, degrees.data, degrees.micro_batch, degrees.zero) == (2, 2, 4, 1, 1)
    assert (found.stack, found.eager, dict(found.inner_overlap)["*"]) == ("megatron-2025", True, 0.85)
    assert found.product_pieces == 4
    alone = recipe(tmp_path, overlap=["dp_grad_reduce"]).statement
    assert alone is not None
    assert (dict(alone.inner_overlap)["*"], alone.product_pieces) == (0.4, 1)


def test_formats_sharding_and_software_are_read(tmp_path: Path) -> None:
    optimizer = {
        "distributed": True,
        "main_grads": "fp32",
        "moments": "bf16",
        "param_gather": "mxfp8 stored, bf16 gathered",
    }
    found = recipe(
        tmp_path, precision="mxfp8", optimizer=optimizer, fsdp=4, cuda_graphs={"impl": "full_iteration"}, overlap=[]
    ).statement
    assert found is not None
    assert (found.job.precision, found.job.optimizer) == ("mxfp8:grads=fp32,weights=bf16", "adam:moments=bf16")
    assert (found.tried[0].zero, found.stack, found.eager) == (3, "graphs", False)


def test_predictors_are_in_the_model_where_layout_or_flops_have_them(tmp_path: Path) -> None:
    def model(tflops: float, **changes: Any) -> str:
        measured = {"iteration_s": 2.0, "tokens_per_s_per_gpu": 1000, "tflops_per_gpu": tflops}
        found = recipe(tmp_path, model="deepseek-v3", measured=measured, tp=1, ep=4, **changes).statement
        assert found is not None
        return found.model

    assert (model(250), model(260)) == ("deepseek-v3", "deepseek-v3-mtp")
    assert model(250, pipeline_layout="Et*30|t*31mL") == "deepseek-v3-mtp"


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({"task": "lora"}, ("weights that are not trained (LoRA)",)),
        ({"model": "palm-3"}, ("model: palm-3",)),
        ({"precision": "int4"}, ("number format: int4",)),
        ({"system": {"device": "H900", "gpus": 16}}, ("system: H900",)),
        ({"fsdp": 3}, ("sharding over a part of the copies",)),
        ({"offload": {"optimizer": True}}, ("activations in the host's memory",)),
        ({"recompute": {"granularity": "selective"}}, ("recomputation of operators that are not named",)),
        ({"dp": None, "measured": {}}, ("not measured as an iteration", "parallelism not stated")),
    ],
)
def test_what_cannot_be_stated_is_named(changes: dict[str, Any], lacks: tuple[str, ...], tmp_path: Path) -> None:
    found = recipe(tmp_path, **changes)
    assert (found.lacks, found.statement) == (lacks, None)
    assert predict(found).refused == "; ".join(lacks)


@pytest.mark.parametrize(
    ("offload", "recompute", "stated"),
    [
        ({"layer_input": True}, {"granularity": "selective", "detail": "of others"}, (True, (), ("layer_input",))),
        ({"fine_grained": ["moe_act"]}, {"granularity": "selective", "modules": ["layernorm"]},
         (False, ("layernorm",), ("moe_act",))),
    ],
)  # fmt: skip
def test_offload_is_stated(
    offload: dict[str, Any], recompute: dict[str, Any], stated: tuple[Any, ...], tmp_path: Path
) -> None:
    found = recipe(tmp_path, offload=offload, recompute=recompute)
    assert found.statement is not None
    (degrees,) = found.statement.tried
    assert (degrees.recompute, degrees.repeats, degrees.offload) == stated
    assert ("all but the layers' inputs is recomputed" in found.assumed) == degrees.recompute


def test_what_a_source_leaves_open_is_tried_and_said(tmp_path: Path) -> None:
    found = recipe(tmp_path, vp=None, mbs=None, schedule="interleaved-1f1b")
    assert found.statement is not None
    tried = {(degrees.micro_batch, degrees.chunks) for degrees in found.statement.tried}
    # 32 layers on 2 workers: 2, 4, 8 or 16 chunks each; 34 with embedding and loss make 17.
    assert tried == {(size, chunks) for size in (1, 2) for chunks in (2, 4, 8, 16, 17)}
    assert "the number of chunks is the fastest" in found.assumed


def test_what_a_sources_scripts_set_goes_behind_the_rows_own_words(tmp_path: Path) -> None:
    llama = {"source": "Megatron-LM examples/llama", "release": "FP8 Performance", "overlap": None}
    silent = recipe(tmp_path, **llama, optimizer={"name": "adam"})
    own = recipe(tmp_path, **llama, optimizer={"name": "adam", "main_grads": "fp32"})
    assert silent.statement is not None
    assert own.statement is not None
    assert (silent.statement.job.precision, own.statement.job.precision) == ("bf16", "bf16:grads=fp32")
    assert dict(silent.statement.inner_overlap)["*"] == 0.85
    assert "distributed, main_grads, overlap as in examples/llama/README.md" in silent.assumed[0]
    ironwood = {"source": "Google tpu-recipes Ironwood", "precision": "fp8", "optimizer": {"name": "adamw"}}
    rows = [recipe(tmp_path, **ironwood, id=f"ironwood-deepseek-v3-fp8-{chips}-4096").statement for chips in (128, 256)]
    assert [row and row.job.precision for row in rows] == ["fp8", "fp8:grads=fp32"]
    named = recipe(tmp_path, model="deepseek-v3", release="NeMo 25.09", tp=1, ep=4, recompute=None)
    assert named.statement is not None
    assert named.statement.tried[0].repeats == (), "a row that names what it overlaps has its script's other words, too"


def test_sharding_over_a_part_of_the_copies_is_stated(tmp_path: Path) -> None:
    found = [recipe(tmp_path, fsdp=fsdp).statement for fsdp in (0, 2, 4)]
    assert [(s.tried[0].zero, s.tried[0].shard_over) for s in found if s] == [(1, 0), (3, 2), (3, 0)]


def test_a_dispatcher_that_sends_rows_once_is_read(tmp_path: Path) -> None:
    row = {"model": "qwen3-30b-a3b", "tp": 1, "ep": 8, "dp": 8}
    found = [recipe(tmp_path, **row, moe={"dispatcher": name}).statement for name in ("flex", "alltoall")]
    assert [statement and statement.rows_once for statement in found] == [True, False]


def made(tmp_path: Path, key: str, seconds: float, measured_s: float, gbs: int) -> Prediction:
    return Prediction(recipe(tmp_path, id=key, gbs=gbs, measured={"iteration_s": measured_s}), seconds)


def test_a_job_is_left_out_of_its_own_factor(tmp_path: Path) -> None:
    ratios = {64: (1.0,), 128: (1.2, 1.4), 256: (2.0,)}
    rows = [made(tmp_path, f"{gbs}-{r}", 10 * r, 10.0, gbs) for gbs, own in ratios.items() for r in own]
    assert factor(rows) == pytest.approx(1.3)  # medians by job: 1.0, 1.3, 2.0
    # Without the job of 64: (1.3 + 2.0) / 2; of 128: 1.5, errors 0.2 and 1/15; of 256: 1.15.
    assert left_out_errors(rows) == pytest.approx([1 - 1 / 1.65, (0.2 + 1 / 15) / 2, 2 / 1.15 - 1])


def test_errors_of_mixtures_and_of_dense_models_stand_apart_under_one_factor(tmp_path: Path) -> None:
    mixture = recipe(tmp_path, model="deepseek-v3", tp=1, ep=4)
    assert mixture.mixture
    rows = [*(made(tmp_path, str(gbs), gbs / 64, 1.0, gbs) for gbs in (64, 128)), Prediction(mixture, 8.0)]
    assert left_out_errors(rows, mixtures=False) == pytest.approx(
        [1 - 1 / 3, 1 - 2 / 2.5]
    )  # factors (2 + 4)/2, (1 + 4)/2
    assert left_out_errors(rows, mixtures=True) == pytest.approx([4 / 1.5 - 1])


def test_pairs_and_ranks(tmp_path: Path) -> None:
    rows = [made(tmp_path, "a", 3.0, 10.0, 64), made(tmp_path, "b", 2.0, 8.0, 64), made(tmp_path, "c", 2.5, 7.0, 64)]
    pair = {"slower": "a", "faster": "b", "ratio": 1.25, "differs": {"vp": [1, 2]}, "same_release": True}
    assert pair_rows(rows, [pair, {**pair, "faster": "x"}]) == [
        ["b", "vp 1 to 2", "same", "1.250", "1.500"],
        ["x", "vp 1 to 2", "same", "1.250", "not both stated"],
    ]
    assert ranking(rows)[0][2:] == ["3", "2 of 3"]  # b before c, which is measured as the faster


def test_the_report_of_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe(tmp_path)
    assert main([str(tmp_path), "--rows"]) == 0
    printed = capsys.readouterr().out
    assert "1 of 1 rows stated whole (100%)" in printed
    assert "| own | 2.000 s |" in printed


def test_our_plan_stands_beside_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"model": "gpt2", "seq": 1024, "tp": 1, "pp": 1, "dp": 16, "precision": "bf16"}
    recipe(tmp_path, **small, measured={"iteration_s": 1.0})
    assert main([str(tmp_path), "--plan", "row"]) == 0
    cells = capsys.readouterr().out.strip().splitlines()[-1].strip("| ").split(" | ")
    assert cells[:3] == ["gpt2 H100-SXM 16 128 1024", "megatron", "tp1 cp1 ep1 pp1 dp16 vp1 mb1 zero1"]
    experts_s, own_s, ratio = float(cells[3].rstrip(" s")), float(cells[4].rstrip(" s")), float(cells[5])
    assert ratio == pytest.approx(experts_s / own_s, rel=0.02)
    assert ratio >= 1  # the configuration is one of those that are searched
    assert main([str(tmp_path), "--plan", "row", "--limit", "0.001"]) == 0
    assert "not planned within" in capsys.readouterr().out


def test_most_of_the_published_rows_are_stated() -> None:
    folder = shared_path(f"reference/{RECIPES}").parent
    rows, pairs = read_recipes(folder)
    assert (len(rows), len(pairs)) == (165, 15)
    assert sum(not row.lacks for row in rows) >= 0.65 * len(rows)


def test_graphs_of_a_router_alone_leave_its_layer_to_the_host(tmp_path: Path) -> None:
    router = ["moe_router", "moe_preprocess"]
    scopes: tuple[list[str], ...] = (router, ["attn", *router], ["mamba"], [])
    graphs = [{"impl": "transformer_engine", "scope": scope} for scope in scopes]
    found = [recipe(tmp_path, cuda_graphs=each).statement for each in graphs]
    assert [statement and statement.eager for statement in found] == [True, False, False, False]


def test_one_kernel_for_all_experts_is_read(tmp_path: Path) -> None:
    found = [recipe(tmp_path, moe={"fused_grouped_mlp": fused}).statement for fused in (True, False)]
    assert [statement and statement.grouped for statement in found] == [True, False]


def test_rows_on_tpus_run_under_maxtext(tmp_path: Path) -> None:
    found = recipe(tmp_path, system={"device": "TPU7x (Ironwood)", "gpus": 16}, cuda_graphs=None).statement
    assert found is not None
    assert (found.cluster, found.stack, found.eager) == ("tpu7x-pod", "maxtext", False)
