"""This machine as a device profile: what is measured, and how it is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import planner
from cli.main import app
from planner.hardware import MachineFigures, measured_profile_text

FOUND = MachineFigures(
    machine="some processor, 8 cores",
    memory_bytes=64 * 2**30,
    product_flop_per_s={2e6: 50e9, 16e9: 400e9},
    copy_byte_per_s={1e5: 10e9, 1e8: 40e9},
    vector_flop_per_s=30e9,
    launch_s=0.5e-6,
)


def test_the_profile_has_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "laptop.yaml"
    file.write_text(measured_profile_text(FOUND, "laptop"))
    device = planner.load_device(file)
    assert device.name == "laptop"
    assert device.memory_bytes == 64 * 2**30
    assert device.matrix_flop_per_s == {"fp32": pytest.approx(400e9)}
    assert device.memory_byte_per_s == pytest.approx(40e9)
    assert device.vector_flop_per_s == pytest.approx(30e9)
    assert device.launch_s == pytest.approx(0.5e-6)
    assert device.memory_efficiency.at(1e5) == pytest.approx(0.25)  # 10 of 40 GB/s
    assert device.memory_efficiency.at(1e8) == pytest.approx(1.0)
    assert "measured on some processor" in planner.hardware.resolved_profile(file)["matrix"]["fp32"]["source"]


def test_the_command_measures_and_what_it_writes_lints(tmp_path: Path) -> None:
    file = tmp_path / "here.yaml"
    run = CliRunner().invoke
    assert run(app, ["hardware", "init", "--measure", "-o", str(file)]).exit_code == 0
    assert "no errors" in run(app, ["hardware", "lint", str(file)]).output
    device = planner.load_device(file)
    assert 1e8 < device.matrix_flop_per_s["fp32"] < 1e15
    assert 1e8 < device.memory_byte_per_s < 1e13
    assert 1e-8 < device.launch_s < 1e-2


def test_a_base_does_not_go_with_measuring() -> None:
    refused = CliRunner().invoke(app, ["hardware", "init", "--measure", "--from", "dgx-a100"])
    assert refused.exit_code != 0
    assert "--from" in str(refused.exception)
