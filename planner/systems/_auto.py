"""The best of all: this planner's own search and, beside it, every named system that was run."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np

from planner.errors import InfeasibleError, JobError
from planner.play import Transfers, bubble_fraction
from planner.schedules import get as get_schedule
from planner.solvers import search as search_stages
from planner.space import lay_workers, simulate_decision
from planner.space.asked import LIMITS, PRICED
from planner.space.pricer import Pricer
from planner.space.types import Candidate, StageChoice
from planner.sync import parts_of, recipe_of, sent_bytes
from planner.systems._bench import Bench
from planner.systems._found import Found
from planner.systems._play import play
from planner.systems._search import found_of, search
from planner.systems.types import Point, System

MOST_PLAYED = 6
"""Decisions of the own search that are simulated."""


def own_search(bench: Bench) -> Found:
    """The own search's best decision by simulation, groups of ranks that share operators among them."""
    job = replace(bench.job, micro_batches=bench.job.micro_batches or bench.sizes)
    shardings = bench.prices if isinstance(bench.prices, Pricer) else None
    try:
        answer = search_stages(bench.costs, bench.cluster, job, shardings=shardings)
    except (InfeasibleError, JobError) as error:
        return Found(reason=str(error))
    rivals = [answer.best, *answer.runners_up, *(t for t in answer.trivial if t.evaluation.feasible)]
    found = [_played(bench, candidate) for candidate in rivals[:MOST_PLAYED]]
    return min(found, key=lambda f: math.inf if f.reason else f.iteration_s)


def _played(bench: Bench, candidate: Candidate) -> Found:
    notes = ("the own search is fastest",)
    if any(stage.ranks > 1 for stage in candidate.decision.stages):
        return replace(shared(bench, candidate), notes=notes)
    return found_of(play(bench, _point(candidate), Transfers.BLOCKING), notes=notes)


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


def shared(bench: Bench, candidate: Candidate) -> Found:
    """A decision in which groups of ranks share every operator, by the judge's terms and their simulation."""
    decision, terms = candidate.decision, candidate.evaluation.stages
    trace = simulate_decision(decision, candidate.evaluation)
    total_s = trace.makespan_s
    workers = sum(stage.replicas for stage in decision.stages)
    talk_s = decision.micro_batches * sum(_inside(bench, candidate, stage)[0] for stage in decision.stages)
    fullest = max(terms, key=lambda t: t.memory.total / t.capacity_bytes)
    return Found(
        plan=_words(candidate),
        iteration_s=total_s,
        memory=fullest.memory,
        capacity_bytes=fullest.capacity_bytes,
        bubble=min(1.0, bubble_fraction(trace) + talk_s / (workers * total_s)),
        sent_bytes=decision.copies * sum(_sent(bench, candidate, i) for i in range(len(decision.stages))),
        devices=decision.copies * sum(stage.devices for stage in decision.stages),
        micro_batch=decision.micro_batch,
        candidate=candidate,
    )


def _inside(bench: Bench, candidate: Candidate, stage: StageChoice) -> tuple[float, float]:
    """Seconds of communication among the ranks of a replica, and bytes that they send, for one micro-batch."""
    if not stage.sharding or not isinstance(bench.prices, Pricer):
        return 0.0, 0.0
    own = bench.prices.entry(candidate.decision.micro_batch, stage.sharding).sharded
    blocks = slice(stage.start, stage.stop)
    return float(own.communication_s[blocks].sum()), float(own.sent_bytes[blocks].sum()) * stage.ranks


def _sent(bench: Bench, candidate: Candidate, index: int) -> float:
    """Bytes that one copy's stage sends: inside its groups, from the stage before, and to exchange its gradients."""
    decision, stage = candidate.decision, candidate.decision.stages[index]
    costs = bench.costs(decision.micro_batch)
    sent = decision.micro_batches * _inside(bench, candidate, stage)[1]
    if index:
        crossing = costs.boundary_bytes[stage.start] + costs.gradient_boundary_bytes[stage.start]
        sent += decision.micro_batches * float(crossing)
    held = float(bench.tables(decision.micro_batch).elements[stage.start, stage.stop])
    if stage.sharding and isinstance(bench.prices, Pricer):
        own = bench.prices.entry(decision.micro_batch, stage.sharding).sharded
        held = float(own.parameter_elements[stage.start : stage.stop].sum()) * stage.ranks
    ranks = lay_workers(decision, get_schedule(decision.schedule)).groups(index)[..., 0].ravel()
    passes, parts = decision.micro_batches / stage.replicas, functools.partial(parts_of, bench.cluster, ranks)
    exchanged = sent_bytes(recipe_of(decision.zero), bench.precision, parts, held, passes)
    return sent + len(ranks) * exchanged / decision.copies


def _words(candidate: Candidate) -> str:
    decision = candidate.decision
    replicas = [stage.replicas for stage in decision.stages]
    ranks = sorted({stage.ranks for stage in decision.stages})
    groups = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    spread = f"{min(replicas)}" if len(set(replicas)) == 1 else f"{min(replicas)} to {max(replicas)}"
    count = len(decision.stages)
    text = f"{count} stages" if count > 1 else "1 stage"
    text += f" of {spread} replicas" if spread != "1" else ""
    text += f" of {groups} ranks"
    text += f" x {decision.copies} copies" if decision.copies > 1 else ""
    text += f", micro-batch {decision.micro_batch} x {decision.micro_batches}"
    again = sum(stage.recompute for stage in decision.stages)
    text += ", recompute" if again == count else f", recompute {again} stages" if again else ""
    return text + (f", ZeRO-{decision.zero}" if decision.zero else "")


@search("auto", PRICED | {*LIMITS, "overlap"})
def by_union(bench: Bench, system: System) -> Found:
    """The fastest of the own search and of all results that the bench holds."""
    own = own_search(bench)
    best = own
    for name, other in sorted(bench.results.items()):
        if not other.reason and not other.alters and other.iteration_s < best.iteration_s * (1 - 1e-9):
            best = replace(other, plan=f"as {name}: {other.plan}", notes=_notes(name, own))
    return best


def _notes(name: str, ours: Found) -> tuple[str, ...]:
    own = "finds nothing that fits" if not np.isfinite(ours.iteration_s) else f"takes {ours.iteration_s:.4g} s"
    return (f"{name} is fastest; the own search {own}",)
