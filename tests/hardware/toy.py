"""Small clusters with round figures, so that costs can be added up by hand."""

from __future__ import annotations

import math

import numpy as np

from planner.hardware import Cluster, Curve, Device, Level

FLAT = Curve((1.0,), (1.0,))
DEVICE = Device("toy", 10**9, 0, {"fp32": 1e12}, FLAT, 1e12, 1e11, FLAT, 0.0)


def cluster(*levels: Level) -> Cluster:
    """Toy devices joined by these levels."""
    count = math.prod(level.size for level in levels)
    return Cluster("toy", "0" * 64, (DEVICE,), np.zeros(count, dtype=np.int64), levels)


def two_nodes() -> Cluster:
    """Two nodes of four: 100 GB/s and 1 us inside, four network cards of 10 GB/s a node and 10 us between."""
    inside = Level("inside", 4, 100e9, 100e9, 1e-6)
    return cluster(inside, Level("between", 2, 40e9, 10e9, 10e-6))


def shared_card() -> Cluster:
    """Two nodes of four behind one network card of 40 GB/s each, which a single device can fill."""
    inside = Level("inside", 4, 100e9, 100e9, 1e-6)
    return cluster(inside, Level("between", 2, 40e9, 40e9, 10e-6))
