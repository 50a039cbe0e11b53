"""The wing of published problems: the core imports nothing of it, its entries are found, old paths say the new ones."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import planner

ROOT = Path(planner.__file__).parent


def _imported(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_core_imports_nothing_of_the_wing() -> None:
    wing = ROOT / "published"
    core = [path for path in ROOT.rglob("*.py") if wing not in path.parents and path != ROOT / "__init__.py"]
    assert len(core) > 300
    assert {
        path.name: name for path in core for name in _imported(path) if f"{name}.".startswith("planner.published.")
    } == {}
    assert any(name.startswith("planner.published.") for path in wing.rglob("*.py") for name in _imported(path))


def test_the_systems_that_share_its_problems_load_without_it() -> None:
    script = (
        "import sys, planner\n"
        "assert {'pipedream', 'bapipe', 'hetpipe', 'tofu', 'pipedream-2bw'} <= set(planner.systems.names())\n"
        "import planner.planning\n"
        "assert [name for name in sys.modules if name.startswith('planner.published')] == []\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_entries_are_found_in_its_folders() -> None:
    assert planner.published.families.FAMILIES.names() == ("operator-graph", "pipedream", "piper")
    assert planner.published.solvers.PARTITION_SOLVERS.names() == (
        "chain-dp", "hierarchical-dp", "hierarchical-dp-placed", "iteration-dp", "latency-cp-sat", "latency-list",
        "layerwise", "max-load-cp-sat", "max-load-highs", "max-load-ideals", "max-load-pairs", "piper-dp",
    )  # fmt: skip
    assert {"gpipe_bubble", "pipedream_partition", "hetpipe_allocation", "wsp_staleness"} <= set(
        planner.published.formulas.names()
    )


def test_names_at_the_front_door_are_those_of_the_wing() -> None:
    assert planner.partitions is planner.published
    assert planner.formulas is planner.published.formulas
    for name in (
        "partition",
        "check_partition",
        "read_partition",
        "write_partition",
        "load_instance",
        "solve_partition",
    ):
        assert getattr(planner, name) is getattr(planner.published, name)


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ("planner.formulas", "planner.published.formulas"),
        ("planner.formulas.pipelines", "planner.published.formulas"),
        ("planner.partitions", "planner.published"),
        ("planner.partitions.plan_file", "planner.published"),
        ("planner.partitions.families", "planner.published"),
        ("planner.space.partition", "planner.published.problems"),
        ("planner.solvers.partition", "planner.published.solvers"),
        ("planner.solvers.partition.cluster_chains", "planner.solvers.cluster_chains"),
        ("planner.importers.operator_graph", "planner.published.readers"),
        ("planner.importers.piper", "planner.published.readers"),
    ],
)
def test_import_of_a_module_that_moved_says_where_it_is(old: str, now: str) -> None:
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module(old)
    assert now in str(error.value)
    importlib.import_module(now)


@pytest.mark.parametrize(
    ("package", "name", "now"),
    [
        ("planner.importers", "read_piper", "planner.published.readers"),
        ("planner.importers", "OperatorGraph", "planner.published.readers"),
        ("planner.importers", "load_operator_graph", "planner.published.readers"),
        ("planner.report", "partition_report", "planner.published"),
        ("planner.report", "partition_diff_report", "planner.published"),
    ],
)
def test_import_of_a_name_that_moved_says_where_it_is(package: str, name: str, now: str) -> None:
    with pytest.raises(ModuleNotFoundError) as error:
        exec(f"from {package} import {name}")
    assert f"it is {now}.{name} now" in str(error.value)
    assert hasattr(importlib.import_module(now), name)


def test_what_never_was_is_just_missing() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'planner.nothing'$"):
        importlib.import_module("planner.nothing")
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from planner.importers import nothing")


def test_a_folder_that_an_update_left_behind_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes a folder without modules for a package; compiled files keep such a folder of an earlier version."""
    (tmp_path / "partitions" / "__pycache__").mkdir(parents=True)
    monkeypatch.setattr(planner, "__path__", [*planner.__path__, str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match=r"it is planner\.published now"):
        importlib.import_module("planner.partitions")
