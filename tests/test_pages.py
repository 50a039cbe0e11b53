"""Pages of docs/ are what the package says."""

from __future__ import annotations

import re

import pytest

from benchmarks.pages import PAGES, page_text, rewritten, with_table
from planner import schedules
from planner.exchange import SCHEMES
from planner.systems import SYSTEMS


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_what_the_package_gives(page: str) -> None:
    assert rewritten(page) == page_text(page)


@pytest.mark.parametrize(
    ("page", "names"),
    [("schedules.md", schedules.names()), ("exchange.md", SCHEMES.names()), ("systems.md", SYSTEMS.names())],
)
def test_every_entry_stands_on_its_page(page: str, names: tuple[str, ...]) -> None:
    text = page_text(page)
    assert [name for name in names if f"| `{name}` |" not in text and f"(`{name}`)" not in text] == []


def test_names_with_options_on_the_page_of_schedules_exist() -> None:
    for name in re.findall(r"`([a-z0-9-]+:[a-z_]+=[^`]+)`", page_text("schedules.md")):
        schedules.get(name)


def test_a_system_without_a_section_gets_one() -> None:
    text = page_text("systems.md")
    heading = "## Herring (`herring`)"
    section = heading + text.partition(heading)[2].partition("\n## ")[0] + "\n"
    without = text.replace(section, "")
    assert heading not in without
    again = PAGES["systems.md"](without)
    assert again.index("(`gshard`)") < again.index(heading) < again.index("(`hetpipe`)")
    assert again.count("**A backend must know.**") == text.count("**A backend must know.**")


def test_a_table_of_a_page_is_replaced() -> None:
    page = "before\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nafter\n"
    assert with_table(page, "| a | b |\n|---|---|\n| 3 | 4 |\n") == page.replace("1 | 2", "3 | 4")
    with pytest.raises(ValueError, match="no table"):
        with_table(page, "| c |\n|---|")
