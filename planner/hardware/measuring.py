"""Measures the processor of this machine as a device profile: matrix products, copies and single calls in fp32.

Numpy runs all of it; its products and copies use all cores. A peak is the best rate over all sizes, and a curve has the
fraction that each size reaches. Accelerators and links are not measured.
"""

from __future__ import annotations

import contextlib
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
from planner.sums import float_sum

SIDES = (64, 128, 256, 512, 1024, 2048)
"""Sizes of the square matrices that are multiplied."""

COPIED_BYTES = (100_000, 1_000_000, 10_000_000, 100_000_000)
"""Bytes that each copy reads and writes."""

_RUNS, _ENOUGH_S = 9, 0.5
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class MachineFigures:
    """Measured figures of a machine.

    Attributes:
        machine: processor and number of cores.
        memory_bytes: memory of the machine.
        product_flop_per_s: by FLOPs of a matrix product, its rate.
        copy_byte_per_s: by bytes that a copy reads and writes, its rate.
        vector_flop_per_s: rate of element-wise sums in cache.
        launch_s: duration of a call on one number.
    """

    machine: str
    memory_bytes: int
    product_flop_per_s: Mapping[float, float]
    copy_byte_per_s: Mapping[float, float]
    vector_flop_per_s: float
    launch_s: float


def machine_name() -> str:
    """Identity of the machine in measurements: processor and number of cores."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):  # other systems than Linux
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        model = next(named, model)
    return f"{model}, {os.cpu_count()} cores"


def measure_machine(progress: Progress | None = None) -> MachineFigures:
    """Run products, copies and small calls on this machine's processor; some seconds.

    Args:
        progress: called with the number of steps done, the number of steps, and the next step.

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
    values = np.ones(4096, dtype=np.float32)
    sums = np.empty_like(values)
    vector = len(values) / _seconds(lambda: np.add(values, values, out=sums))
    _tell(progress, total - 1, total, "small calls")
    number = np.ones(1, dtype=np.float32)
    return MachineFigures(
        machine_name(),
        _memory_bytes(),
        products,
        copies,
        vector,
        _seconds(lambda: np.add(number, number, out=sums[:1])),
    )


def _tell(progress: Progress | None, done: int, total: int, what: str) -> None:
    if progress:
        progress(done, total, what)


def _seconds(run: Callable[[], object]) -> float:
    """Seconds of a call: the minimum of several timings, each of many calls if they are short."""
    run()
    start = time.perf_counter()
    run()
    once = max(time.perf_counter() - start, 1e-9)
    times = max(1, min(10_000, round(0.01 / once)))
    seconds: list[float] = []
    while len(seconds) < _RUNS and (len(seconds) < 3 or float_sum(seconds) * times < _ENOUGH_S):
        start = time.perf_counter()
        for _ in range(times):
            run()
        seconds.append((time.perf_counter() - start) / times)
    return min(seconds)


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        raise UsageError("the machine does not say how much memory it has", hint="write the profile by hand") from None


def measured_profile_text(figures: MachineFigures, name: str) -> str:
    """A device profile (YAML) of measured figures, each with its source."""
    head = "# Measured by `shardplan hardware init --measure`: fp32 on the processor; links are not measured.\n"
    return head + profile_yaml({"device": name, **measured_device(figures)})


def measured_device(figures: MachineFigures, ranks: int = 1) -> dict[str, Any]:
    """A device profile as plain data without a name, with 1/ranks of the memory of the machine."""
    product, copy = max(figures.product_flop_per_s.values()), max(figures.copy_byte_per_s.values())
    source = f"measured on {figures.machine} by numpy {np.__version__}"

    def figure(value: str, note: str) -> dict[str, str]:
        return {"value": value, "source": source, "note": note}

    def curve(rates: Mapping[float, float], unit: str, scale: float, best: float) -> dict[str, Any]:
        points = {f"{size / scale:.4g} {unit}": f"{100 * rate / best:.3g}%" for size, rate in rates.items()}
        return {"points": points, "source": source}

    return {
        "about": figures.machine,
        "memory": {"value": f"{figures.memory_bytes / 2**30 / ranks:.1f} GiB", "source": "the operating system"},
        "memory_bandwidth": figure(f"{copy / 1e9:.4g} GB/s", "best copy, read and write"),
        "matrix": {"fp32": figure(f"{product / 1e9:.5g} GFLOP/s", "best product")},
        "vector": figure(f"{figures.vector_flop_per_s / 1e9:.4g} GFLOP/s", "sums in a cache"),
        "launch": figure(f"{figures.launch_s * 1e6:.3g} us", "a call on one number"),
        "matrix_efficiency": curve(figures.product_flop_per_s, "MFLOP", 1e6, product),
        "memory_efficiency": curve(figures.copy_byte_per_s, "KB", 1e3, copy),
    }
