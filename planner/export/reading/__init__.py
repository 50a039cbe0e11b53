"""Reads the configurations of training frameworks: one reader, and for each framework a table of all its options.

A framework's module parses its text into options with values (`megatron.py`: shell arguments, `torchtitan.py`: TOML,
`deepspeed.py`: JSON) and turns these into a job. What is common to all stands here: options are held against the table
(`options.py`), the sizes among them against the model (`sizes.py`), and a job's open numbers follow from the number of
devices (`job.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from planner.errors import Problem, UsageError
from planner.export.reading.job import FrameworkJob
from planner.export.reading.options import Options, Settings, Value, options_of, settle
from planner.export.reading.sizes import ModelSizes, contradictions, sizes_of
from planner.graph import Graph

Beside = Mapping[str, object]
"""What the user says beside a file, which wins: by field of `Degrees`, `global_batch`, `precision`, `optimizer`,
`overlap`."""


@dataclass(frozen=True, slots=True)
class Reader:
    """How a framework's configuration is read.

    Attributes:
        key: name of the framework and of its table.
        parse: gives the options of a text with their values, and whether it names options of the user's own: those
            that the table does not know are then said instead of refused, unless they look like a slip.
        take: makes a job of them; the model's sizes are None where no model is given.
        passes: why an option that the table does not know is said instead of refused; "" where it is refused.
        moot: sizes of a file that its other options leave without effect, and that are therefore not compared.
    """

    key: str
    parse: Callable[[str], tuple[Mapping[str, Value], bool]]
    take: Callable[[Settings, ModelSizes | None, Beside], FrameworkJob]
    passes: Callable[[str], str] = lambda _: ""
    moot: Callable[[Settings], Collection[str]] = lambda _: ()


def read(reader: Reader, text: str, graph: Graph | None, beside: Beside) -> FrameworkJob:
    """Read a job from a framework's configuration.

    Args:
        reader: of the framework.
        text: the configuration.
        graph: the model that it is to train; without it, sizes are not compared.
        beside: what is said beside the text.

    Raises:
        UsageError: an option is unknown, out of range or contradicts the model, or the framework refuses the division;
            `problems` names every such option.
    """
    given, extended = reader.parse(text)
    table = options_of(reader.key)
    settings = settle(table, given, extended=extended, passes=reader.passes)
    sizes = None if graph is None else sizes_of(graph)
    problems = contradictions(settings, sizes, reader.moot(settings)) if sizes else []
    if problems:
        raise UsageError(problems[0].message, hint=problems[0].hint, problems=problems)
    job = reader.take(settings, sizes, beside)
    return replace(job, ignored=(*job.ignored, *settings.notes()))


__all__ = [
    "Beside", "FrameworkJob", "ModelSizes", "Options", "Problem", "Reader", "Settings", "contradictions", "options_of",
    "read", "sizes_of",
]  # fmt: skip
