"""Every parameter of the command line that reads a file, and a valid command line around it: derived from the commands
themselves, so that a new one is fuzzed or fails a test.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from cli._options import FilePath, FileText
from cli.main import app

FILE = "@file@"
"""Stands for the mutated file in a command line."""
MODEL, PLAN, RUNS, MACHINE = "toy.onnx", "whole.plan.json", "runs.csv", "all_reduce.txt"
"""Valid files in the folder of a trial."""
WRITTEN = ("exported", "rebatched.onnx")
"""What commands write there."""

Line = tuple[str, ...]

TOY = {"model": MODEL, "hardware": "v100-pcie-4", "dims": "batch=1"}
CLUSTER = {**TOY, "global_batch": "4"}
BASES: Mapping[Line, Mapping[str, str]] = {
    ("plan",): CLUSTER,
    ("predict",): CLUSTER,
    ("calibrate",): {**TOY, "runs": RUNS},
    ("compare",): {**CLUSTER, "systems": "gpipe"},
    ("sweep",): {"model": MODEL, "hardware": "v100-pcie-4", "dims": "batch=1", "axes": "batch=4", "workers": "1"},
    ("profile",): {"model": MODEL, "device": "t4-16gb", "dims": "batch=1"},
    ("check",): {"plan_file": PLAN},
    ("migrate",): {"old": PLAN, "output": "-"},
    ("explain",): {"plan_file": PLAN, "model": MODEL, "hardware": "v100-pcie-4", "dims": "batch=1"},
    ("simulate",): {"plan_file": PLAN},
    ("report",): {"plan_file": PLAN, "output": "-"},
    ("export",): {"plan_file": PLAN, "name": "torch", "folder": WRITTEN[0]},
    ("diff",): {"old": PLAN, "new": PLAN},
    ("hardware", "import"): {"source": MACHINE, "device": "a100-sxm-80gb", "level": "nvlink"},
    ("hardware", "init"): {"base": "dgx-a100"},
    ("hardware", "lint"): {"files": "a.yaml"},
    ("hardware", "show"): {"name": "dgx-a100"},
    ("models", "rebatch"): {"model": MODEL, "batch": "2", "output": WRITTEN[1], "dims": "batch=1"},
}
"""By command: values of parameters with which it reads a file and answers soon."""

BESIDE: Mapping[str, Mapping[str, str]] = {
    "costs": {"model": MODEL, "dims": "batch=1"},
    "stack": {"hardware": "v100-pcie-4"},
    "model": {"dims": "batch=1"},
}
"""By what a file holds: values of further parameters without which a command does not read it."""

ELSEWHERE: Mapping[tuple[Line, str], str] = {
    (("run",), "plan_file"): "starts processes with torch; the other commands read plans by the same function",
    (("run",), "model"): "likewise",
    (("run",), "data"): "likewise; the format `data` calls the reader itself",
    (
        ("calibrate",),
        "model",
    ): "predicts every run for every factor; the other commands read models by the same function",
    (("calibrate",), "hardware"): "likewise",
    (("calibrate",), "stack"): "likewise",
    (("profile",), "cache"): "measures operators; the format `measurements` calls the reader itself",
}
"""Parameters that no command line of a trial has, each with the reason."""

TEXTS = frozenset(
    {
        "attention",
        "axes",
        "backends",
        "bandwidth",
        "between",
        "changes",
        "choice",
        "collective",
        "device",
        "dims",
        "exchange",
        "family",
        "folder",
        "forbid",
        "gates",
        "inside",
        "layout",
        "level",
        "machines",
        "memory",
        "name",
        "objective",
        "offload",
        "on",
        "optimizer",
        "precision",
        "rank",
        "recompute",
        "schedule",
        "schedules",
        "sizes",
        "fixed_batch",
        "fixed_cp",
        "fixed_devices",
        "fixed_dp",
        "fixed_ep",
        "fixed_for",
        "fixed_headroom",
        "fixed_max_stages",
        "fixed_micro_batch",
        "fixed_nodes",
        "fixed_optimizer",
        "fixed_overlap",
        "fixed_pp",
        "fixed_precision",
        "fixed_recompute",
        "fixed_schedule",
        "fixed_seq",
        "fixed_tp",
        "fixed_zero",
        "solver",
        "system",
        "systems",
        "target",
        "time_limit",
        "why_not",
    }
)
"""Parameters of plain text that name no file, of all commands."""


@dataclass(frozen=True)
class Reader:
    """A parameter that reads a file.

    Attributes:
        command: words of the command.
        parameter: its name.
        holds: what the file holds.
        words: number of values of the parameter before the file: a framework's name.
    """

    command: Line
    parameter: str
    holds: str
    words: int = 0


def commands() -> Iterator[tuple[Line, click.Command]]:
    """Every command with its words."""

    def walk(command: click.Command, words: Line) -> Iterator[tuple[Line, click.Command]]:
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                inner = command.get_command(context, name)
                assert inner is not None
                yield from walk(inner, (*words, name))
        else:
            yield words, command

    return walk(app, ())


@functools.cache
def readers() -> tuple[Reader, ...]:
    """All parameters that read files."""
    found = []
    for words, command in commands():
        for parameter in command.params:
            kinds = parameter.type.types if isinstance(parameter.type, click.Tuple) else (parameter.type,)
            for place, kind in enumerate(kinds):
                if isinstance(kind, FileText | FilePath):
                    found.append(Reader(words, str(parameter.name), kind.holds, place))
    return tuple(found)


def fuzzed(holds: str) -> tuple[Reader, ...]:
    """Parameters that read files of a kind and that trials give such files."""
    return tuple(each for each in readers() if each.holds == holds and (each.command, each.parameter) not in ELSEWHERE)


def line_of(reader: Reader, file: Path, first: str = "") -> Line:
    """The command line in which a parameter reads a file.

    Args:
        reader: the parameter.
        file: the file; other files of the line lie in its folder.
        first: value before the file, where the parameter has one.
    """
    command = dict(commands())[reader.command]
    values = {**BASES[reader.command]}
    names = {str(parameter.name) for parameter in command.params}
    values |= {name: value for name, value in BESIDE.get(reader.holds, {}).items() if name in names}
    values[reader.parameter] = FILE
    folder, arguments, options = file.parent, list[str](), list[str]()
    for parameter in command.params:
        name = str(parameter.name)
        if name not in values:
            continue
        text = str(file) if values[name] == FILE else values[name]
        text = str(folder / text) if text in (MODEL, PLAN, RUNS, MACHINE, *WRITTEN) else text
        if isinstance(parameter, click.Argument):
            arguments.append(text)
        else:
            options += [parameter.opts[-1], *([first] if name == reader.parameter and reader.words else []), text]
    return (*reader.command, *arguments, *options)
