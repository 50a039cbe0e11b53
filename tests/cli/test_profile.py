"""`shardplan profile`, end to end."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from tests.cli.plan_files import run as command_line
from tests.costs.test_imported import SMALL
from tests.importers.build import absent
from tests.shared_data import shared_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = command_line("profile", *arguments)
    return code, *capsys.readouterr()


GPT2 = "onnx/gpt2_124m_metadata.onnx"


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, str(shared_path(GPT2)), "--device", "h100-sxm-80gb", "--top", "3")
    assert code == 0
    assert "124,439,808" in out
    assert "m.transformer.h.0 .." in out
    assert "by rule" in out
    assert "info: the graph has no Dropout nodes" in out
    assert out.count("more") == 2


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, str(shared_path(GPT2)), "-d", "a100-sxm-80gb", "--format", "json", "--micro-batch", "2")
    document = json.loads(out)
    assert code == 0
    assert document["format"] == "shardplan-profile/1"
    assert document["micro_batch"] == 2
    assert document["whole"]["forward_flops"] == 2 * 291_648_307_200
    assert sum(g["count"] for g in document["layers"] if ".h." in g["name"]) == 12
    assert document["coverage"]["fallback"] == {}
    counted = document["coverage"]
    assert counted["rule"] + counted["plumbing"] + counted["folded"] + counted["dead"] == counted["total"] == 538


def test_csv(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, str(shared_path("onnx/vgg16.onnx")), "-d", "a100-sxm-80gb", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert [r["op"] for r in rows].count("Conv") == 13
    assert sum(float(r["forward_flops"]) for r in rows) == pytest.approx(990_096_916_480)
    assert {r["origin"] for r in rows} == {"rule"}


def test_bundled_models_have_dims(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "gpt2", "-d", "h100-sxm-80gb", "--dim", "seq=512", "--format", "json")
    assert code == 0
    assert json.loads(out)["whole"]["parameters"] == pytest.approx(124_439_808, rel=0.01)


def test_eager_attention_keeps_more(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(shared_path(GPT2))
    kept = []
    for attention in ("fused", "eager"):
        _, out, _ = run(capsys, model, "-d", "h100-sxm-80gb", "--attention", attention, "--format", "json")
        kept.append(json.loads(out)["whole"]["saved_bytes"])
    assert kept[1] > 1.3 * kept[0]


def test_imported_profiles_need_no_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.graph.txt"
    path.write_text(SMALL)
    code, out, _ = run(capsys, str(path), "--dim", "batch=4")
    assert code == 0
    assert "pipedream" in out
    assert "3.5 ms forward" in out


def test_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    path = tmp_path / "small.onnx"
    value = helper.make_tensor_value_info
    model = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Gather", ["table", "i"], ["e"])],
        "small",
        [value("x", TensorProto.FLOAT, (4, 8)), value("i", TensorProto.INT64, (4,))],
        [value("h", TensorProto.FLOAT, (4, 8)), value("e", TensorProto.FLOAT, (4, 64))],
        [absent("w", (8, 8)), absent("table", (10**8, 64))],
    )
    onnx.save(helper.make_model(model, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    code, out, err = run(capsys, str(path), "--measure", "--cache", str(tmp_path), "--format", "json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["source"] == "measured"
    assert document["whole"]["forward_s"] > 0
    assert any(n["code"] == "not-measured" for n in document["notes"])  # a table of 25 GB


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["{model}"], 2, "no device to price for"),
        (["{model}", "-d", "h100-sxm-80gb", "--measure", "--stack", "graphs"], 2, "--stack"),
        (["{model}", "-d", "h1000"], 4, "h1000"),
        (["{model}", "-d", "h100-sxm-80gb", "--precision", "fp12"], 2, "unknown precision"),
        (["nowhere.onnx", "-d", "h100-sxm-80gb"], 3, "nowhere.onnx"),
        (["{model}", "-d", "h100-sxm-80gb", "--dim", "batch"], 2, "NAME=SIZE"),
    ],
)
def test_bad_use_is_one_line(arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(shared_path("onnx/vgg16.onnx"))
    found, out, err = run(capsys, *(a.format(model=model) for a in arguments))
    assert found == code
    assert out == ""
    assert message in err
    assert "Traceback" not in err
