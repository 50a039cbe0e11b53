"""`shardplan hardware` as a user calls it."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from cli.main import main
from tests.cli.plan_files import run as command_line

ROOT = Path(__file__).resolve().parents[2]


def _run(*arguments: object) -> int:
    return command_line("hardware", *arguments)


Capture = pytest.CaptureFixture[str]


def test_list(capsys: Capture) -> None:
    assert _run("list") == 0
    lines = capsys.readouterr().out.splitlines()
    found = {line.split()[0]: line.split()[1:4] for line in lines if line}
    assert found["name"] == ["nodes", "devices", "type"]
    assert found["dgx-a100"] == ["1", "8", "a100-sxm-80gb"]
    assert found["tpu-v4-pod"] == ["16", "64", "tpu-v4"]
    assert found["gb200-nvl72"] == ["1", "72", "gb200-186gb"]


def test_list_devices(capsys: Capture) -> None:
    assert _run("list", "--devices") == 0
    assert re.search(r"h100-sxm-80gb +79.1 GiB +3.35 TB/s +989 TFLOP/s +NVIDIA H100", capsys.readouterr().out)
    assert _run("list", "--devices", "--format", "json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["mi300x-192gb"]["memory_bytes"] == round(191.98 * 2**30)
    assert rows["mi300x-192gb"]["achievable"] == 0.47


def test_list_as_json(capsys: Capture) -> None:
    assert _run("list", "--format", "json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["superpod-h100"]["levels"] == ["nvlink", "leaf"]


def test_show(capsys: Capture) -> None:
    assert _run("show", "dgx-a100", "--nodes", "2") == 0
    out = capsys.readouterr().out
    assert "dgx-a100 (2 nodes)" in out
    tree = ["infiniband joins 2 nodes: 200 GB/s a node, 25 GB/s a device (one direction), 20", "us, 90% achievable"]
    assert out.splitlines()[4:6] == tree
    assert "nvlink joins 8 devices: 300 GB/s a device (one direction), 5.5 us" in out
    assert "16 x a100-sxm-80gb: 79.2 GiB (77.3 GiB plannable)" in out
    assert re.search(r"measured +all_reduce of 2 to 8 +\[2\]", out)
    assert re.search(r"neighbour_buffers +220 MiB +\[\d+\] +not verified", out)
    assert "shardplan hardware show megatron-2025" in out
    assert "[2] VIA-Research/vTrain" in out


def test_show_a_mesh_and_a_device(capsys: Capture) -> None:
    assert _run("show", "nd-mi300x-v5") == 0
    assert "448 GB/s a device, 64 GB/s to one peer" in capsys.readouterr().out
    assert _run("show", "tpu-v4") == 0
    out = capsys.readouterr().out
    assert "1 device, fingerprint" in out
    assert re.search(r"price +3.22 \$/h", out)


def test_show_as_text(capsys: Capture) -> None:
    assert _run("show", "dgx-1v", "--format", "yaml") == 0
    assert capsys.readouterr().out == (ROOT / "hardware_profiles" / "dgx-1v.yaml").read_text()


def test_show_resolved(tmp_path: Path, capsys: Capture) -> None:
    assert _run("show", "dgx-1v", "--nodes", "3", "--resolved") == 0
    path = tmp_path / "resolved.yaml"
    path.write_text(capsys.readouterr().out)
    assert _run("lint", path) == 0
    capsys.readouterr()
    assert _run("show", path, "--format", "json") == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["cluster"], content["nodes"]) == ("dgx-1v", 3)
    assert list(content["device_types"]) == ["v100-sxm2-16gb"]


def test_unknown_hardware_is_one_line(capsys: Capture) -> None:
    assert _run("show", "dgx-a10") == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "unknown hardware 'dgx-a10' (did you mean 'dgx-a100'" in captured.err


def test_lint_prints_every_finding(tmp_path: Path, capsys: Capture) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    assert _run("init", "-o", good) == 0
    bad.write_text(good.read_text().replace("25 GB/s", "25 Gb/s", 1).replace("nodes: 1", "nods: 1"))
    capsys.readouterr()
    assert _run("lint", good, bad, tmp_path / "none.yaml") == 4
    out = capsys.readouterr().out
    assert "unknown key 'nods' (did you mean 'nodes'" in out
    assert "write Gbit/s for bits or GB/s for bytes" in out
    assert re.search(r"port: \{value: 25 Gb/s.*\n +\| +\^{7}\n", out)
    assert "none.yaml: cannot read: " in out
    assert out.endswith("3 files checked: 3 errors\n")
    assert _run("lint", good) == 0
    assert capsys.readouterr().out == "1 file checked: no errors\n"


def test_init(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "lab.yaml"
    assert _run("init", "--from", "ethernet-25g", "-o", path) == 0
    text = path.read_text()
    assert "cluster: lab\n" in text
    assert "yaml-language-server" in text
    assert _run("lint", path) == 0
    assert _run("init", "-o", path) == 2
    assert path.read_text() == text
    assert "the file exists" in capsys.readouterr().err
    assert _run("init", "-o", path, "--force") == 0
    assert path.read_text() != text
    assert _run("init", "-o", tmp_path / "no" / "where.yaml") == 8
    capsys.readouterr()
    assert _run("init") == 0
    assert "cluster: my-dgx-a100\n" in capsys.readouterr().out


def test_schema(capsys: Capture) -> None:
    assert _run("schema") == 0
    schema = json.loads(capsys.readouterr().out)
    assert "port" in schema["definitions"]["LevelEntry"]["required"]


@pytest.mark.parametrize("name", [(), ("list",), ("show",), ("lint",), ("init",), ("import",), ("schema",)])
def test_help_has_examples(name: tuple[str, ...], capsys: Capture) -> None:
    assert _run(*name, "--help") == 0
    assert re.search(r"Examples?:\n  +shardplan hardware", capsys.readouterr().out)


def test_the_example_of_the_guide_lints_clean(tmp_path: Path, capsys: Capture) -> None:
    guide = (ROOT / "docs" / "hardware.md").read_text()
    *examples, stack = re.findall(r"```yaml\n(.*?)```", guide, flags=re.DOTALL)
    example = examples[0]
    assert len(examples) == 3
    for number, text in enumerate(text for text in examples if text.startswith("cluster:")):
        each = tmp_path / f"example{number}.yaml"
        each.write_text(text)
        assert _run("lint", "--strict", each) == 0, capsys.readouterr().out
    mine = tmp_path / "mine.yaml"
    mine.write_text(stack)
    assert _run("lint", mine) == 0
    assert "launch: {value: 35 us" in stack
    path = tmp_path / "lab.yaml"
    path.write_text(example)
    assert _run("lint", path) == 0
    capsys.readouterr()
    assert _run("show", path) == 0
    assert "8 x rtx-4090-24gb" in capsys.readouterr().out


WARNED = """\
cluster: lab
devices: a100-sxm-80gb
node:
  - level: pcie
    size: 4
    port: {value: 32 TB/s, direction: per-direction}
    latency: 5 us
    efficiency: 76%
"""


def test_what_is_not_plausible_is_a_warning_that_does_not_fail(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(WARNED)
    assert _run("lint", path) == 0
    out = capsys.readouterr().out
    assert f"warning: {path}:6:11: PCIe of 32 TB/s is not plausible" in out
    assert out.endswith("1 file checked: no errors, 2 warnings\n")
    assert _run("lint", path, "--strict") == 4


def test_lint_for_machines(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(WARNED.replace("size: 4", "sise: 4"))
    assert _run("lint", path, "--format", "json") == 4
    document = json.loads(capsys.readouterr().out)
    assert document["errors"] == len(document["findings"])
    assert any(f["where"] == f"{path}:5:5" for f in document["findings"])
    assert _run("lint", path, "--format", "github") == 4
    assert f"::error file={path},line=5,col=5::unknown key 'sise' (did you mean 'size'?)" in capsys.readouterr().out
    path.write_text(WARNED)
    assert _run("lint", path, "--format", "github") == 0
    assert f"::warning file={path},line=6,col=11::PCIe of 32 TB/s" in capsys.readouterr().out


FEW_FIGURES = (
    "--device",
    "h100-sxm-80gb",
    "--nodes",
    2,
    "--inside",
    "nvlink:450GB/s",
    "--between",
    "infiniband:400Gbit/s,ports=8",
)


def test_a_profile_by_flags_lints_clean(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "lab.yaml"
    assert _run("init", *FEW_FIGURES, "-o", path) == 0
    assert _run("lint", path, "--strict") == 0
    assert _run("init", *FEW_FIGURES[:4]) == 2
    assert "no link connects the 8 devices of a node" in capsys.readouterr().err
    assert _run("init", "--nodes", 2) == 2


def test_a_profile_by_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "asked.yaml"
    answers = "h100-sxm-80gb\n8\n2\nnvlink\n450GB/s\ninfiniband\n400Gbit/s\n8\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(answers))
    assert _run("init", "--ask", "-o", path) == 0
    assert _run("lint", path, "--strict") == 0
    flags = tmp_path / "flags" / "asked.yaml"
    flags.parent.mkdir()
    assert _run("init", *FEW_FIGURES, "-o", flags) == 0
    assert flags.read_text() == path.read_text()


def test_pasted_text_becomes_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    text = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV12\t0-63\nGPU1\tNV12\t X \t0-63\n"
    (tmp_path / "topo.txt").write_text(text)
    path = tmp_path / "node.yaml"
    assert _run("import", tmp_path / "topo.txt", "--device", "a100-sxm-80gb", "-o", path) == 0
    assert _run("lint", path, "--strict") == 0
    assert _run("import", tmp_path / "topo.txt") == 2
    assert "give --device NAME" in capsys.readouterr().err
    (tmp_path / "words.txt").write_text("hello")
    assert _run("import", tmp_path / "words.txt", "--device", "a100-sxm-80gb") == 4


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_names(shell: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        main(["completion", shell])
    assert f"_SHARDPLAN_COMPLETE={shell}_complete" in capsys.readouterr().out
    for words, name in ((["plan", "gpt2-"], "gpt2-xl"), (["plan", "gpt2", "-H", "dgx-b"], "dgx-b200"),
                        (["hardware", "init", "--device", "h100"], "h100-sxm-80gb")):  # fmt: skip
        monkeypatch.setenv("_SHARDPLAN_COMPLETE", f"{shell}_complete")
        monkeypatch.setenv("COMP_WORDS", " ".join(["shardplan", *words]))
        monkeypatch.setenv("COMP_CWORD", words[-1] if shell == "fish" else str(len(words)))
        with pytest.raises(SystemExit):
            main([])
        assert name in capsys.readouterr().out
