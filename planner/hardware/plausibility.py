"""Figures of a profile that read well and cannot be: a unit that slipped, bits for bytes, a time in the wrong unit.

The bounds are wide: an order of magnitude beyond what has been built. A warning does not keep a profile from use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from planner.errors import Problem
from planner.hardware.document import Document, Location
from planner.units import Dimension, render

if TYPE_CHECKING:
    from planner.hardware.schema import ClusterFile, DeviceBody, LevelEntry
    from planner.hardware.validate import ProfileFile

LATENCY_S = (100e-9, 5e-3)
"""Start-up time of a message: from a wire on a board to the far end of a wide network."""
PORT_BYTE_PER_S = (10e6, 10e12)
"""All ports of one child, one direction."""
PCIE_BYTE_PER_S = 256e9
"""Sixteen lanes of PCIe of generation 7 in one direction."""
MEMORY_BYTES = (64 * 2**20, 4 * 2**40)
MEMORY_BYTE_PER_S = (1e9, 100e12)
PEAK_FLOP_PER_S = (1e9, 1e18)
FLOP_PER_BYTE = (1.0, 20_000.0)
"""Fastest matrix rate over memory bandwidth."""
EFFICIENCY = 0.02
OUTER_FASTER = 1.5
"""Times that a device may send faster into an outer tier than into the one inside it."""

Doubt = tuple[Location, str, str]
"""Place, message, hint."""


def doubts(document: Document, spec: ProfileFile) -> list[Problem]:
    """What is not plausible in a profile that is sound, in the order of the file."""
    from planner.hardware.schema import ClusterFile, DeviceFile

    found: list[Doubt] = []
    if isinstance(spec, DeviceFile):
        found += _device((), spec)
    elif isinstance(spec, ClusterFile):
        for name, body in spec.device_types.items():
            found += _device(("device_types", name), body)
        for place, levels in (("node", spec.node), ("network", spec.network)):
            for number, level in enumerate(levels):
                found += _level((place, number), level)
        found += _outward(spec)
    return [document.problem(location, message, hint) for location, message, hint in found]


def _beyond(
    location: Location, what: str, value: float, bounds: tuple[float, float], dimension: Dimension
) -> Iterator[Doubt]:
    """A value outside of wide bounds."""
    if not bounds[0] <= value <= bounds[1]:
        low, high = (render(bound, dimension, 3) for bound in bounds)
        hint = f"such figures lie from {low} to {high}: check the unit"
        yield location, f"{what} of {render(value, dimension, 4)} is not plausible", hint


def _device(head: Location, body: DeviceBody) -> Iterator[Doubt]:
    yield from _beyond((*head, "memory"), "memory", body.memory.value, MEMORY_BYTES, Dimension.BYTES)
    rate = body.memory_bandwidth.value
    yield from _beyond((*head, "memory_bandwidth"), "a bandwidth", rate, MEMORY_BYTE_PER_S, Dimension.BYTE_RATE)
    peaks = {name: figure.value for name, figure in body.matrix.items()}
    for name, peak in peaks.items():
        yield from _beyond((*head, "matrix", name), f"{name} work", peak, PEAK_FLOP_PER_S, Dimension.FLOP_RATE)
    fastest = max(peaks.values())
    if not FLOP_PER_BYTE[0] <= fastest / rate <= FLOP_PER_BYTE[1]:
        message = f"{fastest / rate:,.0f} FLOP for each byte of memory bandwidth are not plausible"
        yield (*head, "memory_bandwidth"), message, "check the units of `matrix` and `memory_bandwidth`"
    halves = max(peaks.get("bf16", 0.0), peaks.get("fp16", 0.0))
    if halves and peaks.get("fp32", 0.0) > 2 * halves:
        yield (*head, "matrix", "fp32"), "fp32 is faster than 16-bit formats", "check which figure is which"
    if body.reserve is not None and body.reserve.value > body.memory.value / 4:
        yield (*head, "reserve"), "the reserve is more than a quarter of the memory", "600 MiB to 2 GiB are usual"


def _level(head: Location, level: LevelEntry) -> Iterator[Doubt]:
    yield from _beyond((*head, "latency"), "a latency", level.latency.value, LATENCY_S, Dimension.SECONDS)
    rate = level.port.byte_per_s * level.port.count
    yield from _beyond((*head, "port"), "a bandwidth", rate, PORT_BYTE_PER_S, Dimension.BYTE_RATE)
    if "pcie" in level.level.lower() and level.port.byte_per_s > PCIE_BYTE_PER_S:
        message = f"PCIe of {render(level.port.byte_per_s, Dimension.BYTE_RATE, 4)} is not plausible"
        yield (*head, "port"), message, "16 lanes of generation 5 have 64 GB/s in one direction"
    if level.efficiency.value < EFFICIENCY:
        yield (*head, "efficiency"), f"{level.efficiency.value:.1%} of the bandwidth is not plausible", "70% to 95%"


def _outward(spec: ClusterFile) -> Iterator[Doubt]:
    """Tiers into which a device sends much faster than into the one inside them."""
    levels = [("node", i, level) for i, level in enumerate(spec.node)]
    levels += [("network", i, level) for i, level in enumerate(spec.network)]
    devices, inner, inner_name = 1, 0.0, ""
    for place, number, level in levels:
        rate = level.port.byte_per_s * level.port.count * level.efficiency.value / devices
        if inner and rate > OUTER_FASTER * inner:
            message = f"a device sends {rate / inner:.3g} times as fast into {level.level!r} as into {inner_name!r}"
            hint = f"{level.level!r} lies outside: check units, `count` and whether the figures are per device"
            yield (place, number, "port"), message, hint
        inner, inner_name = rate, level.level
        devices *= level.size or 1
