"""The names that `planner` exports: each exists, is imported when first used, and if gone says what to write now."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import planner

_LIGHT = """
import sys
import planner
light = {"planner", "planner.interpreter"}
assert {name for name in sys.modules if name.startswith("planner")} == light, "import planner imports its packages"
from planner.hardware import load_cluster
assert planner.load_cluster is load_cluster and planner.schedules.names()
import planner.report
assert "planner.report.plans" not in sys.modules and planner.report.plan_report is planner.plan_report
"""


@pytest.mark.parametrize("name", planner.__all__)
def test_every_exported_name_can_be_had(name: str) -> None:
    assert getattr(planner, name) is not None


def test_names_are_imported_when_first_used() -> None:
    subprocess.run([sys.executable, "-c", _LIGHT], check=True)


def test_exports_are_listed() -> None:
    assert dir(planner) == planner.__all__
    assert {"plan", "load_graph", "ShardplanError", "exchange"} <= set(planner.__all__)
    assert len(set(planner.__all__)) == len(planner.__all__)


def test_strict_type_checkers_of_users_see_every_name() -> None:
    """They take a name as exported only where it is imported as itself."""
    imports = [
        each for each in ast.walk(ast.parse(Path(planner.__file__).read_text())) if isinstance(each, ast.ImportFrom)
    ]
    assert set(planner.__all__) <= {name.asname for each in imports for name in each.names}


@pytest.mark.parametrize(
    ("name", "now"),
    [
        ("sync", "planner.exchange now"),
        ("plan_schedule", "planner.plan(..., orders=...) now"),
        ("validate_plan", "planner.check_plan now"),
        ("Prediction", "planner.prediction.Prediction now"),
        ("lint", "planner.hardware.lint"),
        ("diff_report", "planner.report.diff_report"),
        ("format_bytes", "planner.units.format_bytes"),
        ("plam", "'plan'"),
    ],
)
def test_a_name_that_is_gone_says_what_to_write(name: str, now: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute {name!r}") as error:
        getattr(planner, name)
    assert now in str(error.value)


def test_a_private_name_is_just_missing() -> None:
    with pytest.raises(AttributeError, match=r"no attribute '_plan'$"):
        planner._plan  # noqa: B018
