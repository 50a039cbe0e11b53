"""Data parallelism: one stage on all devices, gradients exchanged after the last micro-batch."""

from __future__ import annotations

from planner.simulate import Transfers
from planner.space.types import StageChoice
from planner.systems._bench import Bench, StageRule
from planner.systems._play import Played, play
from planner.systems._search import Found, best_of, found_of, search
from planner.systems.types import Point, System


def replicated(bench: Bench, *, recompute: tuple[bool, ...] = (False,), zero: int = 0) -> Played | None:
    """The fastest data-parallel point: the most devices that share the global batch, each micro-batch size."""
    found: list[Played] = []
    room = max(d.usable_bytes for d in bench.cluster.devices)
    for size in bench.sizes:
        parts, rest = divmod(bench.job.global_batch, size)
        if rest:
            continue
        replicas = max(r for r in range(1, bench.devices + 1) if parts % r == 0)
        for again in recompute:
            need = bench.tables(size).needed(StageRule(1), recompute=again)[0, -1]
            if need > room and found:
                continue
            point = Point(
                (StageChoice(0, bench.blocks, 1, again),), replicas, size, parts // replicas, "1f1b", zero=zero
            )
            found.append(play(bench, point, Transfers.BLOCKING))
    running = [p for p in found if p.feasible]
    return best_of(running) if running else (found[0] if found else None)


@search("data-parallel")
def by_replicas(bench: Bench, system: System) -> Found:
    """Every device has the whole model."""
    best = replicated(bench, recompute=system.recompute)
    if best is None:
        return Found(reason="no micro-batch size divides the global batch")
    return found_of(best)
