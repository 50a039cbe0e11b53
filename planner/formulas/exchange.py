"""Exchange of gradients by name of the system; the rest of the closed forms is in `planner.exchange.formulas`."""

from __future__ import annotations

import math

from planner.errors import UsageError
from planner.exchange.formulas import (
    byteps_s,
    byteps_shares,
    reduce_scatter_bytes,
    ring_all_reduce_s,
    separate_server_s,
)
from planner.formulas._checks import positive, whole


def all_gather_bytes(payload_bytes: float, ranks: int) -> float:
    """Bytes a rank sends (and receives) in an all-gather, M being what is gathered: (n-1)/n M, as a reduce-scatter.

    >>> formulas.all_gather_bytes(64, 8)
    56.0
    """
    return reduce_scatter_bytes(payload_bytes, ranks)


def all_to_all_bytes(payload_bytes: float, ranks: int) -> float:
    """Bytes a rank sends of the M that it holds for all: (n-1)/n M.

    >>> formulas.all_to_all_bytes(64, 8)
    56.0
    """
    return reduce_scatter_bytes(payload_bytes, ranks)


def rabenseifner_s(payload_bytes: float, ranks: int, latency_s: float, byte_per_s: float) -> float:
    """Seconds of Rabenseifner's all-reduce: 2 log2(r) alpha + 2 (r-1)/r M/B.

    >>> formulas.rabenseifner_s(800, 8, latency_s=1, byte_per_s=100)
    20.0
    """
    whole(ranks=ranks)
    positive(byte_per_s=byte_per_s)
    return 2 * math.log2(ranks) * latency_s + ring_all_reduce_s(payload_bytes, ranks, byte_per_s)


def byteps_cpu_share(gpu_machines: int, cpu_machines: int) -> float:
    """The part of the gradients that all CPU machines sum together: 2k(n-1)/(n^2+kn-2k).

    >>> formulas.byteps_cpu_share(8, 1), formulas.byteps_cpu_share(8, 8)
    (0.2, 1.0)
    """
    return cpu_machines * byteps_shares(gpu_machines, cpu_machines).cpu


def byteps_speedup(gpu_machines: int, cpu_machines: int, over: str = "all-reduce") -> float:
    """Time of a ring all-reduce, or of k separate servers, over BytePS's.

    >>> formulas.byteps_speedup(8, 2), round(formulas.byteps_speedup(8, 2, over="servers"), 4)
    (1.1875, 2.7143)

    Raises:
        UsageError: another way, or no server to compare with.
    """
    own = byteps_s(1.0, gpu_machines, cpu_machines, 1.0)
    if over == "all-reduce":
        other = ring_all_reduce_s(1.0, gpu_machines, 1.0)
    elif over == "servers":
        other = separate_server_s(1.0, gpu_machines, cpu_machines, 1.0)
    else:
        raise UsageError(f"unknown way {over!r}", hint="use all-reduce or servers")
    return other / own if own > 0 else 1.0


def byteps_bound(gpu_machines: int) -> float:
    """The most that BytePS can gain over a ring, with as many CPU machines: 2(n-1)/n.

    >>> formulas.byteps_bound(8)
    1.75
    """
    return byteps_speedup(gpu_machines, gpu_machines)


def speedup(rate: float, baseline: float) -> float:
    """How many times the rate of a baseline.

    >>> round(formulas.speedup(274, 45.5), 3)
    6.022
    """
    positive(rate=rate, baseline=baseline)
    return rate / baseline
