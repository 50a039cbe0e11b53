"""What the command line reads is fuzzed: the list follows from the commands, so that no reader can be forgotten."""

from __future__ import annotations

import random
from pathlib import Path

import click
import pytest

from planner.export import readable
from planner.importers.formats import FORMATS as MODEL_FORMATS
from planner.published.families import FAMILIES
from tests.fuzz import readers
from tests.fuzz.formats import FORMATS

MACHINE_TEXTS = ("astra", "calculon", "nccl", "topology")
"""What `hardware import` recognises; a text of each kind of its own is in tests/hardware."""


WRITTEN = ("comment_file", "output", "picture", "svg_file", "trace_file", "plot", "folder", "plans_folder")
"""Parameters that name a file or folder to write."""


def test_a_parameter_of_text_reads_a_file_or_is_known_not_to() -> None:
    unknown = [
        (words, parameter.name)
        for words, command in readers.commands()
        for parameter in command.params
        if type(parameter.type) in (click.types.StringParamType, click.types.UnprocessedParamType)
        and parameter.name not in readers.TEXTS
    ]
    unknown = [each for each in unknown if each[1] not in WRITTEN]
    assert not unknown, "give them a FileText or FilePath as type, or name them in TEXTS of tests/fuzz/readers.py"


def test_a_parameter_with_a_path_is_written_or_says_what_it_reads() -> None:
    unknown = [
        (words, parameter.name)
        for words, command in readers.commands()
        for parameter in command.params
        if type(parameter.type) in (click.Path, click.File) and parameter.name not in WRITTEN
    ]
    assert not unknown


@pytest.mark.parametrize("reader", readers.readers(), ids=lambda each: f"{' '.join(each.command)} {each.parameter}")
def test_every_reader_has_files_and_a_command_line(reader: readers.Reader, tmp_path: Path) -> None:
    assert reader.holds in {form.holds for form in FORMATS.values()}
    if (reader.command, reader.parameter) in readers.ELSEWHERE:
        return
    line = readers.line_of(reader, tmp_path / "file.txt", "deepspeed")
    assert line[: len(reader.command)] == reader.command
    assert str(tmp_path / "file.txt") in line


def test_readers_that_registries_know_have_files() -> None:
    entries = {entry for form in FORMATS.values() for entry in form.entries}
    registered = {name for name, _ in MODEL_FORMATS.items()} | {name for name, _ in FAMILIES.items()} | {*readable()}
    assert registered | {*MACHINE_TEXTS} == entries


@pytest.mark.parametrize("kind", FORMATS)
def test_a_format_writes_a_file_and_says_what_reads_it(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"mutated{FORMATS[kind].suffix}"
    trials = FORMATS[kind].make(path, random.Random(3))
    assert path.exists()
    assert trials
