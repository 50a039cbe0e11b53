"""Resolved profiles, templates and the JSON Schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from planner.errors import HardwareError
from planner.hardware import (
    cluster_names,
    device_names,
    lint,
    load_cluster,
    profile_json_schema,
    profile_template,
    profile_text,
    profile_yaml,
    resolved_profile,
)
from planner.hardware.document import profile_folder

NAMES = (*cluster_names(), "a100-sxm-80gb", "fpga-vcu118")


@pytest.mark.parametrize("name", NAMES)
def test_a_resolved_profile_is_the_same_machine(name: str, tmp_path: Path) -> None:
    path = tmp_path / "resolved.yaml"
    path.write_text(profile_yaml(resolved_profile(name)))
    assert lint(path) == []
    assert load_cluster(path).fingerprint == load_cluster(name).fingerprint


def test_a_resolved_profile_stands_alone() -> None:
    content = resolved_profile("p3.16xlarge", 4)
    assert content["nodes"] == 4
    assert content["network"][0]["port"] == {
        "value": "3.125 GB/s",
        "direction": "per-direction",
        "source": "restated",
    }
    device = content["device_types"]["v100-sxm2-16gb"]
    assert device["memory"]["value"] == "15.78 GiB"
    assert "launch" not in device  # the stack's
    assert content["sources"]["restated"].startswith("vendor figure")
    assert content["sources"]["nvsmi"].startswith("total memory")


@pytest.mark.parametrize("name", ["dgx-a100", "mixed-pool", "superpod-h100", "fpga-pool"])
def test_a_template_lints_clean(name: str, tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(profile_template(name, "lab"))
    assert lint(path) == []
    cluster = load_cluster(path)
    assert cluster.name == "lab"
    assert cluster.fingerprint == load_cluster(name).fingerprint
    again = profile_template(path, "other")
    assert again.count("# A hardware profile for shardplan.") == 1
    path.write_text(again)
    assert load_cluster(path).name == "other"


def test_a_device_is_no_template() -> None:
    with pytest.raises(HardwareError, match="is a device, not a cluster"):
        profile_template("a100-sxm-80gb", "x")


def test_text_is_as_written() -> None:
    assert profile_text("dgx-1v") == (profile_folder() / "dgx-1v.yaml").read_text()


def _files() -> list[Any]:
    folder = profile_folder()
    reader = YAML(typ="safe", pure=True)
    paths = [folder / f"{name}.yaml" for name in cluster_names()]
    paths += [folder / "devices" / f"{name}.yaml" for name in device_names()]
    return [reader.load(path) for path in paths]


def test_the_schema_accepts_what_the_loader_accepts() -> None:
    schema = profile_json_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    validator = jsonschema.Draft7Validator(schema)
    for content in _files():
        validator.validate(content)


def test_the_schema_refuses_what_the_loader_refuses() -> None:
    validator = jsonschema.Draft7Validator(profile_json_schema())
    changes: list[dict[str, Any]] = [
        {"nodez": 1},
        {"nodes": 0},
        {"devices": 5},
        {"node_price": "5 GB"},
        {"network": [{}]},
    ]
    for change in changes:
        content = {**YAML(typ="safe", pure=True).load(profile_text("dgx-a100")), **change}
        assert not validator.is_valid(content), change
