"""A partition plan: what a partitioner decided on one instance, with what is proven about it; read and written as JSON,
strictly and canonically.

These types are the file's schema: field names are the keys of the JSON. Fields of parts that have their default are
left out of the file. The file holds no times of the search, so that equal runs give equal bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import planner.documents as documents
from planner.files import STANDARD, input_bytes, write_whole
from planner.foreign_files import MOST_BYTES
from planner.json_text import JsonError, read_json
from planner.plans.files import plain

Ranges = tuple[tuple[int, int], ...]


def to_ranges(numbers: Iterable[int]) -> Ranges:
    """`((1, 3), (7, 7))` for 7, 1, 2, 3. O(n log n)."""
    return to_runs(sorted(numbers))


def to_runs(numbers: Iterable[int]) -> Ranges:
    """Ranges that keep the order of the numbers: `((7, 7), (1, 3))` for 7, 1, 2, 3."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return tuple(ranges)


def from_ranges(ranges: Ranges, limit: int) -> list[int] | None:
    """The numbers of ranges in their order; None if there are more than `limit`, so that no file makes a huge list."""
    if sum(max(0, last - first + 1) for first, last in ranges) > limit:
        return None
    return [number for first, last in ranges for number in range(first, last + 1)]


def in_words(ranges: Ranges, limit: int = 6) -> str:
    """`1-3, 7`, shortened after `limit` ranges."""
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:limit]]
    more = len(ranges) - limit
    return ", ".join(shown) + (f", and {more} more" if more > 0 else "")


SCHEMA_VERSION: Literal[1] = 1
FORMAT: Literal["shardplan-partition"] = "shardplan-partition"

Scalar = bool | int | float | str | tuple[int, ...] | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class InstanceSection:
    """The instance that the plan is for.

    Attributes:
        name: for people.
        family: kind of file ("operator-graph", "piper", "pipedream").
        fingerprint: sha256 (hex) of the file; a plan holds for this instance only.
        nodes: nodes that the plan places.
        edges: edges between them.
    """

    name: str
    family: str
    fingerprint: str
    nodes: int
    edges: int


@dataclass(frozen=True, slots=True)
class ObjectiveSection:
    """What was minimised, what was reached and what is proven.

    Attributes:
        name: of the objective, as `--objective` takes it.
        unit: of value and bound.
        value: what the plan reaches.
        bound: no plan of the space is below it.
        gap: (value - bound) / value.
        proven_optimal: whether the gap is zero up to rounding.
        space: in words, what the bound speaks of.
        stopped_after_s: the time limit of a search that ended before it proved its plan, so that one with more time may
            find a better plan; null for a proven plan, which does not depend on it.
    """

    name: str
    unit: str
    value: float
    bound: float
    gap: float
    proven_optimal: bool
    space: str
    stopped_after_s: float | None


@dataclass(frozen=True, slots=True)
class ChoiceRun:
    """Nodes of a part that run by the same choice.

    Attributes:
        choice: its position among those the instance offers.
        name: what the instance calls it.
        nodes: ranges of node numbers, both ends included.
    """

    choice: int
    name: str
    nodes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A device with its nodes, or a stage of a pipeline.

    Attributes:
        kind: "accelerator", "cpu" or "stage".
        nodes: ranges of node numbers as the instance has them, both ends included; in the order in which they run
            where the order is part of the plan.
        value: its share of the objective (load or time), in the objective's unit.
        memory_bytes: what one device of it keeps; absent where the problem counts no memory.
        devices: devices that it takes in all.
        replicas: copies that take turns at the samples.
        tensor: devices that share one sample's work.
        first_device: leftmost device, where stages have places.
        copies: units beside one another that run the same stages.
        stride: devices from one copy to the next.
        configuration: what a mesh is used as, in words.
        choices: how its nodes run, where they have a choice.
        inner: stages inside one unit, where a stage is replicated over units of several devices.
    """

    kind: str
    nodes: tuple[tuple[int, int], ...]
    value: float | None = None
    memory_bytes: float | None = None
    devices: int = 1
    replicas: int = 1
    tensor: int = 1
    first_device: int | None = None
    copies: int = 1
    stride: int = 0
    configuration: str = ""
    choices: tuple[ChoiceRun, ...] = ()
    inner: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class TrivialPlan:
    """A plan that anybody would try first, priced beside the one found.

    Attributes:
        name: what it is.
        value: what it would reach; null when it cannot be carried out at all.
        breaks: the limits that it breaks, by kind; empty when it is feasible.
    """

    name: str
    value: float | None
    breaks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """A partition plan as its file has it.

    Attributes:
        format: says what kind of file this is.
        version: of this schema.
        digest: sha256 (hex) over everything else.
        instance: what it is for.
        objective: what was reached and proven.
        options: what defines the problem besides the instance: devices, memory (bytes), bandwidths (bytes a second),
            rules.
        solver: who found the plan.
        parts: devices or stages, in order.
        trivial: plans priced beside it.
        statistics: counts of the search.
        notes: what was assumed in reading the instance.
    """

    FORMAT: ClassVar[str] = FORMAT

    format: Literal["shardplan-partition"]
    version: Literal[1]
    digest: str
    instance: InstanceSection
    objective: ObjectiveSection
    options: Mapping[str, Scalar | None]
    solver: str
    parts: tuple[Part, ...]
    trivial: tuple[TrivialPlan, ...] = ()
    statistics: Mapping[str, int] | None = None
    notes: tuple[str, ...] = ()


_HEAD_BYTES = 256


def _document(plan: PartitionPlan) -> dict[str, Any]:
    """The plan as plain dicts and lists; its parts are written without fields that have their default."""
    return {field.name: plain(getattr(plan, field.name)) for field in dataclasses.fields(plan)}


def digest_of(plan: PartitionPlan) -> str:
    """sha256 (hex) over everything but the digest itself."""
    document = _document(plan)
    del document["digest"]
    return hashlib.sha256(documents.compact(document).encode()).hexdigest()


def seal(plan: PartitionPlan) -> PartitionPlan:
    """The plan with its digest filled in."""
    return dataclasses.replace(plan, digest=digest_of(plan))


def dump_partition(plan: PartitionPlan) -> str:
    """The plan as JSON text; the same plan gives the same bytes."""
    return documents.pretty(_document(plan)) + "\n"


def load_partition(text: str | bytes, *, name: str = "plan") -> PartitionPlan:
    """Read a plan from JSON text; its digest is not compared (`check_partition` does).

    Raises:
        PlanError: not JSON, of another format or version, or not as the schema says.
    """
    return documents.parse(text, PartitionPlan, FORMAT, SCHEMA_VERSION, name=name)


def read_partition(path: str | Path) -> PartitionPlan:
    """Read a plan file.

    Raises:
        PlanError: the file is missing, unreadable or not a partition plan.
    """
    return load_partition(documents.read_bytes(path), name=str(path))


def write_partition(plan: PartitionPlan, path: str | Path) -> None:
    """Write a plan file, whole or not at all.

    Raises:
        OutputError: the file cannot be written.
    """
    write_whole(path, dump_partition(plan))


def is_partition_plan(source: str | Path | bytes) -> bool:
    """True if a file (or its content) is JSON whose `format` is that of partition plans.

    Plans have their format first; only if the beginning has none, the whole file is read.
    """
    try:
        content = input_bytes() if str(source) == STANDARD else source
        with io.BytesIO(content) if isinstance(content, bytes) else Path(content).open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
            if b'"format"' in head:
                return f'"{FORMAT}"'.encode() in head
            document = read_json((head + stream.read(MOST_BYTES)).decode("utf-8-sig"))
    except (OSError, ValueError, JsonError):
        return False
    return isinstance(document, dict) and document.get("format") == FORMAT


def partition_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the file, descriptions taken from the types' docstrings."""
    return documents.described(documents.adapter(PartitionPlan).json_schema())
