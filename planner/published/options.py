"""Options that define a partition problem besides its instance, and their forms as text."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import planner.documents as documents
from planner.errors import UsageError
from planner.hardware.types import Cluster
from planner.published.plan_file import Scalar
from planner.published.readers.documents import MOST_INSTANCE_DEVICES
from planner.registry import did_you_mean
from planner.space.cuts import check_samples
from planner.units import Dimension, parse

Quantity = float | int | str
"""A number in SI units, or text with a unit ("16 GiB", "1.25 GB/s", "60 s")."""

COSTS = ("released", "published")
LAYOUTS = ("placed", "nested")

MOST_DEVICES = 4096
"""Most devices of problems whose search grows with the devices."""


@dataclass(frozen=True, slots=True)
class PartitionOptions:
    """Options of all families; None for an option that is not given.

    Attributes:
        contiguous: whether devices must be stages of a pipeline.
        devices: number of accelerators, or of all devices.
        cpus: CPUs beside the accelerators.
        memory_bytes: memory of one device; infinite for no limit.
        bandwidth_byte_per_s: of the links of each level, innermost first.
        machines: units of each level, innermost first: (8, 2) for two servers of eight devices.
        cost: "released" or "published" cost rule.
        layout: "placed" (each stage on its own devices) or "nested" (all servers of a stage cut alike, as published).
        transfers: whether moving activations between stages takes time.
        idle: whether devices may stay idle.
        batch: samples, or micro-batches, from one update of the weights to the next.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    contiguous: bool | None = None
    devices: int | None = None
    cpus: int | None = None
    memory_bytes: float | None = None
    bandwidth_byte_per_s: tuple[float, ...] | None = None
    machines: tuple[int, ...] | None = None
    cost: str | None = None
    layout: str | None = None
    transfers: bool | None = None
    idle: bool | None = None
    batch: int | None = None

    def __post_init__(self) -> None:
        """Check ranges and names.

        Raises:
            UsageError: a value is out of range, or an unknown name; says which option.
            JobError: the batch is too large (`check_samples`).
        """
        _check_minimum("devices", self.devices, 0)
        _check_minimum("cpus", self.cpus, 0)
        _check_minimum("batch", self.batch, 1)
        check_samples(self.batch or 1)
        _check_name("cost", self.cost, COSTS)
        _check_name("layout", self.layout, LAYOUTS)
        counts = (("devices", self.devices, MOST_INSTANCE_DEVICES), ("cpus", self.cpus, MOST_INSTANCE_DEVICES),
                  ("machines", math.prod(self.machines or ()), MOST_DEVICES))  # fmt: skip
        for name, count, limit in counts:
            if count is not None and count > limit:
                raise UsageError(f"{count} are too many", where=FLAGS[name], hint=f"at most {limit:,}")

    def given(self) -> dict[str, Any]:
        """The given options by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def filled(self, **defaults: Any) -> PartitionOptions:  # noqa: ANN401
        """The options with these values for those that are not given."""
        return PartitionOptions(**(defaults | self.given()))

    def only(self, allowed: Collection[str], what: str) -> None:
        """Refuse options that do not apply.

        Args:
            allowed: names of the options that apply.
            what: the problem, for the message.

        Raises:
            UsageError: another option is given; names it and those that apply.
        """
        others = [name for name in self.given() if name not in allowed]
        if others:
            flags = ", ".join(sorted(FLAGS[name] for name in allowed)) or "none"
            raise UsageError(f"{FLAGS[others[0]]} does not apply to {what}", hint=f"options that do: {flags}")


_RENAMED = {"memory_bytes": "memory", "bandwidth_byte_per_s": "bandwidth", "batch": "global-batch"}
FLAGS: Mapping[str, str] = {
    field.name: f"--{_RENAMED.get(field.name, field.name)}" for field in dataclasses.fields(PartitionOptions)
}
"""Command-line flag of each option."""


def seconds(value: Quantity) -> float:
    """A time limit in seconds; a bare number is seconds."""
    if isinstance(value, str):
        number = value.strip()
        value = float(number) if number.replace(".", "", 1).isdigit() else parse(value, Dimension.SECONDS)
    if not value > 0 or not math.isfinite(value):
        raise UsageError(f"a time limit of {value:g} s leaves no time", where="--time-limit", hint="write 60s or 2min")
    return float(value)


def from_cluster(options: PartitionOptions, cluster: Cluster) -> PartitionOptions:
    """The options with machines, bandwidth and (if not given) memory of a cluster.

    The bandwidth of a level is what one device can send into it, times the level's efficiency.

    Raises:
        UsageError: machines, bandwidth or devices are given as well, or the cluster is a single device.
    """
    if options.machines is not None or options.bandwidth_byte_per_s is not None or options.devices is not None:
        raise UsageError(
            "--machines, --bandwidth and --devices describe a cluster, and so does --hardware", hint="give one of them"
        )
    levels = [level for level in cluster.levels if level.size > 1]
    if not levels:
        raise UsageError(f"{cluster.name} is a single device", where="--hardware", hint="name a cluster of several")
    memory = cluster.smallest_bytes
    return dataclasses.replace(
        options,
        machines=tuple(level.size for level in levels),
        bandwidth_byte_per_s=tuple(
            min(level.device_byte_per_s, level.byte_per_s) * level.efficiency for level in levels
        ),
        memory_bytes=float(memory) if options.memory_bytes is None else options.memory_bytes,
    )  # fmt: skip


def recorded(options: PartitionOptions) -> dict[str, Scalar | None]:
    """Options as a plan file has them; unlimited memory is null."""
    return {
        name: None if isinstance(value, float) and math.isinf(value) else value
        for name, value in options.given().items()
    }


def from_recorded(values: Mapping[str, Scalar | None], where: str) -> PartitionOptions:
    """Options of a plan file.

    Raises:
        PlanError: an unknown option, or a value of another type.
    """
    read = documents.validated(json.dumps(values), PartitionOptions, name=f"{where}: options")
    unlimited = "memory_bytes" in values and values["memory_bytes"] is None
    return dataclasses.replace(read, memory_bytes=math.inf) if unlimited else read


def check_devices(count: int, where: str) -> None:
    """Refuse too many devices, for problems in which each of them may run a replica.

    Raises:
        UsageError: there are more than `MOST_DEVICES`.
    """
    if count > MOST_DEVICES:
        raise UsageError(
            f"{count} devices; {MOST_DEVICES:,} are the most that can be planned for", where=where,
            hint="plan for a part of the cluster",
        )  # fmt: skip


def memory_size(value: Quantity | None) -> float | None:
    """Bytes of a memory size as people write it; None for None."""
    return None if value is None else _quantity(value, Dimension.BYTES, "--memory")


def _quantity(value: Quantity, dimension: Dimension, flag: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    else:
        try:
            number = parse(value, dimension)
        except UsageError as error:
            raise UsageError(error.problem.message, where=flag, hint=error.problem.hint) from error
    if not number >= 0:
        raise UsageError(f"{value} is negative", where=flag)
    return number


def bandwidths(value: Quantity | Collection[Quantity] | None) -> tuple[float, ...] | None:
    """Bytes per second by level of links as people write them ("10GB/s,1.25GB/s"); None for None.

    Raises:
        UsageError: no number, an unknown unit, or not positive.
    """
    if value is None:
        return None
    parts: Collection[Quantity] = value.split(",") if isinstance(value, str) else value  # type: ignore[assignment]
    parts = [parts] if isinstance(parts, int | float) else parts
    rates = tuple(_quantity(part, Dimension.BYTE_RATE, "--bandwidth") for part in parts)
    if not rates or min(rates) <= 0:
        raise UsageError("a bandwidth is positive", where="--bandwidth", hint="write 10GB/s,1.25GB/s")
    return rates


def machine_counts(value: str | int | Collection[int] | None) -> tuple[int, ...] | None:
    """(4, 2) for "4x2", two servers of four devices; None for None.

    Raises:
        UsageError: no numbers, or not positive.
    """
    if value is None:
        return None
    parts: Collection[Any] = value.lower().split("x") if isinstance(value, str) else value  # type: ignore[assignment]
    try:
        counts = tuple(int(part) for part in ([parts] if isinstance(parts, int) else parts))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise UsageError(
            f"{value!r} are no machines", where="--machines", hint="write 4x2 for two servers of four devices"
        )
    return counts


def _check_minimum(name: str, value: int | None, minimum: int) -> None:
    if value is not None and value < minimum:
        raise UsageError(f"{value} is less than {minimum}", where=FLAGS[name])


def _check_name(name: str, value: str | None, names: tuple[str, ...]) -> None:
    if value is not None and value not in names:
        raise UsageError(f"{value!r} is no {name}", where=FLAGS[name], hint=did_you_mean(value, names))
