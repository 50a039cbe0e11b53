"""Kinds of instance files, one module each: how to read them, and the objectives that can be asked of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import ModelError, PlanError, UsageError
from planner.partitions.options import Options
from planner.partitions.plan_file import Part, Ranges, from_ranges, to_ranges
from planner.registry import Registry, did_you_mean
from planner.space.partition import PartitionProblem, Verdict

HEAD_BYTES = 4096
"""How much of a file's beginning a family may look at to recognise it."""
MOST_BYTES = 1 << 26
"""How much of a JSON file is searched for the keys of a family."""


@dataclass(frozen=True, eq=False)
class Instance:
    """An instance file.

    Attributes:
        family: name in `FAMILIES`.
        name: for people.
        fingerprint: sha256 (hex) of the file.
        content: what the importer made of it.
        ids: the file's number of each node, by position.
        edges: how many there are.
        notes: what was left out or assumed.
    """

    family: str
    name: str
    fingerprint: str
    content: Any
    ids: tuple[int, ...]
    edges: int
    notes: tuple[str, ...] = ()

    def ranges(self, positions: Iterable[int]) -> Ranges:
        """Node numbers of positions."""
        return to_ranges(self.ids[i] for i in positions)

    def positions(self, ranges: Ranges) -> tuple[int, ...]:
        """Positions of node numbers, ascending.

        Raises:
            PlanError: a number that the instance does not have.
        """
        where = {number: i for i, number in enumerate(self.ids)}
        numbers = from_ranges(ranges, len(self.ids))
        if numbers is None:
            raise PlanError("a part holds more nodes than the instance has", where=self.name)
        stray = [number for number in numbers if number not in where]
        if stray:
            raise PlanError(f"the instance has no node {stray[0]}", where=self.name, hint="is it another instance?")
        return tuple(sorted(where[number] for number in numbers))


@dataclass(frozen=True, slots=True)
class Objective:
    """What can be minimised on an instance.

    Attributes:
        name: as the command line takes it.
        unit: of its values.
        options: names of the options that apply.
        settle: fills in what was not said.
        problem: the problem of an instance under settled options.
        encode: a decision as parts, given what the judge says of it.
        decode: parts as a decision; raises `PlanError` where they make none.
        aliases: other names.
    """

    name: str
    unit: str
    options: frozenset[str]
    settle: Callable[[Instance, Options], Options]
    problem: Callable[[Instance, Options], PartitionProblem]
    encode: Callable[[Instance, Any, Any, Verdict], tuple[Part, ...]]
    decode: Callable[[Instance, Any, Sequence[Part]], Any]
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of instance file.

    Attributes:
        title: what a person calls it.
        sniff: whether a file with these first bytes is of this kind.
        read: reads the file.
        objectives: what can be asked; the first is meant when nothing is said.
        cluster: whether a hardware profile can stand for machines, bandwidth and memory.
        model: whether the ordinary planner reads the file too, as a model.
    """

    title: str
    sniff: Callable[[bytes], bool]
    read: Callable[[Path], Instance]
    objectives: tuple[Objective, ...]
    cluster: bool = False
    model: bool = False

    def objective(self, name: str | None) -> Objective:
        """An objective by name or alias.

        Raises:
            UsageError: none is called so.
        """
        if name is None:
            return self.objectives[0]
        for objective in self.objectives:
            if name == objective.name or name in objective.aliases:
                return objective
        known = [objective.name for objective in self.objectives]
        raise UsageError(
            f"{name!r} is no objective of a file of kind {self.title}", where="--objective",
            hint=f"objectives: {', '.join(known)}; {did_you_mean(name, known)}",
        )  # fmt: skip


FAMILIES: Registry[Family] = Registry(__name__, "instance family")
"""All families by name; a module of this package registers its own."""


def instance_family(path: str | Path) -> Family | None:
    """The family of a file by its content, None when it is of none (or cannot be read).

    JSON files may hold their keys in any order: where the beginning does not tell, the whole file is looked at.
    """
    try:
        with Path(path).open("rb") as stream:
            head = stream.read(HEAD_BYTES)
            found = _sniffed(head)
            if found is None and head.lstrip().startswith(b"{"):
                found = _sniffed(head + stream.read(MOST_BYTES))
    except OSError:
        return None
    return found


def _sniffed(content: bytes) -> Family | None:
    return next((family for _, family in FAMILIES.items() if family.sniff(content)), None)


def load_instance(path: str | Path) -> Instance:
    """Read an instance file, its kind known by its content.

    Raises:
        ModelError: no such file, no instance of a known family, or damaged.
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
