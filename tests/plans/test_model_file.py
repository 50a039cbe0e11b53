"""What a plan says of a model file that was exported at one batch, and the file written for another."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import planner
from planner.plans import dumps, seal
from tests.cli.plan_files import run
from tests.plans.fixed_batch import BATCH, WIDTH, model_file, plan_of


def test_a_plan_says_what_changes_in_a_file_of_another_batch(tmp_path: Path) -> None:
    path = model_file(tmp_path / "fixed.onnx")
    section = plan_of(path, 4).model
    assert section.file_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert section.exported_batch == BATCH
    assert section.identities == ("alike0", "alike1")
    assert {(e.operators, e.operand, e.values) for e in section.rebatch} == {
        (("rows0", "rows1"), 1, (12, WIDTH)),
        (("cube0", "cube1"), 1, (4, 3, WIDTH)),
    }
    assert [(t.tensor, t.shape) for t in section.rebatched_tensors] == [("table", (4, 3, WIDTH))]
    assert plan_of(path, BATCH).model.rebatch == ()


def test_a_plan_of_a_model_in_memory_says_nothing_of_a_file(tmp_path: Path) -> None:
    proto = onnx.load(model_file(tmp_path / "fixed.onnx"))
    job = planner.Job(global_batch=8, precision="fp32", optimizer="sgd", devices=2)
    degrees = planner.Degrees(pipeline=2, micro_batch=4)
    plan = planner.predict(planner.graph_from_proto(proto), planner.load_cluster("dgx-a100"), job, degrees).plan
    assert not {"file_sha256", "exported_batch", "rebatch", "identities"} & set(json.loads(dumps(plan))["model"])


def test_check_holds_the_file_section_to_the_file(tmp_path: Path) -> None:
    path = model_file(tmp_path / "fixed.onnx")
    plan, graph, cluster = plan_of(path, 4), planner.load_graph(path), planner.load_cluster("dgx-a100")
    assert not planner.check_plan(plan, graph, cluster, search_s=0).findings
    wrong = dataclasses.replace(plan.model.rebatch[0], values=(8, WIDTH))
    damaged = dataclasses.replace(plan, model=dataclasses.replace(plan.model, rebatch=(wrong, *plan.model.rebatch[1:])))
    found = [f.message for f in planner.check_plan(seal(damaged), graph, cluster, search_s=0).findings]
    assert any("model.rebatch[0].values[0]" in message for message in found)
    retrained = dataclasses.replace(plan.model, file_sha256="0" * 64)
    other = seal(dataclasses.replace(plan, model=retrained))
    assert not planner.check_plan(other, graph, cluster, search_s=0).findings


@pytest.mark.parametrize("batch", [1, 4])
def test_a_file_at_another_batch_computes_the_same_sample_by_sample(batch: int, tmp_path: Path) -> None:
    path, out = model_file(tmp_path / "fixed.onnx"), tmp_path / "other.onnx"
    assert run("models", "rebatch", path, "--batch", batch, "-o", out) == 0
    assert [d.dim_value for d in onnx.load(out).graph.output[0].type.tensor_type.shape.dim] == [batch, 3, WIDTH]
    onnx.checker.check_model(onnx.load(out), full_check=True)
    x = np.random.default_rng(1).standard_normal((4, 3, WIDTH)).astype(np.float32)
    before, after = ReferenceEvaluator(str(path)), ReferenceEvaluator(str(out))
    expected = np.concatenate([before.run(None, {"x": x[k : k + BATCH]})[0] for k in range(0, 4, BATCH)])
    found = np.concatenate([after.run(None, {"x": x[k : k + batch]})[0] for k in range(0, 4, batch)])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_weights_beside_a_file_stay_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, elsewhere = model_file(tmp_path / "fixed.onnx"), tmp_path / "folder"
    elsewhere.mkdir()
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=64)
    assert run("models", "rebatch", path, "--batch", 4, "-o", elsewhere / "x.onnx") == 2
    assert "weights.bin" in capsys.readouterr().err
    assert run("models", "rebatch", path, "--batch", 4, "-o", tmp_path / "x.onnx") == 0
    assert planner.load_graph(tmp_path / "x.onnx").batch == 4
