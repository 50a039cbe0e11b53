"""`shardplan plan` as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import planner
from cli.main import main
from tests.cli.plan_files import run
from tests.importers.build import model, node, value

LIGHT = sorted((Path(onnx.__file__).parent / "backend/test/data/light").glob("light_*.onnx"))


def mlp(path: Path, *, batch: int | str = 4, hidden: int = 64) -> Path:
    """A two-layer perceptron with absent weights."""
    weights = [
        helper.make_tensor("w0", TensorProto.FLOAT, [hidden, hidden], [0.0] * hidden**2),
        helper.make_tensor("w1", TensorProto.FLOAT, [hidden, hidden], [0.0] * hidden**2),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "w1"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, hidden])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        weights,
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def test_two_commands_lead_from_a_model_to_a_plan_that_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "gpt2.plan.json"
    assert run("plan", "gpt2", "--hardware", "dgx-a100", "--global-batch", 64, "-o", target) == 0
    summary = capsys.readouterr().out
    assert "gpt2 (124.4M parameters) on dgx-a100 (8 devices), bf16, adam" in summary
    assert "operators: " in summary
    assert "0 by fallback" in summary
    assert run("check", target, "--model", "gpt2", "--hardware", "dgx-a100") == 0


def test_two_runs_write_the_same_bytes_apart_from_provenance(tmp_path: Path) -> None:
    one, two = tmp_path / "1.json", tmp_path / "2.json"
    for path in (one, two):
        assert run("plan", "resnet50", "-H", "dgx-a100", "-b", 128, "-q", "-o", path) == 0
    documents = [json.loads(path.read_text()) for path in (one, two)]
    for document in documents:
        document.pop("provenance")
    assert documents[0] == documents[1]


def test_json_on_standard_output_is_the_plan_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "vgg16", "-H", "dgx-1v", "--precision", "fp16", "-b", 64, "--format", "json") == 0
    plan = planner.load_plan(capsys.readouterr().out)
    assert plan.micro_batches.global_batch == 64


def test_an_assumed_global_batch_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", mlp(tmp_path / "m.onnx"), "-H", "dgx-a100") == 0
    assert "global batch 64 (assumed: none was given)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--max-stages", 1), lambda p: len(p.stages) == 1),
        (("--devices", 2), lambda p: sum(len(s.ranks) for s in p.stages) <= 2),
        (("--micro-batch", 2), lambda p: p.micro_batches.size == 2),
        (("--schedule", "gpipe"), lambda p: p.schedule.name == "gpipe"),
        (("--zero", 0), lambda p: all(s.zero == 0 for s in p.stages)),
        (("--recompute", "always"), lambda p: all(s.recompute for s in p.stages)),
        (("--precision", "fp32"), lambda p: p.options.precision == "fp32"),
        (("--assume-dropout",), lambda p: p.options.assume_dropout),
    ],
)
def test_limits_are_kept(flags: tuple[object, ...], expected: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "gpt2", "-H", "dgx-a100", "-b", 32, "--format", "json", *flags) == 0
    assert expected(planner.load_plan(capsys.readouterr().out))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("truncated.onnx", "-H", "dgx-a100"), 3, "truncated.onnx"),
        (("text.onnx", "-H", "dgx-a100"), 3, "text.onnx"),
        (("free.onnx", "-H", "dgx-a100"), 3, "--dim"),
        (("absent.onnx", "-H", "dgx-a100"), 3, "no such file or bundled model"),
        (("gpt-2", "-H", "dgx-a100"), 3, "did you mean 'gpt2'"),
        (("m.onnx", "-H", "dgx-a1000"), 4, "did you mean 'dgx-a100'"),
        (("m.onnx", "-H", "bad.yaml"), 4, "bad.yaml:"),
        (("m.onnx", "-H", "dgx-a100", "-b", 7, "--micro-batch", 2), 5, "7"),
        (("llama3-405b", "-H", "dgx-a100"), 6, "needs"),
        (("m.onnx", "-H", "dgx-a100", "-o", "absent/x.json"), 8, "cannot write"),
        (("m.onnx", "-H", "dgx-a100", "--precision", "bf61"), 2, "did you mean 'bf16'"),
        (("m.onnx", "-H", "dgx-a100", "--optimizer", "adm"), 2, "did you mean 'adam"),
        (("m.onnx", "-H", "dgx-a100", "--schedule", "1f2b"), 2, "did you mean '1f1b'"),
        (("m.onnx", "-H", "dgx-a100", "--dim", "batch"), 2, "NAME=SIZE"),
        (("m.onnx",), 2, "--hardware"),
    ],
)
def test_bad_input_is_one_error_with_its_own_code_and_writes_nothing(
    arguments: tuple[object, ...],
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = mlp(tmp_path / "m.onnx").read_bytes()
    free = model([node("Relu", ["x"], ["y"])], [value("x", ["rows", "columns"])], [value("y", None)])
    (tmp_path / "free.onnx").write_bytes(free.SerializeToString())
    (tmp_path / "truncated.onnx").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.onnx").write_text("this is not a model\n")
    (tmp_path / "bad.yaml").write_text("name: bad\n")
    before = sorted(p.name for p in tmp_path.iterdir())
    assert run("plan", *arguments) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_symbolic_batch_needs_no_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = mlp(tmp_path / "free.onnx", batch="samples")
    assert run("plan", path, "-H", "dgx-a100", "-b", 64, "--format", "json") == 0
    plan = planner.load_plan(capsys.readouterr().out)
    assert plan.micro_batches.size * plan.micro_batches.count <= 64
    assert "batch-assumed" in {note.code for note in plan.notes}


@pytest.mark.parametrize("path", LIGHT, ids=lambda p: p.stem)
def test_every_light_model_of_the_onnx_package_plans(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", path, "-H", "dgx-a100", "--devices", 2, "-b", 64, "--format", "json") == 0
    plan = planner.load_plan(capsys.readouterr().out)
    assert plan.coverage.by_fallback == 0
    assert planner.plans.validate(plan) == []


def test_help_starts_without_heavy_imports() -> None:
    code = (
        "import sys; from cli.main import app; from click.testing import CliRunner;"
        "result = CliRunner().invoke(app, ['plan', '--help']); assert result.exit_code == 0, result.output;"
        "heavy = {'numpy', 'onnx', 'ortools', 'pydantic', 'rich', 'networkx'};"
        "print(sorted({m.split('.')[0] for m in sys.modules} & heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("pln") == 2
    assert "did you mean 'plan'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [("plan",), ("plan", "gpt2", "--preciion", "bf16"), ("pln",), ("hardware", "lst")]
)
def test_usage_errors_are_one_line(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("shardplan: error: ")


def test_debug_may_stand_anywhere_and_lets_the_error_through(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(planner.HardwareError, match="unknown hardware"):
        main(["plan", "gpt2", "-H", "nope", "--debug"])


def test_names_in_brackets_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, hardware = tmp_path / "m[bold]x.onnx", tmp_path / "l[red]z.yaml"
    assert run("models", "build", "gpt3-125m", "-o", model) == 0
    assert run("hardware", "init", "--from", "dgx-a100", "-o", hardware) == 0
    hardware.write_text(hardware.read_text().replace("cluster: l[red]z", 'cluster: "l[red]z"'))
    capsys.readouterr()
    assert run("plan", model, "-H", hardware, "-b", 16, "-o", tmp_path / "p[x].json") == 0
    said = capsys.readouterr().out
    assert "m[bold]x (" in said
    assert "p[x].json" in said
    assert run("profile", model, "--device", "h100-sxm-80gb") == 0
    assert "m[bold]x on" in capsys.readouterr().out


def test_ways_to_share_operators_are_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ("--for", "any", "--zero", 1, "--pp", 8, "--micro-batch", 1)
    asked = ("llama3-70b", "-H", "dgx-h100", "--nodes", 4, *limits)
    assert run("plan", *asked, "-o", tmp_path / "x.json") == 0
    said = capsys.readouterr().out
    assert said.count("every operator shared by groups of 4 ranks: mesh tensor 4") == 1
    assert len(planner.read_plan(tmp_path / "x.json").shardings) > 1


def test_output_that_nobody_reads_is_no_difference_between_plans() -> None:
    command = [sys.executable, "-c", "from cli.main import main; main(['models', 'list'])"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stderr is not None
        started.stdout.close()
        assert started.stderr.read() == b""
    assert started.returncode == 141


def test_a_target_takes_the_least_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, asked = tmp_path / "gpt2.json", ("plan", "gpt2", "-H", "dgx-a100", "--dim", "seq=128")
    assert run(*asked, "-b", 64, "--target", "step=40ms", "--nodes", 1, "-o", path) == 0
    out = capsys.readouterr().out
    plan = planner.read_plan(path)
    assert plan.predictions.reached_s <= 0.04
    assert f"step=40ms needs steps of at most 40 ms: {plan.hardware.device_count} device" in out
    assert "reaches it" in out
    assert run(*asked, "--target", "step=40ms") == 2
    assert "--target needs --global-batch" in capsys.readouterr().err
    assert run(*asked, "-b", 64, "--nodes", 1, "--target", "step=1ms") == 6
    assert "no number of devices does: " in capsys.readouterr().err


def test_changed_hardware_changes_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("plan", "gpt2", "-H", "dgx-a100", "--nodes", 2, "--dim", "seq=128", "-b", 64, "--for", "any")
    seconds = []
    for change in ((), ("--set", "network.bandwidth=1Gbit/s", "--set", "nvlink.bandwidth=1GB/s")):
        assert run(*asked, *change, "--format", "json") == 0
        seconds.append(planner.load_plan(capsys.readouterr().out).predictions.reached_s)
    assert seconds[1] > 1.5 * seconds[0]
    assert run(*asked, "--set", "network.bandwith=1Gbit/s") == 2
    assert "did you mean 'network.bandwidth'" in capsys.readouterr().err
