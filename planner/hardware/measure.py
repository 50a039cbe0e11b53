"""A device profile of the machine that runs this, measured with numpy: products, copies, the start of an operation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from planner.units import Dimension, render

_ENOUGH_S = 0.2
_PRODUCTS = (64, 256, 1024, 2048)
"""Sides of square fp32 products."""
_COPIES = (1 << 16, 1 << 20, 1 << 24, 1 << 27)
"""Bytes read by a copy."""


def measured_device(name: str, memory_bytes: int, machine: str) -> dict[str, Any]:
    """A device profile in the notation of the files: the best product, the largest copy, and what sizes reach of both.

    Args:
        name: of the profile.
        memory_bytes: memory of the machine, which is not measured.
        machine: what was measured, for the source of each figure.
    """
    rates = {2.0 * n**3: 2.0 * n**3 / _product_s(n) for n in _PRODUCTS}
    moved = {2.0 * size: 2.0 * size / _copy_s(size) for size in _COPIES}
    peak, bandwidth = max(rates.values()), moved[max(moved)]
    ones = np.ones(1 << 14, dtype=np.float32)
    vector = ones.size / _least_s(lambda: np.multiply(ones, ones, out=ones))
    small, result = np.ones((2, 1), dtype=np.float32)
    source = f"measured with numpy on {machine}"

    def figure(value: float, dimension: Dimension, note: str) -> dict[str, Any]:
        return {"value": render(float(f"{value:.3g}"), dimension), "source": source, "note": note}

    def curve(found: dict[float, float], most: float, dimension: Dimension) -> dict[str, Any]:
        parts = {size: min(1.0, rate / most) for size, rate in sorted(found.items())}
        points = {
            render(float(f"{size:.3g}"), dimension): render(float(f"{part:.3g}"), Dimension.FRACTION)
            for size, part in parts.items()
        }
        return {"points": points, "source": source}

    return {
        "device": name,
        "about": machine,
        "memory": {"value": render(memory_bytes, Dimension.BYTES), "source": source},
        "reserve": {"value": "0 B", "source": source, "note": "not measured"},
        "memory_bandwidth": figure(
            bandwidth, Dimension.BYTE_RATE, "read and written by a copy of 128 MiB, beyond caches"
        ),
        "matrix": {"fp32": figure(peak, Dimension.FLOP_RATE, f"best of square products of sides {_PRODUCTS}")},
        "vector": figure(min(vector, peak), Dimension.FLOP_RATE, "products of 16,384 elements in cache"),
        "matrix_efficiency": curve(rates, peak, Dimension.FLOPS),
        "memory_efficiency": curve(moved, bandwidth, Dimension.BYTES),
        "launch": figure(_least_s(lambda: np.add(small, small, out=result)), Dimension.SECONDS, "a sum of one element"),
    }


def _product_s(side: int) -> float:
    a = np.ones((side, side), dtype=np.float32)
    out = np.empty_like(a)
    return _least_s(lambda: np.matmul(a, a, out=out))


def _copy_s(size: int) -> float:
    source = np.ones(size, dtype=np.uint8)
    target = np.empty_like(source)
    return _least_s(lambda: np.copyto(target, source))


def _least_s(work: Callable[[], object]) -> float:
    """The shortest of many runs, after one to warm up."""
    work()
    least, until = float("inf"), time.perf_counter() + _ENOUGH_S
    while time.perf_counter() < until or least == float("inf"):
        begin = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - begin)
    return max(least, 1e-9)
