"""Limits that a user sets on the joint search, and other ways to ask for a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

import planner
from tests.cli.plan_files import run

GPT = ("gpt3-125m", "--hardware", "dgx-a100", "--global-batch", 32)


def planned(folder: Path, *options: object) -> planner.Plan:
    target = folder / "x.plan.json"
    assert run("plan", *GPT, *options, "-q", "-o", target) == 0
    assert run("check", target, "--model", "gpt3-125m", "--hardware", "dgx-a100") == 0
    return planner.read_plan(target)


def test_widths_are_what_was_asked_for(tmp_path: Path) -> None:
    plan = planned(tmp_path, "--tp", "2", "--pp", "2", "--dp", "2", "--schedule", "1f1b")
    assert len(plan.stages) == 2
    assert [len(stage.replicas) for stage in plan.stages] == [2, 2]
    assert {len(group) for stage in plan.stages for group in stage.replicas} == {2}
    assert [axis.size for axis in plan.shardings[0].axes] == [2]


def test_a_mesh_of_two_axes(tmp_path: Path) -> None:
    plan = planned(tmp_path, "--mesh", "2x2", "--tp", "4", "--pp", "1")
    assert [axis.size for axis in plan.shardings[0].axes] == [2, 2]


def test_a_layer_stays_where_it_was_put(tmp_path: Path) -> None:
    limits = ("--devices", 6, "--tp", 1, "--pp", 3, "--uniform", "--for", "any")
    plan = planned(tmp_path, *limits, "--keep", "layer0 on stage 1", "--keep", "layer11=-1")
    assert len({len(stage.replicas) for stage in plan.stages}) == 1
    assert plan.stages[0].modules == ("transformer.wte", "transformer")
    assert plan.stages[1].modules[0].startswith("transformer.h.0-")
    assert any(module.startswith("transformer.h.") and module.endswith("11") for module in plan.stages[2].modules)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (
            ("--tp", "8", "--pp", "8"),
            5,
            "TP 8 x PP 8 takes 64 devices of 8 (use smaller degrees, or more devices: --nodes 8",
        ),
        (("--cp", "16"), 5, "CP 16 takes 16 devices of 8"),
        (("--dp", "12"), 5, "DP 12 takes 12 devices of 8 (use smaller degrees, or more devices: --nodes 2 makes 16)"),
        (("--pp", "40", "--nodes", "8"), 5, "40 stages of a model with 27 blocks (use --pp 27 or less)"),
        (("--dp", "8", "--pp", "2"), 6, "without --pp 2"),
        (("--devices", "4096"), 5, "dgx-a100 has 8 devices, not 4,096 (--nodes 512 makes 4,096)"),
        (("--zero", "4"), 2, "'--zero': 4 is not in the range"),
        (("--least", "dollars"), 2, "add --target"),
        (("--target", "step=1s", "--devices", "4"), 2, "give their maximum by --nodes"),
        (("--tp", "3"), 5, "use 1, 2, 4"),
        (("--tp", "16"), 5, "needs 16 ranks, of which there are 8"),
        (("--mesh", "16"), 5, "needs 16 ranks, of which there are 8"),
        (("--mesh", "3"), 5, "no mesh of 3 ranks lies alike everywhere"),
        (("--mesh", "2x2", "--tp", "2"), 5, "none of the meshes that are allowed has 2 ranks"),
        (("--mesh", "2x2", "--tp", "1"), 5, "no mesh has all of --tp 1, --mesh 2x2"),
        (("--mesh", "2x2", "--pp", "8"), 6, "without --mesh 2x2"),
        (("--tp", "two"), 2, "'two' is not a list of whole numbers"),
        (("--mesh", "2y2"), 2, "is not a mesh such as 8 or 2x8"),
        (("--keep", "layer3"), 2, "layer3 on stage 0"),
        (("--keep", "layer77 on stage 0"), 5, "no block is called 'layer77'"),
        (("--keep", "layer0 on stage 9"), 5, "'layer0' cannot be on stage 9: 9 stages before it would share"),
        (("--keep", "layer11 on stage -9"), 5, "'layer11' cannot be on stage -9: 8 stages behind it would share"),
        (("--forbid", "MatMull:k"), 5, "did you mean 'MatMul'"),
        (("--system", "chimera", "--schedule", "1f1b"), 2, "--system chooses its own schedule"),
        (("--system", "chimra"), 2, "did you mean 'chimera'"),
        (("--system", "chimera", "--tp", "2"), 2, "the rules of Chimera cannot follow --tp 2"),
        (("--system", "gpipe", "--recompute", "never"), 2, "the rules of GPipe cannot follow --recompute never"),
        (
            ("--schedule", "interleaved", "--devices", "1"),
            5,
            "a pipeline needs two devices at the least, and may use 1",
        ),
        (("--schedule", "chimera", "--pp", "3"), 5, "with --pp 3"),
        (("--micro-batch", "3"), 5, "no micro-batch size of 3 divides the global batch of 32"),
        (("--system", "chimera", "--micro-batch", "3"), 5, "no micro-batch size of 3 divides the global batch of 32"),
        (("--global-batch", "1000000007"), 5, "1,000,000,007 micro-batches of 1 in a pipeline"),
    ],
)
def test_limits_that_cannot_be_met_say_why(
    options: tuple[str, ...], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", *GPT, *options, "-o", tmp_path / "x.json") == code
    assert words in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("options", [("--schedule", "zb-h1"), ("--system", "chimera"), ("--zero", "3", "--tp", "1")])
def test_other_ways_to_ask_give_plans_that_simulate(options: tuple[str, ...], tmp_path: Path) -> None:
    plan = planned(tmp_path, *options)
    assert run("simulate", tmp_path / "x.plan.json", "--quiet") in (0, 2)
    assert plan.predictions.iteration_s > 0


def test_where_memory_is_in_the_way_the_limits_are_not_blamed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "gpt3-13b", "-H", "v100-pcie-4", "-b", 8, "--precision", "fp16", "--tp", "4") == 6
    said = capsys.readouterr().err
    assert "with or without --tp 4" in said
    assert "GiB" in said


def test_numbers_of_stages_and_replicas_are_kept_for_a_given_schedule(tmp_path: Path) -> None:
    plan = planned(tmp_path, "--schedule", "zb-h1", "--pp", "4", "--dp", "1")
    assert [len(stage.replicas) for stage in plan.stages] == [1, 1, 1, 1]
    both_ways = planned(tmp_path, "--schedule", "chimera", "--pp", "4", "--dp", "4")
    assert [len(stage.replicas) for stage in both_ways.stages] == [4, 4, 4, 4]


def test_unlike_devices_share_no_operators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool = ("plan", "t5-small", "-H", "mixed-pool", "-b", 2, "-o", tmp_path / "x.json", "-q")
    assert run(*pool, "--mesh", "2") == 5
    assert "only the first 4 of mixed-pool are equal" in capsys.readouterr().err
    assert run(*pool, "--mesh", "2", "--devices", 4) == 0
    assert {stage.group_ranks for stage in planner.read_plan(tmp_path / "x.json").stages} <= {1, 2}
    # the whole pool is tried where three of its devices do not suffice
    assert run("plan", "t5-11b", "-H", "mixed-pool", "-b", 2, "--mesh", "2", "--devices", 3) == 6
    assert "without --mesh 2 and --devices 3" in capsys.readouterr().err


def test_limits_without_a_plan_are_the_users_own(capsys: pytest.CaptureFixture[str]) -> None:
    """JAX has no pipelines, but the user set no number of stages. With inputs of layers in the host 13.3 GiB fit."""
    job = "plan", "llama3-8b", "-H", "tpu-v5e-pod", "--tp", 1, "--for", "jax"
    assert run(*job, "--set", "device.memory=16GiB") == 0
    assert "offload layer_input" in capsys.readouterr().out
    assert run(*job, "--set", "device.memory=13GiB") != 0
    assert "no plan has all of --tp 1, --for jax (" in " ".join(capsys.readouterr().err.split())
