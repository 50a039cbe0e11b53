"""The page of all systems says what their data says."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.systems import SYSTEMS, names

PAGE = Path(__file__).parents[2] / "docs" / "systems.md"


@pytest.mark.parametrize("name", names())
def test_the_page_has_a_section_with_the_data_of_each_system(name: str) -> None:
    system, text = SYSTEMS.get(name), PAGE.read_text()
    section = text.partition(f"## {system.title} (`{name}`)")[2].partition("\n## ")[0]
    for fact in (system.chooses, system.cut, system.source, system.staleness, *system.open, *system.backend.values()):
        assert fact in section
    for part in ("**Formulas.**", "**A backend must know.**", "**Decided here.**"):
        assert part in section
    assert name == "auto" or f"--systems {name}" in section
