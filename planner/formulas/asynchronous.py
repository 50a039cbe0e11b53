"""Pipelines that never drain: stages and memory as their planners count them, what a trainer corrects, HetPipe.

Stages are counted from 0; the literature's i = 1..P is i + 1 here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from planner.errors import UsageError
from planner.exchange.formulas import all_reduce_bytes
from planner.formulas.checks import chosen, divides, positive, whole
from planner.space.partition import TwoBWSchedule, stage_kept


def pipedream_stage_s(
    compute_s: float, weight_bytes: float, replicas: int, byte_per_s: float, cost: str = "published"
) -> float:
    """Time of a replicated stage a mini-batch, m replicas: the longer of work and exchange, or their sum as released.

    published max(compute, 2(m-1) w/B)/m, released (compute + 4(m-1) w/(m B))/m.

    >>> formulas.pipedream_stage_s(10, 0.7, 3, 4.0), formulas.pipedream_stage_s(10, 0.7, 3, 4.0, cost="released")
    (3.3333333333333335, 3.488888888888889)
    """
    whole(replicas=replicas)
    positive(byte_per_s=byte_per_s)
    table = {
        "published": max(compute_s, 2 * (replicas - 1) * weight_bytes / byte_per_s),
        "released": compute_s + 2 * all_reduce_bytes(weight_bytes, replicas) / byte_per_s,
    }
    return chosen("cost", cost, table) / replicas


def pipedream_stashes(behind: int, replicas: int, *, released: bool = False) -> int:
    """Mini-batches whose weights and activations a replica stashes, `behind` workers being on later stages.

    ceil((behind + replicas)/replicas); the released program ceil(behind/replicas), nothing on the last stage.

    >>> formulas.pipedream_stashes(3, 2), formulas.pipedream_stashes(3, 2, released=True)
    (3, 2)
    """
    whole(0, behind=behind)
    whole(replicas=replicas)
    return math.ceil((behind if released else behind + replicas) / replicas)


def pipedream_2bw_stage_bytes(
    weight_bytes: float,
    activation_bytes: float,
    input_bytes: float,
    stages: int,
    *,
    schedule: str = "2bw",
    micro_batches: int | None = None,
    recompute: bool = False,
) -> float:
    """Weights and activations of the worst of d equal stages, as 2BW's planner counts them.

    v W/d + n A/d, with recomputation v W/d + A/d + n A_in: v versions (2bw 2, dream d, flush and gpipe 1), n
    micro-batches (d; gpipe all m).

    Args:
        weight_bytes: W of the whole model.
        activation_bytes: A of the whole model for one micro-batch.
        input_bytes: A_in, what recomputation keeps of a micro-batch on a stage.
        stages: d.
        schedule: 2bw, flush, gpipe or dream.
        micro_batches: m, needed for gpipe; else d when absent.
        recompute: whether activations are computed again.

    >>> [formulas.pipedream_2bw_stage_bytes(8, 12, 0.5, 4, recompute=r) for r in (False, True)]
    [16.0, 9.0]
    >>> formulas.pipedream_2bw_stage_bytes(8, 12, 0.5, 4, schedule="gpipe", micro_batches=16)
    50.0
    """
    whole(stages=stages)
    order = chosen("schedule", schedule, {s.value: s for s in TwoBWSchedule})
    if order is TwoBWSchedule.GPIPE:
        whole(micro_batches=micro_batches or 0)
    kept = stage_kept(order, stages, order.in_flight(stages, micro_batches or stages), recompute=recompute)
    return kept.bytes(weight_bytes / stages, activation_bytes / stages, input_bytes)


def pipemare_throughput(stages: int, micro_batches: int, synchronous_share: float) -> float:
    """T3, throughput relative to no bubble when that share of the epochs runs at N/(N+P-1), as `1 - gpipe_bubble`.

    >>> round(formulas.pipemare_throughput(8, 4, synchronous_share=10 / 100), 6)
    0.851064
    """
    whole(stages=stages, micro_batches=micro_batches)
    drained = (micro_batches + stages - 1) / micro_batches
    return 1.0 / (synchronous_share * drained + 1.0 - synchronous_share)


def fill_drain_utilisation(stages: int, samples: int) -> float:
    """Use of the workers when the pipeline drains after N samples, F and B side by side: N/(N+2S-2).

    >>> round(formulas.fill_drain_utilisation(4, 128), 6)
    0.955224
    """
    whole(stages=stages, samples=samples)
    return samples / (samples + 2 * stages - 2)


def fill_drain_bound(stages: int, samples: int) -> float:
    """The published bound of the same, N/(N+2S).

    >>> round(formulas.fill_drain_bound(4, 128), 6)
    0.941176
    """
    whole(stages=stages, samples=samples)
    return samples / (samples + 2 * stages)


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
