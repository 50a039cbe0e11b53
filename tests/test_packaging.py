"""What the wheel must hold."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAPPED = {"cli": "planner.cli", "models": "planner.models", "hardware_profiles": "planner.hardware_profiles"}


def _settings() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_package_folder_is_listed() -> None:
    folders = {
        p.parent.relative_to(ROOT).as_posix()
        for top in ("planner", *MAPPED)
        for p in ROOT.glob(f"{top}/**/__init__.py")
    }
    names = set()
    for folder in folders:
        top, _, rest = folder.partition("/")
        names.add(".".join(filter(None, [MAPPED.get(top, top), rest.replace("/", ".")])))
    assert set(_settings()["packages"]) == names  # type: ignore[call-overload]


def test_every_hardware_profile_is_package_data() -> None:
    patterns = _settings()["package-data"]["planner.hardware_profiles"]  # type: ignore[index]
    folder = ROOT / "hardware_profiles"
    listed = {path for pattern in patterns for path in folder.glob(pattern)}
    assert listed == set(folder.rglob("*.yaml"))
    assert len(listed) > 50


def test_the_sizes_of_the_bundled_models_are_package_data() -> None:
    patterns = _settings()["package-data"]["planner.models"]  # type: ignore[index]
    listed = {path.name for pattern in patterns for path in (ROOT / "models").glob(pattern)}
    assert listed == {path.name for path in (ROOT / "models").iterdir() if path.suffix not in (".py", "")}


def test_the_programs_of_exports_are_package_data() -> None:
    patterns = _settings()["package-data"]["planner.export"]  # type: ignore[index]
    folder = ROOT / "planner" / "export"
    listed = {path.name for pattern in patterns for path in folder.glob(pattern)}
    assert listed == {path.name for path in folder.iterdir() if path.is_file() and path.suffix != ".py"}
    assert len(listed) == 3


def test_the_tables_of_options_are_package_data() -> None:
    patterns = _settings()["package-data"]["planner.export.reading"]  # type: ignore[index]
    folder = ROOT / "planner" / "export" / "reading"
    listed = {path.name for pattern in patterns for path in folder.glob(pattern)}
    assert listed == {path.name for path in folder.iterdir() if path.is_file() and path.suffix != ".py"}
    assert len(listed) == 4


def test_the_files_of_the_page_are_package_data() -> None:
    patterns = _settings()["package-data"]["planner.report"]  # type: ignore[index]
    folder = ROOT / "planner" / "report"
    listed = {path.name for pattern in patterns for path in folder.glob(pattern)}
    assert listed == {path.name for path in folder.iterdir() if path.is_file() and path.suffix != ".py"}
    assert len(listed) == 2


FROM_INDEX = re.compile(r"(pip|pipx|uv (pip|tool)) (install|run)\b[^\n`]*[ '\"=]shardplan(?![-\w/])")
"""A command that would ask a package index for shardplan, which nobody has published there."""


def test_nothing_says_to_install_shardplan_from_an_index() -> None:
    assert FROM_INDEX.search("pip install shardplan")
    assert FROM_INDEX.search("- run: pip install --quiet 'shardplan[torch]'")
    assert FROM_INDEX.search("uv pip install shardplan==0.2.0")
    assert not FROM_INDEX.search("pip install shardplan-0.2.0-py3-none-any.whl")
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*"),
        *(ROOT / "planner").rglob("*.py"),
    ]
    pages += [*(ROOT / "cli").rglob("*.py"), *(ROOT / ".github").rglob("*.yml")]
    texts = {page: page.read_text(encoding="utf-8") for page in pages if page.is_file()}
    assert len(texts) > 300
    assert [str(page.relative_to(ROOT)) for page, text in texts.items() if FROM_INDEX.search(text)] == []
