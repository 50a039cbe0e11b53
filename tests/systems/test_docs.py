"""The page of all systems says what their data says, and shows what the commands print."""

from __future__ import annotations

import pytest

from benchmarks import headlines_parts
from benchmarks.systems_page import PAGE, command_output, examples, generated, with_table
from planner.systems import SYSTEMS, names
from tests.shared_data import shared_path

CHEAP = ("bert-large -H ethernet-25g", "dlrm -H dgx-a100", "--systems hetpipe:policy=NP", "--systems pipedream-2bw")
"""Parts of commands of the page that take a second or two."""


@pytest.mark.parametrize("name", names())
def test_the_page_has_a_section_with_the_data_of_each_system(name: str) -> None:
    system, text = SYSTEMS.get(name), PAGE.read_text()
    section = text.partition(f"## {system.title} (`{name}`)")[2].partition("\n## ")[0]
    for title, paragraph in generated(system).items():
        assert f"**{title}** {paragraph}\n" in section
    for fact in (system.chooses, system.cut, system.source, system.staleness, *system.open, *system.backend.values()):
        assert fact in section
    for part in ("**Formulas.**", "**Modelled.**", "**Not modelled.**"):
        assert part in section
    assert name == "auto" or any(name in command for command, _ in examples(section))


@pytest.mark.parametrize("part", CHEAP)
def test_a_command_of_the_page_prints_what_stands_under_it(part: str) -> None:
    shown = [example for example in examples(PAGE.read_text()) if part in example[0]]
    assert shown
    for command, output in shown[:1]:
        assert command_output(command) == output


def test_the_page_has_the_parts_of_pipedreams_headlines_as_they_are_now() -> None:
    folder = shared_path("instances/pipedream/vgg16.graph.txt").parent
    text = PAGE.read_text()
    for line in headlines_parts.pipedream(folder):
        assert line in text


def test_a_table_of_the_page_is_replaced() -> None:
    page = "before\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nafter\n"
    assert with_table(page, "| a | b |\n|---|---|\n| 3 | 4 |\n") == page.replace("1 | 2", "3 | 4")
    with pytest.raises(ValueError, match="no table"):
        with_table(page, "| c |\n|---|")
