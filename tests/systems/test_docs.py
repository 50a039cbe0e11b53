"""The page of all systems says what their data says, and shows what the commands print."""

from __future__ import annotations

import pytest

from benchmarks import headlines_parts
from benchmarks.pages import page_text
from benchmarks.systems_page import command_output, examples
from planner.systems import SYSTEMS, names
from tests.shared_data import shared_path

CHEAP = ("bert-large -H ethernet-25g", "dlrm -H dgx-a100", "--systems hetpipe:policy=NP", "--systems pipedream-2bw")
"""Parts of commands of the page that take a second or two."""


@pytest.mark.parametrize("name", names())
def test_the_page_has_a_section_with_the_data_of_each_system(name: str) -> None:
    system, text = SYSTEMS.get(name), page_text("systems.md")
    section = text.partition(f"## {system.title} (`{name}`)")[2].partition("\n## ")[0]
    options = (f"`{name}:{option}=" for option in system.tunable)
    for fact in (
        system.source,
        *system.backend.values(),
        *(f"`{schedule}`" for schedule in system.schedules),
        *options,
    ):
        assert fact in section
    for part in ("**Decides.**", "**Decided here.**", "**Formulas.**", "**Modelled.**", "**Not modelled.**"):
        assert part in section
    assert name == "auto" or any(name in command for command, _ in examples(section))


@pytest.mark.parametrize("part", CHEAP)
def test_a_command_of_the_page_prints_what_stands_under_it(part: str) -> None:
    shown = [example for example in examples(page_text("systems.md")) if part in example[0]]
    assert shown
    for command, output in shown[:1]:
        assert command_output(command) == output


def test_the_page_has_the_parts_of_pipedreams_headlines_as_they_are_now() -> None:
    folder = shared_path("instances/pipedream/vgg16.graph.txt").parent
    text = page_text("systems.md")
    for line in headlines_parts.pipedream(folder):
        assert line in text
