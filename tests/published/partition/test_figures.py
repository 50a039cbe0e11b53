"""Figures of instances that no computation can take: refused with their field, in every format."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from planner import ModelError, UsageError, check_partition, load_instance, partition
from tests.published.partition.instances import PIPEDREAM, operator_graph, piper

LITERALS = ("1e308", "9" * 400, "9" * 5000, "1e400", "Infinity", "NaN", "-1")


def refused(text: str, path: Path) -> str:
    path.write_text(text)
    with pytest.raises(ModelError) as caught:
        load_instance(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("literal", LITERALS)
@pytest.mark.parametrize(("key", "number"), [("fpgaLatency", "2.0"), ("maxSizePerFPGA", "250"), ("maxFPGAs", "2")])
def test_operator_graphs(key: str, number: str, literal: str, tmp_path: Path) -> None:
    text = json.dumps(operator_graph()).replace(f'"{key}": {number}', f'"{key}": {literal}', 1)
    said = refused(text, tmp_path / "g.json")
    assert key in said or ".json:1:" in said


@pytest.mark.parametrize("literal", LITERALS)
@pytest.mark.parametrize(("key", "number"), [("timePerSample", "1.0"), ("bandwidth", "1.0"), ("maxDevices", "2")])
def test_piper_instances(key: str, number: str, literal: str, tmp_path: Path) -> None:
    text = json.dumps(piper()).replace(f'"{key}": {number}', f'"{key}": {literal}', 1)
    said = refused(text, tmp_path / "p.json")
    assert key in said or ".json:1:" in said


@pytest.mark.parametrize("literal", ["1e308", "9" * 400, "1e400", "inf", "nan", "-1"])
@pytest.mark.parametrize("field", ["forward_compute_time=20.000", "parameter_size=4000.000"])
def test_pipedream_profiles(field: str, literal: str, tmp_path: Path) -> None:
    text = PIPEDREAM.replace(field, f"{field.partition('=')[0]}={literal}", 1)
    assert ":2:1: node2 has a figure" in refused(text, tmp_path / "a.graph.txt")


@pytest.mark.parametrize("number", ["9" * 400, "9" * 5000])
def test_node_numbers_of_many_digits(number: str, tmp_path: Path) -> None:
    assert "is not a node" in refused(PIPEDREAM.replace("node4", f"node{number}"), tmp_path / "a.graph.txt")
    degree = json.dumps(piper()).replace('"TMPCs": {"1"', f'"TMPCs": {{"{number}"', 1)
    assert f"TMPCs.{number[:40]}" in refused(degree, tmp_path / "p.json")


@pytest.mark.parametrize(("document", "key"), [(operator_graph(maxFPGAs=10**8), "maxFPGAs"), (piper(), "maxDevices")])
def test_too_many_devices(document: dict[str, object], key: str, tmp_path: Path) -> None:
    said = refused(json.dumps(document | {key: 10**8}), tmp_path / "i.json")
    assert key in said
    assert "4096" in said


def test_json_that_is_nested_too_deeply(tmp_path: Path) -> None:
    text = '{"maxFPGAs": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert "g.json:1:77: nested deeper than 64 levels" in refused(text, tmp_path / "g.json")


@pytest.mark.parametrize("options", [{"devices": 10**8}, {"cpus": 4097}, {"machines": "1024x1025"}])
def test_options_that_ask_for_too_many_devices(options: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    path.write_text(json.dumps(operator_graph()))
    with pytest.raises(UsageError, match="are too many"):
        partition(path, **options)  # type: ignore[arg-type]


def test_a_plan_that_records_too_many_devices(tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    path.write_text(json.dumps(operator_graph()))
    plan = partition(path, time_limit=5.0)
    asked = dataclasses.replace(plan, options=dict(plan.options) | {"devices": 10**8})
    findings = check_partition(asked, load_instance(path))
    assert any(finding.fault == "options" and "100000000 are too many" in finding.message for finding in findings)


def test_devices_without_memory_hold_nothing(tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    path.write_text(json.dumps(operator_graph(maxSizePerFPGA=0)))
    plan = partition(path, objective="latency", time_limit=5.0)
    assert plan.objective.value == 100.0  # 20 + 30 + 30 + 20 ms on the one CPU
