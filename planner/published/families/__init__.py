"""Kinds of instance files, one module each: a reader and the objectives that can be minimised."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import ModelError, PlanError, UsageError
from planner.published.options import PartitionOptions
from planner.published.plan_file import Part, Ranges, from_ranges, to_ranges
from planner.published.problems import PartitionProblem, PartitionVerdict
from planner.registry import Registry

HEAD_BYTES = 4096
"""Bytes at the beginning of a file by which families recognise it."""
MOST_BYTES = 1 << 26
"""Most bytes of a JSON file that are searched for the keys of a family."""


@dataclass(frozen=True, eq=False)
class Instance:
    """An instance file.

    Attributes:
        family: name in `FAMILIES`.
        name: for people.
        fingerprint: sha256 (hex) of the file.
        content: the importer's result.
        ids: number of each node in the file, by position.
        edges: number of edges.
        notes: what was left out or assumed in reading.
    """

    family: str
    name: str
    fingerprint: str
    content: Any
    ids: tuple[int, ...]
    edges: int
    notes: tuple[str, ...] = ()

    def ranges(self, positions: Iterable[int]) -> Ranges:
        """Ranges of the node numbers at some positions."""
        return to_ranges(self.ids[i] for i in positions)

    def positions(self, ranges: Ranges, *, in_order: bool = False) -> tuple[int, ...]:
        """Positions of node numbers, ascending, or in the order of the ranges.

        Raises:
            PlanError: the instance has no node of that number.
        """
        position_of = {number: i for i, number in enumerate(self.ids)}
        numbers = from_ranges(ranges, len(self.ids))
        if numbers is None:
            raise PlanError("a part holds more nodes than the instance has", where=self.name)
        unknown = [number for number in numbers if number not in position_of]
        if unknown:
            raise PlanError(f"the instance has no node {unknown[0]}", where=self.name, hint="is it another instance?")
        positions = [position_of[number] for number in numbers]
        return tuple(positions if in_order else sorted(positions))


@dataclass(frozen=True, slots=True)
class Objective:
    """An objective of a kind of instances.

    Attributes:
        name: as on the command line.
        unit: of its values.
        options: names of the options that apply.
        settle: fills in the options that are not given.
        problem: builds the problem of an instance under settled options.
        encode: turns a decision and its verdict into parts of a plan.
        decode: turns parts into a decision; raises `PlanError` if they are not valid.
        aliases: other names.
    """

    name: str
    unit: str
    options: frozenset[str]
    settle: Callable[[Instance, PartitionOptions], PartitionOptions]
    problem: Callable[[Instance, PartitionOptions], PartitionProblem]
    encode: Callable[[Instance, Any, Any, PartitionVerdict], tuple[Part, ...]]
    decode: Callable[[Instance, Any, Sequence[Part]], Any]
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of instance file.

    Attributes:
        title: for people.
        sniff: true if a file with these first bytes is of this kind.
        read: reads the file.
        objectives: the first is the default.
        cluster: whether `--hardware` may give machines, bandwidth and memory.
        model: whether the file is also a model for the ordinary planner.
    """

    title: str
    sniff: Callable[[bytes], bool]
    read: Callable[[Path], Instance]
    objectives: tuple[Objective, ...]
    cluster: bool = False
    model: bool = False

    def objective(self, name: str | None) -> Objective:
        """The objective of a name or alias; the default for None.

        Raises:
            UsageError: there is none of that name.
        """
        if name is None:
            return self.objectives[0]
        for objective in self.objectives:
            if name == objective.name or name in objective.aliases:
                return objective
        known = [objective.name for objective in self.objectives]
        raise UsageError(
            f"{name!r} is no objective of a file of kind {self.title}", where="--objective",
            hint=f"use {' or '.join(known)}",
        )  # fmt: skip


FAMILIES: Registry[Family] = Registry(__name__, "instance family")
"""All families by name; a module of this package registers its own."""


def instance_family(path: str | Path) -> Family | None:
    """The family of a file by its content; None if no family recognises it or it cannot be read.

    The keys of a JSON file may be in any order: if its beginning is not recognised, the whole file is searched.
    """
    try:
        with Path(path).open("rb") as stream:
            head = stream.read(HEAD_BYTES)
            family = _sniffed(head)
            if family is None and head.lstrip().startswith(b"{"):
                family = _sniffed(head + stream.read(MOST_BYTES))
    except OSError:
        return None
    return family


def _sniffed(content: bytes) -> Family | None:
    return next((family for _, family in FAMILIES.items() if family.sniff(content)), None)


def load_instance(path: str | Path) -> Instance:
    """Read an instance file; its content says of which family it is.

    Raises:
        ModelError: no such file, of no known family, or damaged.
    """
    file = Path(path)
    if not os.path.exists(file):
        raise ModelError("no such instance file", where=str(path), hint="check the path")
    family = instance_family(file)
    if family is None:
        known = ", ".join(family.title for _, family in FAMILIES.items())
        raise ModelError(
            "not an instance of a partition problem", where=str(path), hint=f"kinds that can be read: {known}"
        )
    return family.read(file)
