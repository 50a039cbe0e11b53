"""A plan held against a model or a cluster: what differs is said, options first, and following the remedy helps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.plan_files import run

JOB = ("-H", "dgx-a100", "-b", "64", "--pp", "1", "--tp", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plans of gpt2 at 256 tokens: on one node, on two, with a changed figure, and under another stack."""
    made = tmp_path_factory.mktemp("identity")
    more = {
        "plain": (),
        "two": ("--nodes", "2"),
        "set": ("--set", "nvlink.bandwidth=200GB/s"),
        "stack": ("--stack", "fsdp-2023"),
    }
    for name, options in more.items():
        file = made / f"{name}.plan.json"
        assert run("predict", "gpt2", *JOB, "--dim", "seq=256", *options, "-o", file) == 0
    return made


def said(capsys: pytest.CaptureFixture[str], *words: object, code: int) -> str:
    capsys.readouterr()
    assert run(*words) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


SIZES = (
    "the plan is for gpt2 at other sizes (made with --dim seq=256): input_ids 256 int64 -> 1024 int64; "
    "lm_head.matmul 256 x 50257 bfloat16 -> 1024 x 50257 bfloat16 (add --dim seq=256, or plan again for this model)"
)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("check", "plain.plan.json", "--model", "gpt2"), 7),
        (("export", "plain.plan.json", "--to", "megatron", "-o", "out", "--model", "gpt2"), 2),
    ],
    ids=lambda words: words[0] if isinstance(words, tuple) else "",
)
def test_a_length_that_was_asked_for_is_said_and_is_the_remedy(
    words: tuple[str, ...], code: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert SIZES in said(capsys, *words, code=code)
    said(capsys, *words, "--dim", "seq=256", code=0)


@pytest.mark.parametrize(
    ("plan", "given", "message"),
    [
        ("two", (), "16 devices in the plan, 8 devices here (add --nodes 2, or plan again for this hardware)"),
        ("plain", ("--nodes", "2"), "8 devices in the plan, 16 devices here (add --nodes 1, or plan again"),
        ("set", (), "nvlink.bandwidth=200GB/s changed in the plan, none here (add --set nvlink.bandwidth=200GB/s, or"),
        (
            "stack",
            ("--stack", "megatron-2025"),
            "under fsdp-2023 in the plan, under megatron-2025 here (add --stack fsdp-2023, or",
        ),
    ],
)
def test_nodes_figures_and_stack_that_were_asked_for_are_said_and_are_the_remedy(
    plan: str, given: tuple[str, ...], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("check", folder / f"{plan}.plan.json", "--hardware", "dgx-a100")
    text = said(capsys, *words, *given, code=7)
    assert message in text
    remedy = re.search(r"\(add (--\S+ \S+), or", text)
    assert remedy is not None
    said(capsys, *words, *remedy[1].split(), code=0)


@pytest.mark.parametrize("plan", ["plain", "two", "set", "stack"])
def test_a_plan_is_made_again_with_the_options_that_it_records(
    plan: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "check", folder / f"{plan}.plan.json", "--replan", code=0)
    assert "planning anew gives the same plan" in text


def test_another_model_and_other_hardware_are_said_as_such(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = folder / "plain.plan.json"
    assert "model: the plan is for gpt2, not gpt2-medium" in said(
        capsys, "check", plan, "--model", "gpt2-medium", code=7
    )
    assert "hardware: the plan is for dgx-a100, not dgx-h100 (plan again for this hardware)" in said(
        capsys, "check", plan, "--hardware", "dgx-h100", code=7
    )


def test_a_model_that_changed_says_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, plan = tmp_path / "m.onnx", tmp_path / "m.plan.json"
    for layers in (2, 3):
        run("models", "build", "gpt2", "--layers", layers, "--seq", "128", "-o", model)
        if layers == 2:
            assert run("predict", model, *JOB, "-o", plan) == 0
    words = "the plan is for m, as it was: 1 layer more (transformer.h.2); 53,561,088 -> 60,648,960 parameters"
    assert words in said(capsys, "check", plan, "--model", model, code=7)


def test_diff_takes_models_at_the_sizes_of_its_plans(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = folder / "plain.plan.json"
    said(capsys, "diff", plan, plan, "--model", "gpt2", "-H", "dgx-a100", code=0)
    text = said(capsys, "diff", plan, plan, "--model", "gpt2", "--dim", "seq=512", code=2)
    assert "gpt2 is the model of neither plan: the plan is for gpt2 at other sizes (made with --dim seq=256)" in text


def test_options_are_recorded_outside_the_digest_and_only_where_given(folder: Path) -> None:
    text = (folder / "set.plan.json").read_text()
    assert '"dims": ["seq=256"]' in text
    assert '"changes": ["nvlink.bandwidth=200GB/s"]' in text
    assert '"nodes": "' not in (folder / "plain.plan.json").read_text()
    assert '"nodes": "2"' in (folder / "two.plan.json").read_text()


@pytest.mark.parametrize("path", ["--output=gp3:y", "-x:y", "--no-index:z"])
def test_what_looks_like_a_revision_is_no_option_of_git(
    path: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(file.name for file in folder.iterdir())
    said(capsys, "diff", "plain.plan.json", "plain.plan.json", f"--rules={path}", code=7)
    said(capsys, "diff", "plain.plan.json", "--", path, code=7)
    said(capsys, "calibrate", "gpt2", "-H", "dgx-a100", f"--runs={path}", "-o", "none.yaml", code=7)
    assert sorted(file.name for file in folder.iterdir()) == before
