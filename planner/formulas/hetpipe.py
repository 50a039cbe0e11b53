"""HetPipe: virtual workers of unlike devices, their pipelines, clocks and staleness."""

from __future__ import annotations

import math
from collections.abc import Mapping

from planner.errors import UsageError
from planner.exchange.formulas import WSPStaleness, wsp_staleness
from planner.formulas._checks import chosen, divides, whole
from planner.space.partition.hetpipe import in_flight


def hetpipe_staleness(concurrent: int, distance: int) -> WSPStaleness:
    """HetPipe, waves of Nm at clock distance D: s_local = Nm - 1, s_global = (D+1)(s_local+1) + s_local - 1.

    >>> formulas.hetpipe_staleness(concurrent=7, distance=32)
    WSPStaleness(local=6, wave=7, overall=236)
    """
    return wsp_staleness(concurrent, distance)


def hetpipe_in_flight(stages: int, concurrent: int) -> tuple[int, ...]:
    """Mini-batches that each stage of a virtual worker keeps: k - q + 1 for Nm = k, q = 1..k; at most Nm.

    >>> formulas.hetpipe_in_flight(4, 4), formulas.hetpipe_in_flight(4, 2)
    ((4, 3, 2, 1), (2, 2, 2, 1))
    """
    whole(stages=stages, concurrent=concurrent)
    return tuple(in_flight(stage, stages, concurrent) for stage in range(stages))


def hetpipe_allocation(devices: Mapping[str, int], policy: str, size: int | None = None) -> tuple[tuple[str, ...], ...]:
    """Devices of each virtual worker: of one type each (NP), a share of every type (ED), fast with slow (HD).

    Args:
        devices: how many of each type, the fastest type first; NP takes each type for one node's.
        policy: NP, ED or HD.
        size: devices of a virtual worker; for NP and HD as many as there are of the rarest type, when absent.

    >>> pool = {"V": 4, "R": 4, "G": 4, "Q": 4}
    >>> formulas.hetpipe_allocation(pool, "ED")[0], ["".join(w) for w in formulas.hetpipe_allocation(pool, "HD")]
    (('V', 'R', 'G', 'Q'), ['VVQQ', 'VVQQ', 'RRGG', 'RRGG'])

    Raises:
        UsageError: no such policy, or virtual workers that do not come out whole.
    """
    for kind, count in devices.items():
        whole(**{f"devices of type {kind}": count})
    chosen("policy", policy, dict.fromkeys(("NP", "ED", "HD")))
    kinds = list(devices)
    if policy == "ED":
        count = math.gcd(*devices.values())
        return (tuple(kind for kind in kinds for _ in range(devices[kind] // count)),) * count
    wide = min(devices.values()) if size is None else size
    whole(size=wide)
    groups: list[tuple[str, ...]] = [(kind,) for kind in kinds]
    if policy == "HD":
        half = len(kinds) // 2
        pairs = zip(kinds[:half], reversed(kinds[-half:] if half else []), strict=True)
        groups = [*pairs, *((kind,) for kind in kinds[half : len(kinds) - half])]
    workers: list[tuple[str, ...]] = []
    for group in groups:
        divides("devices of a virtual worker", wide, "types", len(group))
        each = wide // len(group)
        for kind in group:
            divides(f"devices of type {kind}", devices[kind], "in a virtual worker", each)
        counts = {devices[kind] // each for kind in group}
        if len(counts) > 1:
            raise UsageError(f"there are not as many {' as '.join(group)}", hint="use another policy")
        workers += [tuple(kind for kind in group for _ in range(each))] * counts.pop()
    return tuple(workers)


def hetpipe_clock_may_advance(clock: int, slowest_clock: int, distance: int) -> bool:
    """Whether a virtual worker may begin its wave `clock`: it is at most D waves ahead of the slowest.

    >>> formulas.hetpipe_clock_may_advance(3, 1, distance=1), formulas.hetpipe_clock_may_advance(2, 1, distance=1)
    (False, True)
    """
    whole(0, clock=clock, slowest_clock=slowest_clock, distance=distance)
    return clock - slowest_clock <= distance
