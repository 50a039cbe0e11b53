"""This machine's processor as a device profile: what matrix products, copies and single calls take in fp32 here.

All is run by numpy, whose products and copies use all cores. Peaks are the best rate of any size, and the curves say
what each size reaches of it. Other accelerators, and links, are not measured.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import UsageError
from planner.hardware.write import profile_yaml

SIDES = (64, 128, 256, 512, 1024, 2048)
"""Sides of the square matrices that are multiplied."""

COPIED_BYTES = (100_000, 1_000_000, 10_000_000, 100_000_000)
"""Bytes that are read and written by the copies."""

_RUNS, _ENOUGH_S = 9, 0.5
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class MachineFigures:
    """What was measured.

    Attributes:
        machine: processor and cores.
        memory_bytes: of the machine.
        product_flop_per_s: by FLOPs of a product of square matrices.
        copy_byte_per_s: by bytes that a copy reads and writes.
        vector_flop_per_s: sums of numbers in a cache.
        launch_s: of a call that does nothing to speak of.
    """

    machine: str
    memory_bytes: int
    product_flop_per_s: Mapping[float, float]
    copy_byte_per_s: Mapping[float, float]
    vector_flop_per_s: float
    launch_s: float


def machine_name() -> str:
    """What a measurement is bound to besides the software: processor and number of cores."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores"


def measure_machine(progress: Progress | None = None) -> MachineFigures:
    """Run products, copies and small calls on this machine's processor; some seconds.

    Args:
        progress: told what is run: steps done, steps in all, the next one.

    Raises:
        UsageError: the machine does not say how much memory it has.
    """
    total = len(SIDES) + len(COPIED_BYTES) + 2
    products: dict[float, float] = {}
    copies: dict[float, float] = {}
    for side in SIDES:
        _tell(progress, len(products), total, f"product of {side} x {side}")
        a = np.ones((side, side), dtype=np.float32)
        out = np.empty_like(a)
        flops = 2.0 * side**3
        products[flops] = flops / _seconds(lambda a=a, out=out: np.matmul(a, a, out=out))  # type: ignore[misc]
    for size in COPIED_BYTES:
        _tell(progress, len(products) + len(copies), total, f"copy of {size:,} bytes")
        source = np.ones(size // 8, dtype=np.float32)
        target = np.empty_like(source)
        copies[float(size)] = size / _seconds(lambda s=source, t=target: np.copyto(t, s))  # type: ignore[misc]
    _tell(progress, total - 2, total, "element-wise work")
    some = np.ones(4096, dtype=np.float32)
    sums = np.empty_like(some)
    vector = len(some) / _seconds(lambda: np.add(some, some, out=sums))
    _tell(progress, total - 1, total, "small calls")
    one = np.ones(1, dtype=np.float32)
    return MachineFigures(
        machine_name(),
        _memory_bytes(),
        products,
        copies,
        vector,
        _seconds(lambda: np.add(one, one, out=sums[:1])),
    )


def _tell(progress: Progress | None, done: int, total: int, what: str) -> None:
    if progress:
        progress(done, total, what)


def _seconds(run: Callable[[], object]) -> float:
    """Seconds of a call that nothing else disturbed: the least of some; short ones are timed many at a time."""
    run()
    start = time.perf_counter()
    run()
    once = max(time.perf_counter() - start, 1e-9)
    times = max(1, min(10_000, round(0.01 / once)))
    found: list[float] = []
    while len(found) < _RUNS and (len(found) < 3 or sum(found) * times < _ENOUGH_S):
        start = time.perf_counter()
        for _ in range(times):
            run()
        found.append((time.perf_counter() - start) / times)
    return min(found)


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        raise UsageError("the machine does not say how much memory it has", hint="write the profile by hand") from None


def measured_profile_text(found: MachineFigures, name: str) -> str:
    """A device profile (YAML) of what was measured, each figure with its source."""
    head = "# Measured by `shardplan hardware init --measure`: fp32 on the processor; links are not measured.\n"
    return head + profile_yaml({"device": name, **measured_device(found)})


def measured_device(found: MachineFigures, ranks: int = 1) -> dict[str, Any]:
    """The same as plain data without a name, of the memory of the machine the part that one of some ranks has."""
    product, copy = max(found.product_flop_per_s.values()), max(found.copy_byte_per_s.values())
    source = f"measured on {found.machine} by numpy {np.__version__}"

    def figure(value: str, note: str) -> dict[str, str]:
        return {"value": value, "source": source, "note": note}

    def curve(rates: Mapping[float, float], unit: str, scale: float, best: float) -> dict[str, Any]:
        points = {f"{size / scale:.4g} {unit}": f"{100 * rate / best:.3g}%" for size, rate in rates.items()}
        return {"points": points, "source": source}

    return {
        "about": found.machine,
        "memory": {"value": f"{found.memory_bytes / 2**30 / ranks:.1f} GiB", "source": "the operating system"},
        "memory_bandwidth": figure(f"{copy / 1e9:.4g} GB/s", "best copy, read and write"),
        "matrix": {"fp32": figure(f"{product / 1e9:.5g} GFLOP/s", "best product")},
        "vector": figure(f"{found.vector_flop_per_s / 1e9:.4g} GFLOP/s", "sums in a cache"),
        "launch": figure(f"{found.launch_s * 1e6:.3g} us", "a call on one number"),
        "matrix_efficiency": curve(found.product_flop_per_s, "MFLOP", 1e6, product),
        "memory_efficiency": curve(found.copy_byte_per_s, "KB", 1e3, copy),
    }
