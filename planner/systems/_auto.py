"""The best of all: this planner's own search and, beside it, every named system that was run."""

from __future__ import annotations

import math
from dataclasses import replace

from planner.errors import InfeasibleError, JobError
from planner.simulate import Transfers
from planner.solvers import search as search_stages
from planner.space.pricer import Pricer
from planner.space.types import Candidate
from planner.systems._bench import Bench
from planner.systems._joint import shared_found
from planner.systems._play import play
from planner.systems._search import Found, best_of, found_of, search
from planner.systems.types import Point, System

MOST_PLAYED = 6
"""Decisions of the own search that are simulated."""


def own_search(bench: Bench) -> Found:
    """The own search's best decision by simulation, or why there is none."""
    job = replace(bench.job, micro_batches=bench.job.micro_batches or bench.sizes)
    prices = bench.prices if isinstance(bench.prices, Pricer) else None
    try:
        answer = search_stages(bench.costs, bench.cluster, job, shardings=prices)
    except (InfeasibleError, JobError) as error:
        return Found(reason=str(error))
    rivals = [answer.best, *answer.runners_up, *(t for t in answer.trivial if t.evaluation.feasible)][:MOST_PLAYED]
    alone = [c for c in rivals if all(stage.ranks == 1 for stage in c.decision.stages)]
    played = best_of(play(bench, _point(c), Transfers.BLOCKING) for c in alone)
    found = [found_of(played, notes=("the own search is fastest",))] if played is not None else []
    found += [shared_found(bench, prices, c) for c in rivals if prices is not None and c not in alone]
    return min(found, key=lambda f: f.iteration_s)


def _point(candidate: Candidate) -> Point:
    decision = candidate.decision
    return Point(
        decision.stages,
        decision.copies,
        decision.micro_batch,
        decision.micro_batches,
        decision.schedule,
        zero=decision.zero,
        slice_devices=decision.slice_devices,
    )


@search("auto")
def by_union(bench: Bench, system: System) -> Found:
    """The fastest of the own search and of all results that the bench holds."""
    best = ours = own_search(bench)
    for name, other in sorted(bench.results.items()):
        if not other.reason and not other.alters and other.iteration_s < best.iteration_s * (1 - 1e-9):
            best = replace(other, plan=f"as {name}: {other.plan}", notes=_notes(name, ours))
    return best


def _notes(name: str, ours: Found) -> tuple[str, ...]:
    own = "finds nothing that fits" if math.isinf(ours.iteration_s) else f"takes {ours.iteration_s:.4g} s"
    return (f"{name} is fastest; the own search {own}",)
